"""Attention as a chain of steps in NumPy, each of which can also be taken the wrong way students take it.

``Steps()`` is attention as the paper has it; ``replace(Steps(), scale="none")`` forgets the √d. A number that a mistake
leaves open, such as a row that may look at nothing, comes out as NaN.
Axes: T queries, S keys, H heads, D model width, K head size; ``...`` stands for any axes in front.
"""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]

Scale = Literal["sqrt_d", "none", "d", "times", "sqrt_d_v", "sqrt_d_model", "sqrt_keys", "after"]
Masking = Literal[
    "right", "missing", "transposed", "strict", "strict_causal", "strict_always", "inverted", "causal",
    "causal_always", "after_softmax", "multiplied", "minus_one", "minus_one_early",
    "minus_one_added",
]  # fmt: skip
Group = Literal["blocks", "cycle", "count", "first"]  # h // (H / G), h % G, h // G, 0
Softmax = Literal["keys", "queries", "matrix", "everything", "first_axis", "second_axis", "missing"]


@dataclass(frozen=True)
class Steps:
    """How each step is taken; the defaults are right."""

    inputs: str = "qkv"  # which input becomes queries, keys and values
    matrices: str = "QKVO"  # which of W_Q W_K W_V W_O is used in each of the four places
    transposed: str = ""  # matrices W that are used as x W instead of x Wᵀ
    split: bool = True  # cut into heads with the transpose
    key_group: Group = "blocks"  # which of G key heads query head h uses
    value_group: Group = "blocks"  # ... and which value head
    swapped: bool = False  # K Qᵀ instead of Q Kᵀ
    scale: Scale = "sqrt_d"
    mask: Masking = "right"
    softmax: Softmax = "keys"
    weights_transposed: bool = False  # Wᵀ V instead of W V
    merge: bool = True  # heads merged with the transpose
    output: bool = True  # the output projection is there
    bias: bool = True  # ... and its bias


RIGHT = Steps()


class Projections(NamedTuple):
    """What a multi-head layer has learned: four matrices (D, D), used as x Wᵀ, and the output's bias (D,)."""

    n_head: int
    query: Array
    key: Array
    value: Array
    output: Array
    bias: Array


class Inputs(NamedTuple):
    """What attention is computed of; with projections these are the inputs (..., T, D) of a whole layer."""

    query: Array  # (..., T, K)
    key: Array  # (..., S, K)
    value: Array  # (..., S, width of v)
    mask: Mask | None = None  # (T, S) or more axes, True = may look
    bias: Array | None = None  # (T, S), numbers added to the scores, in place of a mask
    projections: Projections | None = None


def compute(inputs: Inputs, steps: Steps = RIGHT) -> Array | None:
    """The output (..., T, width of v) that these steps lead to; None where shapes forbid them."""
    try:
        with np.errstate(all="ignore"):
            return _layer(inputs, inputs.projections, steps) if inputs.projections else _attend(inputs, steps)
    except ValueError:  # NumPy's word for shapes that do not fit
        return None


def expected_weights(inputs: Inputs) -> Array:
    """The right attention weights (..., T, S), or of a layer (..., H, T, S)."""
    inner = _project(inputs, inputs.projections, RIGHT) if inputs.projections else inputs
    weights = compute(inner._replace(projections=None, value=np.eye(inner.key.shape[-2])))
    assert weights is not None
    return weights


def _project(inputs: Inputs, learned: Projections, steps: Steps) -> Inputs:
    """Inputs of a layer (..., T, D) → queries, keys and values of its heads (..., H, T, K)."""
    sources = {"q": inputs.query, "k": inputs.key, "v": inputs.value}

    def heads(place: int) -> Array:
        x = _times(sources[steps.inputs[place]], learned, steps, place)
        *lead, length, width = x.shape
        size = width // learned.n_head
        if not steps.split:
            return x.reshape(*lead, learned.n_head, length, size)
        return x.reshape(*lead, length, learned.n_head, size).swapaxes(-3, -2)

    return inputs._replace(query=heads(0), key=heads(1), value=heads(2))


def _times(x: Array, learned: Projections, steps: Steps, place: int) -> Array:
    """x Wᵀ with the matrix that is used in this place."""
    name = steps.matrices[place]
    matrix = {"Q": learned.query, "K": learned.key, "V": learned.value, "O": learned.output}[name]
    return x @ (matrix if name in steps.transposed else matrix.T)


def _layer(inputs: Inputs, learned: Projections, steps: Steps) -> Array:
    attended = _attend(_project(inputs, learned, steps), replace(steps, inputs="qkv"), width=inputs.query.shape[-1])
    if steps.merge:
        attended = attended.swapaxes(-3, -2)
    merged = attended.reshape(*inputs.query.shape[:-1], -1)
    if not steps.output:
        return merged
    projected = _times(merged, learned, steps, 3)
    return projected + learned.bias if steps.bias else projected


def _attend(inputs: Inputs, steps: Steps, width: int = 0) -> Array:
    sources = {"q": inputs.query, "k": inputs.key, "v": inputs.value}
    query, key, value = (sources[letter] for letter in steps.inputs)
    key, value = _share(key, query, steps.key_group), _share(value, query, steps.value_group)
    raw = key @ query.swapaxes(-1, -2) if steps.swapped else query @ key.swapaxes(-1, -2)
    d = query.shape[-1]
    factors = {"sqrt_d": d**-0.5, "none": 1.0, "d": 1 / d, "times": d**0.5, "sqrt_d_v": value.shape[-1] ** -0.5}
    factors |= {"sqrt_d_model": (width or d) ** -0.5, "sqrt_keys": key.shape[-2] ** -0.5, "after": 1.0}
    scores = raw * factors[steps.scale]
    if inputs.bias is not None and steps.mask != "missing":
        scores = scores + _bias(inputs.bias, steps.mask)
    weights = _weights(scores, seen(inputs.mask, scores.shape, steps.mask), steps, factors[steps.scale])
    if steps.scale == "after":
        weights = weights * d**-0.5
    if steps.weights_transposed:
        weights = weights.swapaxes(-1, -2)
    return weights @ value


def _bias(bias: Array, how: Masking) -> Array:
    """What is added to the scores; of most mistakes with a mask nobody can say what they make of it."""
    if how == "right":
        return bias
    return bias.swapaxes(-1, -2) if how == "transposed" else np.full_like(bias, np.nan)


def _share(heads: Array, query: Array, group: Group) -> Array:
    """Give each query head its key or value head, where there are fewer of these."""
    if heads.ndim < 3 or (have := heads.shape[-3]) == (want := query.shape[-3]):
        return heads
    number = np.arange(want)
    chosen = {"blocks": number * have // want, "cycle": number % have, "count": np.minimum(number // have, have - 1)}
    return heads[..., chosen.get(group, 0 * number), :, :]


def seen(mask: Mask | None, shape: tuple[int, ...], how: Masking) -> Mask | None:
    """Which keys each query sees, by a mask used rightly or wrongly; None: all of them."""
    if how == "missing":
        return None
    if how in ("causal_always", "strict_always") or (mask is not None and how in ("causal", "strict_causal")):
        return np.tri(*shape[-2:], k=-1 if how.startswith("strict") else 0, dtype=bool)
    if mask is None or how in ("causal", "strict_causal"):
        return None
    if how == "transposed":
        return mask.swapaxes(-1, -2)
    if how == "inverted":
        return ~mask
    return mask & ~np.eye(*shape[-2:], dtype=bool) if how == "strict" else mask


def _weights(scores: Array, visible: Mask | None, steps: Steps, factor: float) -> Array:
    if visible is None:
        return _normalise(scores, steps.softmax)
    if steps.mask == "after_softmax":
        return np.where(visible, _normalise(scores, steps.softmax), 0.0)
    hidden = {"multiplied": 0.0, "minus_one": -1.0, "minus_one_early": -factor, "minus_one_added": scores - 1}
    return _normalise(np.where(visible, scores, hidden.get(steps.mask, -np.inf)), steps.softmax)


def _normalise(scores: Array, how: Softmax) -> Array:
    """Softmax over some axes. Nothing but -inf gives NaN, and so does -inf that meets no softmax."""
    if how == "missing":
        return np.where(np.isinf(scores), np.nan, scores)
    several: dict[str, int | tuple[int, ...] | None] = {
        "keys": -1, "queries": -2, "matrix": (-2, -1), "everything": None, "first_axis": 0, "second_axis": 1
    }  # fmt: skip
    axis = several[how]
    if isinstance(axis, int) and axis >= scores.ndim:
        raise ValueError(f"scores of {scores.ndim} axes have no axis {axis}")
    powers = np.exp(scores - scores.max(axis=axis, keepdims=True))
    return powers / powers.sum(axis=axis, keepdims=True)
