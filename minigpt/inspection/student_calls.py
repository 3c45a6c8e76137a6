"""Asking a student's function or class for numbers, in every manner it may reasonably expect to be asked.

Nobody can tell from outside whether a function wants tensors of torch or arrays of NumPy, a batch axis or none, a mask
of truth values, of 0 and 1, or one that is added to the scores. So all are offered, and each gives one ``Series``.
This module runs in the student's process; it knows no right answers.
"""

import contextlib
import inspect
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from minigpt.inspection.steps import Inputs, Mask
from minigpt.inspection.student_layer import Layer, Unusable
from minigpt.inspection.trials import BIAS, PROBES, Trial, without_mask

OK, RAISED, SHAPE, TYPE = "ok", "raised", "shape", "type"
CONVENTIONS = ("bool", "0/1", "additive")  # a mask True = may look; its numbers; 0 and -inf to be added
NO_MASK, OWN_CAUSAL, FLAG = "no mask", "own causal", "flag"  # functions that take no mask, or ``causal=True``
OTHER = re.compile("scal|drop|temp|return|need|head|dim|size|eps|train|d_?k|d_?v|d_?model|dev|type|verb")  # no masks


@dataclass(frozen=True)
class Answer:
    """What came of one call."""

    kind: str  # OK, RAISED, SHAPE, TYPE
    output: Any = None  # array, or None
    weights: Any = None  # array, if the student returned some
    message: str = ""
    line: int = 0  # of the student's file, where an exception came from


@dataclass
class Series:
    """The answers of one implementation asked in one manner, by the name of the trial."""

    n_axis: int
    library: str
    convention: str
    answers: dict[str, Answer] = field(default_factory=dict)


Note = Callable[[str], None]
Call = Callable[[Inputs, str, Any], Any]
"""(inputs, library, mask or None) → whatever the student's code returns."""


def ask_function(function: Callable[..., Any], trials: Mapping[int, Sequence[Trial]], note: Note) -> list[Series]:
    """Every manner of calling a function of query, key, value and perhaps a mask.

    Raises:
        Unusable: if it can't be called so at all.
    """
    mask_name, flag = _mask_parameter(function, 3)

    def call(inputs: Inputs, library: str, mask: Any) -> Any:
        arrays = [_converted(array, library) for array in (inputs.query, inputs.key, inputs.value)]
        return _with_mask(function, arrays, mask_name, mask)

    conventions = (FLAG,) if flag else CONVENTIONS if mask_name is not None else (NO_MASK, OWN_CAUSAL)
    found: list[Series] = []
    for library in _libraries(found):
        for n_axis, given in trials.items():
            found += [_ask(call, library, convention, n_axis, given, note) for convention in conventions]
    return found


def ask_layer(layer: Layer, trials: Mapping[int, Sequence[Trial]], note: Note) -> list[Series]:
    """Every manner of calling a class with ``forward(query, key, value, mask)`` or ``forward(x, mask)``.

    Raises:
        Unusable: if it can't be made, filled with weights or called so at all.
    """
    mask_name, flag = _mask_parameter(layer.forward, layer.n_input)
    conventions = (FLAG,) if flag else CONVENTIONS if mask_name is not None else (NO_MASK, OWN_CAUSAL)
    found: list[Series] = []
    for library in ("torch float32", "torch float64"):
        for turned in (False, True) if layer.bare else (False,):

            def call(inputs: Inputs, library: str, mask: Any, turned: bool = turned) -> Any:
                assert inputs.projections
                module = layer.made(inputs.projections, library, turned)
                arrays = [_converted(array, library) for array in (inputs.query, inputs.key, inputs.value)]
                return _with_mask(module, arrays[: layer.n_input], mask_name, mask)

            for n_axis, given in trials.items():
                fitting = given if layer.takes_other_inputs else [trial for trial in given if _of_one_input(trial)]
                found += [_ask(call, library, convention, n_axis, fitting, note) for convention in conventions]
        if not _in_trouble(found):
            break
    return found


def _of_one_input(trial: Trial) -> bool:
    return trial.inputs.query is trial.inputs.key is trial.inputs.value


# ── one manner ─────────────────────────────────────────────────────────────────────────────────────────────────


def _ask(call: Call, library: str, convention: str, n_axis: int, trials: Sequence[Trial], note: Note) -> Series:
    """The answers to all trials, or to the simplest alone if that one fails."""
    series = Series(n_axis, library, convention)
    if convention == OWN_CAUSAL:
        trials = without_mask(list(trials))
    elif convention == NO_MASK:
        trials = [trial for trial in trials if trial.inputs.mask is None and trial.inputs.bias is None]
    elif convention == FLAG:
        trials = [trial for trial in trials if trial.causal or trial.inputs.mask is trial.inputs.bias is None]
    if convention != "additive":
        trials = [trial for trial in trials if trial.name != BIAS]
    named = {trial.name: trial for trial in trials}

    def answer(trial: Trial, form: int = 0) -> Answer:
        note(f"computing '{trial.name}' with {n_axis} axes, {library}")
        return _answer(call, trial, library, convention, form)

    probe = next((named[name] for name in PROBES if name in named), None)
    assert probe, "the drawn trials begin with the probes"
    first = series.answers[probe.name] = answer(probe)
    if first.kind != OK:
        return series
    again = answer(probe)
    if again.kind != OK or not np.allclose(first.output, again.output, equal_nan=True):
        raise Unusable("gives other numbers each time for the same input: is there dropout that never rests?")
    form = 0
    if convention in CONVENTIONS:
        masked = named[PROBES[1]]
        count = len(_forms(_lead(masked.inputs)))
        form = next((number for number in range(count) if answer(masked, number).kind == OK), 0)
    for trial in trials:
        series.answers[trial.name] = answer(trial, form)
    return series


def _answer(call: Call, trial: Trial, library: str, convention: str, form: int) -> Answer:
    inputs = trial.inputs
    lead = _lead(inputs)

    def ask() -> Any:
        if convention == FLAG:
            return call(inputs, library, inputs.mask is not None)
        if inputs.bias is not None:
            return call(inputs, library, _converted(inputs.bias, library))
        if inputs.mask is not None:
            return call(inputs, library, _mask(inputs.mask, library, convention, lead, form))
        try:
            return call(inputs, library, None)
        except Exception as first:
            if convention not in CONVENTIONS:
                raise
            everything = np.ones((inputs.query.shape[-2], inputs.key.shape[-2]), dtype=bool)
            try:  # it may insist on a mask: one that hides nothing
                return call(inputs, library, _mask(everything, library, convention, lead, form))
            except Exception:
                raise first from None

    try:
        with _quiet():
            return _read(ask(), trial)
    except (Unusable, KeyboardInterrupt):
        raise
    except SystemExit:
        raise Unusable("called exit(); it must return its result") from None
    except BaseException as error:
        return _failure(error)


def _read(returned: Any, trial: Trial) -> Answer:
    """The output, and weights if there are any, of what a call returned."""
    several = list(returned) if isinstance(returned, tuple) and returned else [returned]
    arrays = [_array(item) for item in several]
    output, weights = arrays[0], arrays[1] if len(arrays) > 1 else None
    if output is None:
        what = "nothing (None)" if several[0] is None else f"a {type(several[0]).__name__}"
        return Answer(TYPE, message=f"returned {what} where the output, an array of numbers, was expected")
    if output.shape == trial.output.shape:
        return Answer(OK, output, weights)
    message = f"returned an output of shape {output.shape} where {trial.output.shape} was expected"
    if weights is not None and weights.shape == trial.output.shape:
        message += "; the output must come first, then the weights"
    return Answer(SHAPE, output, weights, message)


def _array(item: Any) -> Any:
    """Numbers of any library as float64; None if it is something else."""
    try:
        if hasattr(item, "detach"):
            item = item.detach().cpu().double().numpy()
        array = np.asarray(item)
        return array.astype(np.float64) if array.dtype.kind in "fiub" and array.size <= 1_000_000 else None
    except Exception:
        return None


def _failure(error: BaseException) -> Answer:
    """An exception, and the last line of the student's file that it went through."""
    places = traceback.extract_tb(error.__traceback__)
    here = Path(__file__).parent
    theirs = next((place.filename for place in places if Path(place.filename).parent != here), None)
    line = next((place.lineno for place in reversed(places) if place.filename == theirs), None)
    return Answer(RAISED, message=f"{type(error).__name__}: {error}", line=line or 0)


# ── arguments ──────────────────────────────────────────────────────────────────────────────────────────────────


def _mask_parameter(function: Callable[..., Any], n_input: int) -> tuple[str | None, bool]:
    """The name of the parameter for the mask ("": the next one by position, None: there is none); whether a flag.

    Raises:
        Unusable: if something else must be given too, or less can be.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # built-in functions do not tell
        return "", False
    if any(parameter.kind == parameter.VAR_POSITIONAL for parameter in parameters):
        return "", False
    ordered = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(ordered) < n_input:
        raise Unusable(f"takes {len(ordered)} arguments; query, key and value must be its first {n_input}")
    rest = [p for p in parameters if p not in ordered[:n_input] and p.kind != p.VAR_KEYWORD]
    masks = [p for p in rest if "mask" in p.name.lower()] or [p for p in rest if "causal" in p.name.lower()]
    masks = masks or [p for p in rest[:1] if p.default in (p.empty, None) and not OTHER.search(p.name)]
    needed = [p.name for p in rest if p.default is p.empty and p not in masks]
    if needed:
        raise Unusable(f"needs the argument {needed[0]!r}; only query, key, value and a mask are given")
    if not masks:
        return None, False
    name = "" if masks[0].kind == masks[0].POSITIONAL_ONLY else masks[0].name
    return name, "mask" not in masks[0].name.lower() and "causal" in masks[0].name.lower()


def _with_mask(function: Callable[..., Any], arrays: Sequence[Any], name: str | None, mask: Any) -> Any:
    if name is None or (mask is None and _has_default(function, name)):
        return function(*arrays)
    return function(*arrays, mask) if name == "" else function(*arrays, **{name: mask})


def _has_default(function: Callable[..., Any], name: str) -> bool:
    target = getattr(function, "forward", function)
    with contextlib.suppress(TypeError, ValueError):
        parameter = inspect.signature(target).parameters.get(name)
        return parameter is not None and parameter.default is not inspect.Parameter.empty
    return name == ""


def _converted(array: Any, library: str) -> Any:
    """A copy that the student's code may write to."""
    if library == "numpy":
        return array.copy()
    import torch

    kind = torch.bool if array.dtype == bool else torch.float32 if library.endswith("32") else torch.float64
    return torch.tensor(array, dtype=kind)


def _lead(inputs: Inputs) -> tuple[int, ...]:
    """The axes of the scores in front of (T, S)."""
    lead = inputs.query.shape[:-2]
    return (*lead, inputs.projections.n_head) if inputs.projections else lead


def _forms(lead: tuple[int, ...]) -> list[tuple[int, ...]]:
    """What may stand in front of a mask's (T, S): nothing, ones, the batch, or all that the scores have."""
    return [(), (1,)[: len(lead)], lead[:1], (1, 1)[: len(lead)], (*lead[:1], 1)[: len(lead)], lead]


def _mask(mask: Mask, library: str, convention: str, lead: tuple[int, ...], form: int) -> Any:
    front = lead if mask.ndim > 2 else _forms(lead)[form]
    shaped = np.broadcast_to(mask, (*front, *mask.shape[-2:]))
    if convention == "bool":
        return _converted(shaped, library)
    return _converted(shaped.astype(float) if convention == "0/1" else np.where(shaped, 0.0, -np.inf), library)


# ── libraries ──────────────────────────────────────────────────────────────────────────────────────────────────


def _libraries(found: Sequence[Series]) -> Iterator[str]:
    """In the order to be tried; ``found`` grows meanwhile and tells whether more is needed."""
    with_torch = "torch" in sys.modules
    if not with_torch:
        yield "numpy"
        if any(series.answers[PROBES[0]].kind == OK for series in found if PROBES[0] in series.answers):
            return
    yield "torch float32"
    if _in_trouble([series for series in found if series.library == "torch float32"]):
        yield "torch float64"
    if with_torch:
        yield "numpy"


def _in_trouble(found: Sequence[Series]) -> bool:
    """Whether no number of axes got every probe answered."""
    return not any(
        all(series.answers.get(name, Answer(RAISED)).kind == OK for name in PROBES)
        for series in found
        if series.convention in CONVENTIONS
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No warnings, and no gradients kept."""
    torch = sys.modules.get("torch")
    with warnings.catch_warnings(), np.errstate(all="ignore"), torch.no_grad() if torch else contextlib.nullcontext():
        warnings.simplefilter("ignore")
        yield
