"""Rows of the table of recurrent networks against the Transformer that need no training.

Weights are random, and none is zero, as those of a network that has begun to learn.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minigpt.config import ModelConfig
from minigpt.model import GPT, Memory
from minigpt.network import Network, new_network
from minigpt.studies.growth import PowerLaw
from minigpt.studies.measure import Spread, alternate, table
from minigpt.studies.written_out import counted, explicit_attention, logits

VOCAB_SIZE = 64
PARAMETERS = 106_000  # about, of every network that is compared
SCALES = (0.7, 1.0, 1.4)  # of the recurrent matrices, whose singular values are then these
STEADY = 0.1  # seconds that a contender runs before, and while, it is timed


@dataclass(frozen=True)
class Row:
    """One row of the comparison: what was found, as text and as numbers, and what it can't say."""

    title: str
    lines: list[str]
    numbers: dict[str, Any]
    limits: str


@dataclass(frozen=True)
class Extent:
    """How much is measured, and on what.

    ``folder`` takes the runs of what is trained; ``stop`` is asked before each step, and ``advance`` told of each
    training when it is done.
    """

    kinds: tuple[str, ...]
    quick: bool
    seeds: int
    text: str
    cache_dir: str
    threads: int
    folder: Path
    stop: Callable[[], bool] = field(default=lambda: False)
    advance: Callable[[str], None] = field(default=lambda _what: None)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths T at which things are counted and timed."""
        return (64, 128, 256) if self.quick else (64, 128, 256, 512, 1024)


def shape(kind: str, *, context_length: int = 1024, **keys: Any) -> ModelConfig:
    """A network of this kind with about PARAMETERS of them: two layers; the width follows."""
    values = {"kind": kind, "n_layer": 2, "n_head": 2, "d_model": 64, "context_length": context_length}
    config = ModelConfig.model_validate({**values, "attention_init": "zero", "tie_embeddings": False})
    if kind != "gpt":
        sizes = {width: n_parameter(config.model_copy(update={"d_model": width})) for width in range(16, 257, 4)}
        config = config.model_copy(update={"d_model": min(sizes, key=lambda width: abs(sizes[width] - PARAMETERS))})
    return config.model_copy(update=keys)


def n_parameter(config: ModelConfig) -> int:
    """Learned numbers of a network, without laying it out."""
    with torch.device("meta"):
        return new_network(config, VOCAB_SIZE).n_parameter


def begun(config: ModelConfig, seed: int = 1) -> Network:
    """A network in which nothing is zero."""
    torch.manual_seed(seed)
    network = new_network(config, VOCAB_SIZE).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.ndim == 2 and not parameter.any():
                parameter.normal_(std=parameter.shape[1] ** -0.5)
    return network


def tokens_of(length: int, n: int = 1, seed: int = 2) -> Tensor:
    """Random tokens (n, T)."""
    return torch.randint(VOCAB_SIZE, (n, length), generator=torch.Generator().manual_seed(seed))


# ── counted and timed ──────────────────────────────────────────────────────────────────────────────────────────


def steps(extent: Extent) -> Row:
    """The longest chain of products that wait for each other."""
    chains: dict[str, list[int]] = {}
    for kind in extent.kinds:
        network = begun(shape(kind))
        tokens_BT = tokens_of(32, 2)
        with torch.no_grad():
            torch.testing.assert_close(logits(network, tokens_BT), network(tokens_BT), atol=1e-5, rtol=1e-5)
        chains[kind] = [counted(network, tokens_of(length)).longest for length in extent.lengths]
    head = ["longest chain of matrix products", *(f"T = {length}" for length in extent.lengths)]
    return Row(
        "sequential steps",
        table([head, *([kind, *map(str, chain)] for kind, chain in chains.items())]),
        {"lengths": extent.lengths, "chains": chains},
        "A chain says how long a pass must take with boundless processors, not how long it takes on these.",
    )


@torch.no_grad()
def operations(extent: Extent) -> Row:
    """Multiplications and additions of a pass, and its time, against T."""
    networks = {kind: begun(shape(kind)) for kind in extent.kinds}
    work = {k: [counted(network, tokens_of(t)).operations for t in extent.lengths] for k, network in networks.items()}
    calls = {(kind, t): partial(networks[kind], tokens_of(t, 4)) for kind in extent.kinds for t in extent.lengths}
    seconds = alternate({f"{kind} {t}": call for (kind, t), call in calls.items()}, 5, STEADY)
    times = {k: [Spread.of(seconds[f"{k} {t}"]).median for t in extent.lengths] for k in extent.kinds}
    laws = {k: (PowerLaw.through(extent.lengths, work[k]), PowerLaw.through(extent.lengths, times[k])) for k in times}
    last = extent.lengths[-1]
    rows = [[f"T = {last}", "MFLOP a text", "~ T", "ms, 4 texts", "~ T"]]
    rows += [
        [kind, f"{work[kind][-1] / 1e6:.1f}", str(laws[kind][0]), f"{1000 * times[kind][-1]:.1f}", str(laws[kind][1])]
        for kind in extent.kinds
    ]
    numbers = {
        "lengths": extent.lengths,
        "operations": work,
        "seconds": times,
        "exponents": {k: {"operations": a.exponent, "time": b.exponent} for k, (a, b) in laws.items()},
    }
    return Row(
        "operations and time of a pass",
        table(rows),
        numbers,
        "Exponents hold between these lengths; where attention's T^2 outweighs the rest depends on the width.",
    )


@torch.no_grad()
def parallelism(extent: Extent) -> Row:
    """One pass over T tokens against T single steps."""
    length = extent.lengths[-2]
    tokens_BT = tokens_of(length)
    found: dict[str, tuple[float, float]] = {}
    for kind in extent.kinds:
        network = begun(shape(kind))

        def by_step(network: Network = network) -> None:
            memory = network.new_memory()
            for t in range(length):
                network(tokens_BT[:, t : t + 1], memory)

        seconds = alternate({"pass": partial(network, tokens_BT), "steps": by_step}, 3, STEADY)
        found[kind] = Spread.of(seconds["pass"]).median, Spread.of(seconds["steps"]).median
    rows = [["", f"one pass of {length}, ms", "single steps, ms", "x"]]
    rows += [[k, f"{1e3 * a:.2f}", f"{1e3 * b:.1f}", f"{b / a:.0f}"] for k, (a, b) in found.items()]
    return Row(
        "parallelism",
        table(rows),
        {"length": length, "seconds": found},
        "Single steps pay for Python as well; torch's recurrent pass is a loop in C++. On a GPU the gap is another.",
    )


@torch.no_grad()
def generation(extent: Extent) -> Row:
    """Time of one more token, and memory, at position T."""
    found: dict[str, dict[str, list[float]]] = {}
    for kind in extent.kinds:
        network = begun(shape(kind, context_length=extent.lengths[-1] + 1))
        times, sizes = [], []
        for length in extent.lengths:
            memory: Any = network.new_memory()
            network(tokens_of(length), memory)

            def once(memory: Any = memory, length: int = length, network: Network = network) -> None:
                network(tokens_of(1), memory)
                if isinstance(memory, Memory):
                    memory.crop(length)

            times.append(Spread.of(alternate({"step": once}, 5, STEADY)["step"]).median)
            filled = length / network.longest if isinstance(memory, Memory) else 1  # a cache is laid out beforehand
            sizes.append(memory.nbytes * filled)
        found[kind] = {"seconds": times, "bytes": sizes}
    first, last = extent.lengths[0], extent.lengths[-1]
    rows = [["", f"µs a token at {first}", f"at {last}", f"kB of memory at {first}", f"at {last}"]]
    rows += [
        [kind, *(f"{1e6 * f['seconds'][i]:.0f}" for i in (0, -1)), *(f"{f['bytes'][i] / 1000:.1f}" for i in (0, -1))]
        for kind, f in found.items()
    ]
    return Row(
        "generation",
        table(rows),
        {"lengths": extent.lengths, **found},
        "Small networks in torch: most of the time is Python's. generate.py is tens of times faster.",
    )


# ── differentiated and permuted ────────────────────────────────────────────────────────────────────────────────


def gradients(extent: Extent) -> Row:
    """How much the last prediction depends on the embedding so many tokens before."""
    length = extent.lengths[0] + 1
    distances = [d for d in (1, 2, 4, 8, 16, 32, 64) if d < length]
    found: dict[str, list[float]] = {}
    for kind in extent.kinds:
        for scale in (1.0,) if kind == "gpt" else SCALES:
            network = begun(shape(kind))
            with torch.no_grad():
                if kind != "gpt":  # else its cells are saturated, and nothing gets through
                    network.token_embedding.weight.mul_(0.1)
                for name, parameter in network.named_parameters():
                    if "weight_hh" in name:
                        parameter.mul_(scale)
            found[kind if kind == "gpt" else f"{kind}, matrices x {scale:g}"] = by_distance(network, length, distances)
    rows = [["", *map(str, distances)], *([name, *(f"{n:.0e}" for n in norms)] for name, norms in found.items())]
    return Row(
        "gradients: size of d(last logit) / d(embedding), by tokens before it",
        table(rows),
        {"distances": distances, **found},
        "First weights, before any learning; training moves them, and an LSTM's gates with them. Recurrent networks "
        "have embeddings a tenth as large here, so that no cell is saturated.",
    )


def by_distance(network: Network, length: int, distances: Sequence[int]) -> list[float]:
    """Geometric mean over texts of the gradient's norm, at each distance."""
    tokens_BT = tokens_of(length, 8)
    embedded = network.token_embedding(tokens_BT).detach().requires_grad_()
    hook = network.token_embedding.register_forward_hook(lambda *_: embedded)
    try:
        network(tokens_BT)[:, -1, 0].sum().backward()
    finally:
        hook.remove()
        network.zero_grad()
    assert embedded.grad is not None
    norms_BT = embedded.grad.norm(dim=-1).clamp_min(1e-38)
    return [math.exp(norms_BT[:, -1 - d].log().mean().item()) for d in distances]


@torch.no_grad()
def position(extent: Extent) -> Row:
    """Whether the last prediction changes when the tokens before it change places."""
    found: dict[str, list[float]] = {}
    for masked in (True, False) if "gpt" in extent.kinds else ():
        for n_layer in (1, 2):
            values = []
            for name in ("none", "sinusoidal", "learned", "rotary"):
                network = begun(shape("gpt", n_layer=n_layer, position=name, context_length=32))
                assert isinstance(network, GPT)
                with explicit_attention(network, masked=masked) if not masked else nullcontext():
                    values.append(change_by_order(network))
            layers = "1 layer" if n_layer == 1 else f"{n_layer} layers"
            found[f"gpt, {layers}, {'causal mask' if masked else 'no mask'}"] = values
    for kind in extent.kinds:
        if kind != "gpt":
            found[kind] = [change_by_order(begun(shape(kind)))]
    rows = [["", "none", "sinusoidal", "learned", "rotary"]]
    rows += [
        [name, *(f"{v:.2g}" if v > 1e-5 else "0" for v in vs), *[""] * (4 - len(vs))] for name, vs in found.items()
    ]
    return Row(
        "position: change of the last prediction when earlier tokens are permuted",
        table(rows),
        found,
        "Without positions one layer reads a bag of tokens; from the second on a causal mask alone tells order. "
        "Total variation of two distributions, 0 to 1, with random weights: that there is a change, not its worth.",
    )


def change_by_order(network: Network, length: int = 24, orders: int = 10) -> float:
    """Mean total variation between the predictions after a text and after its permutations, the last token in place."""
    tokens_BT = tokens_of(length)
    permuted = [torch.randperm(length - 1, generator=torch.Generator().manual_seed(n)) for n in range(orders)]
    others_BT = torch.cat([torch.cat([tokens_BT[:, order], tokens_BT[:, -1:]], dim=1) for order in permuted])
    one, many = (network(some)[:, -1].softmax(dim=-1) for some in (tokens_BT, others_BT))
    return float((one - many).abs().sum(dim=-1).mean() / 2)
