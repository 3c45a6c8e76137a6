"""Tasks with known attention: what counts follows from the tokens, causes hold the answers, parts share no example."""

import numpy as np
import pytest
from tiny_runs import told

from minigpt.config import TaskConfig
from minigpt.tasks.synthetic import HELD_OUT, NONE, SYMBOLS, TASKS, Examples, class_of, examples
from minigpt.tokenizer import END

LENGTH = 24


def drawn(name: str, *, part: str = "train", tokens: int = LENGTH, count: int = 300, **options: object) -> Examples:
    return examples(name, TaskConfig.model_validate(options), length=tokens, count=count, seed=3, part=part)


def texts(name: str, found: Examples, **options: object) -> list[str]:
    alphabet = "^" + TASKS[name].alphabet(TaskConfig.model_validate(options))
    return ["".join(alphabet[token] for token in row) for row in found.tokens]


@pytest.mark.parametrize("name", TASKS)
def test_examples_are_the_same_again_and_kept_apart(name: str) -> None:
    found = drawn(name)
    assert found.tokens.shape == found.targets.shape == found.causes.shape == (300, LENGTH)
    assert all(np.array_equal(a, b) for a, b in zip(vars(found).values(), vars(drawn(name)).values(), strict=True))
    assert (found.tokens[:, 0] == END).all() and (found.tokens[:, 1:] > END).all()
    alphabet = TASKS[name].alphabet(TaskConfig())
    assert sorted(set(alphabet)) == list(alphabet), "as a char tokenizer numbers them"
    assert found.tokens.max() <= len(alphabet) and (found.targets != END).all()
    held_out = {part: {row.tobytes() for row in drawn(name, part=part).tokens} for part in ("val", "test")}
    train = {row.tobytes() for row in found.tokens}
    assert not train & held_out["val"] and not train & held_out["test"] and not held_out["val"] & held_out["test"]
    others = examples(name, TaskConfig(), length=LENGTH, count=300, seed=4, part="train").tokens
    assert not np.array_equal(others, found.tokens)
    assert {0, 1}.isdisjoint(class_of(others).tolist()), "whatever the seed"


@pytest.mark.parametrize("name", ["copy", "induction", "recall"])
def test_the_cause_of_an_answer_holds_it(name: str) -> None:
    found = drawn(name)
    rows, places = np.nonzero(found.targets != NONE)
    causes = found.causes[rows, places]
    assert (causes > 0).all() and (causes <= places).all()
    assert (found.tokens[rows, causes] == found.targets[rows, places]).all()
    assert (found.tokens[rows, places + 1] == found.targets[rows, places]).all(), "the answer is the next token too"
    assert ((found.causes == NONE) == (found.targets == NONE)).all()


@pytest.mark.parametrize("order", ["same", "reversed", "sorted"])
def test_copy(order: str) -> None:
    for text in texts("copy", drawn("copy", order=order, distance=3, tokens=21)):
        assert text[0] == "^" and len(text) == 21
        read, bar, copied = text[1:].partition("...|")
        assert bar and len(read) == 8
        expected = {"same": read, "reversed": read[::-1], "sorted": "".join(sorted(read))}[order]
        assert copied == expected


def test_induction_has_one_match_at_a_gap_that_varies() -> None:
    found = drawn("induction")
    gaps = set()
    for text, targets, causes in zip(texts("induction", found), found.targets, found.causes, strict=True):
        twice = [symbol for symbol in text if text.count(symbol) == 2]
        assert len(twice) == 2 * LENGTH // 4 and all(text.count(symbol) <= 2 for symbol in text)
        known = np.flatnonzero(targets != NONE)
        assert len(known) == LENGTH // 4 - 1
        for row in known:
            assert text.index(text[row]) == causes[row] - 1 < row, "it stands after the same symbol before"
            gaps.add(row + 1 - causes[row])
    assert len(gaps) > 8
    fixed = drawn("induction", distance=9)
    rows, places = np.nonzero(fixed.causes != NONE)
    assert set((places + 1 - fixed.causes[rows, places]).tolist()) == {9}


def test_recall_asks_each_key_once() -> None:
    half = SYMBOLS[:31]
    for text in texts("recall", drawn("recall", distance=2)):
        pairs, _, asked = text[1:].partition("..|")
        table = dict(zip(pairs[::2], pairs[1::2], strict=True))
        keys = asked.rstrip(".")[::2]
        assert len(table) == 5 and sorted(keys) == sorted(table) and set(keys) <= set(half)
        assert [table[key] for key in keys] == list(asked.rstrip(".")[1::2])
        assert set(table.values()).isdisjoint(half)


def test_brackets_close_what_was_opened_last() -> None:
    found = drawn("brackets", depth=3)
    deepest = 0
    for row, text in enumerate(texts("brackets", found)):
        targets, causes = found.targets[row], found.causes[row]
        opened: list[int] = []
        for place, character in enumerate(text):
            if character in "([":
                opened.append(place)
                deepest = max(deepest, len(opened))
            elif character in ")]":
                opener = opened.pop()
                assert "([".index(text[opener]) == ")]".index(character)
                assert causes[place - 1] == opener and targets[place - 1] == found.tokens[row, place]
            else:
                assert character in "^."
        assert not opened
    assert deepest == 3


def test_parity_answers_after_each_bit() -> None:
    found = drawn("parity")
    assert (found.causes == NONE).all() and (found.targets[:, 0] == NONE).all()
    for text, targets in zip(texts("parity", found), found.targets, strict=True):
        assert [int(target) - 1 for target in targets[1:]] == [text[: n + 1].count("1") % 2 for n in range(1, LENGTH)]


@pytest.mark.parametrize(
    ("name", "options", "length", "sentence"),
    [
        ("recal", {}, 24, "data.source = task:recal: no such task; did you mean recall?"),
        ("copy", {"length": 12}, 24, "model.context_length = 24: the task copy needs 26 tokens for 12 symbols"),
        ("copy", {"distance": 30}, 24, "model.context_length = 24: the task copy needs 34 tokens"),
        ("copy", {"order": "sorted", "symbols": 5}, 24, "task.symbols = 5: sorting 11 different ones takes as many"),
        ("recall", {"length": 6}, 24, "model.context_length = 24: the task recall needs 26 tokens for 6 pairs"),
        ("recall", {"symbols": 8}, 24, "task.symbols = 8: half of them are keys, which is too few for 5 pairs"),
        ("induction", {"length": 12}, 24, "model.context_length = 24: the task induction needs 25 tokens"),
        ("induction", {"symbols": 9}, 24, "task.symbols = 9: 24 tokens take 17 different ones"),
        ("induction", {"length": 1}, 24, "task.length = 1: the first symbol that comes again can't be known"),
        ("induction", {"distance": 20}, 24, "model.context_length = 24: the task induction needs 27 tokens"),
        ("induction", {"distance": 4}, 24, "task.distance = 4: must be at least task.length = 6"),
        ("brackets", {}, 2, "model.context_length = 2: the task brackets needs 3 tokens for one pair"),
    ],
)
def test_what_does_not_fit_is_one_sentence(name: str, options: dict, length: int, sentence: str) -> None:
    for part in ("val", "test"):
        said = told(drawn, name, part=part, tokens=length, **options)
        assert said.startswith(sentence) and "\n" not in said


def test_a_task_with_two_examples_leaves_some_part_empty() -> None:
    there = {part for part in ("val", "test") if (class_of(np.array([[0, 1], [0, 2]])) == HELD_OUT[part]).any()}
    (empty, *_) = {"val", "test"} - there
    said = told(drawn, "parity", part=empty, tokens=2)
    assert said.startswith("data.source = task:parity: there are too few different examples of 2 tokens")
