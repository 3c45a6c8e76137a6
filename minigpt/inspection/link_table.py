"""The link table: how much each head moves along links of each kind, against nulls, and whether it matters."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from minigpt.errors import UserError
from minigpt.inspection.compare import Floats
from minigpt.inspection.dropping import Heads, Outcome, drop
from minigpt.inspection.heads import Head
from minigpt.inspection.links import LinkedText, Masses, link_masses, windows
from minigpt.model import GPT

OVERALL = "overall"  # all kinds together
STRONGEST, ALL = "strongest", "all"  # of the link's kind; of the network
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class MassRow:
    """Mean weight that one head moves from the cause's tokens (their sum), over the links of one kind.

    ``mass`` is that of the row that predicts the word's first token; NaN stands for "no such row".
    """

    kind: str
    head: str
    links: int
    mass: float
    word_mass: float  # the mean over all rows that predict the word
    own_mass: float  # the mean over the rows of the word itself
    uniform: float  # null: all keys in sight weigh the same
    other_words: float  # null: rows of the kind's other links, words as far away
    fresh: float  # null: the same head of fresh networks
    fresh_strongest: float  # null: that head of each fresh network that moves most


@dataclass(frozen=True)
class Effect:
    """Means over links, before and as changes. Loss in nats; a word's probability is the product over its tokens."""

    links: int
    loss: float
    loss_drop: float
    loss_control: float
    probability: float
    probability_drop: float
    probability_control: float


@dataclass(frozen=True)
class DropRow:
    """What dropping the cause's tokens from the predicting rows does, in some heads, for the links of one kind.

    A link is compared with the control if all its rows are; ``dropping`` tells what a row is, and why.
    """

    kind: str
    heads: str
    links: int
    mass: float  # dropped, the mean over these heads
    nothing_left: int  # links left out: a row had no other weight
    unmatched: int  # links left out: from a row the control could not remove enough elsewhere
    rows: int
    rows_nothing_left: int
    rows_unmatched: int
    first: Effect  # on the word's first token
    word: Effect  # on all its tokens
    without_control: Effect  # on its first token, for the unmatched links too


@dataclass(frozen=True)
class LinkTable:
    """``left_out``: links of each kind whose cause and word no window holds."""

    links: int
    left_out: dict[str, int]
    masses: tuple[MassRow, ...]
    drops: tuple[DropRow, ...]

    def strongest(self) -> list[MassRow]:
        """For each kind the row of the head that moves most."""
        kinds = dict.fromkeys(row.kind for row in self.masses)
        return [max((row for row in self.masses if row.kind == kind), key=lambda row: row.mass) for kind in kinds]


def link_table(
    model: GPT, texts: Iterable[LinkedText], *, fresh: Floats | None = None, all_heads: bool = False
) -> LinkTable:
    """Read texts with known links, then drop each link in its kind's strongest head and in all heads at once.

    Args:
        model: in evaluation mode.
        texts: of any length, tales or other: each is cut into windows that fit the context.
        fresh: ``Masses.first`` of networks with other first weights on the windows of the texts, as a null; or none.
        all_heads: drop the links in every single head instead of the strongest.

    Raises:
        UserError: if no link fits the context.
    """
    read, left_out = windows(texts, model.config.context_length)
    if not read:
        raise UserError(f"no link fits the model's context of {model.config.context_length} tokens; take a longer one")
    masses = link_masses(model, read)
    null = np.full((1, *masses.first.shape), np.nan) if fresh is None or not len(fresh) else fresh
    members = _members(masses.kinds)
    selections = _selections(masses, members, all_heads=all_heads)
    outcomes = drop(model, read, selections)
    return LinkTable(
        links=len(masses.kinds),
        left_out=dict(left_out),
        masses=tuple(row for kind, chosen in members.items() for row in _mass_rows(kind, chosen, masses, null)),
        drops=tuple(
            _drop_row(kind, _name(name, selections[name][chosen]), outcome, chosen)
            for name, outcome in outcomes.items()
            for kind, chosen in members.items()
        ),
    )


# ── rows ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _members(kinds: Sequence[str]) -> dict[str, Mask]:
    """Which links are of each kind, and overall."""
    named = np.array(kinds)
    return {kind: named == kind for kind in sorted(set(kinds))} | {OVERALL: np.ones(len(kinds), dtype=bool)}


def _selections(masses: Masses, members: dict[str, Mask], *, all_heads: bool) -> dict[str, Heads]:
    """The heads (N, L, H) in which the links are dropped, by name."""
    shape = masses.first.shape
    if all_heads:
        single = {str(Head(*place)): np.zeros(shape, dtype=bool) for place in np.ndindex(shape[1:])}
        for place, heads in zip(np.ndindex(shape[1:]), single.values(), strict=True):
            heads[:, *place] = True
    else:
        single = {STRONGEST: np.zeros(shape, dtype=bool)}
        for kind, chosen in members.items():
            if kind != OVERALL:
                layer, head = np.unravel_index(masses.first[chosen].mean(axis=0).argmax(), shape[1:])
                single[STRONGEST][chosen, layer, head] = True
    return single | {ALL: np.ones(shape, dtype=bool)}


def _name(selection: str, heads: Heads) -> str:
    """The one head that is meant for all these links, or the selection's own name."""
    used = np.argwhere(heads.any(axis=0))
    return str(Head(*map(int, used[0]))) if selection == STRONGEST and len(used) == 1 else selection


def _mass_rows(kind: str, chosen: Mask, masses: Masses, null: Floats) -> list[MassRow]:
    """One row a head; ``null`` (S, N, L, H) holds the masses of S fresh networks."""
    first, word, own = (part[chosen].mean(axis=0) for part in (masses.first, masses.word, masses.own))
    reached = masses.other_words[chosen & ~np.isnan(masses.other_words[:, 0, 0])]
    others = reached.mean(axis=0) if len(reached) else np.full(first.shape, np.nan)
    fresh = null[:, chosen].mean(axis=1)
    return [
        MassRow(
            kind=kind,
            head=str(Head(*place)),
            links=int(chosen.sum()),
            mass=float(first[place]),
            word_mass=float(word[place]),
            own_mass=float(own[place]),
            uniform=float(masses.uniform[chosen].mean()),
            other_words=float(others[place]),
            fresh=float(fresh[:, *place].mean()),
            fresh_strongest=float(fresh.max(axis=(1, 2)).mean()),
        )
        for place in np.ndindex(first.shape)
    ]


def _drop_row(kind: str, heads: str, outcome: Outcome, chosen: Mask) -> DropRow:
    left = chosen & (outcome.nothing_left == 0)
    matched = left & (outcome.unmatched == 0)
    return DropRow(
        kind=kind,
        heads=heads,
        links=int(chosen.sum()),
        mass=float(outcome.mass[chosen].mean()),
        nothing_left=int((chosen & ~left).sum()),
        unmatched=int((left & ~matched).sum()),
        rows=int(outcome.rows[chosen].sum()),
        rows_nothing_left=int(outcome.nothing_left[chosen].sum()),
        rows_unmatched=int(outcome.unmatched[chosen].sum()),
        first=_effect(outcome.first[matched]),
        word=_effect(outcome.word[matched]),
        without_control=_effect(np.where([True, True, False], outcome.first[left], np.nan)),
    )


def _effect(log_probability: Floats) -> Effect:
    """Means of log-probabilities (N, 3): as it was, with the drop, with the control."""
    if not len(log_probability):
        return Effect(0, *[float("nan")] * 6)
    loss, probability = -log_probability.mean(axis=0), np.exp(log_probability).mean(axis=0)
    return Effect(
        links=len(log_probability),
        loss=float(loss[0]),
        loss_drop=float(loss[1] - loss[0]),
        loss_control=float(loss[2] - loss[0]),
        probability=float(probability[0]),
        probability_drop=float(probability[1] - probability[0]),
        probability_control=float(probability[2] - probability[0]),
    )
