"""From the answers of a student's code to a verdict: right, or which mistake makes exactly these numbers.

A mistake is named only if attention with that mistake gives every number that the student's code gave. If no single
one does, pairs are tried. Nothing is concluded from rows that may look at nothing, where customs differ.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from minigpt.inspection.mistakes import ORDER, SOFTMAX, SUM, Mistake, candidates, made_of
from minigpt.inspection.narrowing import Finding, narrow
from minigpt.inspection.steps import Array, compute, expected_weights
from minigpt.inspection.student_calls import FLAG, NO_MASK, OK, OWN_CAUSAL, RAISED, SHAPE, Answer, Series
from minigpt.inspection.trials import BIAS, Trial

TOLERANCE = 1e-5  # float32: |got − x| ≤ 1e-5 + 1e-5·|x|
FIT = 1e-4  # of the largest number: wrong steps can magnify rounding
HUGE_SCORE = 80.0  # exp of more overflows in float32
OVERFLOW = Mistake(
    "softmax overflows",
    SOFTMAX,
    "Take each row's largest score away before exp: the weights stay the same and exp can't overflow.",
    (),
)
ONLY_WEIGHTS = Mistake("weights returned instead of the output", SUM, "Return weights V, the mix of the values.", ())


@dataclass(frozen=True, eq=False)
class Verdict:
    """What is to be told to the student."""

    correct: bool
    message: str
    mistake: str | None = None  # its name; several are joined by "and", or by "or" if the numbers fit each
    mend: str = ""
    step: str | None = None  # the first that differs
    example: str | None = None
    expected: Array | None = None
    got: Array | None = None
    weights: tuple[Array, Array] | None = None  # expected and got, if the student returned some
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Judged:
    """One series held against the right outputs."""

    series: Series
    off: list[tuple[Trial, Answer]]  # other numbers
    failed: list[tuple[Trial, Answer]]  # no numbers
    sound: list[tuple[Trial, Answer]]  # the right numbers
    left_out: list[tuple[Trial, Answer]]

    @property
    def right(self) -> bool:
        return not self.off and not self.failed

    @property
    def overflows(self) -> bool:
        """Whether huge scores alone are off, by numbers that are none."""
        return bool(self.off) and all(_overflown(trial, answer) for trial, answer in self.off)


def judge(found: Sequence[Series], trials: Mapping[int, Sequence[Trial]]) -> Verdict:
    """The verdict on all answers of one implementation.

    Args:
        trials: what was asked, by the number of axes.
    """
    taken = [_held(series, trials[series.n_axis]) for series in found if _taken(series)]
    if not taken:
        return _failure([(series, answer) for series in found for answer in series.answers.values()], trials)
    axes = list(dict.fromkeys(judged.series.n_axis for judged in taken))
    best = {n: _best([judged for judged in taken if judged.series.n_axis == n]) for n in axes}
    wrong = [n for n in axes if best[n].off and (n < 4 or axes == [4])]
    notes = _notes([best[n] for n in axes])
    if wrong:
        named = {n: _explained(best[n]) for n in wrong}
        n = next((n for n in wrong if named[n]), wrong[0])
        if n > min(axes):
            notes += (f"with {min(axes)} axes it is right; the mistake shows with {n}",)
        return _wrong(best[n], named[n], notes)
    if any(best[n].right for n in axes):
        return Verdict(True, "right in every example", notes=notes)
    first = best[axes[0]]
    if first.failed:
        trial, answer = first.failed[0]
        return Verdict(False, _where(answer), example=trial.name, expected=trial.output, notes=notes)
    return _wrong(first, _explained(first), notes)


def _taken(series: Series) -> bool:
    return next(iter(series.answers.values())).kind == OK


def _held(series: Series, trials: Sequence[Trial]) -> Judged:
    judged = Judged(series, [], [], [], [])
    for trial in trials:
        answer = series.answers.get(trial.name)
        if answer is None:
            continue
        answered = answer.kind == OK and answer.output is not None and answer.output.shape == trial.output.shape
        if not trial.judged or (not answered and (trial.optional or trial.name == BIAS)):
            judged.left_out.append((trial, answer))
        elif not answered:
            judged.failed.append((trial, answer))
        else:
            assert answer.output is not None
            (judged.sound if _close(answer.output, trial.output, TOLERANCE) else judged.off).append((trial, answer))
    return judged


def _close(got: Array, expected: Array, tolerance: float) -> bool:
    return bool((np.abs(got - expected) <= tolerance + tolerance * np.abs(expected)).all())


def _best(several: Sequence[Judged]) -> Judged:
    """Of all manners of asking with one number of axes: a right one, else the one with the simplest explanation."""
    for judged in several:
        if judged.right:
            return judged
    for judged in several:  # adds no other numbers than 0 and -inf: right, unless it takes 'may look' for 'hidden'
        if not judged.failed and [trial.name for trial, _ in judged.off] == [BIAS]:
            inverted = [other for other in several if _explained(other) == "mask inverted"]
            return inverted[0] if inverted else Judged(judged.series, [], [], judged.sound, judged.left_out)
    for number in (1, 2):
        for judged in several:
            if judged.off and (judged.overflows or any(_fitting(judged, number))):
                return judged
    return min(several, key=lambda judged: (len(judged.off) + len(judged.failed), -len(judged.sound)))


# ── which mistake ──────────────────────────────────────────────────────────────────────────────────────────────


def _fitting(judged: Judged, number: int) -> Iterator[tuple[Mistake, ...]]:
    """The sets of so many mistakes that give all numbers of the series."""
    evidence = [pair for pair in [*judged.off, *judged.sound] if not _overflown(*pair)]
    evidence.sort(key=lambda pair: not pair[0].name.startswith("drawn"))  # these tell most mistakes apart at once
    off = [trial.name for trial, _ in judged.off]
    layer = evidence[0][0].inputs.projections is not None
    for chosen in candidates(layer=layer, n_axis=judged.series.n_axis, number=number):
        steps, explained = made_of(chosen), False
        for trial, answer in evidence:
            predicted = compute(trial.inputs, steps)
            if predicted is None or not _fits(answer.output, predicted):
                break
            explained |= trial.name in off and not _close(
                np.where(np.isnan(predicted), trial.output, predicted), trial.output, TOLERANCE
            )
        else:
            if explained:
                yield chosen


def _fits(got: Array, predicted: Array) -> bool:
    """Whether all numbers agree that the mistake does not leave open."""
    settled = ~np.isnan(predicted)
    if got.shape != predicted.shape:
        return False
    size = max(1.0, float(np.abs(predicted[settled]).max(initial=0)))
    return bool((np.abs(got - predicted)[settled] <= FIT * size).all())


def _overflown(trial: Trial, answer: Answer) -> bool:
    inputs = trial.inputs
    if inputs.projections or np.isfinite(answer.output).all():
        return False
    return float(np.abs(inputs.query).max() * np.abs(inputs.key).max()) > HUGE_SCORE


def _explanations(judged: Judged) -> list[tuple[Mistake, ...]]:
    """The smallest sets of mistakes that fit, one for each choice of names; none if nothing fits."""
    if judged.overflows:
        return [(OVERFLOW,)]
    for number in (1, 2):
        fitting = list(_fitting(judged, number))
        if fitting:
            return list({tuple(mistake.name for mistake in chosen): chosen for chosen in fitting}.values())
    return []


def _explained(judged: Judged) -> str:
    """Names of the mistakes; empty if nothing fits."""
    if not judged.off:
        return ""
    found = _explanations(judged)
    return " or ".join(" and ".join(mistake.name for mistake in chosen) for chosen in found)


# ── what is told ───────────────────────────────────────────────────────────────────────────────────────────────


def _wrong(judged: Judged, name: str, notes: tuple[str, ...]) -> Verdict:
    trial, answer = judged.off[0]
    found = _explanations(judged)
    pairs = bool(found) and len(found[0]) > 1
    if not found:
        finding = narrow([*judged.off, *judged.sound])
    elif pairs and len(found) > 1:
        steps = min((mistake.step for mistake in found[0]), key=ORDER.index)
        finding = Finding(steps, f"more than one step differs; it could be {name}")
        name = ""
    else:
        every = [mistake for chosen in found for mistake in chosen]
        mend = " ".join(dict.fromkeys(mistake.mend for mistake in every))
        step = min((mistake.step for mistake in every), key=ORDER.index)
        finding = Finding(step, name, mend)
    weights = _other_weights(trial, answer)
    if any(_overflown(*pair) for pair in judged.off) and not judged.overflows:
        notes += (f"besides, {OVERFLOW.name}: {OVERFLOW.mend}",)
    return Verdict(
        False,
        finding.message,
        name or None,
        finding.mend,
        finding.step,
        trial.name,
        trial.output,
        answer.output,
        weights,
        notes,
    )


def _other_weights(trial: Trial, answer: Answer) -> tuple[Array, Array] | None:
    """Expected and returned weights, if some of the right shape were returned and they differ."""
    if answer.weights is None:
        return None
    right = expected_weights(trial.inputs)
    same = answer.weights.shape != right.shape or _close(answer.weights, right, TOLERANCE)
    return None if same else (right, answer.weights)


def _failure(answers: Sequence[tuple[Series, Answer]], trials: Mapping[int, Sequence[Trial]]) -> Verdict:
    """Nothing had the right shape: what came of the call that got furthest."""
    series, answer = max(answers, key=lambda pair: (pair[1].kind != RAISED, pair[1].line))
    name = next(name for name, other in series.answers.items() if other is answer)
    trial = next(trial for trial in trials[series.n_axis] if trial.name == name)
    if answer.kind == SHAPE:
        right = expected_weights(trial.inputs)
        if answer.output.shape == right.shape and _close(answer.output, right, TOLERANCE):
            told = ONLY_WEIGHTS
            return Verdict(
                False, told.name, told.name, told.mend, SUM, trial.name, expected=trial.output, got=answer.output
            )
    got = answer.output if answer.kind == SHAPE else None
    return Verdict(False, _where(answer), example=trial.name, expected=trial.output, got=got)


def _where(answer: Answer) -> str:
    return f"line {answer.line}: {answer.message}" if answer.line else answer.message


def _notes(several: Sequence[Judged]) -> tuple[str, ...]:
    """What was asked and what was left out."""
    first = several[0]
    notes = []
    axes = " or ".join(str(judged.series.n_axis) for judged in several)
    kind = {NO_MASK: "no mask", OWN_CAUSAL: "a causal mask of its own", FLAG: "a flag for the causal mask"}.get(
        first.series.convention, f"masks as {first.series.convention}"
    )
    notes.append(f"asked with {axes} axes, {first.series.library}, {kind}")
    if first.series.convention in (NO_MASK, OWN_CAUSAL):
        notes.append("it takes no mask: examples with other masks were left out")
    for judged in several:
        for trial, answer in judged.left_out:
            if trial.optional:
                notes.append(f"{trial.name}: left out, it takes as many key heads as query heads only")
            elif not trial.judged and (answer.kind != OK or not _close(answer.output, trial.output, TOLERANCE)):
                notes.append(f"{trial.name}: not judged; a row that may look at nothing gives zeros in minigpt")
        others = [trial.name for trial, answer in judged.sound if _other_weights(trial, answer)]
        if others:
            notes.append(f"{others[0]}: the output is right, the weights returned with it are not")
    return tuple(dict.fromkeys(notes))
