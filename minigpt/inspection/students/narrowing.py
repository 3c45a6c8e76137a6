"""Where numbers that fit no known mistake first go wrong, as far as outputs let it be inferred."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from minigpt.inspection.students.answers import Answer
from minigpt.inspection.students.mistakes import MASK, SCALING, SCORES, SOFTMAX, SUM
from minigpt.inspection.students.steps import Array, Inputs, compute, expected_weights
from minigpt.inspection.students.trials import Trial

UNKNOWN = "no known mistake gives these numbers"
CLOSE = 1e-4


@dataclass(frozen=True)
class Finding:
    """The step that differs first (None: unknown), what to say, and how to mend it."""

    step: str | None
    message: str
    mend: str = ""


def narrow(answers: Sequence[tuple[Trial, Answer]]) -> Finding:
    """All answers that are numbers, the wrong ones first → the step that seems to differ first."""
    plain = [pair for pair in answers if pair[0].inputs.mask is None and pair[0].inputs.bias is None]
    off = [pair for pair in plain if not _agrees(pair[1].output, pair[0].output)]
    if not off:
        return Finding(MASK, f"{UNKNOWN}; without a mask all is right, so it is in what the mask does")
    if all(trial.optional for trial, _ in off):
        says = "query head h must use key and value head h // (heads per group)"
        return Finding(None, f"{UNKNOWN}; without a mask only heads in groups are off: {says}")
    off = [pair for pair in off if not pair[0].optional]
    for trial, answer in off:
        right = expected_weights(trial.inputs)
        weights = answer.weights if answer.weights is not None and answer.weights.shape == right.shape else None
        if weights is None and not trial.inputs.projections:
            weights = _recovered(trial.inputs, answer.output)
            if weights is None and _value_is_wide(trial.inputs):
                return Finding(SUM, f"{UNKNOWN}; the output is no mix of the rows of V")
        if weights is not None:
            return _of_weights(weights, right, [answers[0], *off])
    return Finding(None, UNKNOWN)


def _value_is_wide(inputs: Inputs) -> bool:
    """Whether V has independent rows, so that an output tells its weights."""
    value = inputs.value
    return value.shape[-1] >= value.shape[-2] and int(np.linalg.matrix_rank(value).min()) == value.shape[-2]


def _recovered(inputs: Inputs, output: Array) -> Array | None:
    """The weights W of an output W V; None if there are none or many."""
    if not _value_is_wide(inputs) or not np.isfinite(output).all():
        return None
    weights = output @ np.linalg.pinv(inputs.value)
    size = max(1.0, float(np.abs(output).max()))
    return weights if np.allclose(weights @ inputs.value, output, atol=CLOSE * size) else None


def _of_weights(weights: Array, right: Array, off: Sequence[tuple[Trial, Answer]]) -> Finding:
    """What differs in these weights; ``off`` are the answers for which what is said must hold."""
    if np.allclose(weights, right, atol=CLOSE):
        return Finding(SUM, f"{UNKNOWN}; the weights are right, so it is in what comes after them")
    if not np.allclose(weights.sum(axis=-1), 1, atol=CLOSE) or weights.min() < -CLOSE:
        return Finding(SOFTMAX, f"{UNKNOWN}; rows of the weights do not add up to 1")
    floor = 1e-6
    if weights.min() > floor and right.min() > floor:
        got, scores = _centred_logs(weights), _centred_logs(right)
        factor = float((got * scores).sum() / (scores**2).sum()) if np.any(scores) else 1.0
        if np.ptp(got) < CLOSE:
            return Finding(SCORES, f"{UNKNOWN}; every key gets the same weight, whatever its score")
        if np.allclose(got, factor * scores, atol=1e-2):
            return Finding(SCALING, f"{UNKNOWN}; {_of_factor(factor, off)}")
    return Finding(SCORES, f"{UNKNOWN}; the weights add up to 1 but belong to other scores")


def _of_factor(factor: float, off: Sequence[tuple[Trial, Answer]]) -> str:
    """What to say of scores that are so many times the right ones in one answer."""
    scaled = ((compute(_with_scores(trial.inputs, factor)), answer.output) for trial, answer in off)
    if all(output is not None and _agrees(got, output) for output, got in scaled):
        return f"the scaled scores are {factor:.4g} times what they must be"
    return "the scaled scores are a multiple of what they must be, another one for other sizes"


def _with_scores(inputs: Inputs, factor: float) -> Inputs:
    """Inputs whose scores are so many times as large."""
    learned = inputs.projections
    if learned is None:
        return inputs._replace(query=factor * inputs.query)
    return inputs._replace(projections=learned._replace(query=factor * learned.query))


def _agrees(got: Array, expected: Array) -> bool:
    return np.allclose(got, expected, rtol=CLOSE, atol=CLOSE)


def _centred_logs(weights: Array) -> Array:
    """Scores up to a constant a row, from their softmax."""
    logs = np.log(weights)
    return logs - logs.mean(axis=-1, keepdims=True)
