"""Which text is for training, which for validation, which for the test."""

import json
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minigpt import corpus as corpus_module
from minigpt.config import DataConfig
from minigpt.corpus import Corpus, evaluation_batches, open_corpus
from minigpt.split import VAL, assign, thinned
from minigpt.tokenizer import END

ENGLISH = "The river rose in spring, and the old bridge didn't hold; 12 boats went under.\n"
JAPANESE = "春の朝、小さな駅で猫が電車を待っていた。「次は何時ですか」と駅長にきいた。\n夏には子猫が三匹ふえた。\n"


def open_text(tmp_path: Path, text: str, *, context_length: int = 8, **options: Any) -> Corpus:
    path = tmp_path / "a.txt"
    path.write_text(text, encoding="utf-8")
    data = DataConfig(source=str(path), cache_dir=str(tmp_path / "cache"), **options)
    return open_corpus(data, context_length=context_length, seed=1)


def open_stories(tmp_path: Path, stories: list[str], *, seed: int = 1, **options: Any) -> Corpus:
    path = tmp_path / "stories.jsonl"
    path.write_text("\n".join(json.dumps({"text": story}) for story in stories), encoding="utf-8")
    options = {"tokenizer": "char", "cache_dir": str(tmp_path / "cache")} | options
    return open_corpus(DataConfig(source=str(path), **options), context_length=8, seed=seed)


def documents_of(corpus: Corpus, part: np.ndarray) -> list[str]:
    """The documents of a part; checks END doc END doc END."""
    ends = np.flatnonzero(part == END)
    assert part[0] == END and part[-1] == END
    return [corpus.tokenizer.decode(part[a + 1 : b].tolist()) for a, b in pairwise(ends)]


def test_one_document_is_cut_by_characters(tmp_path: Path) -> None:
    text = (ENGLISH * 20)[:1007]
    corpus = open_text(tmp_path, text, tokenizer="char", val_fraction=0.1, test_fraction=0.2)
    decode = corpus.tokenizer.decode
    assert corpus.train[0] == END and END not in corpus.train[1:]
    assert decode(corpus.train.tolist()) == text[:704]  # ⌊0.7 · 1007⌋
    assert decode(corpus.val.tolist()) == text[704:805]
    assert decode(corpus.test.tolist()) == text[805:]
    assert corpus.notes == ()


def test_cuts_do_not_depend_on_how_the_text_comes_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (JAPANESE * 30)[:1000]
    whole = open_text(tmp_path, text, tokenizer="byte", test_fraction=0.3)
    monkeypatch.setattr("minigpt.reading.CHUNK", 7)
    monkeypatch.setattr(corpus_module, "FORMAT", 0)  # so that nothing comes from the cache
    in_bits = open_text(tmp_path, text, tokenizer="byte", test_fraction=0.3)
    assert [len(part.tolist()) for part in (whole.train, whole.val, whole.test)] == [
        1 + len(text[:600].encode()),
        len(text[600:700].encode()),
        len(text[700:].encode()),
    ]
    for part in ("train", "val", "test"):
        assert np.array_equal(getattr(whole, part), getattr(in_bits, part))


def test_the_known_split_of_a_text_of_tinyshakespeares_length(tmp_path: Path) -> None:
    corpus = open_text(tmp_path, (ENGLISH * 14_200)[:1_115_394], tokenizer="char", context_length=64)
    assert (len(corpus.train) - 1, len(corpus.val), len(corpus.test)) == (1_003_854, 111_540, 0)
    assert sum(targets.size for _, targets in evaluation_batches(corpus.val, 64, 128)) == 111_539


def test_documents_go_whole_into_one_part(tmp_path: Path) -> None:
    stories = [f"Story {i} tells of {i * i} boats." for i in range(50)]
    corpus = open_stories(tmp_path, [*stories, "", "  \n"], val_fraction=0.1, test_fraction=0.2)
    parts = [documents_of(corpus, part) for part in (corpus.train, corpus.val, corpus.test)]
    assert sorted(chain(*parts)) == sorted(stories)
    assert [len(part) for part in parts[1:]] == pytest.approx([5, 10], abs=1)
    assert all(part == sorted(part, key=stories.index) for part in parts), "in the order of the source"
    other = open_stories(tmp_path, stories, seed=2, val_fraction=0.1)
    assert documents_of(other, other.val) != parts[1]


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 1000), min_size=2, max_size=20).filter(lambda many: sum(map(bool, many)) > 1),
    val=st.floats(0, 0.6),
    test=st.floats(0, 0.39),
    seed=st.integers(0, 9),
)
def test_every_part_asked_for_gets_a_document_if_there_are_enough(
    lengths: list[int], val: float, test: float, seed: int
) -> None:
    data = DataConfig(val_fraction=val, test_fraction=test)
    part_of = assign(np.array(lengths), data, seed)
    documents = sum(map(bool, lengths))
    assert ((part_of == -1) == (np.array(lengths) == 0)).all()
    assert (part_of == 0).any()
    assert (part_of == 1).any() == (val > 0)
    if documents > 2 and val <= 0.3 and test <= 0.3:
        held = np.array(lengths)[part_of == 1].sum()
        assert held <= max(val * sum(lengths), min(filter(None, lengths)))
    if not test:
        assert not (part_of == 2).any()


def test_a_note_beside_a_novel_is_what_gets_validated() -> None:
    for seed in range(5):
        assert assign(np.array([1_000_000, 2_000]), DataConfig(), seed).tolist() == [0, VAL]


def test_a_tokenizer_learns_from_the_training_part_alone(tmp_path: Path) -> None:
    text = ENGLISH * 90 + "zqzqzq zqzqzq zqzq\n" * 40
    corpus = open_text(tmp_path, text, tokenizer="bpe", vocab_size=350)
    assert not any(b"zq" in corpus.tokenizer.token_bytes(token) for token in range(corpus.tokenizer.vocab_size))
    char = open_text(tmp_path, ENGLISH * 90 + "é" * 9, tokenizer="char")
    assert char.tokenizer.decode(char.val.tolist()).endswith("é" * 9), "char knows the whole text"


def test_a_very_long_text_is_thinned_out_for_learning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_module, "learning_bytes", lambda _vocab_size: 1000)
    stories = ["even boats"] * 200 + ["odd bridges"] * 200
    corpus = open_stories(tmp_path, stories, tokenizer="bpe", vocab_size=300)
    assert all(len(corpus.tokenizer.encode(word)) < len(word) for word in ("boats", "bridges"))


@given(n=st.integers(0, 300), spacing=st.integers(1, 20))
def test_thinning_takes_one_of_each_row(n: int, spacing: int) -> None:
    taken = [int(text) for text in thinned(map(str, range(n)), spacing)]
    rows = [number // spacing for number in taken]
    assert rows[: n // spacing] == [*range(n // spacing)] and len(rows) <= n // spacing + 1


def test_thinning_meets_no_beat() -> None:
    taken = list(thinned("ab" * 500, 2))
    assert len(taken) == 500 and 200 < taken.count("a") < 300
    assert list(thinned("ab" * 5, 1)) == list("ab" * 5)
