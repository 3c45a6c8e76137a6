"""Text, measured inside one process: NumPy and compiled code against other libraries, with the ids that prove it."""

import contextlib
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from minigpt.checkpoint import checkpoint_path, save_checkpoint
from minigpt.config import Config, merge, read_toml, validate
from minigpt.model import GPT
from minigpt.network import TorchEngine
from minigpt.normal_form import from_tensors
from minigpt.plain import PlainEngine
from minigpt.sampling import Engine, SamplingOptions, Text, WritingEngine, generate, generate_together
from minigpt.studies import peers
from minigpt.studies.benchmark import SHAPE
from minigpt.studies.measure import Report, Spread, alternate, table
from minigpt.studies.whole_runs import first_token_seconds
from minigpt.tokenizer import Tokenizer, train_tokenizer

SMALL, LARGE = "0.8M", "10.6M"
SIZES: dict[str, dict[str, int]] = {SMALL: {}, LARGE: {"n_layer": 6, "n_head": 6, "d_model": 384}}
NO_NUMBA = "numba left out: pip install numba"
FIRST_TOKEN_RUNS = 5
STEADY = 0.5  # seconds

Writers = dict[str, Callable[[int], object]]  # by name: writes so many tokens in each of a case's texts


@dataclass(frozen=True)
class DecodeCase:
    """Texts of one size of network and one context length, so many at once."""

    size: str
    context_length: int
    n_stream: int


@dataclass(frozen=True)
class Decoded:
    """What was measured of a case."""

    case: DecodeCase
    n_parameter: int
    ids_equal: dict[str, bool]  # by engine: whether its greedy text is torch's
    seconds: dict[int, dict[str, list[float]]]  # by tokens a text, then engine


DECODE_CASES = (
    DecodeCase(SMALL, context_length=64, n_stream=1),
    DecodeCase(SMALL, context_length=256, n_stream=1),
    DecodeCase(SMALL, context_length=64, n_stream=32),
    DecodeCase(SMALL, context_length=256, n_stream=32),
    DecodeCase(LARGE, context_length=256, n_stream=1),
)


def decode(
    *, cases: Sequence[DecodeCase], nanogpt: Path | None, transformers: bool, repeats: int, threads: int
) -> Report:
    """Tokens a second of greedy texts with untrained weights, and seconds until ``generate.py`` shows its first token.

    Each case is measured inside the context and over four contexts.

    Args:
        cases: what to measure.
        nanogpt: a checkout to compare one small stream with.
        transformers: compare with transformers too.
        repeats: timed texts of each length for each contender.
        threads: CPU threads for torch, and for compiled code.
    """
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    tokenizer = train_tokenizer("char", ["".join(map(chr, range(32, 32 + 65)))])
    decoded = []
    for case in cases:
        others = _peers(case, nanogpt, transformers, tokenizer.vocab_size)
        decoded.append(_decoded(case, untrained(case, tokenizer.vocab_size), others, repeats=repeats, threads=threads))
    waits, equal = first_token(tokenizer), all(same for found in decoded for same in found.ids_equal.values())
    numbers = {
        "first_token_seconds": waits,
        "greedy_ids_equal": equal,
        "texts": [
            {**asdict(found.case), "parameters": found.n_parameter, "tokens": n_token, "seconds": seconds}
            for found in decoded
            for n_token, seconds in found.seconds.items()
        ],
    }
    named = {"numba": NO_NUMBA, "transformers": peers.NO_TRANSFORMERS, "nanoGPT": peers.NO_NANOGPT}
    there = {name for found in decoded for times in found.seconds.values() for name in times}
    reference = "transformers" if "transformers" in there else "NumPy"
    lines = [
        "Greedy texts inside one context and over four; tokens/s of all streams together",
        *table([["parameters", "context", "streams", "tokens", "engine", "tokens/s", "x " + reference]]
               + [row for found in decoded for row in _rows(found, reference)]),
        f"first token of generate.py, from the start of the process: {Spread.of(waits)} s",
        "greedy ids of all minigpt's engines: " + ("equal to torch's" if equal else "DIFFERENT FROM TORCH'S"),
        *(sentence for name, sentence in named.items() if name not in there),
    ]  # fmt: skip
    return Report(lines, numbers, holds=equal)


def _peers(case: DecodeCase, nanogpt: Path | None, transformers: bool, vocab_size: int) -> Writers:
    """Other people's programs for this case; nanoGPT, which keeps no memory, only where that takes seconds."""
    shape = decode_config(case).model
    found: Writers = {}
    if transformers and (writer := peers.transformers_writer(shape, vocab_size, case.n_stream)):
        found["transformers"] = writer
    if nanogpt and case.n_stream == 1 and case.size == SMALL:
        found["nanoGPT"] = peers.nanogpt_writer(nanogpt, shape, vocab_size)
    return found


def _decoded(case: DecodeCase, model: GPT, others: Writers, *, repeats: int, threads: int) -> Decoded:
    engines, longest = our_engines(model, threads), 4 * case.context_length
    measured = engines  # of several texts compiled code's alone: NumPy writes one after the other
    if case.n_stream > 1 and "numba" in engines:
        measured = {"numba": engines["numba"]}
    ours = {name: partial(write_many, engine, n_stream=case.n_stream) for name, engine in measured.items()}
    seconds = {}
    for n_token in (case.context_length, longest):
        writers = {name: partial(writer, n_token) for name, writer in (ours | others).items()}
        seconds[n_token] = alternate(writers, repeats, STEADY)
    texts = [write(TorchEngine(model), longest, 1 + i) for i in range(min(2, case.n_stream))]
    ids_equal = {name: write_many(engine, longest, case.n_stream)[:2] == texts for name, engine in engines.items()}
    return Decoded(case, peers.n_parameter(model), ids_equal, seconds)


def _rows(found: Decoded, reference: str) -> list[list[str]]:
    case = found.case
    return [
        [
            f"{found.n_parameter:,}",
            *map(str, (case.context_length, case.n_stream, n_token)),
            name,
            f"{case.n_stream * n_token / Spread.of(times).median:,.0f}",
            str(Spread.of_ratios(by_engine[reference], times)) if reference in by_engine and name != reference else "",
        ]
        for n_token, by_engine in found.seconds.items()
        for name, times in by_engine.items()
    ]


def untrained(case: DecodeCase, vocab_size: int) -> GPT:
    """A network whose every matrix is random: as initialised, its head is zero and all tokens are alike."""
    torch.manual_seed(0)
    model = GPT(decode_config(case).model, vocab_size).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
    return model


def decode_config(case: DecodeCase) -> Config:
    """``configs/shakespeare_char.toml`` in another size."""
    changes = SIZES[case.size] | {"context_length": case.context_length}
    return validate(merge(read_toml(SHAPE), {"model": changes}))


def our_engines(model: GPT, threads: int) -> dict[str, Engine | WritingEngine]:
    """The same network in NumPy and, where numba is installed, compiled, for so many threads a token."""
    normal = from_tensors({name: t.numpy() for name, t in model.state_dict().items()}, model.config, np.float32)
    engines: dict[str, Engine | WritingEngine] = {"NumPy": PlainEngine(normal)}
    with contextlib.suppress(ImportError):
        from minigpt.fast import FastEngine

        engines["numba"] = FastEngine(normal, threads)
    return engines


def write(engine: Engine | WritingEngine, n_token: int, first: int = 1) -> list[int]:
    """The ids of a greedy text that nothing ends early."""
    options = SamplingOptions(temperature=0)
    return list(generate(engine, [first], max_new_tokens=n_token, options=options, end=None))


def write_many(engine: Engine | WritingEngine, n_token: int, n_stream: int) -> list[list[int]]:
    """Texts with different beginnings, as ``generate.py`` writes several: side by side if the engine can."""
    if not isinstance(engine, WritingEngine):
        return [write(engine, n_token, 1 + i) for i in range(n_stream)]
    options = SamplingOptions(temperature=0)
    texts = [Text.begin([1 + i], max_new_tokens=n_token, options=options, end=None) for i in range(n_stream)]
    for _ in generate_together(engine, texts):
        pass
    return [text.tokens[1:] for text in texts]


def first_token(tokenizer: Tokenizer) -> list[float]:
    """Seconds from the start of ``scripts/generate.py`` on a saved run to its first token, several times."""
    case = DECODE_CASES[0]
    model = untrained(case, tokenizer.vocab_size)
    tensors = {f"model.{name}": tensor.numpy() for name, tensor in model.state_dict().items()}
    config = decode_config(case).model_dump()
    with tempfile.TemporaryDirectory() as scratch:
        path = checkpoint_path(Path(scratch), 0)
        save_checkpoint(path, tensors, {"step": 0, "config": config, "tokenizer": tokenizer.to_dict()})
        first_token_seconds(path, "A")  # reads everything from the disk once
        return [first_token_seconds(path, "A") for _ in range(FIRST_TOKEN_RUNS)]
