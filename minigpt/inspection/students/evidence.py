"""The answers of one series held against the right numbers, and the mistakes that make exactly the numbers given.

A mistake is named only if attention with that mistake gives every number that the student's code gave. If no single
one does, pairs are tried. Nothing is concluded from rows that may look at nothing, where customs differ.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from minigpt.inspection.students.answers import OK, Answer, Series
from minigpt.inspection.students.mistakes import Mistake, candidates, made_of
from minigpt.inspection.students.steps import Array, compute
from minigpt.inspection.students.trials import BIAS, Trial

TOLERANCE = 1e-5  # float32: |got − x| ≤ 1e-5 + 1e-5·|x|
FIT = 1e-4  # of the largest number: wrong steps can magnify rounding
HUGE_SCORE = 80.0  # exp of more overflows in float32

Mistakes = tuple[Mistake, ...]
Answered = tuple[Trial, Answer]


@dataclass(frozen=True, eq=False)
class Evidence:
    """The trials of one series, parted by what came of them."""

    series: Series
    sound: list[Answered] = field(default_factory=list)  # the right numbers
    off: list[Answered] = field(default_factory=list)  # other numbers
    failed: list[Answered] = field(default_factory=list)  # no numbers
    left_out: list[Answered] = field(default_factory=list)

    @property
    def right(self) -> bool:
        """Whether nothing is wrong."""
        return not self.off and not self.failed

    @cached_property
    def single(self) -> list[Mistakes]:
        """Single mistakes that fit, one for each name."""
        return _by_name(self._fitting(1))

    @cached_property
    def pairs(self) -> list[Mistakes]:
        """Pairs of mistakes that fit, one for each two names."""
        return _by_name(self._fitting(2))

    def _fitting(self, number: int) -> Iterator[Mistakes]:
        """The sets of so many mistakes that give all the numbers, some wrong ones among them."""
        pairs = [*self.off, *self.sound]
        pairs.sort(key=lambda pair: not pair[0].name.startswith("drawn"))  # these tell most mistakes apart at once
        layer = pairs[0][0].inputs.projections is not None
        off = {trial.name for trial, _ in self.off}
        for chosen in candidates(layer=layer, n_axis=self.series.n_axis, number=number):
            steps, explains = made_of(chosen), False
            for trial, answer in pairs:
                predicted = compute(trial.inputs, steps)
                if predicted is None or not _fits(answer.output, predicted):
                    break
                settled = np.where(np.isnan(predicted), trial.output, predicted)
                explains |= trial.name in off and not close(settled, trial.output)
            else:
                if explains:
                    yield chosen


def weigh(series: Series, trials: Sequence[Trial]) -> Evidence:
    """One series held against the right outputs."""
    evidence = Evidence(series)
    for trial in trials:
        answer = series.answers.get(trial.name)
        if answer is None:
            continue
        numbers = answer.kind == OK and answer.output is not None and answer.output.shape == trial.output.shape
        if not trial.judged or overflown(trial, answer) or (not numbers and (trial.optional or trial.name == BIAS)):
            part = evidence.left_out
        elif not numbers:
            part = evidence.failed
        else:
            part = evidence.sound if close(answer.output, trial.output) else evidence.off
        part.append((trial, answer))
    return evidence


def close(got: Array | None, expected: Array) -> bool:
    """Whether all numbers are what they must be."""
    if got is None or got.shape != expected.shape:
        return False
    return bool((np.abs(got - expected) <= TOLERANCE + TOLERANCE * np.abs(expected)).all())


def overflown(trial: Trial, answer: Answer) -> bool:
    """Whether an answer is no number because exp of a huge score is none; mathematically such code is right."""
    inputs = trial.inputs
    if inputs.projections or answer.output is None or np.isfinite(answer.output).all():
        return False
    return float(np.abs(inputs.query).max() * np.abs(inputs.key).max()) > HUGE_SCORE


def _fits(got: Array, predicted: Array) -> bool:
    """Whether all numbers agree that the mistake does not leave open."""
    if got.shape != predicted.shape:
        return False
    settled = ~np.isnan(predicted)
    size = max(1.0, float(np.abs(predicted[settled]).max(initial=0)))
    return bool((np.abs(got - predicted)[settled] <= FIT * size).all())


def _by_name(fitting: Iterator[Mistakes]) -> list[Mistakes]:
    return list({tuple(mistake.name for mistake in chosen): chosen for chosen in fitting}.values())
