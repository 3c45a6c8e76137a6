"""What a student's attention is given to compute: the worked examples, and drawn numbers that leave no doubt.

The examples come first, as they can be followed by hand. But their Q and K are often alike, and then wrong steps give
the right numbers; the drawn trials have sizes that all differ, masks without symmetry, and matrices without any.
What must come out is computed from the inputs, so that a file may print its numbers rounded.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from minigpt.inspection.students.steps import Array, Inputs, Mask, Projections, compute
from minigpt.inspection.worked.cases import AttentionCase, MultiHeadCase, is_causal
from minigpt.inspection.worked.examples import Examples
from minigpt.inspection.worked.plain_steps import plain_steps

SEED = 1
PROBES = ("drawn: 5 tokens", "drawn: 5 tokens, causal")  # plain enough for every implementation
BIAS = "drawn: numbers added to scores"


@dataclass(frozen=True, eq=False)
class Trial:
    """Inputs, the output they must give, and what may be concluded from a failure."""

    name: str
    inputs: Inputs
    output: Array  # (..., T, width of v)
    optional: bool = False  # heads in groups: not every implementation takes them
    judged: bool = True  # False: a row may look at nothing, and customs differ

    @property
    def causal(self) -> bool:
        """Whether the mask is the causal one."""
        mask = self.inputs.mask
        return mask is not None and is_causal(mask, mask.shape)


def function_trials(examples: Examples, n_axis: int) -> list[Trial]:
    """For a function of Q, K, V and a mask: everything with so many axes, 2 to 4."""
    shipped = [trial for case in examples.attention if case.scaled for trial in _with_axes(case, n_axis)]
    return [*shipped, *_drawn_for_functions((2, 3)[: n_axis - 2])]


def layer_trials(examples: Examples, n_axis: int) -> list[Trial]:
    """For a layer with four projections: inputs with a batch axis (3) or without (2)."""
    shipped = [_of_layer(case, n_axis) for case in examples.multi_head]
    return [*shipped, *_drawn_for_layers((2,)[: n_axis - 2])]


# ── worked examples ────────────────────────────────────────────────────────────────────────────────────────────


def _with_axes(case: AttentionCase, n_axis: int) -> Iterator[Trial]:
    """The case with axes of length 1 put in front or taken away; nothing if that can't be done."""
    spare = case.query.ndim - n_axis
    if spare > 0 and any(size != 1 for array in (case.query, case.key) for size in array.shape[:spare]):
        return

    def reshaped(array: Array) -> Array:
        return array.reshape(array.shape[spare:] if spare > 0 else (1,) * -spare + array.shape)

    query, key, value, output = map(reshaped, (case.query, case.key, case.value, plain_steps(case)["output"]))
    mask = None if case.mask is None else _plainest(case.mask)
    yield Trial(
        case.name,
        Inputs(query, key, value, mask),
        output,
        optional=query.shape[:-2] != key.shape[:-2],
        judged=mask is None or bool(mask.any(axis=-1).all()),
    )


def _plainest(mask: Mask) -> Mask:
    """(..., T, S) → (T, S), if it is the same everywhere."""
    first = mask.reshape(-1, *mask.shape[-2:])[0]
    return first if (mask == first).all() else mask


def _of_layer(case: MultiHeadCase, n_axis: int) -> Trial:
    x = case.x.reshape((1,) * (n_axis - 2) + case.x.shape)
    learned = Projections(
        case.n_head, case.query_weight, case.key_weight, case.value_weight, case.output_weight, case.output_bias
    )
    judged = bool(case.mask.any(axis=-1).all())
    output = plain_steps(case)["output"].reshape(x.shape)
    return Trial(case.name, Inputs(x, x, x, case.mask, projections=learned), output, judged=judged)


# ── drawn numbers ──────────────────────────────────────────────────────────────────────────────────────────────


def _numbers(random: np.random.Generator, *shape: int) -> Array:
    return random.normal(size=shape).round(2)


def _lopsided_mask(n_query: int, n_key: int) -> Mask:
    """Neither causal nor symmetric; every query sees some keys and every key is seen, also if turned over."""
    row, column = np.ogrid[:n_query, :n_key]
    return (row + 2 * column) % 5 < 3


def _finished(name: str, inputs: Inputs, **marks: bool) -> Trial:
    output = compute(inputs)
    assert output is not None
    return Trial(name, inputs, output, **marks)


def _drawn_for_functions(lead: tuple[int, ...]) -> Iterator[Trial]:
    random = np.random.default_rng(SEED)

    def draw(n_query: int, n_key: int, d_k: int, d_v: int, *heads: int) -> Inputs:
        sizes = (n_query, d_k), (n_key, d_k), (n_key, d_v)
        leads = [lead] * 3 if not heads else [(*lead[:-1], number) for number in heads]
        query, key, value = (_numbers(random, *front, *size) for front, size in zip(leads, sizes, strict=True))
        return Inputs(query, key, value)

    plain = draw(5, 5, 8, 8)
    causal = np.tri(5, dtype=bool)
    yield _finished(PROBES[0], plain)
    yield _finished(PROBES[1], plain._replace(mask=causal))
    square = draw(5, 5, 8, 6)
    yield _finished("drawn: d_v differs from d_k", square)
    yield _finished("drawn: a mask that is not causal", square._replace(mask=_lopsided_mask(5, 5)))
    cross = draw(5, 7, 8, 6)
    yield _finished("drawn: 5 queries, 7 keys", cross)
    yield _finished("drawn: 5 queries, 7 keys, masked", cross._replace(mask=_lopsided_mask(5, 7)))
    yield _finished(BIAS, cross._replace(bias=_numbers(random, 5, 7) - 1))
    if lead:
        grouped = draw(5, 5, 8, 8, 6, 3, 3)
        yield _finished("drawn: 6 query heads, 3 key heads", grouped, optional=True)
        yield _finished("drawn: 6 query heads, 3 key heads, causal", grouped._replace(mask=causal), optional=True)


def _drawn_for_layers(lead: tuple[int, ...]) -> Iterator[Trial]:
    random = np.random.default_rng(SEED)
    width = 12
    matrices = [_numbers(random, width, width) / 2 for _ in range(4)]
    learned = Projections(3, *matrices, bias=_numbers(random, width))

    def draw(n_query: int, n_key: int) -> Inputs:
        query, key, value = (_numbers(random, *lead, length, width) for length in (n_query, n_key, n_key))
        return Inputs(query, key, value, projections=learned)

    x = _numbers(random, *lead, 5, width)
    itself = Inputs(x, x, x, projections=learned)
    causal = np.tri(5, dtype=bool)
    yield _finished(PROBES[0], itself)
    yield _finished(PROBES[1], itself._replace(mask=causal))
    yield _finished("drawn: a mask that is not causal", itself._replace(mask=_lopsided_mask(5, 5)))
    others = draw(5, 5)
    yield _finished("drawn: three different inputs", others)
    yield _finished("drawn: three different inputs, causal", others._replace(mask=causal))
    yield _finished("drawn: 5 queries, 7 keys", draw(5, 7))
    yield _finished(BIAS, others._replace(bias=_numbers(random, 5, 5) - 1))


def without_mask(trials: Sequence[Trial]) -> list[Trial]:
    """The same numbers with no mask at all, for a function that makes the causal mask by itself."""
    return [replace(trial, inputs=trial.inputs._replace(mask=None)) for trial in trials if trial.causal]


def asked_of_functions(examples: Examples) -> dict[int, list[Trial]]:
    """All trials for a function, by the number of axes."""
    return {n_axis: function_trials(examples, n_axis) for n_axis in (2, 3, 4)}


def asked_of_layers(examples: Examples) -> dict[int, list[Trial]]:
    """All trials for a class, by the number of axes."""
    return {n_axis: layer_trials(examples, n_axis) for n_axis in (3, 2)}
