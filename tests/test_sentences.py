"""Sentences side by side: what differs, what a row can see, and a published row."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import tiny_tables
from running import ROOT, Script, Trained
from tiny_runs import begun

from minigpt.errors import UserError
from minigpt.inspection.sentences import (
    ReferenceRow,
    aligned,
    common_start,
    compare_row,
    difference,
    read,
    reference_rows,
    same_order,
    sight,
    total_variation,
)
from minigpt.inspection.subject import Subject, load_subject

COMPARE = ROOT / "scripts" / "compare_attention.py"
BANK, MONEY = "The bank of the river was muddy", "The money was deposited in the bank"
RIVER, DEPOSIT = ["<|end|>", *BANK.split()], ["<|end|>", *MONEY.split()]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, english: str) -> Path:
    """A run that can read any text, hardly trained."""
    tables = tiny_tables(tmp_path_factory.mktemp("bytes"), english)
    begun(tables, data={"tokenizer": "byte"}, model={"context_length": 64}, train={"max_steps": 2, "batch_size": 1})
    return Path(tables["run"]["dir"]) / "tiny"


@pytest.fixture
def subject(run: Path) -> Subject:
    return load_subject(run)


@pytest.fixture
def even(subject: Subject) -> Subject:
    """All rows weigh all they see the same."""
    for block in subject.model.blocks:
        torch.nn.init.zeros_(block.attn.query_linear.weight)  # type: ignore[union-attr, arg-type]
    return subject


# ── reading and comparing ──────────────────────────────────────────────────────────────────────────────────────


def test_a_reading_is_pooled_by_words(even: Subject) -> None:
    reading = read(even, "a bcd ef")
    assert reading.texts == ["<|end|>", "a", "bcd", "ef"]
    assert reading.maps.shape == (1, 2, 4, 4) and np.allclose(reading.maps.sum(axis=-1), 1)
    assert np.allclose(reading.maps[..., 1, :], [1 / 2, 1 / 2, 0, 0]), "END, and the word's only token"
    rows = np.array([[1, 1, 1], [1, 1, 2], [1, 1, 3], [1, 1, 4]]) / [[3], [4], [5], [6]]
    assert np.allclose(reading.maps[0, 1, 2, :3], rows.mean(axis=0))


def test_texts_that_can_not_be_read(subject: Subject, trained: Trained) -> None:
    with pytest.raises(UserError, match="'': 0 tokens; must be at least 1, and at most 63"):
        read(subject, "")
    with pytest.raises(UserError, match="64 tokens; must be"):
        read(subject, "x" * 64)
    with pytest.raises(UserError, match="never seen: '東'"):
        read(load_subject(trained.path), "東")


def test_words_that_both_have_in_the_order_of_both() -> None:
    assert aligned(RIVER, DEPOSIT) == [(0, 0), (1, 1), (2, 7)]
    assert aligned(["a", "b", "c"], ["b", "c", "a"]) == [(1, 0), (2, 1)]
    assert aligned(["a"], ["b"]) == []


def test_difference_by_hand() -> None:
    first = np.array([[1, 0, 0], [0.5, 0.5, 0], [0.2, 0.3, 0.5]])
    second = np.array([[1, 0], [0.9, 0.1]])
    found = difference(first, second, [(0, 0), (2, 1)])
    assert np.allclose(found, [[0, 0, 0], [0.7, -0.4, -0.3]])
    assert total_variation(found) == pytest.approx((0 + 0.7) / 2)
    assert np.allclose(difference(first, first, [(0, 0), (1, 1), (2, 2)]), 0)


# ── who can see whom ───────────────────────────────────────────────────────────────────────────────────────────


def test_bank_can_not_see_river() -> None:
    bank = {seen.word: seen for seen in sight(RIVER, DEPOSIT)}["bank"]
    assert bank.place == 2 and bank.sees == ("The", "bank")
    assert bank.cannot_see == ("of", "the", "river", "was", "muddy")
    assert bank.meets == (
        ("of", ("of", "the", "river", "was", "muddy")),
        ("river", ("river", "was", "muddy")),
        ("muddy", ("muddy",)),
    )
    assert bank.told == (
        'the row of "bank" sees only: The, bank; it cannot see: of, the, river, was, muddy. '
        'Later rows see it together with "of" (of to muddy), "river" (river to muddy), "muddy" (muddy)'
    )
    other = {seen.word: seen for seen in sight(DEPOSIT, RIVER)}["bank"]
    assert not other.cannot_see and "money" in other.sees
    assert other.told == 'the row of "bank" sees the whole sentence'
    assert [seen.word for seen in sight(RIVER, DEPOSIT)] == ["The", "bank", "the", "was"], "what both have"


def test_what_is_said_about_sight_is_so(subject: Subject) -> None:
    """The model itself: a word that a row cannot see may change without changing the row, and one it sees not."""
    first, second = read(subject, "the old boat"), read(subject, "the old mill")
    same = common_start(first.texts, second.texts)
    assert same == 3 and common_start(["a"], ["a", "b"]) == 1 and common_start(["a"], ["b"]) == 0
    assert np.allclose(first.maps[..., :same, :same], second.maps[..., :same, :same], atol=1e-6)
    assert np.abs(first.maps[..., 3, :] - second.maps[..., 3, :]).max() > 1e-3
    (the, old) = sight(first.texts, second.texts)
    assert the.cannot_see == ("old", "boat") and old.cannot_see == ("boat",) and old.meets == (("boat", ("boat",)),)


# ── the published row ──────────────────────────────────────────────────────────────────────────────────────────


def test_the_published_row_beside_equal_weights(even: Subject) -> None:
    (reference,) = reference_rows()
    assert reference.words == ("Orange", "is", "my", "favorite", "fruit") and reference.query == "Orange"
    found = compare_row(even, reference)
    letters = np.array([6, 3, 3, 9, 6])  # each with the space before it, but the first
    assert np.allclose(found.equal_words.weights, 1 / 5) and found.equal_words.order == 0.5
    assert found.equal_words.distance == pytest.approx((0.01 + 0.17 + 0.15 + 0.11 + 0.2) / 2)
    assert np.allclose(found.equal_tokens.weights, letters / 27)
    assert np.allclose(found.rows, letters / 27, atol=1e-6), "so does a head that prefers nothing"
    assert np.allclose(found.distance, found.equal_tokens.distance, atol=1e-6)
    assert np.allclose(found.removed, np.mean([1 - 27 / seen for seen in range(29, 36)]), atol=2e-3)


def test_the_order_of_a_row() -> None:
    weights = np.array([0.21, 0.03, 0.05, 0.31, 0.4])
    assert same_order(weights, weights) == 1 and same_order(-weights, weights) == 0
    assert same_order(np.ones(5), weights) == 0.5
    assert same_order(weights[[0, 2, 1, 3, 4]], weights) == pytest.approx(0.9), "one pair of ten"


def test_a_row_without_a_counterpart_is_refused(subject: Subject) -> None:
    half = np.array([0.5, 0.5])
    with pytest.raises(UserError, match="tokens; must be at least 1, and at most 63"):
        compare_row(subject, ReferenceRow("long", ("a" * 20, "b" * 20), "a" * 20, half))
    with pytest.raises(UserError, match="hyphen: the text made of its words is parted into other words"):
        compare_row(subject, ReferenceRow("hyphen", ("a-b", "c"), "c", half))


# ── the command ────────────────────────────────────────────────────────────────────────────────────────────────


def test_minimal_pair_before_and_after(script: Script, run: Path) -> None:
    answer = script(COMPARE, "sentences", run, BANK, MONEY, "--which", 0, "--which", "best")
    assert answer.code == 0, answer.err
    lines = answer.out.splitlines()
    assert all(len(line) <= 80 for line in lines[1:])
    assert lines[0].endswith("<|end|> in front of each sentence; percent of each row")
    assert any("step 0" in line and "step 2" in line for line in lines), "side by side"
    assert "mean over all heads, sentence 2 minus sentence 1, over the words that both have" in lines
    assert " 2 bank" in answer.out and " 2=7  bank" in answer.out
    assert 'sentence 1: the row of "bank" sees only: The, bank; it cannot see: of, the,' in answer.out
    assert "- The: the same row in both sentences, since all it sees is the same" in lines


def test_numbers_of_the_table_are_the_maps(script: Script, run: Path, subject: Subject) -> None:
    found = script(COMPARE, "sentences", run, BANK, MONEY, "--head", "L0H1", "--json").json
    maps = [read(subject, sentence).maps[0, 1] for sentence in (BANK, MONEY)]
    assert found["steps"] == [2] and [item["words"] for item in found["sentences"]] == [RIVER, DEPOSIT]
    assert np.allclose(found["maps"]["L0H1"][0][1], maps[1])
    (against,) = found["against_first"]
    assert against["aligned"] == [[0, 0], [1, 1], [2, 7]] and against["same_start"] == 2
    assert np.allclose(against["difference"]["L0H1"][0], difference(maps[0], maps[1], aligned(RIVER, DEPOSIT)))
    assert against["sight"][0][1]["cannot_see"] == ["of", "the", "river", "was", "muddy"]
    lines = script(COMPARE, "sentences", run, BANK, "--head", "L0H1").out.splitlines()
    row = next(line for line in lines if line.startswith(" 7 muddy"))
    assert [int(number) for number in row.split()[2:]] == [round(100 * weight) for weight in maps[0][7]]


def test_the_published_sentence_is_recognised(script: Script, run: Path) -> None:
    words: list[Any] = ["sentences", run, "Orange is my favorite fruit"]
    answer = script(COMPARE, *words)
    assert answer.code == 0 and all(len(line) <= 80 for line in answer.out.splitlines()[1:])
    assert "published              21        3        5       31       40" in answer.out
    assert "there its row can't be compared" in " ".join(answer.out.split())
    (row,) = script(COMPARE, *words, "--json").json["references"]
    assert np.allclose(np.sum(row["steps"][0]["rows"], axis=-1), 1)
    asked = script(COMPARE, "sentences", run, "a b", "--reference", "orange_reference_row", "--json").json
    assert asked["references"] == [row]
    assert script(COMPARE, "sentences", run, "a b", "--json").json["references"] == []


def test_long_sentences_go_into_several_tables(script: Script, run: Path) -> None:
    words = [f"w{number}" for number in range(18)]
    answer = script(COMPARE, "sentences", run, " ".join(words), "extraordinarily 古い", "--head", "L0H0")
    lines = answer.out.splitlines()
    assert all(len(line) <= 80 for line in lines[1:])
    assert sum(line.startswith("18 w17") for line in lines) == 2
    assert " 1 extraor..." in "\n".join(line[:14] for line in lines)


def test_a_published_row_that_can_not_be_compared_costs_nothing_else(
    script: Script, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise UserError("so")

    row = ReferenceRow("hyphen", ("a", "-", "b"), "a", np.ones(3) / 3)
    monkeypatch.setattr("minigpt.inspection.sentences.reference_rows", lambda: [row])
    monkeypatch.setattr("minigpt.inspection.sentences.same_order", refuse)
    answer = script(COMPARE, "sentences", run, "a - b")
    assert answer.code == 0 and "step 2" in answer.out
    assert answer.err == "not held against the published row: so\n"
    assert script(COMPARE, "sentences", run, "a - b", "--reference", "hyphen").code == 2


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--head", "L1H0"], "L1H0: no such head"),
        (["--reference", "apple"], "--reference apple: no such row; known are orange_reference_row"),
        (["--which", "7"], "no checkpoint of step 7"),
    ],
)
def test_mistakes(script: Script, run: Path, words: list[str], told: str) -> None:
    answer = script(COMPARE, "sentences", run, "a b", *words)
    assert answer.code == 2 and told in answer.err and not answer.out
