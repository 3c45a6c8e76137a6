"""Does it matter what a head moves along a link? Take exactly that away, and as a control as much of something else.

Both change only the rows that predict the determined word, one link at a time, and nothing but weights: the network
goes on with what follows from them.

A row here is that of one head and one predicting token. One whose dropped mass the control can't match is counted, and
its whole link left out of the comparison. To leave out that row alone, from drop and control, would spare just the
heads that carry the link, and the drop would seem to do little.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minigpt.inspection.capture import looking, refuse_overflow
from minigpt.inspection.compare import Floats
from minigpt.inspection.links import LinkedText, TokenLink, batches, padded
from minigpt.model import GPT

MATCHED = 0.8  # of a row's dropped mass, at least, must be removed by the control
LEAST_LEFT = 1e-3  # of a row's weight: what is left is scaled up to 1, and less than this is no row any more

Counts = NDArray[np.int64]
Heads = NDArray[np.bool_]  # (N, L, H): which heads are changed, link by link


def without(weights: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows (..., T) without some keys (bool, broadcastable), renormalised to their old sum.

    Returns:
        The rows, the mass removed (...), and what was left of them before they were renormalised (...).
    """
    kept = weights.masked_fill(keys, 0)
    return _renormalised(weights, kept), weights.masked_fill(~keys, 0).sum(dim=-1), kept.sum(dim=-1)


def without_as_much(weights: Tensor, keys: Tensor, mass: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows (..., T) without ``mass`` (...) of the heaviest keys other than ``keys``, the last of them in part.

    Where there is less, all of it is removed. Returns as ``without``.
    """
    heaviest, order = weights.masked_fill(keys, 0).sort(dim=-1, descending=True, stable=True)
    before = heaviest.cumsum(dim=-1) - heaviest
    taken = torch.minimum((mass[..., None] - before).clamp(min=0), heaviest)
    kept = weights - torch.zeros_like(weights).scatter(-1, order, taken)
    return _renormalised(weights, kept), taken.sum(dim=-1), kept.sum(dim=-1)


def _renormalised(weights: Tensor, kept: Tensor) -> Tensor:
    """``kept`` with the sum of ``weights``; these where hardly anything is left."""
    total, left = weights.sum(dim=-1, keepdim=True), kept.sum(dim=-1, keepdim=True)
    enough = left >= LEAST_LEFT
    return torch.where(enough, kept * (total / left.clamp(min=LEAST_LEFT)), weights)


# ── effects ────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Outcome:
    """What came of dropping N links. The log-probabilities (N, 3) are as it was, with the drop, with the control."""

    first: Floats  # of the word's first token
    word: Floats  # of all its tokens together
    mass: Floats  # (N,) dropped, the mean over the changed rows
    rows: Counts  # (N,): how many were to be changed, each that of one head and one predicting token
    nothing_left: Counts  # (N,): of these, such that have no other weight
    unmatched: Counts  # (N,): others from which the control could not remove ``MATCHED`` of as much, or left nothing


@torch.inference_mode()
def drop(model: GPT, texts: Sequence[LinkedText], selections: Mapping[str, Heads]) -> dict[str, Outcome]:
    """Drop each link, by itself, in the heads that each selection names for it; links in the order of the texts.

    Nothing after the rows that predict the word is read: it could not change them.
    """
    cases = [(text.tokens, link) for text in texts for link in text.links]
    parts: dict[str, list[tuple[list[int], Outcome]]] = {name: [] for name in selections}
    for batch in batches([link.word[-1] for _, link in cases]):
        tokens = padded([cases[index][0][: cases[index][1].word[-1]] for index in batch])
        rows = _predicting_rows([cases[index] for index in batch], tokens.shape[1])
        as_it_was = rows.log_probabilities(model(tokens))
        refuse_overflow(as_it_was, "the network's output")
        for name, heads in selections.items():
            chosen = torch.from_numpy(heads[batch])[rows.case]
            parts[name].append((batch, _outcome(model, tokens, rows, chosen, as_it_was)))
    return {name: _in_order(found) for name, found in parts.items()}


class _Rows(NamedTuple):
    """The R rows of a batch that predict determined words, case by case."""

    case: Tensor  # (R,)
    row: Tensor  # (R,)
    target: Tensor  # (R,): the token to predict
    cause: Tensor  # (R, T), bool
    first: Tensor  # (B,): the first of each case

    def log_probabilities(self, logits: Tensor) -> Tensor:
        """Of each row's target: (B, T, V) → (R,)."""
        scores = logits[self.case, self.row].double().log_softmax(dim=-1)
        return scores.gather(-1, self.target[:, None])[:, 0]

    def total(self, numbers: Tensor) -> Tensor:
        """Sums over the rows of each case: (R,) → (B,)."""
        return numbers.new_zeros(len(self.first)).index_add(0, self.case, numbers)


def _predicting_rows(cases: Sequence[tuple[NDArray[np.int64], TokenLink]], length: int) -> _Rows:
    places = [(case, place) for case, (_, link) in enumerate(cases) for place in link.word]
    cause = torch.zeros(len(cases), length, dtype=torch.bool)
    for keys, (_, link) in zip(cause, cases, strict=True):
        keys[list(link.cause)] = True
    case, place = (torch.tensor(numbers) for numbers in zip(*places, strict=True))
    counts = [len(link.word) for _, link in cases]
    return _Rows(
        case=case,
        row=place - 1,
        target=torch.tensor([int(cases[case][0][place]) for case, place in places]),
        cause=cause[case],
        first=torch.tensor([0, *counts[:-1]]).cumsum(0),
    )


class _Changed(NamedTuple):
    log_probabilities: Tensor  # (R,)
    removed: Tensor  # (R, L, H), 0 in heads that are not changed
    left: Tensor  # (R, L, H), infinite in heads that are not changed


def _changed(
    model: GPT, tokens: Tensor, rows: _Rows, chosen: Tensor, removal: Callable[[int, Tensor], tuple[Tensor, ...]]
) -> _Changed:
    """Read with the rows changed in the chosen heads (R, L, H); removal: (layer, rows (R, H, T)) → as ``without``."""
    removed = torch.zeros(chosen.shape)
    left = torch.full(chosen.shape, torch.inf)

    def change(layer: int, weights: Tensor) -> Tensor:
        heads = chosen[:, layer]
        if not heads.any():
            return weights
        before = weights[rows.case, :, rows.row]
        new, mass, rest = removal(layer, before)
        removed[:, layer], left[:, layer] = mass.where(heads, 0.0), rest.where(heads, torch.inf)
        changed = weights.clone()
        changed[rows.case, :, rows.row] = new.where(heads[..., None], before)
        return changed

    with looking(model, change_weights=change):
        logits = model(tokens)
    return _Changed(rows.log_probabilities(logits), removed, left)


def _outcome(model: GPT, tokens: Tensor, rows: _Rows, chosen: Tensor, as_it_was: Tensor) -> Outcome:
    keys = rows.cause[:, None]
    dropped = _changed(model, tokens, rows, chosen, lambda _, weights: without(weights, keys))
    control = _changed(
        model, tokens, rows, chosen, lambda layer, weights: without_as_much(weights, keys, dropped.removed[:, layer])
    )
    log_p = torch.stack([as_it_was, dropped.log_probabilities, control.log_probabilities])
    nothing_left = dropped.left < LEAST_LEFT
    unmatched = (control.removed < MATCHED * dropped.removed) | (control.left < LEAST_LEFT)
    counts = [rows.total(part.sum(dim=(1, 2))) for part in (chosen, nothing_left, unmatched & ~nothing_left)]
    return Outcome(
        first=log_p[:, rows.first].T.numpy(),
        word=torch.stack([rows.total(part) for part in log_p], dim=-1).numpy(),
        mass=(rows.total(dropped.removed.double().sum(dim=(1, 2))) / counts[0]).numpy(),
        rows=counts[0].numpy(),
        nothing_left=counts[1].numpy(),
        unmatched=counts[2].numpy(),
    )


def _in_order(found: Sequence[tuple[list[int], Outcome]]) -> Outcome:
    """The outcomes of all batches, in the order of their indices."""
    order = np.argsort(np.concatenate([batch for batch, _ in found]))
    return Outcome(
        *(np.concatenate([vars(part)[name] for _, part in found])[order] for name in Outcome.__annotations__)
    )
