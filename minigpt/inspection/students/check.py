"""A student's own attention, run apart with a time limit, and what is told about it.

Nothing of the student's process can reach this one: it is started anew, is killed with all that it started, and what
it leaves is read as JSON, as numbers or not at all. Its own prints go nowhere.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import minigpt
from minigpt.config import nearest
from minigpt.errors import UserError
from minigpt.inspection.students.answers import Answer, Series
from minigpt.inspection.students.arguments import ANY
from minigpt.inspection.students.diagnosis import Verdict, judge
from minigpt.inspection.students.layer import NAMES
from minigpt.inspection.students.trials import asked_of_functions, asked_of_layers
from minigpt.inspection.worked.examples import load_examples
from minigpt.inspection.worked.printed import require_right

TIME_LIMIT = 30.0  # seconds
LONGEST_ANSWER = 100_000_000  # bytes; a thousand times what is expected


@dataclass(frozen=True)
class Implementation:
    """``student.py:attention``."""

    file: Path
    name: str

    def __str__(self) -> str:
        return f"{self.file}:{self.name}"


def parse_implementation(text: str) -> Implementation:
    """``FILE:NAME`` → what is to be run.

    Raises:
        UserError: if it has another form or there is no such file.
    """
    file, colon, name = text.rpartition(":")
    if not colon or not file or not name.isidentifier():
        raise UserError(f"--impl {text}: must be FILE:NAME, such as student.py:attention")
    if not Path(file).is_file():
        raise UserError(f"{file}: no such file; --impl takes the path of a Python file, a colon and a name in it")
    return Implementation(Path(file), name)


def parse_names(text: str) -> dict[str, str]:
    """``query=W_q,key=W_k,value=W_v,output=W_o``, or ``qkv=packed,output=W_o`` → attributes of a class.

    Raises:
        UserError: for anything else.
    """
    pairs = {role: name for role, _, name in (part.partition("=") for part in text.split(",") if part)}
    roles = {"qkv", "output"} if "qkv" in pairs else set(NAMES)
    roles |= {"bias"} & set(pairs)
    for role, name in pairs.items():
        if role not in roles or not all(part.isidentifier() or part.isdigit() for part in name.split(".")):
            form = "query=NAME,key=NAME,value=NAME,output=NAME or qkv=NAME,output=NAME, and perhaps bias=NAME"
            raise UserError(f"--names: {role}={name} makes no sense; give {form}")
    return {role: pairs.get(role, NAMES.get(role, "")) for role in ("qkv", *NAMES, "bias") if role in roles}


def check(
    implementation: Implementation,
    *,
    examples: Path | None = None,
    names: Mapping[str, str] | None = None,
    mask: str = ANY,
    time_limit: float = TIME_LIMIT,
) -> Verdict:
    """Run the student's code on all examples and drawn numbers, and judge it.

    Args:
        examples: a file of one's own instead of the shipped ones.
        names: where a class keeps its projections; None: in those of NAMES.
        mask: which kinds of masks are given, a key of MASKS.
        time_limit: seconds for all of it, the start of Python and torch included.

    Raises:
        UserError: if what is named is not there, or the examples' own numbers are wrong.
    """
    if not time_limit > 0:
        raise UserError(f"--time-limit = {time_limit:g}: must be above 0")
    given = load_examples(examples)
    require_right(given)
    request = {
        "file": str(implementation.file.resolve()),
        "name": implementation.name,
        "names": dict(names) if names else None,
        "mask": mask,
        "examples": str(examples.resolve()) if examples else "",
    }
    lines, ended = _run(request, time_limit)
    for line in lines:
        _refuse(line, implementation)
        if "problem" in line:
            return Verdict(False, str(line["problem"]))
    doing = next((line["doing"] for line in reversed(lines) if "doing" in line), "starting Python")
    if ended is None:
        return Verdict(False, f"did not finish within {time_limit:g} s, while {doing}: is there an endless loop?")
    if not lines or "done" not in lines[-1]:
        return Verdict(False, f"ended the process (exit code {ended}) while {doing}")
    found = [series for line in lines if "series" in line and (series := _series(line["series"]))]
    if not found:
        return Verdict(False, "left no answers that can be read")
    return judge(found, (asked_of_layers if lines[-1]["done"] == "layer" else asked_of_functions)(given))


def _refuse(line: dict[str, Any], implementation: Implementation) -> None:
    """Raise what the line says of something that is not there, or of a fault of our own."""
    if "bug" in line:
        raise RuntimeError(f"the process that runs the student's code failed:\n{line['bug']}")
    if "known" in line:
        here = nearest(implementation.name, line["known"]) if line["known"] else ""
        raise UserError(f"{implementation.file}: has no {implementation.name}{here}")
    if "absent" in line:
        raise UserError(f"{implementation}: {line['absent']}")


def _run(request: dict[str, Any], time_limit: float) -> tuple[list[dict[str, Any]], int | None]:
    """The lines that the student's process wrote, and its exit code; None: it was stopped."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        asked, answers = Path(folder) / "request.json", Path(folder) / "answers.jsonl"
        asked.write_text(json.dumps(request), encoding="utf-8")
        root = str(Path(minigpt.__file__).resolve().parent.parent)
        inherited = os.environ.get("PYTHONPATH")
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([root, inherited] if inherited else [root]),
            "PYTHONIOENCODING": "utf-8",
            "PYTHONDONTWRITEBYTECODE": "1",  # leave nothing beside the student's file
            "OMP_NUM_THREADS": "1",
        }
        nowhere = subprocess.DEVNULL
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "minigpt.inspection.students.process", str(asked), str(answers)],
            stdin=nowhere,
            stdout=nowhere,
            stderr=nowhere,
            env=environment,
            start_new_session=True,  # so that all it starts can be ended with it
        )
        try:
            ended = process.wait(time_limit)
        except subprocess.TimeoutExpired:
            ended = None
        finally:
            _end(process)
        return list(_lines(answers)), ended


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and, where the system knows such groups, all it has started."""
    if sys.platform == "win32":
        process.kill()
    else:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """What can be read of the answers, up to the first line that makes no sense."""
    if not path.exists() or path.stat().st_size > LONGEST_ANSWER:
        return
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            return
        if not isinstance(line, dict):
            return
        yield line


def _series(line: Any) -> Series | None:
    """A series from JSON; None if it is none."""
    try:
        answers = {
            str(name): Answer(
                str(answer["kind"]),
                _numbers(answer["output"]),
                _numbers(answer["weights"]),
                str(answer["message"]),
                int(answer["line"]),
            )
            for name, answer in line["answers"].items()
        }
        return Series(int(line["n_axis"]), str(line["library"]), str(line["convention"]), answers)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _numbers(value: Any) -> Any:
    return None if value is None else np.array(value, dtype=np.float64)
