"""Numbers on attention maps: how near heads are to a fixed pattern, and what they are like without one.

All maps are (..., T, T), rows are queries, and a row sums to 1. Leading axes are kept: usually (layers, heads).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minigpt.inspection.patterns import Pattern

Maps = NDArray[np.floating[Any]]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Closeness:
    """How near heads are to a pattern P: means over the rows where P is defined, NaN where there is none."""

    total_variation: Floats
    """½ Σ|A − P| in [0, 1]: this share of the weight is elsewhere."""
    jensen_shannon: Floats
    """Jensen–Shannon divergence / ln 2, in [0, 1]."""
    kl: Floats
    """KL(P‖A) in nats, infinite where A has no weight at all on a key of P. (KL(A‖P) would nearly always be.)"""
    mass: Floats
    """Weight on the keys of P, in [0, 1]."""
    argmax: Floats
    """Share of rows whose largest weight is on a key of P."""
    uniform_mass: float
    """The mass that uniform causal attention has."""
    rows: int
    """Rows where P is defined."""
    all_rows: int
    """Rows where a pattern can be defined: all but row 0."""

    @property
    def lift(self) -> Floats:
        """(mass − uniform's) / (1 − uniform's): 0 for no preference, 1 for the pattern; NaN if uniform has it all."""
        room = 1 - self.uniform_mass
        return (self.mass - self.uniform_mass) / (room if room > 1e-9 else math.nan)

    @property
    def coverage(self) -> float:
        """Share of the rows where P is defined."""
        return self.rows / self.all_rows


def closeness(maps: Maps, pattern: Pattern) -> Closeness:
    """Hold the maps (..., T, T) of some heads on one text against a pattern on the same text; results (...).

    Only the keys of P are visited: on all others |A − P| is A, and the Jensen–Shannon term A·½ ln 2.
    """
    length = maps.shape[-1]
    places = np.flatnonzero(pattern.weights)
    queries, rows = places // length, int(pattern.defined.sum())
    target = pattern.weights.ravel()[places]
    on_keys = maps.reshape(*maps.shape[:-2], length * length)[..., places]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        middle = (on_keys + target) / 2
        of_head = np.where(on_keys > 0, on_keys * np.log(on_keys / middle), 0)
        of_pattern = target * np.log(target / middle)
        divergence = target * np.log(target / on_keys)
    mass = _total(on_keys)
    elsewhere = np.maximum(_total(maps[..., pattern.defined, :], axis=(-2, -1)) - mass, 0)
    largest = maps.argmax(axis=-1)
    hits = np.take_along_axis(pattern.weights, largest.reshape(-1, length).T, axis=1).T.reshape(largest.shape) > 0
    return Closeness(
        total_variation=_mean((_total(np.abs(on_keys - target)) + elsewhere) / 2, rows),
        jensen_shannon=_mean(_total(of_head + of_pattern) / (2 * math.log(2)) + elsewhere / 2, rows),
        kl=_mean(_total(divergence), rows),
        mass=_mean(mass, rows),
        argmax=_mean(hits.sum(axis=-1), rows),
        uniform_mass=float((1 / (queries + 1)).sum() / rows) if rows else math.nan,
        rows=rows,
        all_rows=length - 1,
    )


def pooled(parts: Sequence[Closeness]) -> Closeness:
    """What several texts say together: means over the defined rows of all of them."""
    rows = sum(part.rows for part in parts)

    def mean(read: Callable[[Closeness], Any]) -> Any:
        counted = [part.rows * read(part) for part in parts if part.rows]
        return sum(counted) / rows if rows else read(parts[0])

    return Closeness(
        total_variation=mean(lambda part: part.total_variation),
        jensen_shannon=mean(lambda part: part.jensen_shannon),
        kl=mean(lambda part: part.kl),
        mass=mean(lambda part: part.mass),
        argmax=mean(lambda part: part.argmax),
        uniform_mass=mean(lambda part: part.uniform_mass),
        rows=rows,
        all_rows=sum(part.all_rows for part in parts),
    )


@dataclass(frozen=True)
class Null:
    """Total variations of all heads of the fresh networks from one reference, in rising order."""

    total_variation: Floats  # (seeds · layers · H,)

    def percentile(self, total_variation: Floats) -> Floats:
        """How many in a hundred fresh heads are as near as this, or nearer."""
        as_near = np.searchsorted(self.total_variation, total_variation, side="right")
        return 100 * as_near / len(self.total_variation)

    @property
    def first_percentile(self) -> float:
        """Nearer than this is one fresh head in a hundred."""
        return float(np.percentile(self.total_variation, 1))


# ── without a reference ────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Description:
    """What heads are like: means over the rows after row 0, in which there is no choice, and over the texts."""

    normalised_entropy: Floats
    """Of a row, over that of uniform attention to the same keys: 0 one key, 1 uniform, for every T."""
    effective_keys: Floats
    """e^entropy: as many keys with equal weights would have the row's entropy."""
    mean_distance: Floats
    """Mean distance in tokens (Vig & Belinkov 2019), row 0 included."""
    first_token_mass: Floats
    """Weight on the first token."""
    positional_share: Floats
    """1 − variability of the maps over the texts (Vig & Belinkov 2019), on all rows: 1 where only positions count.

    NaN for one text; N texts can't give less than 1/N.
    """


def describe(maps: Maps, *, causal: bool = True) -> Description:
    """Maps of N texts (N, ..., T, T), T at least 2 → numbers of shape (...).

    Args:
        causal: whether a row has only the keys up to its own; the entropy is compared with that of all its keys.
    """
    length = maps.shape[-1]
    n_keys = np.arange(2, length + 1) if causal else np.full(length - 1, length)
    places = np.arange(length)
    distances = np.abs(places[:, None] - places).astype(maps.dtype)
    entropies = _entropies(maps[..., 1:, :])
    flat = maps.reshape(*maps.shape[:-2], length * length)
    return Description(
        normalised_entropy=(entropies / np.log(n_keys)).mean(axis=(0, -1)),
        effective_keys=np.exp(entropies).mean(axis=(0, -1)),
        mean_distance=((flat @ distances.ravel()) / _total(flat)).mean(axis=0, dtype=np.float64),
        first_token_mass=maps[..., 1:, 0].mean(axis=(0, -1), dtype=np.float64),
        positional_share=1 - _variability(flat),
    )


def _entropies(maps: Maps) -> Floats:
    """−Σ A ln A of each row, in nats, 0 ln 0 = 0."""
    logarithms = np.log(np.maximum(maps, np.finfo(maps.dtype).tiny))
    return np.maximum(-np.einsum("...j,...j->...", maps, logarithms, dtype=np.float64), 0)


def _variability(maps: Maps) -> Floats:
    """Σ|A − Ā| / (2 Σ A) over texts (first axis) and places (last), Ā the mean over the texts."""
    if len(maps) < 2:
        return np.full(maps.shape[1:-1], math.nan)
    mean = maps.mean(axis=0)
    apart = sum(_total(np.abs(one - mean)) for one in maps)
    return np.asarray(apart / (2 * _total(maps).sum(axis=0)))


def _total(values: Maps, axis: int | tuple[int, ...] = -1) -> Floats:
    return values.sum(axis=axis, dtype=np.float64)


def _mean(total: Floats, rows: int) -> Floats:
    return np.asarray(total / rows if rows else np.full_like(total, math.nan, dtype=np.float64))
