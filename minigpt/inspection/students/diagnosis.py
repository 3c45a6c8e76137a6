"""From all the answers of a student's code to one verdict: right, or the name of the mistake, and where it shows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from minigpt.inspection.students.answers import OK, RAISED, SHAPE, Answer, Series
from minigpt.inspection.students.arguments import FLAG, NO_MASK, OWN_CAUSAL
from minigpt.inspection.students.evidence import Answered, Evidence, Mistakes, close, overflown, weigh
from minigpt.inspection.students.mistakes import INVERTED, ONLY_WEIGHTS, ORDER, WEIGHTS_FIRST
from minigpt.inspection.students.narrowing import Finding, narrow
from minigpt.inspection.students.steps import Array, expected_weights
from minigpt.inspection.students.trials import BIAS, Trial


@dataclass(frozen=True, eq=False)
class Verdict:
    """What is to be told to the student."""

    correct: bool
    message: str
    mistake: str | None = None  # its name; two at once are joined by "and", equals by "or"
    mend: str = ""
    step: str | None = None  # the first that differs
    example: str | None = None
    expected: Array | None = None
    got: Array | None = None
    weights: tuple[Array, Array] | None = None  # expected and got, if the student returned some and they differ
    notes: tuple[str, ...] = ()


def judge(found: Sequence[Series], trials: Mapping[int, Sequence[Trial]]) -> Verdict:
    """The verdict on all answers of one implementation.

    Args:
        found: at least one series.
        trials: what was asked, by the number of axes.
    """
    taken = [weigh(series, trials[series.n_axis]) for series in found if _taken(series)]
    if not taken:
        return _failure(found, trials)
    axes = list(dict.fromkeys(evidence.series.n_axis for evidence in taken))
    best = {n: _best([evidence for evidence in taken if evidence.series.n_axis == n]) for n in axes}
    notes = _notes(list(best.values()))
    wrong = [n for n in axes if best[n].off]
    right = [n for n in axes if best[n].right]
    strict = [n for n in wrong if n < 4 or not right or all(trial.optional for trial, _ in best[n].off)]
    if strict:
        n = next((n for n in strict if best[n].single), strict[0])
        if right:
            notes += (f"with {' or '.join(map(str, right))} axes it is right; this shows with {n}",)
        return _wrong(best[n], notes)
    if right:
        # Examples have up to three axes; who writes for these need not think of a fourth.
        notes += tuple(f"with {n} axes: {_names(_explanations(best[n])) or 'other numbers'}" for n in wrong)
        return Verdict(True, "right in every example", notes=notes)
    trial, answer = best[axes[0]].failed[0]
    return Verdict(False, _where(answer), example=trial.name, expected=trial.output, notes=notes)


def _taken(series: Series) -> bool:
    """Whether the simplest trial, which comes first, was answered."""
    return bool(series.answers) and next(iter(series.answers.values())).kind == OK


def _best(several: Sequence[Evidence]) -> Evidence:
    """Of all manners of asking with one number of axes: a right one, else the one with the simplest explanation."""
    for evidence in several:
        if evidence.right:
            return evidence
    for evidence in several:  # adds nothing but 0 and -inf rightly: good, unless it takes 'may look' for 'hidden'
        if not evidence.failed and [trial.name for trial, _ in evidence.off] == [BIAS]:
            inverted = [other for other in several if other.off and (INVERTED,) in map(_named, other.single)]
            return inverted[0] if inverted else Evidence(evidence.series, evidence.sound, left_out=evidence.left_out)
    fewest = min(len(evidence.failed) for evidence in several)
    several = [evidence for evidence in several if len(evidence.failed) == fewest]  # few numbers fit anything
    all_right_but_failures = [evidence for evidence in several if not evidence.off]
    simply = (evidence for evidence in several if evidence.off and evidence.single)
    doubly = (evidence for evidence in several if evidence.off and evidence.pairs)
    best = next(chain(all_right_but_failures, simply, doubly), None)
    return best or min(several, key=lambda evidence: (len(evidence.off), -len(evidence.sound)))


def _named(mistakes: Mistakes) -> tuple[str, ...]:
    return tuple(mistake.name for mistake in mistakes)


def _names(found: Sequence[Mistakes]) -> str:
    return " or ".join(" and ".join(_named(mistakes)) for mistakes in found)


def _explanations(evidence: Evidence) -> list[Mistakes]:
    return (evidence.single or evidence.pairs) if evidence.off else []


# ── what is told ───────────────────────────────────────────────────────────────────────────────────────────────


def _wrong(evidence: Evidence, notes: tuple[str, ...]) -> Verdict:
    trial, answer = evidence.off[0]
    found = _explanations(evidence)
    name = _names(found)
    if not found:
        finding = narrow([*evidence.off, *evidence.sound])
    else:
        every = [mistake for mistakes in found for mistake in mistakes]
        step = min((mistake.step for mistake in every), key=ORDER.index)
        finding = Finding(step, name, " ".join(dict.fromkeys(mistake.mend for mistake in every)))
        if len(found) > 1 and len(found[0]) > 1:
            name, finding = "", Finding(step, f"more than one step differs; it could be {name}")
    return Verdict(
        False,
        finding.message,
        name or None,
        finding.mend,
        finding.step,
        trial.name,
        trial.output,
        answer.output,
        _other_weights(trial, answer),
        notes,
    )


def _other_weights(trial: Trial, answer: Answer) -> tuple[Array, Array] | None:
    """Expected and returned weights, if some of the right shape were returned and they differ."""
    if answer.weights is None:
        return None
    right = expected_weights(trial.inputs)
    same = answer.weights.shape != right.shape or close(answer.weights, right)
    return None if same else (right, answer.weights)


def _failure(found: Sequence[Series], trials: Mapping[int, Sequence[Trial]]) -> Verdict:
    """Nothing had the right shape: what came of the call that got furthest."""
    named = {trial.name: trial for given in trials.values() for trial in given}
    answers = [(series, name) for series in found for name in series.answers if name in named]
    if not answers:
        return Verdict(False, "left no answers that can be read")
    series, name = max(answers, key=lambda pair: _progress(pair[0].answers[pair[1]]))
    answer = series.answers[name]
    trial = next(trial for trial in trials[series.n_axis] if trial.name == name)
    got = answer.output if answer.kind == SHAPE else None
    if close(got, expected_weights(trial.inputs)):
        mistake = WEIGHTS_FIRST if close(answer.weights, trial.output) else ONLY_WEIGHTS
        return Verdict(False, mistake.name, mistake.name, mistake.mend, mistake.step, name, trial.output, got)
    return Verdict(False, _where(answer), example=name, expected=trial.output, got=got)


def _progress(answer: Answer) -> tuple[bool, int]:
    """How far a call got: to its end, or to which line."""
    return answer.kind != RAISED, answer.line


def _where(answer: Answer) -> str:
    return f"line {answer.line}: {answer.message}" if answer.line else answer.message


def _notes(several: Sequence[Evidence]) -> tuple[str, ...]:
    """What was asked and what was left out."""
    first = several[0].series
    axes = " or ".join(str(evidence.series.n_axis) for evidence in several)
    kinds = {NO_MASK: "no mask", OWN_CAUSAL: "a causal mask of its own", FLAG: "a flag for the causal mask"}
    notes = [f"asked with {axes} axes, {first.library}, {kinds.get(first.convention, f'masks as {first.convention}')}"]
    if first.convention == NO_MASK:
        notes.append("it takes no mask: give it one more argument, mask")
    if first.convention == OWN_CAUSAL:
        notes.append("it takes no mask: examples with other masks than the causal one were left out")
    left_out = [pair for evidence in several for pair in evidence.left_out]
    taken = [pair for evidence in several for pair in [*evidence.sound, *evidence.off]]
    if any(trial.optional for trial, _ in left_out) and not any(trial.optional for trial, _ in taken):
        notes.append("heads in groups were left out: it wants as many key heads as query heads")
    if any(_another_custom(pair) for pair in left_out):
        notes.append("a row that may look at nothing gives zeros in minigpt; this was not judged")
    if huge := [trial.name for trial, answer in left_out if trial.judged and overflown(trial, answer)]:
        mend = "take each row's largest score away before exp, the weights stay the same"
        notes.append(f"{huge[0]}, not judged: the softmax overflows at huge scores; {mend}")
    others = [trial.name for evidence in several for trial, answer in evidence.sound if _other_weights(trial, answer)]
    if others:
        notes.append(f"{others[0]}: the output is right, the weights returned with it are not")
    return tuple(notes)


def _another_custom(pair: Answered) -> bool:
    trial, answer = pair
    return not trial.judged and not close(answer.output, trial.output)
