"""What came of one call of a student's code: numbers, or a sentence. Runs in the student's process."""

import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from minigpt.inspection.students.layer import Unusable
from minigpt.inspection.students.trials import Trial

OK, RAISED, SHAPE, TYPE = "ok", "raised", "shape", "type"


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


def answer_of(ask: Callable[[], Any], trial: Trial) -> Answer:
    """Ask once.

    Raises:
        Unusable: if nothing more can be asked.
    """
    try:
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
