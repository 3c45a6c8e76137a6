"""A run's text as token ids: encoded once into files, and read in batches that depend on (seed, step) alone.

Every document is preceded by ``<|end|>``, and so is the end of a part of several documents: END doc END doc END.
A text that is one document has a single END, at its start. Nothing here keeps the text in memory.
"""

import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, lru_cache
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minigpt.bpe import learning_bytes
from minigpt.config import DataConfig
from minigpt.errors import UserError
from minigpt.shipped import HOME, INSTALLED
from minigpt.sources import open_source
from minigpt.split import TRAIN, Split, Tokens, check_training_part, split_source, usable
from minigpt.tokenizer import END, Tokenizer, pieces, tokenizer_from_dict, train_tokenizer
from minigpt.unseen import UnseenError, lost_note

Batch = tuple[NDArray[np.int64], NDArray[np.int64]]

PARTS = ("train", "val", "test")
FORMAT = 1  # of the cached files; they are made anew when it changes
MOVES = 3  # times that finished files are moved into place; other processes may be doing the same


@dataclass(frozen=True)
class Corpus:
    """Token ids of the three parts, memory-mapped, each of shape (N,); a part that does not exist has length 0.

    ``notes`` are sentences to say before training starts. ``fingerprint`` is the same for the same text, split and
    tokenizer. ``targets``: of a part where each token's target is not simply the next one, the targets (N,); −1 does
    not count.
    """

    tokenizer: Tokenizer
    train: Tokens
    val: Tokens
    test: Tokens
    notes: tuple[str, ...]
    fingerprint: str
    targets: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)


def open_corpus(data: DataConfig, *, context_length: int, seed: int, tokenizer: Tokenizer | None = None) -> Corpus:
    """The corpus of a run; without ``tokenizer`` one is trained, on the training part alone.

    (Only ``char`` looks at the whole text, so that validation never meets an unknown character.) Tokenizer and ids
    are cached in ``data.cache_dir``: a second start does little more than hash the text.

    Raises:
        UserError: for text that is missing, unreadable, not in ``data.encoding``, or too short for the context.
    """
    folder = cache_folder(data.cache_dir)
    source = open_source(data, folder)
    least = ceil(context_length / (1 - data.val_fraction - data.test_fraction))

    @cache
    def split() -> Split:
        return split_source(source, data, seed=seed, least=least)

    text_key = digest(FORMAT, source.identity, data.val_fraction, data.test_fraction, seed)
    notes = [*source.notes]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if tokenizer is None:
            key = digest(text_key, data.tokenizer, data.vocab_size)
            tokenizer = _cached_tokenizer(folder / f"tokenizer-{key}.json", data, split)
            if data.vocab_size > tokenizer.vocab_size:
                notes.append(
                    f"the tokenizer has {tokenizer.vocab_size} ids, fewer than data.vocab_size = {data.vocab_size}: "
                    "the text gives no more"
                )
        fingerprint = digest(text_key, tokenizer.to_dict())
        files = folder / f"tokens-{fingerprint}"
        train, val, test = _cached_parts(files, split, tokenizer)
        notes += [f"{source.name}: {note}" for note in _lost_notes(files, tokenizer)]
    except UnseenError as error:
        raise error.in_source(source.name) from None
    except OSError as error:
        raise UserError(
            f"{folder}: token files cannot be written ({error.strerror or error}); make room there or name another "
            "folder with --data.cache-dir"
        ) from None
    check_training_part(len(train), source.name, context_length, least)
    val = usable(val, "validation", data.val_fraction, context_length, notes)
    test = usable(test, "the test", data.test_fraction, context_length, notes)
    return Corpus(tokenizer, train, val, test, tuple(notes), fingerprint)


def held_back(corpus: Corpus, data: DataConfig, part: str) -> Tokens:
    """The part ``val`` or ``test`` of a run's text.

    Raises:
        UserError: if there is nothing in it, saying why.
    """
    tokens, fraction = (corpus.val, data.val_fraction) if part == "val" else (corpus.test, data.test_fraction)
    if len(tokens):
        return tokens
    name, key = ("validation" if part == "val" else "test"), f"data.{part}_fraction = {fraction:g}"
    if fraction:
        raise UserError(f"--source {part}: the run's {name} part is too short, it has no two tokens ({key})")
    raise UserError(f"--source {part}: the run held no {name} part back ({key})")


def cache_folder(cache_dir: str) -> Path:
    """Where token files and downloads go: ``cache_dir``; for "auto" data/cache of the checkout if writable."""
    if cache_dir != "auto":
        return Path(os.path.expanduser(cache_dir))  # unlike the method of Path it lets a stranger's ~ be
    data = HOME / "data"
    if not INSTALLED and (data / "sources.toml").is_file() and os.access(data, os.W_OK):
        return data / "cache"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "minigpt" / "cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "minigpt"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minigpt"


# ── batches ────────────────────────────────────────────────────────────────────────────────────────────────────


def batch(
    tokens: NDArray[np.integer], *, seed: int, step: int, batch_size: int, context_length: int, examples: bool = False
) -> Batch:
    """Inputs and targets of one step, shapes (B, T): a pure function of its arguments.

    An epoch is a random order of the ``n`` windows that fit, laid from an offset that differs between epochs; of
    ``examples``, which begin every T tokens, from the first. Sequence j of step s is window s·B + j of the endless row
    of epochs. Needs at least T + 1 tokens.
    """
    spare = len(tokens) - context_length
    assert spare >= 1, "open_corpus refuses a text shorter than the context"
    n = (len(tokens) - 1) // context_length if examples else max(1, spare // context_length)
    slack = 0 if examples else min(context_length - 1, len(tokens) - 1 - n * context_length)
    starts = np.empty(batch_size, dtype=np.int64)
    for j in range(batch_size):
        epoch, position = divmod(step * batch_size + j, n)
        offset, order = _epoch(seed, epoch, n, slack)
        starts[j] = offset + order[position] * context_length
    rows = tokens[starts[:, None] + np.arange(context_length + 1)].astype(np.int64)
    return rows[:, :-1], rows[:, 1:]


def evaluation_batches(tokens: NDArray[np.integer], context_length: int, batch_size: int) -> Iterator[Batch]:
    """Inputs and targets of all windows in order, shapes (b, T) with b ≤ ``batch_size``, without overlap.

    A last window shorter than T comes alone, so that every token but the first is predicted exactly once.
    """
    whole = max(0, len(tokens) - 1) // context_length
    for first in range(0, whole, batch_size):
        last = min(first + batch_size, whole)
        row = tokens[first * context_length : last * context_length + 1].astype(np.int64)
        yield row[:-1].reshape(-1, context_length), row[1:].reshape(-1, context_length)
    rest = tokens[whole * context_length :].astype(np.int64)
    if len(rest) > 1:
        yield rest[None, :-1], rest[None, 1:]


@lru_cache(maxsize=4)
def _epoch(seed: int, epoch: int, n: int, slack: int) -> tuple[int, NDArray[np.int64]]:
    """Offset and order of the windows of one epoch."""
    generator = np.random.default_rng([seed, epoch])
    offset = int(generator.integers(slack + 1))
    order = generator.permutation(n)
    order.setflags(write=False)
    return offset, order


# ── files ──────────────────────────────────────────────────────────────────────────────────────────────────────


def digest(*values: Any) -> str:
    """32 hexadecimal digits that are the same for the same plain values alone."""
    return hashlib.sha256(json.dumps(values).encode("utf-8")).hexdigest()[:32]


def _cached_tokenizer(path: Path, data: DataConfig, split: Callable[[], Split]) -> Tokenizer:
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):  # not there, or damaged
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["digest"] == digest(stored["tokenizer"]):  # one changed byte may leave another valid tokenizer
            return tokenizer_from_dict(stored["tokenizer"], unseen=data.unseen)
    texts = split().learning_texts(most=None if data.tokenizer == "char" else learning_bytes(data.vocab_size))
    tokenizer = train_tokenizer(data.tokenizer, texts, data.vocab_size)
    stored = {"tokenizer": tokenizer.to_dict(), "digest": digest(tokenizer.to_dict())}
    with _scratch(path.parent) as scratch:
        written = scratch / path.name
        written.write_text(json.dumps(stored), encoding="utf-8")
        os.replace(written, path)
    return tokenizer_from_dict(stored["tokenizer"], unseen=data.unseen)


@contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """A folder for what is being written; those that killed processes left a day ago and more are removed."""
    for left in folder.glob("unfinished-*"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > 86_400:
                shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix="unfinished-", dir=folder) as scratch:
        yield Path(scratch)


def _cached_parts(folder: Path, split: Callable[[], Split], tokenizer: Tokenizer) -> list[Tokens]:
    kind = "<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4"
    if parts := _read_parts(folder, kind):
        return parts
    with _scratch(folder.parent) as scratch:
        written = scratch / folder.name
        _write_parts(written, split(), tokenizer, kind)
        problem = OSError("what was written does not read back")
        for attempt in range(MOVES):
            try:
                os.replace(written, folder)
            except OSError as error:  # something is there: the same files from another process, or damaged ones
                problem = error
            if parts := _read_parts(folder, kind):
                return parts
            with suppress(OSError):  # of several processes that find them damaged, one gets them out of the way
                os.replace(folder, scratch / f"damaged-{attempt}")
        raise problem


def _write_parts(folder: Path, split: Split, tokenizer: Tokenizer, kind: str) -> None:
    folder.mkdir()
    end = np.array([END], dtype=kind).tobytes()
    checksums, lost, characters = [0, 0, 0], 0, 0
    places: deque[tuple[int, bool]] = deque()  # of the pieces that are being encoded: part, whether END goes before
    files = [(folder / f"{part}.bin").open("wb") for part in PARTS]

    def write(part: int, ids: bytes) -> None:
        files[part].write(ids)
        checksums[part] = zlib.crc32(ids, checksums[part])

    def texts() -> Iterator[str]:
        nonlocal lost, characters
        for part, text in split.texts():
            starts = split.cuts is None or part == TRAIN
            for piece in pieces(text):
                lost, characters = lost + tokenizer.count_unseen(piece), characters + len(piece)
                places.append((part, starts))
                starts = False
                yield piece

    try:
        for ids in tokenizer.encode_each(texts()):
            part, starts = places.popleft()
            write(part, end * starts + ids.astype(kind).tobytes())
        if split.cuts is None:
            for part in np.unique(split.part_of[split.part_of >= TRAIN]).tolist():
                write(part, end)
    finally:
        for file in files:
            file.close()
    description = {"type": kind, "checksums": checksums, "lost": [lost, characters]}
    (folder / "tokens.json").write_text(json.dumps(description), encoding="utf-8")


def _read_parts(folder: Path, kind: str) -> list[Tokens] | None:
    """The three parts, or None if they are missing, damaged, or not of that type."""
    parts: list[Tokens] = []
    try:
        description = json.loads((folder / "tokens.json").read_text(encoding="utf-8"))
        if description["type"] != kind:
            return None
        for part, checksum in zip(PARTS, description["checksums"], strict=True):
            path = folder / f"{part}.bin"
            if _checksum(path) != checksum:
                return None
            parts.append(
                np.asarray(np.memmap(path, dtype=kind, mode="r")) if path.stat().st_size else np.empty(0, kind)
            )
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return parts


def _lost_notes(folder: Path, tokenizer: Tokenizer) -> list[str]:
    """What is to be said of characters that the files of a folder lack."""
    with suppress(OSError, ValueError, TypeError):
        lost, characters = json.loads((folder / "tokens.json").read_text(encoding="utf-8")).get("lost", [0, 0])
        return [lost_note(tokenizer, lost, characters)] if lost else []
    return []


def _checksum(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            checksum = zlib.crc32(block, checksum)
    return checksum
