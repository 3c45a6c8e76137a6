"""What a head is for: its attention or its result is replaced by something fixed, and the loss tells.

Everywhere N sequences of T tokens are read, and a change is counted in nats a predicted token, one number a sequence;
the T − 1 targets are the next tokens within each sequence.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from minigpt.errors import UserError
from minigpt.inspection.capture import Change, attention_maps, looking, refuse_overflow
from minigpt.inspection.compare import Closeness, Floats, closeness, pooled
from minigpt.inspection.heads import Head, parse_head
from minigpt.inspection.patterns import Reference
from minigpt.model import GPT
from minigpt.tasks.synthetic import NONE

PASS_TOKENS = 2048  # in one pass: its attention weights are all in memory at once
DRAWS = 2000  # resamplings of a bootstrap
FEWEST = 5  # sequences: of fewer, resampling tells a far too narrow interval

Method = Literal["zero", "mean", "resample"]
Group = tuple[Head, ...]
"""Heads that are taken out together."""
Item = TypeVar("Item")


Replacement = Callable[[slice, Tensor], Tensor]
"""(which of the N sequences, what a head has of its own on them) → what it goes on with, of the same shape.

For attention that is (n, T, T), for results (n, T, K). The argument is not written to.
"""


# ── the loss with some heads replaced ──────────────────────────────────────────────────────────────────────────


@torch.inference_mode()
def sequence_losses(
    model: GPT,
    tokens: NDArray[np.int64],
    *,
    targets: NDArray[np.int64] | None = None,
    attention: Mapping[Head, Replacement] | None = None,
    results: Mapping[Head, Replacement] | None = None,
) -> Floats:
    """Mean loss of each of N sequences, (N, T) → (N,), in nats a token.

    Args:
        model: in evaluation mode.
        tokens: (N, T), at least two each.
        targets: (N, T), what is to be answered after each token, −1: nothing; instead of each next token.
        attention: other weights for some heads.
        results: something else for what some heads give, weights @ values, before the output projection.
    """
    losses = []
    for part in _passes(tokens):
        inputs = torch.from_numpy(tokens[part])
        with looking(model, change_weights=_change(attention, part), change_heads=_change(results, part)):
            logits_BTV = model(inputs)
        refuse_overflow(logits_BTV, "the network's output")
        expected = F.pad(inputs[:, 1:], (0, 1), value=NONE) if targets is None else torch.from_numpy(targets[part])
        loss_BT = F.cross_entropy(logits_BTV.transpose(1, 2), expected, ignore_index=NONE, reduction="none")
        losses.append((loss_BT.double().sum(dim=1) / (expected != NONE).sum(dim=1)).numpy())
    return np.concatenate(losses)


def _change(replacements: Mapping[Head, Replacement] | None, part: slice) -> Change | None:
    if not replacements:
        return None

    def change(layer: int, own: Tensor) -> Tensor:
        mine = {head.head: replace for head, replace in replacements.items() if head.layer == layer}
        changed = own.clone() if mine else own
        for number, replace in mine.items():
            changed[:, number] = replace(part, own[:, number])
        return changed

    return change


def _passes(tokens: NDArray[np.int64]) -> Iterable[slice]:
    size = max(1, PASS_TOKENS // tokens.shape[1])
    return (slice(start, start + size) for start in range(0, len(tokens), size))


def heads_of(model: GPT, names: Sequence[str] = ()) -> list[Head]:
    """The named heads of a model, each once; all of them where none is named.

    Raises:
        UserError: for a head that is not there.
    """
    n_layer, n_head = model.config.n_layer, model.config.n_head
    if not names:
        return [Head(layer, head) for layer in range(n_layer) for head in range(n_head)]
    return list(dict.fromkeys(parse_head(name, n_layer, n_head) for name in names))


# ── a head's attention replaced by a reference ─────────────────────────────────────────────────────────────────


def closeness_to(model: GPT, tokens: NDArray[np.int64], references: Sequence[Reference]) -> dict[str, Closeness]:
    """How near every head is to each reference on the sequences (N, T), arrays of shape (layers, H)."""
    parts: dict[str, list[Closeness]] = {reference.name: [] for reference in references}
    for row in tokens:
        maps = attention_maps(model, torch.from_numpy(row))
        for reference in references:
            parts[reference.name].append(closeness(maps, reference.pattern(row)))
    return {name: pooled(found) for name, found in parts.items()}


def forced_by(reference: Reference, tokens: NDArray[np.int64]) -> Replacement:
    """The reference's pattern on each of the sequences (N, T); a row where it is not defined stays the head's own."""
    patterns = [reference.pattern(row) for row in tokens]
    weights = torch.from_numpy(np.stack([pattern.weights for pattern in patterns]))
    rows = torch.from_numpy(np.stack([pattern.defined for pattern in patterns]))
    return lambda part, own: torch.where(rows[part, :, None], weights[part], own)


def losses_under(
    model: GPT,
    tokens: NDArray[np.int64],
    forced: Iterable[tuple[Head, Reference]],
    *,
    targets: NDArray[np.int64] | None = None,
) -> dict[tuple[Head, str], Floats]:
    """The loss of each sequence, (N,), when one head attends as one reference says, by head and reference's name.

    ``targets`` as in ``sequence_losses``.
    """
    drawn: dict[str, Replacement] = {}
    losses = {}
    for head, reference in forced:
        if reference.name not in drawn:
            drawn[reference.name] = forced_by(reference, tokens)
        attention = {head: drawn[reference.name]}
        losses[head, reference.name] = sequence_losses(model, tokens, targets=targets, attention=attention)
    return losses


# ── heads taken out ────────────────────────────────────────────────────────────────────────────────────────────


@torch.inference_mode()
def substitutes(model: GPT, tokens: NDArray[np.int64], method: Method, *, seed: int = 0) -> dict[Head, Replacement]:
    """For every head, what it gives when it is taken out.

    ``zero``: nothing. ``mean``: its mean over sequences and positions, dimension by dimension. ``resample``: its result
    at the same position of another of the sequences, a seeded choice in which each serves once.

    Raises:
        UserError: for a resample of fewer than two sequences.
    """
    if method == "resample" and len(tokens) < 2:
        raise UserError("resample takes results from another sequence: read at least 2, or use --method mean")
    captured: list[list[Tensor]] = []
    for part in _passes(tokens):
        with looking(model) as looks:
            model(torch.from_numpy(tokens[part]))
        captured.append([look.heads for look in looks])
    donor = torch.from_numpy(derangement(len(tokens), seed)) if method == "resample" else None
    found: dict[Head, Replacement] = {}
    for layer, parts in enumerate(zip(*captured, strict=True)):
        heads_NHTK = torch.cat(parts)
        if donor is not None:
            given = heads_NHTK[donor]
        else:
            mean = heads_NHTK.double().mean(dim=(0, 2), keepdim=True).to(heads_NHTK.dtype)
            given = (mean if method == "mean" else torch.zeros_like(mean)).expand_as(heads_NHTK)
        for head in range(given.shape[1]):
            found[Head(layer, head)] = lambda part, own, result=given[:, head]: result[part]
    return found


def ablate(
    model: GPT,
    tokens: NDArray[np.int64],
    groups: Iterable[Group],
    *,
    targets: NDArray[np.int64] | None = None,
    method: Method = "mean",
    seed: int = 0,
) -> dict[Group, Floats]:
    """The loss of each sequence, (N,), when the heads of a group are taken out together; ``targets`` as above.

    Raises:
        UserError: see ``substitutes``.
    """
    instead = substitutes(model, tokens, method, seed=seed)
    return {
        group: sequence_losses(model, tokens, targets=targets, results={head: instead[head] for head in group})
        for group in groups
    }


def pair_excess(changes: Mapping[Group, Floats]) -> dict[Group, Floats]:
    """What each pair among the groups costs beyond the sum of its heads' own costs.

    Above 0 where either head can stand in for the other, so that one alone seems to matter little.
    """
    return {pair: change - changes[pair[:1]] - changes[pair[1:]] for pair, change in changes.items() if len(pair) == 2}


def derangement(count: int, seed: int) -> NDArray[np.int64]:
    """A random order of 0 … count−1 in one cycle, so that none keeps its place."""
    cycle = np.random.default_rng(seed).permutation(count)
    order = np.empty_like(cycle)
    order[cycle] = np.roll(cycle, 1)
    return order


# ── how sure ───────────────────────────────────────────────────────────────────────────────────────────────────


class Interval(NamedTuple):
    """A mean over sequences, and where it would likely fall with other sequences of the kind; NaN from too few."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        around = "(too few sequences)" if math.isnan(self.low) else f"[{self.low:+.4f}, {self.high:+.4f}]"
        return f"{self.mean:+8.4f}  {around}"

    def to_dict(self) -> dict[str, float | None]:
        """As JSON has it, without NaN."""
        return {name: None if math.isnan(value) else value for name, value in self._asdict().items()}


def bootstrap(values: Floats | Sequence[float], *, level: float = 0.95, seed: int = 0) -> Interval:
    """Percentile interval of the mean of ``FEWEST`` values or more, drawn anew with replacement (Efron 1979)."""
    values = np.asarray(values, dtype=np.float64)
    if len(values) < FEWEST:
        return Interval(float(values.mean()), np.nan, np.nan)
    picks = np.random.default_rng(seed).integers(len(values), size=(DRAWS, len(values)))
    low, high = np.quantile(values[picks].mean(axis=1), [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(values.mean()), float(low), float(high))


# ── what the commands share ────────────────────────────────────────────────────────────────────────────────────


def facts(run: Path, step: int, tokens: NDArray[np.int64], losses: Floats) -> dict[str, str | int | float]:
    """What was read, and the loss of the model as it is."""
    count, length = tokens.shape
    return {"run": str(run), "step": step, "sequences": count, "length": length, "loss": float(losses.mean())}


def heading(run: Path, step: int, what: str, losses: Floats) -> str:
    """The same, and whether it is enough for intervals, in words; ``what`` are those of the sequences."""
    lines = [f"{run}, step {step}"]
    lines.append(f"{what}, loss {losses.mean():.4f} nats a token")
    if len(losses) < FEWEST:
        lines.append(f"fewer than {FEWEST} sequences do not tell how sure a change is; read more for intervals")
    return "\n".join(lines)


def watched(items: Collection[Item]) -> Iterator[Item]:
    """The items one by one, with a bar on the terminal's stderr: each is a pass over all sequences."""
    yield from tqdm(items, leave=False, disable=None, unit=" heads")
