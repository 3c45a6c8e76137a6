"""What a worked example holds: numbers that are given and numbers that must come out.

Axes: T queries, S keys, H heads, D model width, K head size. Arrays are float64, masks bool with True = may look.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from minigpt.inspection.worked.fields import Array


def is_causal(mask: Array | None, shape: Sequence[int]) -> bool:
    """Whether weights of this shape, (..., T, S), are those of tokens that see themselves and what came before."""
    seen = np.ones(shape, dtype=bool) if mask is None else mask
    return shape[-2] == shape[-1] and bool((seen == np.tri(shape[-1], dtype=bool)).all())


@dataclass(frozen=True, eq=False)
class AttentionCase:
    """softmax(Q Kᵀ / √K) V, step by step; a step that the file leaves out is None."""

    name: str
    about: str
    query: Array  # (..., T, K)
    key: Array  # (..., S, K), or with fewer heads in the third axis from the end: query head h uses h // group
    value: Array  # (..., S, width of v)
    mask: Array | None  # bool, (..., T, S), True = may look
    scaled: bool  # whether scores are divided by √K
    raw_scores: Array | None  # (..., T, S)
    scaled_scores: Array | None  # (..., T, S), before the mask
    weights: Array  # (..., T, S)
    output: Array  # (..., T, width of v)

    @property
    def group(self) -> int:
        """Query heads that share one key head."""
        return self.query.shape[-3] // self.key.shape[-3] if self.query.ndim > 2 else 1

    @property
    def causal(self) -> bool:
        """Whether query i sees exactly the keys 0 … i."""
        return is_causal(self.mask, self.weights.shape)

    def expected(self) -> dict[str, Array]:
        """What must come out, in order of computation."""
        return _present(self, "raw_scores", "scaled_scores", "weights", "output")


@dataclass(frozen=True, eq=False)
class MultiHeadCase:
    """Self-attention of H heads between four projections y = x Wᵀ, the last with a bias."""

    name: str
    about: str
    x: Array  # (T, D)
    query_weight: Array  # (D, D), W_Q; identity if the file has none
    key_weight: Array  # (D, D), W_K
    value_weight: Array  # (D, D), W_V
    output_weight: Array  # (D, D), W_O
    output_bias: Array  # (D,), b_O; zeros if the file has none
    mask: Array  # bool (T, T); causal if the file has none
    query: Array | None  # (T, D), before it is cut into heads
    key: Array | None  # (T, D)
    value: Array | None  # (T, D)
    weights: Array  # (H, T, T)
    output: Array  # (T, D)

    @property
    def n_head(self) -> int:
        """H."""
        return len(self.weights)

    @property
    def causal(self) -> bool:
        """Whether token i sees exactly the tokens 0 … i."""
        return is_causal(self.mask, self.weights.shape)

    def expected(self) -> dict[str, Array]:
        """What must come out, in order of computation."""
        return _present(self, "query", "key", "value", "weights", "output")


@dataclass(frozen=True, eq=False)
class Part:
    """Another piece of a Transformer; its kind, one of ``PARTS``, says what is computed from what."""

    name: str
    about: str
    kind: str
    given: dict[str, Array]
    results: dict[str, Array]

    def expected(self) -> dict[str, Array]:
        """What must come out, in order of computation."""
        return self.results


@dataclass(frozen=True, eq=False)
class ReferenceRow:
    """One row of attention as printed somewhere, to compare a model with."""

    name: str
    about: str
    tokens: tuple[str, ...]
    query: str  # one of the tokens
    weights: Array  # (number of tokens,)


Case = AttentionCase | MultiHeadCase | Part


def _present(case: object, *steps: str) -> dict[str, Array]:
    found = {step: getattr(case, step) for step in steps}
    return {step: array for step, array in found.items() if array is not None}
