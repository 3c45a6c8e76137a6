"""What is measured inside one process: a training step against nanoGPT's, and text against other libraries' text."""

import itertools
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from minigpt.assembly import Parts, assembled
from minigpt.checkpoint import checkpoint_path, save_checkpoint
from minigpt.config import DEFAULT_CONFIG, Config, merge, read_toml, validate
from minigpt.model import GPT, TorchEngine
from minigpt.normal_form import from_tensors
from minigpt.plain import PlainEngine
from minigpt.sampling import Engine, SamplingOptions, generate
from minigpt.studies import peers
from minigpt.studies.measure import Report, Spread, alternate, table
from minigpt.studies.whole_runs import first_token_seconds
from minigpt.tokenizer import Tokenizer, train_tokenizer
from minigpt.training import Run, evaluate, train_step

SHAPE = DEFAULT_CONFIG.parent / "shakespeare_char.toml"
BLOCK = 10  # steps timed together
ADAMW = {"name": "adamw", "lr": 0.003, "beta2": 0.99, "weight_decay": 0.1, "warmup_steps": 20}
# The architecture of nanoGPT's recipe, for a step of equal arithmetic.
LIKE_NANOGPT = {
    "position": "learned",
    "norm": "layernorm",
    "norm_weight": True,
    "embedding_norm": False,
    "mlp": "gelu",
    "qk_norm": False,
    "tie_embeddings": True,
    "logit_softcap": 0.0,
}
CONTENDERS: dict[str, dict[str, dict[str, Any]]] = {
    "minigpt, AdamW": {"optim": ADAMW},
    "minigpt, Muon": {},  # as the configuration ships
    "minigpt, GPT-2 layout, AdamW": {"optim": ADAMW, "model": LIKE_NANOGPT},
}
PEER = "nanoGPT, AdamW"
CONTEXTS = (64, 256)
FIRST_TOKEN_RUNS = 5


# ── a training step ────────────────────────────────────────────────────────────────────────────────────────────


def step(*, nanogpt: Path | None, repeats: int, threads: int, overrides: Mapping[str, Any]) -> Report:
    """Milliseconds of one training step of the shape of ``configs/shakespeare_char.toml``, and the loss it leads to.

    A step is everything the trainer does for it: batch, forward, backward, clipping, optimizer, reading the loss.

    Args:
        nanogpt: a checkout to compare with.
        repeats: timed blocks of steps for each contender.
        threads: CPU threads, the same for all.
        overrides: tables of keys, such as the text, on top of the shipped configuration.
    """
    steps = BLOCK * (repeats + 1)
    fixed = {"run": {"threads": threads, "device": "cpu", "dtype": "float32"}, "train": {"max_steps": steps}}
    values = merge(merge(read_toml(SHAPE), overrides), fixed)
    ours = {name: _run(merge(values, changes)) for name, changes in CONTENDERS.items()}
    first = ours["minigpt, AdamW"]
    contenders: dict[str, Callable[[], object]] = {name: partial(train_step, run) for name, run in ours.items()}
    with tempfile.TemporaryDirectory() as scratch:
        theirs = _nanogpt_training(nanogpt, first, Path(scratch)) if nanogpt else None
        if theirs:
            contenders[PEER] = theirs.step
        seconds = alternate({name: partial(_repeat, call, BLOCK) for name, call in contenders.items()}, repeats)
    milliseconds = {name: [1000 * s / BLOCK for s in blocks] for name, blocks in seconds.items()}
    sizes = {name: peers.n_parameter(run.model) for name, run in ours.items()}
    losses = {name: _whole_loss(run) for name, run in ours.items()}
    if theirs:
        sizes[PEER] = peers.n_parameter(theirs.model)
        losses[PEER] = peers.nanogpt_loss(theirs.model, first.corpus.val)
    return _step_report(milliseconds, sizes, losses, first.config, steps)


def _step_report(
    milliseconds: Mapping[str, list[float]],
    sizes: Mapping[str, int],
    losses: Mapping[str, float],
    config: Config,
    steps: int,
) -> Report:
    peer = milliseconds.get(PEER)
    ratios = {name: Spread.of_ratios(times, peer) for name, times in milliseconds.items() if peer and times is not peer}
    rows = [["", "parameters", "ms/step", f"loss@{steps}", "x nanoGPT's time"]]
    for name, times in milliseconds.items():
        ratio = str(ratios[name]) if name in ratios else ""
        rows.append([name, f"{sizes[name]:,}", f"{Spread.of(times).median:.1f}", f"{losses[name]:.4f}", ratio])
    tokens = config.train.batch_size * config.model.context_length
    lines = [
        f"One training step of {tokens} tokens; blocks of {BLOCK} steps in turn, median (quartiles);",
        f"loss over the whole validation part, in windows of {config.model.context_length}",
        *table(rows),
    ]
    if not peer:
        lines.append(peers.NO_NANOGPT)
    numbers = {
        "milliseconds": dict(milliseconds),
        "parameters": dict(sizes),
        "loss": dict(losses),
        "steps": steps,
        "time_ratio_to_nanogpt": {name: ratio.median for name, ratio in ratios.items()},
    }
    return Report(lines, numbers)


def _run(values: Mapping[str, Any]) -> Run:
    parts: Parts = assembled(values, config_path=SHAPE, source_given=False, init_from=None)
    return Run(config=parts.config, corpus=parts.corpus, model=parts.model, optimizers=parts.optimizers)


def _nanogpt_training(folder: Path, run: Run, scratch: Path) -> peers.NanoGptTraining:
    vocab_size = peers.write_nanogpt_data(run.corpus, scratch)
    batch_size = run.config.train.batch_size
    return peers.NanoGptTraining(folder, scratch, run.config.model, vocab_size=vocab_size, batch_size=batch_size)


def _repeat(call: Callable[[], object], times: int) -> None:
    for _ in range(times):
        call()


def _whole_loss(run: Run) -> float:
    return evaluate(run.model, run.corpus.val, run.config, run.corpus.tokenizer.byte_lengths).loss


# ── text ───────────────────────────────────────────────────────────────────────────────────────────────────────


def decode(*, nanogpt: Path | None, transformers: bool, repeats: int, threads: int) -> Report:
    """Tokens a second of one stream with untrained weights, and seconds until ``generate.py`` shows its first.

    Args:
        nanogpt: a checkout to compare with.
        transformers: compare with transformers too.
        repeats: timed texts of each length for each contender.
        threads: CPU threads for torch.
    """
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    tokenizer = train_tokenizer("char", ["".join(map(chr, range(32, 32 + 65)))])
    cases = [_decode_case(n, nanogpt, transformers, repeats, tokenizer.vocab_size) for n in CONTEXTS]
    waits = first_token(tokenizer)
    numbers = {
        "parameters": cases[0].n_parameter,
        "first_token_seconds": waits,
        "greedy_ids_equal": all(case.ids_equal for case in cases),
        "texts": [
            {"context_length": case.context_length, "tokens": n_token, "seconds": seconds}
            for case in cases
            for n_token, seconds in case.seconds.items()
        ],
    }
    lines = [
        f"One stream, {numbers['parameters']:,} parameters; texts of one context's length and of four",
        *table(
            [["context", "tokens", "engine", "tokens/s", "minigpt is x times"], *itertools.chain(*map(_rows, cases))]
        ),
        f"first token of generate.py, from the start of the process: {Spread.of(waits)} s",
        "greedy ids of NumPy and torch: " + ("equal" if numbers["greedy_ids_equal"] else "DIFFERENT"),
    ]
    lines += [] if nanogpt else [peers.NO_NANOGPT]
    lines += [] if all("transformers" in times for times in cases[0].seconds.values()) else [peers.NO_TRANSFORMERS]
    return Report(lines, numbers, holds=numbers["greedy_ids_equal"])


@dataclass(frozen=True)
class DecodeCase:
    """Texts of models with one context length."""

    context_length: int
    n_parameter: int
    ids_equal: bool
    seconds: dict[int, dict[str, list[float]]]  # by number of tokens, then engine


def _decode_case(
    context_length: int, nanogpt: Path | None, transformers: bool, repeats: int, vocab_size: int
) -> DecodeCase:
    model = untrained(context_length, vocab_size)
    engine, shape, longest = plain_engine(model), model.config, 4 * context_length
    writers: dict[str, Callable[[int], object]] = {"minigpt": partial(write, engine)}
    if transformers and (peer := peers.transformers_writer(shape, vocab_size)):
        writers["transformers"] = peer
    if nanogpt:
        writers["nanoGPT"] = peers.nanogpt_writer(nanogpt, shape, vocab_size)
    seconds = {
        n_token: alternate({name: partial(writer, n_token) for name, writer in writers.items()}, repeats)
        for n_token in (context_length, longest)
    }
    ids_equal = write(engine, longest) == write(TorchEngine(model), longest)
    return DecodeCase(context_length, peers.n_parameter(model), ids_equal, seconds)


def _rows(case: DecodeCase) -> list[list[str]]:
    return [
        [
            str(case.context_length),
            str(n_token),
            name,
            f"{n_token / Spread.of(times).median:,.0f}",
            "" if name == "minigpt" else str(Spread.of_ratios(times, by_engine["minigpt"])),
        ]
        for n_token, by_engine in case.seconds.items()
        for name, times in by_engine.items()
    ]


def untrained(context_length: int, vocab_size: int) -> GPT:
    """A network whose every matrix is random: as initialised, its head is zero and all tokens are alike."""
    torch.manual_seed(0)
    model = GPT(shape_config(context_length).model, vocab_size).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
    return model


def shape_config(context_length: int) -> Config:
    """``configs/shakespeare_char.toml`` with another context length."""
    return validate(merge(read_toml(SHAPE), {"model": {"context_length": context_length}}))


def plain_engine(model: GPT) -> PlainEngine:
    """The same network in NumPy."""
    return PlainEngine(from_tensors({name: t.numpy() for name, t in model.state_dict().items()}, model.config))


def write(engine: Engine, n_token: int) -> list[int]:
    """The ids of a greedy text that nothing ends early."""
    options = SamplingOptions(temperature=0)
    return list(generate(engine, [1], max_new_tokens=n_token, options=options, end=None))


def first_token(tokenizer: Tokenizer) -> list[float]:
    """Seconds from the start of ``scripts/generate.py`` on a saved run to its first token, several times."""
    model = untrained(CONTEXTS[0], tokenizer.vocab_size)
    tensors = {f"model.{name}": tensor.numpy() for name, tensor in model.state_dict().items()}
    config = shape_config(CONTEXTS[0]).model_dump()
    with tempfile.TemporaryDirectory() as scratch:
        path = checkpoint_path(Path(scratch), 0)
        save_checkpoint(path, tensors, {"step": 0, "config": config, "tokenizer": tokenizer.to_dict()})
        first_token_seconds(path, "A")  # reads everything from the disk once
        return [first_token_seconds(path, "A") for _ in range(FIRST_TOKEN_RUNS)]
