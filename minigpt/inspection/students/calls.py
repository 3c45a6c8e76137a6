"""Asking a student's function or class for numbers, in every manner it may reasonably expect to be asked.

Nobody can tell from outside whether a function wants tensors of torch or arrays of NumPy, a batch axis or none, a mask
of truth values, of 0 and 1, or one that is added to the scores. So all are offered, and each gives one ``Series``.
This module runs in the student's process.
"""

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from minigpt.inspection.students.answers import OK, Answer, Series, answer_of
from minigpt.inspection.students.arguments import (
    ANY,
    CONVENTIONS,
    FLAG,
    NO_MASK,
    OWN_CAUSAL,
    MaskArgument,
    arrays_of,
    converted,
    forms,
    lead_of,
    mask_of,
    mask_parameter,
)
from minigpt.inspection.students.layer import Layer, Unusable
from minigpt.inspection.students.steps import Inputs
from minigpt.inspection.students.trials import BIAS, PROBES, Trial, without_mask

Trials = Mapping[int, Sequence[Trial]]
Note = Callable[[str], None]
Enough = Callable[[Series], bool]
Call = Callable[[Inputs, str, Any], Any]
"""(inputs, library, mask or None) → whatever the student's code returns."""


def ask_function(
    function: Callable[..., Any], trials: Trials, note: Note, enough: Enough, masks: str = ANY
) -> list[Series]:
    """Ask a function of query, key, value and perhaps a mask in every manner, until there is enough.

    Args:
        trials: what to ask, by the number of axes.
        note: is told what comes next.
        enough: whether a series makes further ones with this number of axes needless.
        masks: a key of MASKS.

    Raises:
        Unusable: if it can't be called so at all.
    """
    mask = mask_parameter(function, 3, masks)

    def call(inputs: Inputs, library: str, given: Any) -> Any:
        return mask.call(function, arrays_of(inputs, library), given)

    found: list[Series] = []
    for library in _libraries(found):
        _ask_all(_Manner(call, library), mask.conventions, trials, note, enough, found)
    return found


def ask_layer(layer: Layer, trials: Trials, note: Note, enough: Enough, masks: str = ANY) -> list[Series]:
    """The same for a class with ``forward(query, key, value, mask)`` or ``forward(x, mask)``.

    Raises:
        Unusable: if it can't be made, filled with weights or called so at all.
    """
    mask = mask_parameter(layer.forward, layer.n_input, masks)
    if not layer.takes_other_inputs:
        trials = {n: [trial for trial in given if _of_one_input(trial)] for n, given in trials.items()}
    found: list[Series] = []
    for n_axis in trials:
        found += _ask_layer_with(layer, mask, {n_axis: trials[n_axis]}, note, enough)
        if any(_answered(series, PROBES[:1]) for series in found):
            break  # what wants a batch may take its absence for something else
    return found


def _ask_layer_with(layer: Layer, mask: MaskArgument, trials: Trials, note: Note, enough: Enough) -> list[Series]:
    found: list[Series] = []
    for library in layer.libraries:
        for turned in (False, True) if layer.ambiguous else (False,):

            def call(inputs: Inputs, library: str, given: Any, turned: bool = turned) -> Any:
                assert inputs.projections
                module = layer.made(inputs.projections, library, turned)
                return mask.call(module, arrays_of(inputs, library)[: layer.n_input], given)

            _ask_all(_Manner(call, library), mask.conventions, trials, note, enough, found)
        if not _in_trouble(found):
            break
    return found


def _of_one_input(trial: Trial) -> bool:
    return trial.inputs.query is trial.inputs.key is trial.inputs.value


# ── one manner ─────────────────────────────────────────────────────────────────────────────────────────────────


class _Manner(NamedTuple):
    """How one series is asked."""

    call: Call
    library: str
    convention: str = CONVENTIONS[0]
    form: int = 0  # what stands in front of a mask's (T, S)


def _ask_all(
    manner: _Manner, conventions: Sequence[str], trials: Trials, note: Note, enough: Enough, found: list[Series]
) -> None:
    """Add a series for each number of axes and each kind of mask, where there is not yet enough."""
    settled = {series.n_axis for series in found if enough(series)}
    for n_axis in trials:
        for convention in conventions:
            if n_axis not in settled:
                with _quiet():
                    series = _ask(manner._replace(convention=convention), n_axis, trials[n_axis], note)
                found.append(series)
                if enough(series):
                    settled.add(n_axis)


def _ask(manner: _Manner, n_axis: int, trials: Sequence[Trial], note: Note) -> Series:
    """The answers to all trials, or to the simplest alone if that one fails."""
    series = Series(n_axis, manner.library, manner.convention)
    named = {trial.name: trial for trial in _fitting(trials, manner.convention)}

    def answer(trial: Trial, form: int = 0) -> Answer:
        note(f"computing '{trial.name}' with {n_axis} axes, {manner.library}")
        return _answer(manner._replace(form=form), trial)

    probe = next(named[name] for name in PROBES if name in named)
    first = series.answers[probe.name] = answer(probe)
    if first.kind != OK:
        return series
    again = answer(probe)
    if again.kind != OK or not np.allclose(first.output, again.output, equal_nan=True):
        raise Unusable("gives other numbers each time for the same input: is there dropout that never rests?")
    form = 0
    if manner.convention in CONVENTIONS:
        masked = named[PROBES[1]]
        count = len(forms(lead_of(masked.inputs)))
        form = next((number for number in range(count) if answer(masked, number).kind == OK), 0)
    for trial in named.values():
        series.answers[trial.name] = answer(trial, form)
    return series


def _fitting(trials: Sequence[Trial], convention: str) -> list[Trial]:
    """Those that can be asked with this kind of mask."""
    if convention == OWN_CAUSAL:
        return without_mask(trials)
    if convention in CONVENTIONS:
        return [trial for trial in trials if convention == "additive" or trial.name != BIAS]
    unbiased = [trial for trial in trials if trial.inputs.bias is None]
    if convention == NO_MASK:  # masks do not reach it: where there is one, it is missing
        return unbiased
    return [trial for trial in unbiased if trial.inputs.mask is None or trial.causal]


def _answer(manner: _Manner, trial: Trial) -> Answer:
    call, library, convention, form = manner
    inputs = trial.inputs
    lead = lead_of(inputs)

    def ask() -> Any:
        if convention == FLAG:
            return call(inputs, library, inputs.mask is not None)
        if inputs.bias is not None:
            return call(inputs, library, converted(inputs.bias, library))
        if inputs.mask is not None and convention in CONVENTIONS:
            return call(inputs, library, mask_of(inputs.mask, library, convention, lead, form))
        try:
            return call(inputs, library, None)
        except Exception as first:
            if convention not in CONVENTIONS:
                raise
            everything = np.ones((inputs.query.shape[-2], inputs.key.shape[-2]), dtype=bool)
            try:  # it may insist on a mask: one that hides nothing
                return call(inputs, library, mask_of(everything, library, convention, lead, form))
            except Exception:
                raise first from None

    return answer_of(ask, trial)


# ── libraries ──────────────────────────────────────────────────────────────────────────────────────────────────


def _libraries(found: Sequence[Series]) -> Iterator[str]:
    """In the order to be tried; ``found`` grows meanwhile and tells whether more is needed."""
    with_torch = "torch" in sys.modules
    if not with_torch:
        yield "numpy"
        if not _in_trouble(found):
            return
    yield "torch float32"
    if _in_trouble([series for series in found if series.library == "torch float32"]):
        yield "torch float64"
    if with_torch:
        yield "numpy"


def _in_trouble(found: Sequence[Series]) -> bool:
    """Whether a probe went unanswered with every number of axes."""
    return not any(_answered(series, PROBES) for series in found)


def _answered(series: Series, names: Sequence[str]) -> bool:
    """Whether all of these trials that were asked gave numbers."""
    return all(answer.kind == OK for name, answer in series.answers.items() if name in names)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No warnings, and no gradients kept."""
    torch = sys.modules.get("torch")
    with warnings.catch_warnings(), np.errstate(all="ignore"), torch.no_grad() if torch else contextlib.nullcontext():
        warnings.simplefilter("ignore")
        yield
