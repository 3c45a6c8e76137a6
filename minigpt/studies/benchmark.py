"""A training step, measured inside one process against nanoGPT's."""

import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from minigpt.assembly import Parts, assembled
from minigpt.config import DEFAULT_CONFIG, Config, merge, read_toml
from minigpt.studies import peers
from minigpt.studies.measure import Report, Spread, alternate, table
from minigpt.training import Run, evaluate, train_step

SHAPE = DEFAULT_CONFIG.parent / "shakespeare_char.toml"
BLOCK = 25  # steps timed together
SGEMM_REPEATS = 5
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
    return _step_report(milliseconds, sizes, losses, first.config, steps, flops(first), sgemm_rate())


def _step_report(
    milliseconds: Mapping[str, list[float]],
    sizes: Mapping[str, int],
    losses: Mapping[str, float],
    config: Config,
    steps: int,
    flop: float,
    rate: float,
) -> Report:
    peer = milliseconds.get(PEER)
    ratios = {name: Spread.of_ratios(times, peer) for name, times in milliseconds.items() if peer and times is not peer}
    shares = {name: 1000 * flop / rate / Spread.of(times).median for name, times in milliseconds.items()}
    rows = [["", "parameters", "ms/step", f"loss@{steps}", "x nanoGPT's time"]]
    for name, times in milliseconds.items():
        ratio = str(ratios[name]) if name in ratios else ""
        rows.append([name, f"{sizes[name]:,}", f"{Spread.of(times).median:.1f}", f"{losses[name]:.4f}", ratio])
    tokens = config.train.batch_size * config.model.context_length
    lines = [
        f"One training step of {tokens} tokens; blocks of {BLOCK} steps in turn, median (quartiles);",
        f"loss over the whole validation part, in windows of {config.model.context_length}",
        *table(rows),
        "",
        f"The products of a step take {flop / 1e9:.1f} GFLOP; at the rate of one large",
        f"product, {rate / 1e9:.0f} GFLOP/s here, they alone would fill so much of the step:",
        *table([[name, f"{share:.0%}"] for name, share in shares.items()]),
    ]
    if not peer:
        lines.append(peers.NO_NANOGPT)
    numbers = {
        "milliseconds": dict(milliseconds),
        "parameters": dict(sizes),
        "loss": dict(losses),
        "steps": steps,
        "sgemm_flops_a_second": rate,
        "share_of_sgemm": shares,
        "time_ratio_to_nanogpt": {name: ratio.median for name, ratio in ratios.items()},
    }
    return Report(lines, numbers)


def flops(run: Run) -> float:
    """Multiplications and additions in the products of one step, forward and backward; half of them for nothing in
    attention, where no one looks ahead."""
    shape, vocab_size = run.config.model, run.corpus.tokenizer.vocab_size
    matrices = sum(p.numel() for name, p in run.model.named_parameters() if p.ndim == 2 and name.startswith("blocks."))
    a_token = matrices + vocab_size * shape.d_model + 2 * shape.n_layer * shape.context_length * shape.d_model
    return 6 * a_token * run.config.train.batch_size * shape.context_length


def sgemm_rate(size: int = 2048) -> float:
    """Multiplications and additions a second, in one product of two square matrices: the best of a few."""
    a, b = torch.rand(2, size, size)
    seconds = alternate({"product": partial(torch.mm, a, b)}, SGEMM_REPEATS)["product"]
    return 2 * size**3 / min(seconds)


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
