"""A verdict as text of at most 80 columns, or as one object for grading."""

import textwrap
from typing import Any

import numpy as np

from minigpt.inspection.students.diagnosis import Verdict
from minigpt.inspection.students.steps import Array
from minigpt.inspection.worked.pencil import WIDTH, matrix


def as_text(verdict: Verdict, implementation: str) -> str:
    """All that is known, the most important first."""
    if verdict.correct:
        return "\n".join([_filled(f"{implementation}: right in every example"), *_notes(verdict)])
    head = verdict.mistake or verdict.message
    lines = [_filled(f"{implementation}: {'MISTAKE: ' if verdict.mistake else 'WRONG: '}{head}")]
    if verdict.step:
        lines.append(_filled(f"first step that differs: {verdict.step}"))
    if verdict.mend:
        lines.append(_filled(verdict.mend))
    if verdict.expected is not None and verdict.got is not None:
        lines += ["", *_tables(f"{verdict.example}: output", verdict.expected, verdict.got)]
    elif verdict.example:
        lines.append(_filled(f"in the example '{verdict.example}'"))
    if verdict.weights:
        lines += ["", *_tables(f"{verdict.example}: weights returned", *verdict.weights)]
    return "\n".join([*lines, "", *_notes(verdict)]).rstrip()


def as_object(verdict: Verdict, implementation: str) -> dict[str, Any]:
    """The same for machines; numbers that are none (NaN, infinite) are null."""
    return {
        "implementation": implementation,
        "correct": verdict.correct,
        "mistake": verdict.mistake,
        "step": verdict.step,
        "message": verdict.message,
        "mend": verdict.mend or None,
        "example": verdict.example,
        "expected": _plain(verdict.expected),
        "got": _plain(verdict.got),
        "notes": list(verdict.notes),
    }


def _plain(array: Array | None) -> Any:
    return None if array is None else np.where(np.isfinite(array), array, None).tolist()  # type: ignore[arg-type]


def _notes(verdict: Verdict) -> list[str]:
    return [textwrap.fill(f"note: {note}", WIDTH, subsequent_indent="  ") for note in verdict.notes]


def _filled(text: str) -> str:
    return textwrap.fill(text, WIDTH, subsequent_indent="  ", break_long_words=True)


def _tables(title: str, expected: Array, got: Array) -> list[str]:
    """The first matrix with a difference, expected above got."""
    if expected.shape != got.shape:
        return [_filled(title), "expected", _first(expected), "got", _first(got)]
    differs = ~np.isclose(got, expected, rtol=1e-5, atol=1e-5)
    if expected.ndim > 2:
        front = tuple(int(axis[0]) for axis in np.nonzero(differs.any(axis=(-2, -1))))
        title += f"[{', '.join(map(str, front))}]"
        expected, got, differs = expected[front], got[front], differs[front]
    rows = ", ".join(map(str, np.flatnonzero(differs.any(axis=-1))))
    return [_filled(f"{title}; rows that differ: {rows}"), "expected", matrix(expected), "got", matrix(got)]


def _first(array: Array) -> str:
    """A matrix, or the first of several."""
    return matrix(array.reshape(-1, *array.shape[-2:])[0] if array.ndim > 1 else np.atleast_2d(array))
