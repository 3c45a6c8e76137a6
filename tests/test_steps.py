"""The chain of steps that every answer of a student is held against."""

from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from student_judging import OF_FUNCTIONS, OF_LAYERS

from minigpt import plain
from minigpt.inspection.students.mistakes import candidates, made_of
from minigpt.inspection.students.steps import RIGHT, Inputs, compute, expected_weights


def test_right_steps_are_attention() -> None:
    for trial in [trial for trials in OF_FUNCTIONS.values() for trial in trials]:
        inputs = trial.inputs
        if inputs.bias is None and not trial.optional:
            np.testing.assert_allclose(trial.output, plain.attention(*inputs[:4]), atol=1e-8)
            np.testing.assert_allclose(
                np.nan_to_num(expected_weights(inputs)), plain.attention_weights(*inputs[:2], inputs.mask), atol=1e-8
            )
    for trial in OF_LAYERS[3]:
        output = compute(trial.inputs, RIGHT)
        assert output is not None
        np.testing.assert_allclose(output, trial.output, atol=1e-8)


@pytest.mark.parametrize("layer", [False, True])
def test_no_two_mistakes_with_other_names_give_the_same_numbers(layer: bool) -> None:
    trials = OF_LAYERS[3] if layer else OF_FUNCTIONS[4]
    outputs = {}
    for (mistake,) in candidates(layer=layer, n_axis=3 if layer else 4, number=1):
        steps = made_of([mistake])
        outputs[mistake] = [compute(trial.inputs, steps) for trial in trials if trial.judged]
    right = [trial.output for trial in trials if trial.judged]
    for mistake, numbers in outputs.items():
        assert _told_apart(numbers, right), mistake.name
    for (one, numbers), (other, others) in combinations(outputs.items(), 2):
        assert one.name == other.name or _told_apart(numbers, others), (one.name, other.name)


def _told_apart(numbers: list[Any], others: list[Any]) -> bool:
    """Whether some number that both settle differs clearly."""
    both = [(a, b) for a, b in zip(numbers, others, strict=True) if a is not None and b is not None]
    return any(np.nanmax(np.abs(a - b), initial=0, where=~np.isnan(a - b)) > 1e-2 for a, b in both)


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 5), st.integers(0, 2**31))
def test_steps_agree_with_the_plain_decoder_on_any_shape(heads: int, queries: int, keys: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    query, key, value = (random.normal(size=(heads, length, 3)) for length in (queries, keys, keys))
    mask = random.random((queries, keys)) < 0.7
    mask[:, 0] = True
    got = compute(Inputs(query, key, value, mask), replace(RIGHT, scale="none"))
    assert got is not None
    np.testing.assert_allclose(got, plain.attention(query, key, value, mask, scaled=False), atol=1e-12)
