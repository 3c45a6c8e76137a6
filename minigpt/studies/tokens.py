"""How fast a text becomes token ids: encoding alone, and the whole way from a file to token files.

A preparation is measured in a process of its own, whose peak of memory is the preparation's.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from minigpt.config import DataConfig
from minigpt.corpus import open_corpus
from minigpt.errors import UserError
from minigpt.reading import read_text
from minigpt.studies.made_text import write_text
from minigpt.studies.measure import Report, Spread, alternate, table
from minigpt.tokenizer import END, Tokenizer, pieces, train_tokenizer

TOKENIZERS = {"char": 0, "byte": 0, "bpe": 4096}  # with the sizes asked for
BLOCK = 1 << 20  # ids looked at together
LEARNED_FROM = 1_115_394  # characters: as many as tinyshakespeare has


def tokens(*, source: Path | None, megabytes: int, repeats: int) -> Report:
    """MB of UTF-8 a second of each tokenizer, on made-up English and Japanese or on a given file.

    The ids that ``encode`` gives and those in the token files have to be the same; their checksum is shown.

    Args:
        source: a text file in UTF-8; None: made-up texts.
        megabytes: their size.
        repeats: times each is measured, in turn.
    """
    with tempfile.TemporaryDirectory() as scratch:
        texts = {source.name[:12]: source} if source else {}
        for script in () if source else ("English", "Japanese"):
            texts[script] = Path(scratch) / f"{script}.txt"
            write_text(texts[script], script, megabytes * 1_000_000)
        cases = [case for name, path in texts.items() for case in _cases(name, path, repeats, Path(scratch))]
    rows = [["text", "tokenizer", "encode", "prepare", "again", "MB more", "ids", "CRC-32"], *map(_row, cases)]
    lines = [
        "MB of UTF-8 a second. encode: text and ids in memory; prepare: from a file to",
        "token files, what the tokenizer has to learn included; again: finding them;",
        "MB more: the peak of memory in preparing above that before it",
        *table(rows),
    ]
    for case in cases:
        if case["learn_seconds"]:
            size, wait = TOKENIZERS[case["tokenizer"]], Spread.of(case["learn_seconds"])
            lines.append(f"{size} tokens learned from {LEARNED_FROM:,} characters, {case['text']}: {wait} s")
    wrong = [
        f"{case['text']}, {case['tokenizer']}: ids in files DIFFER from encode's" for case in cases if case["wrong"]
    ]
    return Report([*lines, *wrong], {"cases": cases}, holds=not wrong)


def _cases(text: str, path: Path, repeats: int, scratch: Path) -> list[dict[str, Any]]:
    """What is measured of each tokenizer on one text."""
    chunks = list(read_text(path, "utf-8"))
    size = sum(len(chunk.encode("utf-8")) for chunk in chunks)
    beginning = "".join(chunks)[:LEARNED_FROM]
    learning = {"bpe": partial(train_tokenizer, "bpe", [beginning], TOKENIZERS["bpe"])}
    learned = alternate(learning, repeats)
    tokenizers = {
        kind: open_corpus(_settings(path, kind, scratch / "cache"), context_length=1, seed=1).tokenizer
        for kind in TOKENIZERS
    }
    encoded = alternate({kind: partial(encode, tokenizer, chunks) for kind, tokenizer in tokenizers.items()}, repeats)
    prepared = [{kind: prepare_apart(path, kind) for kind in TOKENIZERS} for _ in range(repeats)]
    cases = []
    for kind, tokenizer in tokenizers.items():
        runs = [turn[kind] for turn in prepared]
        checksum = encode(tokenizer, chunks)
        cases.append(
            {
                "text": text,
                "tokenizer": kind,
                "bytes": size,
                "ids": runs[0]["ids"],
                "checksum": checksum,
                "wrong": any(run["checksum"] != checksum for run in runs),
                "learn_seconds": learned.get(kind, []),
                "encode_seconds": encoded[kind],
                "prepare_seconds": [run["seconds"] for run in runs],
                "again_seconds": [run["again_seconds"] for run in runs],
                "more_bytes": None if runs[0]["more_bytes"] is None else max(run["more_bytes"] for run in runs),
            }
        )
    return cases


def _row(case: dict[str, Any]) -> list[str]:
    speeds = [
        f"{case['bytes'] / 1e6 / Spread.of(case[what]).median:,.0f}"
        for what in ("encode_seconds", "prepare_seconds", "again_seconds")
    ]
    more = "?" if case["more_bytes"] is None else f"{case['more_bytes'] / 1e6:,.0f}"
    return [case["text"], case["tokenizer"], *speeds, more, f"{case['ids']:,}", f"{case['checksum']:08x}"]


def encode(tokenizer: Tokenizer, chunks: Iterable[str]) -> int:
    """Encode a text; the checksum of its ids after one END."""
    checksum = _checksum([END], 0)
    for ids in tokenizer.encode_each(pieces(chunks)):
        checksum = _checksum(ids, checksum)
    return checksum


def _checksum(ids: Sequence[int] | np.ndarray, before: int) -> int:
    return zlib.crc32(np.asarray(ids, dtype="<i4").tobytes(), before)


# ── a preparation in a process of its own ──────────────────────────────────────────────────────────────────────


def prepare_apart(path: Path, kind: str) -> dict[str, Any]:
    """What ``prepare`` answers in a new process.

    Raises:
        UserError: if it fails, with what it said last.
    """
    command = [sys.executable, "-m", "minigpt.studies.tokens", str(path.resolve()), kind]
    done = subprocess.run(command, capture_output=True, env=os.environ | {"PYTHONUTF8": "1"})
    if done.returncode:
        raise UserError(f"{path}: preparing it failed: {done.stderr.decode('utf-8', 'replace').strip()}")
    return json.loads(done.stdout)


def prepare(path: Path, kind: str) -> dict[str, Any]:
    """Make the token files of a text in an empty cache, then open it again.

    Returns:
        ``seconds`` and ``again_seconds`` of the two, ``more_bytes`` of memory (None where the system doesn't tell),
        the number of ``ids`` and their ``checksum``.
    """
    before = peak_bytes()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:  # Windows removes no file that is mapped
        data = _settings(path, kind, Path(cache))
        begun = time.perf_counter()
        open_corpus(data, context_length=1, seed=1)
        made = time.perf_counter()
        ids = open_corpus(data, context_length=1, seed=1).train
        opened, after, checksum = time.perf_counter(), peak_bytes(), 0
        for start in range(0, len(ids), BLOCK):
            checksum = _checksum(ids[start : start + BLOCK], checksum)
        count = len(ids)
    return {
        "seconds": made - begun,
        "again_seconds": opened - made,
        "more_bytes": None if before is None or after is None else after - before,
        "ids": count,
        "checksum": checksum,
    }


def peak_bytes() -> int | None:
    """Largest resident memory of this process so far; None where the system doesn't tell."""
    if sys.platform == "linux":  # where a new process inherits the peak that getrusage tells from the one it came from
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        return 1024 * int(status.partition("VmHWM:")[2].split()[0])
    try:
        import resource
    except ImportError:  # Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _settings(path: Path, kind: str, cache: Path) -> DataConfig:
    return DataConfig(
        source=str(path), tokenizer=kind, vocab_size=TOKENIZERS[kind], val_fraction=0.0, cache_dir=str(cache)
    )


if __name__ == "__main__":
    print(json.dumps(prepare(Path(sys.argv[1]), sys.argv[2])))
