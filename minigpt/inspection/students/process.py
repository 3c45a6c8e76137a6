"""The process a student's file is run in: ``python -m minigpt.inspection.students.process REQUEST ANSWERS``.

REQUEST is a file of JSON. ANSWERS is written line by line, so that whoever waits knows what was going on when this
process was lost: ``{"doing": ...}`` before each call, ``{"series": ...}`` with numbers, ``{"problem": ...}``,
``{"absent": ..., "known": [...]}`` or ``{"bug": ...}`` where there are none, and ``{"done": "layer"}`` or
``{"done": "function"}`` at the end.
"""

import importlib.util
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

from minigpt.inspection.students.answers import Series
from minigpt.inspection.students.calls import ask_function, ask_layer
from minigpt.inspection.students.evidence import weigh
from minigpt.inspection.students.layer import NAMES, Layer, Unusable
from minigpt.inspection.students.trials import asked_of_functions, asked_of_layers
from minigpt.inspection.worked.examples import load_examples

Tell = Callable[[dict[str, Any]], None]


def main(request: Path, answers: Path) -> None:
    with answers.open("w", encoding="utf-8") as file:

        def tell(line: dict[str, Any]) -> None:
            file.write(json.dumps(line) + "\n")
            file.flush()

        kind = ""
        try:
            kind = _answer(json.loads(request.read_text(encoding="utf-8")), tell)
        except Unusable as error:
            tell({"absent" if error.absent else "problem": str(error)})
        except Exception:
            tell({"bug": traceback.format_exc()})
        tell({"done": kind})


def _answer(request: dict[str, Any], tell: Tell) -> str:
    """Ask whatever is named; returns whether it is a "layer" or a "function"."""
    path, name = Path(request["file"]), request["name"]
    tell({"doing": "reading the file"})
    module = _read(path)
    if not hasattr(module, name):
        own = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        tell({"absent": "", "known": own})
        return ""
    wanted = getattr(module, name)
    if not callable(wanted):
        raise Unusable(f"is a {type(wanted).__name__}, neither a function nor a class", absent=True)
    is_class = inspect.isclass(wanted)
    if request["names"] and not is_class:
        raise Unusable("is a function; --names tells where a class keeps its projections", absent=True)
    examples = load_examples(Path(request["examples"]) if request["examples"] else None)
    trials = asked_of_layers(examples) if is_class else asked_of_functions(examples)

    def note(doing: str) -> None:
        tell({"doing": doing})

    def enough(series: Series) -> bool:
        return weigh(series, trials[series.n_axis]).right

    if is_class:
        note("making an object of the class")
        layer = Layer(wanted, request["names"] or NAMES)
        found = ask_layer(layer, trials, note, enough, request["mask"])
    else:
        found = ask_function(wanted, trials, note, enough, request["mask"])
    for series in found:
        tell({"series": _as_json(series)})
    return "layer" if is_class else "function"


def _read(path: Path) -> ModuleType:
    """The student's file as a module; its neighbours can be imported by it.

    Raises:
        Unusable: with the line, if it can't be read or run.
    """
    sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location("student_code", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["student_code"] = module
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise Unusable(f"line {error.lineno}: {type(error).__name__}: {error.msg}") from None
    except SystemExit:
        raise Unusable("called exit() while it was read") from None
    except Exception as error:
        lines = [place.lineno for place in traceback.extract_tb(error.__traceback__) if place.filename == str(path)]
        where = f"line {lines[-1]}: " if lines else ""
        raise Unusable(f"{where}{type(error).__name__}: {error}") from None
    return module


def _as_json(series: Series) -> dict[str, Any]:
    """Numbers as lists; a NaN is written as Python's json does."""
    plain = asdict(series)
    for answer in plain["answers"].values():
        for name in ("output", "weights"):
            answer[name] = None if answer[name] is None else answer[name].tolist()
    return plain


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
    os._exit(0)  # threads that the student left running are not waited for
