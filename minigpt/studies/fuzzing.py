"""Random and hostile input for everything that reads what others wrote: a result, or one sentence, and never more.

Each ``Surface`` makes inputs with hypothesis and reads them as the scripts do. What has failed once stands in its
``found`` and is tried first, for ever.
"""

import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, example, given, seed, settings
from hypothesis import strategies as st

from minigpt.errors import TrainingStopped, UserError
from minigpt.studies.surfaces import (
    TOKENIZERS,
    checkpoints,
    command_lines,
    config_tables,
    corpora,
    read_command_line,
    read_config,
    read_corpus,
    read_sampling,
    read_saved,
    read_tokenizer,
    samplings,
    tokenizer_headers,
)


@dataclass(frozen=True)
class Surface:
    """One kind of input: how it is made, how it is read (raising UserError where it is refused), what once failed."""

    inputs: Callable[[], st.SearchStrategy[Any]]
    read: Callable[[Any, Path], None]
    found: Sequence[Any] = ()


@dataclass
class Tally:
    """What became of the inputs of one surface."""

    tried: int = 0
    refused: int = 0


def fuzz(name: str, count: int, number: int = 0) -> Tally:
    """Try all that was found and ``count`` more inputs, drawn by the seed ``number``, on one surface.

    Any exception but the orderly ones comes out, with hypothesis' smallest input that leads to it.
    """
    surface, tally = SURFACES[name], Tally()
    with tempfile.TemporaryDirectory() as scratch:

        def attempt(value: Any) -> None:
            place = Path(tempfile.mkdtemp(dir=scratch))
            tally.tried += 1
            try:
                with warnings.catch_warnings(action="error"):
                    surface.read(value, place)
            except (UserError, TrainingStopped, SystemExit) as error:
                assert str(error), "a refusal says why"
                tally.refused += 1
            finally:
                shutil.rmtree(place)

        test = given(surface.inputs())(attempt)
        for case in surface.found:
            test = example(case)(test)
        checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
        seed(number)(settings(max_examples=count, database=None, deadline=None, suppress_health_check=checks)(test))()
    return tally


SURFACES = {
    "configurations": Surface(config_tables, read_config, [
        {"\ud800": None},
        {"run": {"dir": "a\0b"}},
        {"data": {"cache_dir": "\ud800"}},
        {"model": {"d_model": 10**30}},
    ]),
    "command lines": Surface(command_lines, read_command_line, [
        ("generate", ["run", "--top-k", "9" * 5000]),
        ("train", ["--model.n-layer=\udce9", "--run.dir", "\0"]),
    ]),
    "tokenizer headers": Surface(tokenizer_headers, read_tokenizer, [
        ({**TOKENIZERS[3], "pattern": pattern}, "a" * 40 + "!") for pattern in ("", "x*", "(a+)+$", "(?:a|a)*b")
    ]),
    "corpus bytes": Surface(corpora, read_corpus, [
        ("hello there ".encode("utf-16-le") * 9, "txt", "utf-16", ("char", 0)),
        (b"to be or not to be", "txt", "undefined", ("char", 0)),
        (b" " * 30_000, "txt", "utf-8", ("bpe", 0)),
        (b"x" + b" " * 30_000, "txt", "utf-8", ("bpe", 0)),
        (b"x" + b"\0" * 1_000, "csv", "utf-8", ("bpe", 0)),
        (b"x" + b"\0" * 1_000, "txt", "utf-8", ("char", 0)),
        (b'{"text": "to be \\ud800 or not to be"}', "jsonl", "utf-8", ("char", 0)),
        (b"to be or not to be", "txt", "utf-8", ("bpe", 2**31 - 1)),
    ]),
    "sampling options": Surface(samplings, read_sampling, [
        ((1.0, 0, 1.0, 0.0, 5e-324), [1.0, 2.0, 3.0, 4.0, 5.0], {0}, set()),
        ((1.0, 0, 1.0, 0.0, 1e308), [-9.0] * 5, {0, 1, 2, 3, 4}, {0}),
    ]),
    "checkpoint headers": Surface(checkpoints, read_saved, [
        [("metadata", "val_loss", "low")],
        [("metadata", "versions", [1]), ("metadata", "config", {"x": 1})],
        [("metadata", "config", {"\ud800": 1})],
        [("metadata", "tokenizer", TOKENIZERS[3])],
        [("array", "dtype", "BF16")],
        [("array", "shape", [0, 2**62]), ("array", "data_offsets", [0, 0])],
        [("model", "context_length", 2**50)],
        [("model", "logit_softcap", 1e-300)],
    ]),
}  # fmt: skip


def fuzz_all(count: int, number: int) -> Iterator[tuple[str, Tally]]:
    """About ``count`` inputs in all, an equal share for each surface."""
    for name in SURFACES:
        yield name, fuzz(name, -(-count // len(SURFACES)), number)
