"""Whether what was computed agrees with what a worked example expects, and where it does not, first."""

import math
from dataclasses import dataclass

import numpy as np

from minigpt.inspection.worked.fields import Array

Steps = dict[str, Array]
"""Name of a step → its numbers, in order of computation."""

TOLERANCE = {"float64": 1e-6, "float32": 1e-5}


@dataclass(frozen=True, eq=False)
class FirstWrong:
    """The first step that is off, and the place in it that is farthest off."""

    step: str
    expected: Array
    got: Array  # not always of the same shape
    place: tuple[int, ...] | None  # index of the largest difference; None if the shapes differ

    def __str__(self) -> str:
        if self.place is None:
            return f"{self.step}: expected the shape {self.expected.shape}, got {self.got.shape}"
        index = f"[{', '.join(map(str, self.place))}]" if self.place else ""
        return f"{self.step}{index}: expected {self.expected[self.place]:.10g}, got {self.got[self.place]:.10g}"


@dataclass(frozen=True, eq=False)
class Agreement:
    """Largest difference of each step that both have, and the first step that is off."""

    differences: dict[str, float]  # infinite for a NaN or another shape
    first_wrong: FirstWrong | None

    @property
    def holds(self) -> bool:
        """Whether every number is within the tolerance."""
        return self.first_wrong is None

    @property
    def largest(self) -> float:
        """Of all steps."""
        return max(self.differences.values())


def compare(expected: Steps, got: Steps, tolerance: float = TOLERANCE["float64"]) -> Agreement:
    """Hold the steps that were computed against those expected: |got − x| ≤ tolerance + tolerance·|x| everywhere."""
    differences: dict[str, float] = {}
    first_wrong = None
    for step, wanted in expected.items():
        if step not in got:
            continue
        differences[step], place = _farthest(got[step], wanted)
        fits = place is not None and within(got[step], wanted, tolerance)
        if not fits and first_wrong is None:
            first_wrong = FirstWrong(step, wanted, got[step], place)
    assert differences, "nothing to compare"
    return Agreement(differences, first_wrong)


def within(got: Array, expected: Array, tolerance: float) -> bool:
    """Whether |got − x| ≤ tolerance + tolerance·|x| everywhere; a NaN is never within. Both of one shape."""
    return bool((np.abs(got - expected) <= tolerance + tolerance * np.abs(expected)).all())


def _farthest(got: Array, expected: Array) -> tuple[float, tuple[int, ...] | None]:
    """The largest difference and its place; NaN counts as the largest of all."""
    if got.shape != expected.shape:
        return math.inf, None
    distance = np.nan_to_num(np.abs(got - expected), nan=math.inf, posinf=math.inf)
    place = tuple(int(i) for i in np.unravel_index(distance.argmax(), distance.shape))
    return float(distance[place]), place
