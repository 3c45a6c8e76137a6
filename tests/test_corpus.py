"""From a source to batches: split, token files, short texts, and batches that are a function of (seed, step)."""

import os
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minigpt import corpus as corpus_module
from minigpt.config import DataConfig
from minigpt.corpus import Corpus, batch, cache_folder, evaluation_batches, open_corpus
from minigpt.errors import UserError
from minigpt.tokenizer import END, tokenizer_from_dict, train_tokenizer

ENGLISH = "The river rose in spring, and the old bridge didn't hold; 12 boats went under.\n"
JAPANESE = "春の朝、小さな駅で猫が電車を待っていた。「次は何時ですか」と駅長にきいた。\n夏には子猫が三匹ふえた。\n"


def open_text(
    tmp_path: Path, content: str | bytes, *, context_length: int = 8, name: str = "a.txt", **options: Any
) -> Corpus:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    data = DataConfig(source=str(path), cache_dir=str(tmp_path / "cache"), **options)
    return open_corpus(data, context_length=context_length, seed=1)


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


def test_what_becomes_of_unseen_characters_is_kept_with_the_tokenizer(tmp_path: Path) -> None:
    """Also where the tokenizer is found as another run left it."""
    for unseen in ("stop", "skip", "replace", "stop"):
        corpus = open_text(tmp_path, ENGLISH * 20, tokenizer="char", unseen=unseen)
        assert corpus.tokenizer.to_dict()["unseen"] == unseen


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
    if tokenizer != "byte":  # which takes any file as it is
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
    monkeypatch.setattr(os, "access", lambda path, mode: True)
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


def test_lost_characters_are_said_on_every_start(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text(ENGLISH * 30 + "ééx", encoding="utf-8")
    data = DataConfig(source=str(path), cache_dir=str(tmp_path / "cache"))
    characters = train_tokenizer("char", [ENGLISH]).to_dict()
    for unseen, how in (("skip", "left out"), ("replace", "replaced")):
        tokenizer = tokenizer_from_dict(characters, unseen=unseen)
        for _start in range(2):
            corpus = open_corpus(data, context_length=8, seed=1, tokenizer=tokenizer)
            assert corpus.notes == (f"{path}: 3 of 2,373 characters {how}: the tokenizer has never seen them",)
    with pytest.raises(UserError, match=r"'é' \(U\+00E9\), .*a\.txt; --data\.unseen skip or replace goes on .*"):
        open_corpus(data, context_length=8, seed=1, tokenizer=tokenizer_from_dict(characters))


def test_a_file_taken_byte_by_byte_is_said_on_every_start(tmp_path: Path) -> None:
    for _start in range(2):
        corpus = open_text(tmp_path, "it’s ".encode("cp1252") * 60, tokenizer="byte", encoding="UTF8")
        assert corpus.notes == (f"{tmp_path / 'a.txt'} is not UTF-8: its bytes are taken as they are",)


def test_a_vocabulary_smaller_than_asked_is_said(tmp_path: Path) -> None:
    corpus = open_text(tmp_path, "ab " * 100, tokenizer="bpe", vocab_size=1000)
    assert corpus.tokenizer.vocab_size < 1000
    assert f"{corpus.tokenizer.vocab_size} ids, fewer than data.vocab_size = 1000" in corpus.notes[0]
