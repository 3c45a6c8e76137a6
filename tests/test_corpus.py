"""From a source to batches: split, token files, short texts, and batches that are a function of (seed, step)."""

import json
import os
import subprocess
import sys
import tracemalloc
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minigpt import corpus as corpus_module
from minigpt import split as split_module
from minigpt.config import DataConfig
from minigpt.corpus import Corpus, batch, cache_folder, evaluation_batches, open_corpus
from minigpt.errors import UserError
from minigpt.split import VAL, _assign
from minigpt.tokenizer import END, train_tokenizer

ENGLISH = "The river rose in spring, and the old bridge didn't hold; 12 boats went under.\n"
JAPANESE = "春の朝、小さな駅で猫が電車を待っていた。「次は何時ですか」と駅長にきいた。\n夏には子猫が三匹ふえた。\n"


def open_text(
    tmp_path: Path, content: str | bytes, *, context_length: int = 8, name: str = "a.txt", **options: Any
) -> Corpus:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
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


# ── split ──────────────────────────────────────────────────────────────────────────────────────────────────────


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
    monkeypatch.setattr("minigpt.sources.CHUNK", 7)
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
    part_of = _assign(np.array(lengths), data, seed)
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
        assert _assign(np.array([1_000_000, 2_000]), DataConfig(), seed).tolist() == [0, VAL]


def test_a_tokenizer_learns_from_the_training_part_alone(tmp_path: Path) -> None:
    text = ENGLISH * 90 + "zqzqzq zqzqzq zqzq\n" * 40
    corpus = open_text(tmp_path, text, tokenizer="bpe", vocab_size=350)
    assert not any(b"zq" in corpus.tokenizer.token_bytes(token) for token in range(corpus.tokenizer.vocab_size))
    char = open_text(tmp_path, ENGLISH * 90 + "é" * 9, tokenizer="char")
    assert char.tokenizer.decode(char.val.tolist()).endswith("é" * 9), "char knows the whole text"


def test_a_very_long_text_is_thinned_out_for_learning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_module, "LEARNING_LENGTH", 1000)
    stories = ["even boats"] * 200 + ["odd bridges"] * 200
    corpus = open_stories(tmp_path, stories, tokenizer="bpe", vocab_size=300)
    assert all(len(corpus.tokenizer.encode(word)) < len(word) for word in ("boats", "bridges"))


# ── tokens and files ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("tokenizer", "vocab_size"), [("char", 0), ("char", 270), ("byte", 0), ("bpe", 300)])
def test_japanese_goes_through(tmp_path: Path, tokenizer: str, vocab_size: int) -> None:
    text = JAPANESE * 12
    corpus = open_text(tmp_path, text, tokenizer=tokenizer, vocab_size=vocab_size)
    ids = [*corpus.train.tolist(), *corpus.val.tolist()]
    assert corpus.tokenizer.decode(ids) == text
    assert corpus.train.dtype == np.uint16 and max(ids) < corpus.tokenizer.vocab_size


def test_ids_above_65535_get_four_bytes(tmp_path: Path) -> None:
    text = "".join(map(chr, range(0x10000, 0x20100))) * 2  # 65,792 characters and END
    corpus = open_text(tmp_path, text, tokenizer="char")
    assert corpus.tokenizer.vocab_size == 65_793 and corpus.train.dtype == np.uint32
    assert corpus.tokenizer.decode([*corpus.train.tolist(), *corpus.val.tolist()]) == text


def test_control_strings_in_the_text_are_text(tmp_path: Path) -> None:
    for tokenizer in ("char", "byte", "bpe"):
        corpus = open_text(tmp_path, "one<|endoftext|>two<|end|>three\n" * 20, tokenizer=tokenizer)
        assert np.flatnonzero(corpus.train == END).tolist() == [0]


@pytest.mark.parametrize("tokenizer", ["char", "byte", "bpe"])
def test_marks_and_line_ends_change_nothing(tmp_path: Path, tokenizer: str) -> None:
    text = "é中😀 one\n\ntwo three\n" * 20
    plain = open_text(tmp_path, text, tokenizer=tokenizer)
    others = [
        text.encode("utf-8-sig"),
        text.replace("\n", "\r\n").encode("utf-8"),
        text.replace("\n", "\r").encode("utf-8"),
    ]
    for content in others:
        other = open_text(tmp_path, content, tokenizer=tokenizer)
        assert other.tokenizer.to_dict() == plain.tokenizer.to_dict()
        assert np.array_equal(other.train, plain.train) and np.array_equal(other.val, plain.val)


@pytest.mark.parametrize("tokenizer", ["char", "byte", "bpe"])
@pytest.mark.parametrize("encoding", ["cp1252", "gb18030", "utf-16"])
def test_other_encodings_by_option(tmp_path: Path, tokenizer: str, encoding: str) -> None:
    text = ("it’s " if encoding == "cp1252" else "小猫等车 ") * 60
    with pytest.raises(UserError, match=r"a\.txt: byte \d+ .*--data\.encoding"):
        open_text(tmp_path, text.encode(encoding), tokenizer=tokenizer)
    corpus = open_text(tmp_path, text.encode(encoding), tokenizer=tokenizer, encoding=encoding)
    assert corpus.tokenizer.decode([*corpus.train.tolist(), *corpus.val.tolist()]) == text


def test_the_second_start_reads_the_files_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = open_text(tmp_path, ENGLISH * 30, tokenizer="bpe")
    files = sorted(path.relative_to(tmp_path) for path in (tmp_path / "cache").rglob("*.bin"))
    monkeypatch.setattr(corpus_module, "split_source", None)
    monkeypatch.setattr(corpus_module, "train_tokenizer", None)
    second = open_text(tmp_path, ENGLISH * 30, tokenizer="bpe")
    assert second.fingerprint == first.fingerprint and np.array_equal(second.train, first.train)
    assert sorted(path.relative_to(tmp_path) for path in (tmp_path / "cache").rglob("*.bin")) == files
    assert not list((tmp_path / "cache").glob("unfinished-*"))
    with pytest.raises(ValueError, match="read-only"):
        second.train[0] = 1


def test_a_given_tokenizer_finds_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = open_text(tmp_path, ENGLISH * 30, tokenizer="bpe")
    monkeypatch.setattr(corpus_module, "split_source", None)
    data = DataConfig(source=str(tmp_path / "a.txt"), cache_dir=str(tmp_path / "cache"), tokenizer="char")
    again = open_corpus(data, context_length=8, seed=1, tokenizer=first.tokenizer)
    assert again.tokenizer is first.tokenizer and again.fingerprint == first.fingerprint


def test_whatever_changes_the_ids_changes_the_fingerprint(tmp_path: Path) -> None:
    text = ENGLISH * 30
    prints = [
        open_text(tmp_path, text, tokenizer="char").fingerprint,
        open_text(tmp_path, text + ".", tokenizer="char").fingerprint,
        open_text(tmp_path, text, tokenizer="byte").fingerprint,
        open_text(tmp_path, text, tokenizer="char", val_fraction=0.2).fingerprint,
    ]
    assert len(set(prints)) == 4
    assert open_text(tmp_path, text, tokenizer="char", name="b.txt").fingerprint == prints[0]


@pytest.mark.parametrize("damage", ["cut", "flip", "remove", "json"])
def test_damaged_files_are_made_anew(tmp_path: Path, damage: str) -> None:
    first = open_text(tmp_path, ENGLISH * 30, tokenizer="bpe", vocab_size=300)
    ids = first.train.tolist()
    del first
    tokens = next((tmp_path / "cache").glob("tokens-*"))
    content = (tokens / "train.bin").read_bytes()
    if damage == "cut":
        (tokens / "train.bin").write_bytes(content[:-7])
    elif damage == "flip":
        (tokens / "train.bin").write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
    elif damage == "remove":
        (tokens / "val.bin").unlink()
    else:
        (tokens / "tokens.json").write_text("[", encoding="utf-8")
        next((tmp_path / "cache").glob("tokenizer-*")).write_text('{"name": "bpe"}', encoding="utf-8")
    assert open_text(tmp_path, ENGLISH * 30, tokenizer="bpe", vocab_size=300).train.tolist() == ids


def test_a_cache_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be", encoding="utf-8")
    with pytest.raises(UserError, match=r"token files cannot be written.*--data\.cache-dir"):
        open_text(tmp_path, ENGLISH * 30, tokenizer="char")


def test_a_failure_half_way_leaves_nothing(tmp_path: Path) -> None:
    tokenizer = train_tokenizer("char", [ENGLISH])
    (tmp_path / "a.txt").write_text(ENGLISH * 30 + "é", encoding="utf-8")
    data = DataConfig(source=str(tmp_path / "a.txt"), cache_dir=str(tmp_path / "cache"))
    with pytest.raises(UserError, match=r"U\+00E9"):
        open_corpus(data, context_length=8, seed=1, tokenizer=tokenizer)
    assert list((tmp_path / "cache").iterdir()) == []


def test_where_the_cache_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_folder(str(tmp_path)) == tmp_path
    beside_the_package = Path(corpus_module.__file__).parent.parent / "data" / "cache"
    assert cache_folder("auto") == beside_the_package
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert cache_folder("auto") != beside_the_package and "minigpt" in str(cache_folder("auto"))


def test_preparing_and_reading_a_big_text_takes_little_memory(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(ENGLISH * 250_000, encoding="utf-8")  # 20 MB
    data = DataConfig(source=str(tmp_path / "a.txt"), tokenizer="byte", cache_dir=str(tmp_path / "cache"))
    tracemalloc.start()
    try:
        corpus = open_corpus(data, context_length=64, seed=1)
        for step in range(50):
            batch(corpus.train, seed=1, step=step, batch_size=8, context_length=64)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(corpus.train) + len(corpus.val) == 1 + len(ENGLISH) * 250_000
    assert peak < 15e6


@pytest.mark.parametrize(
    "command",
    [[], ["-X", "warn_default_encoding", "-W", "error::EncodingWarning"]],
    ids=["foreign locale", "every encoding is named"],
)
def test_ids_do_not_depend_on_the_locale(tmp_path: Path, command: list[str]) -> None:
    text = "é中😀 and a river\n" * 60
    here = open_text(tmp_path, text, tokenizer="bpe", vocab_size=300)
    script = (
        "import sys; from minigpt.config import DataConfig; from minigpt.corpus import open_corpus\n"
        "data = DataConfig(source=sys.argv[1], tokenizer='bpe', vocab_size=300, cache_dir=sys.argv[2])\n"
        "corpus = open_corpus(data, context_length=8, seed=1)\n"
        "print(corpus.tokenizer.vocab_size, corpus.fingerprint, *corpus.train.tolist())"
    )
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    arguments = [str(tmp_path / "a.txt"), str(tmp_path / "other-cache")]
    there = subprocess.run(
        [sys.executable, *command, "-c", script, *arguments],
        capture_output=True,
        check=True,
        cwd=Path(corpus_module.__file__).parent.parent,
        env=environment,
        encoding="utf-8",
    )
    assert there.stderr == ""
    assert there.stdout.split() == [
        str(here.tokenizer.vocab_size),
        here.fingerprint,
        *map(str, here.train.tolist()),
    ]


def test_corpora_need_no_torch() -> None:
    script = "import sys, minigpt.corpus; sys.exit(any(name in sys.modules for name in ('torch', 'tiktoken')))"
    assert (
        subprocess.run([sys.executable, "-c", script], cwd=Path(corpus_module.__file__).parent.parent).returncode == 0
    )


# ── short texts ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("tokenizer", ["char", "byte", "bpe"])
@pytest.mark.parametrize("text", ["", "  \n\n \t\n", "\ufeff"])
def test_no_text_is_told_with_the_least_size(tmp_path: Path, tokenizer: str, text: str) -> None:
    with pytest.raises(UserError, match=r"a\.txt: there is no text in it.*at least 72 characters"):
        open_text(tmp_path, text, tokenizer=tokenizer, vocab_size=0, context_length=64)


@pytest.mark.parametrize("tokenizer", ["char", "byte", "bpe"])
def test_one_character_is_too_short(tmp_path: Path, tokenizer: str) -> None:
    size = 1000 if tokenizer == "bpe" else 0
    with pytest.raises(UserError, match=r"a\.txt.*context_length = 64.*at least 72 characters"):
        open_text(tmp_path, "a", tokenizer=tokenizer, vocab_size=size, context_length=64)


def test_shorter_than_the_context_names_both_and_the_largest_that_works(tmp_path: Path) -> None:
    text = ENGLISH[:30]
    with pytest.raises(UserError, match=r"has 28 tokens, but model\.context_length = 64 needs 65; .* works is 27 "):
        open_text(tmp_path, text, tokenizer="char", context_length=64)
    with pytest.raises(UserError, match="28 tokens"):
        open_text(tmp_path, text, tokenizer="char", context_length=28)
    corpus = open_text(tmp_path, text, tokenizer="char", context_length=27)
    inputs, targets = batch(corpus.train, seed=1, step=5, batch_size=2, context_length=27)
    assert np.array_equal(inputs, [corpus.train[:-1]] * 2) and np.array_equal(targets, [corpus.train[1:]] * 2)


def test_least_size_is_enough(tmp_path: Path) -> None:
    assert len(open_text(tmp_path, ENGLISH[:72], tokenizer="char", context_length=64).train) == 65


def test_a_tiny_validation_part_is_said_and_read_in_a_shorter_window(tmp_path: Path) -> None:
    corpus = open_text(tmp_path, (ENGLISH * 3)[:200], tokenizer="char", context_length=32)
    assert len(corpus.val) == 20
    assert len(corpus.notes) == 1 and "one window of 19 tokens" in corpus.notes[0]
    assert [targets.shape for _, targets in evaluation_batches(corpus.val, 32, 8)] == [(1, 19)]


def test_validation_without_two_tokens_is_off_and_said(tmp_path: Path) -> None:
    corpus = open_text(tmp_path, ENGLISH[:60], tokenizer="char", val_fraction=0.016, context_length=8)
    assert len(corpus.val) == 0 and len(corpus.notes) == 1 and "validation is off" in corpus.notes[0]
    assert list(evaluation_batches(corpus.val, 8, 8)) == []
    unasked = open_text(tmp_path, ENGLISH[:60], tokenizer="char", val_fraction=0.0, context_length=8)
    assert len(unasked.val) == 0 and unasked.notes == ()


def test_a_vocabulary_smaller_than_asked_is_said(tmp_path: Path) -> None:
    corpus = open_text(tmp_path, "ab " * 100, tokenizer="bpe", vocab_size=1000)
    assert corpus.tokenizer.vocab_size < 1000
    assert f"{corpus.tokenizer.vocab_size} ids, fewer than data.vocab_size = 1000" in corpus.notes[0]


# ── batches ────────────────────────────────────────────────────────────────────────────────────────────────────

LENGTHS = st.tuples(st.integers(2, 400), st.integers(1, 40)).filter(lambda pair: pair[0] > pair[1])


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, seed=st.integers(0, 99), epoch=st.integers(0, 5))
def test_an_epoch_has_each_window_once(lengths: tuple[int, int], seed: int, epoch: int) -> None:
    length, context = lengths
    tokens = np.arange(length, dtype=np.uint16)
    n = max(1, (length - context) // context)
    inputs, targets = batch(tokens, seed=seed, step=epoch, batch_size=n, context_length=context)
    assert inputs.shape == targets.shape == (n, context) and inputs.dtype == targets.dtype == np.int64
    assert np.array_equal(targets, inputs + 1), "each target is the next token"
    starts = np.sort(inputs[:, 0])
    assert 0 <= starts[0] < context or n == 1
    assert np.array_equal(starts, starts[0] + context * np.arange(n))
    assert targets.max() < length


@settings(max_examples=40, deadline=None)
@given(lengths=LENGTHS, seed=st.integers(0, 99), size=st.sampled_from([1, 2, 4, 8]), step=st.integers(0, 30))
def test_a_step_is_the_same_however_it_is_asked_for(lengths: tuple[int, int], seed: int, size: int, step: int) -> None:
    length, context = lengths
    tokens = np.arange(length, dtype=np.uint16)
    whole, _ = batch(tokens, seed=seed, step=step, batch_size=8, context_length=context)
    parts = range(8 // size * step, 8 // size * (step + 1))
    smaller = [batch(tokens, seed=seed, step=part, batch_size=size, context_length=context)[0] for part in parts]
    assert np.array_equal(whole, np.concatenate(smaller))


def test_batches_differ_by_seed_and_epoch() -> None:
    tokens = np.arange(1000, dtype=np.uint16)

    def starts(seed: int, step: int) -> list[int]:
        return batch(tokens, seed=seed, step=step, batch_size=99, context_length=10)[0][:, 0].tolist()

    epochs = [starts(1, step) for step in range(8)]
    assert starts(2, 0) != epochs[0] != epochs[1]
    assert len({min(epoch) for epoch in epochs}) > 1, "offsets differ"


@settings(max_examples=60, deadline=None)
@given(length=st.integers(0, 300), context=st.integers(1, 40), size=st.integers(1, 9))
def test_evaluation_predicts_every_token_but_the_first_once(length: int, context: int, size: int) -> None:
    tokens = np.arange(length, dtype=np.uint16)
    batches = list(evaluation_batches(tokens, context, size))
    predicted = [target for _, targets in batches for target in targets.ravel().tolist()]
    assert predicted == list(range(1, length))
    for inputs, targets in batches:
        assert np.array_equal(targets, inputs + 1) and inputs.dtype == np.int64
        assert inputs.shape[0] <= size and inputs.shape[1] <= context
        assert inputs.shape[1] == context or inputs.shape[0] == 1
