"""Compute worked examples in every way the project has, against expected numbers.

The ways are plain NumPy, PyTorch in the open, its fused kernel, the kernel
written by hand that trains on a CPU, and decoding token by token behind a
cache. A number x is met if |got - x| <= 1e-6 + 1e-6 |x| in float64; for float32
put 1e-5. The exit code is 1 if any is missed.

With --impl your own code is judged by them, and a mistake is told by its name:
a function of query, key, value and mask, or a class made as
(d_model, num_heads) with forward(query, key, value, mask=None) and its
projections in query_linear, key_linear, value_linear and output_linear (or
elsewhere: --names). Inputs come from torch or NumPy, with a batch axis or none;
masks as truth values or 1 and 0 (True = may look), or as 0 and -inf to be
added: whichever the code understands, or only what --mask says.

With --examples the judge is your file. Its numbers are first held against its
inputs, to the places printed (three or more): one that is off is the file's
mistake, and the exit code is 2.
"""

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minigpt.console import counted
from minigpt.errors import UserError
from minigpt.inspection.worked.agreement import TOLERANCE, Agreement, FirstWrong, compare
from minigpt.inspection.worked.cases import Case
from minigpt.inspection.worked.examples import Examples, load_examples
from minigpt.inspection.worked.pencil import matrix, pencil
from minigpt.inspection.worked.plain_steps import plain_steps

NAME_WIDTH = 20
COLUMNS = {"numpy": 8, "torch": 8, "fused": 8, "kernel": 11, "cached": 11}  # in float64, and their widths
IN_FLOAT32 = 10
OF_OWN_CODE = {"attributes": "--names", "mask": "--mask", "time_limit": "--time-limit"}
WHY_NOT = {
    "no mask": "tokens see their future, so there is no order to decode them in",
    "other mask": "a cache goes with the causal mask alone",
    "unscaled": "it always divides by sqrt(K)",
    "not self": "it needs as many queries as keys",
    "groups": "it wants a key head for every query head",
    "wide V": "it packs Q, K and V, all of one width",
    "many masks": "it takes one mask for all heads",
    "empty row": "a query that sees nothing does not occur where it is used",
    "-": "this part has no such form",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which examples, and how they are shown."""
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these examples (default: all)")
    parser.add_argument(
        "--examples", type=Path, metavar="FILE", help="your own, a JSON file like minigpt/inspection/examples.json"
    )
    parser.add_argument("--steps", action="store_true", help="print every step as a table to follow with a pencil")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    own = parser.add_argument_group("your own code")
    own.add_argument("--impl", metavar="FILE:NAME", help="a function or class, such as student.py:attention")
    own.add_argument(
        "--names",
        dest="attributes",
        metavar="ROLE=NAME,...",
        help="where a class keeps its projections: query=W_q,key=W_k,value=W_v,output=W_o, or qkv=packed,output=out;"
        " and bias=b_o, if the output's bias is an array by itself",
    )
    own.add_argument(
        "--mask", choices=("bool", "additive", "any"), help="the one kind of mask that is given (default: any)"
    )
    own.add_argument("--time-limit", type=float, metavar="SECONDS", help="for all of your code (default: 30)")


def run(options: argparse.Namespace) -> int:
    """Compute, print, and say by the exit code whether all holds."""
    if options.impl:
        return _judge_own(options)
    for option in OF_OWN_CODE:
        if getattr(options, option) is not None:
            raise UserError(f"{OF_OWN_CODE[option]} goes with --impl: it is about code of your own")
    examples = load_examples(options.examples)
    results = {case: results_of(case) for case in examples.cases(options.names)}
    if options.json:
        print(json.dumps(_as_json(examples, results, with_steps=options.steps), allow_nan=False))
    else:
        if options.steps:
            print("\n\n\n".join(map(pencil, results)), end="\n\n\n")
        print(_report(results))
        for row in () if options.names else examples.reference_rows:
            print(f"{row.name}: a printed row, to be compared with a model's, not computed")
    return 0 if all(result.holds for of_case in results.values() for result in of_case) else 1


def _judge_own(options: argparse.Namespace) -> int:
    """Run the student's code and tell what is wrong with it, if anything is."""
    from minigpt.inspection.students.check import TIME_LIMIT, check, parse_implementation, parse_names
    from minigpt.inspection.students.report import as_object, as_text

    if options.names or options.steps:
        raise UserError("--impl goes with neither names of examples nor --steps: it is judged by all examples")
    verdict = check(
        parse_implementation(options.impl),
        examples=options.examples,
        names=None if options.attributes is None else parse_names(options.attributes),
        mask=options.mask or "any",
        time_limit=TIME_LIMIT if options.time_limit is None else options.time_limit,
    )
    print(json.dumps(as_object(verdict, options.impl)) if options.json else as_text(verdict, options.impl))
    return 0 if verdict.correct else 1


@dataclass(frozen=True, eq=False)
class Result:
    """One example by one implementation in one number type."""

    implementation: str
    dtype: str
    agreement: Agreement | None  # None: not computed
    why_not: str = ""  # a key of WHY_NOT

    @property
    def holds(self) -> bool:
        """False only where something is off."""
        return self.agreement is None or self.agreement.holds


Results = dict[Case, list[Result]]


def results_of(case: Case) -> list[Result]:
    """One example in every way: NumPy in float64, the others in both number types."""
    from minigpt.inspection.worked.implementations import IMPLEMENTATIONS, computed

    results = []
    for implementation in IMPLEMENTATIONS:
        for dtype in ("float64",) if implementation == "numpy" else ("float64", "float32"):
            got = computed(case, implementation, dtype)
            if isinstance(got, str):
                results.append(Result(implementation, dtype, None, got))
            else:
                results.append(Result(implementation, dtype, compare(case.expected(), got, TOLERANCE[dtype])))
    return results


# ── in words ───────────────────────────────────────────────────────────────────────────────────────────────────


def _report(results: Results) -> str:
    """A table, what its words mean, and what is off."""
    heading = "".join(name.rjust(width) for name, width in COLUMNS.items()) + "float32".rjust(IN_FLOAT32)
    lines = ["largest difference".ljust(NAME_WIDTH) + heading]
    for case, of_case in results.items():
        cells = {result.implementation: _cell([result]) for result in of_case if result.dtype == "float64"}
        row = "".join(cells[name].rjust(width) for name, width in COLUMNS.items())
        in_float32 = _cell([result for result in of_case if result.dtype == "float32"])
        lines.append(f"{_shortened(case.name)}{row}{in_float32.rjust(IN_FLOAT32)}")
    every = [result for of_case in results.values() for result in of_case]
    words = {result.why_not for result in every}
    lines += ["", "fused, kernel and cached: the output alone; float32: the worst of all but numpy"]
    lines += [f"{word:<12}{meaning}" for word, meaning in WHY_NOT.items() if word in words]
    for case, of_case in results.items():
        lines += _what_is_off(case, of_case)
    computed = [result for result in every if result.agreement]
    off = sum(not result.holds for result in computed)
    verdict = f"{off} of {len(computed)} results are off (!)" if off else f"all {len(computed)} results hold"
    return "\n".join([*lines, "", f"{counted(len(results), 'example')}: {verdict}"])


def _cell(results: list[Result]) -> str:
    """The largest difference of several results, marked if one is off, or why there is none."""
    differences = [result.agreement.largest for result in results if result.agreement]
    if not differences:
        return results[0].why_not
    return f"{max(differences):.0e}".replace("0e+00", "0") + "!" * (not all(result.holds for result in results))


def _shortened(name: str) -> str:
    return name.ljust(NAME_WIDTH) if len(name) <= NAME_WIDTH else name[: NAME_WIDTH - 3] + "..."


def _what_is_off(case: Case, results: list[Result]) -> list[str]:
    """Each first wrong step once, expected and got, under all the ways that come to it."""
    by_step: dict[str, list[tuple[str, FirstWrong]]] = {}
    for result in results:
        if result.agreement and (wrong := result.agreement.first_wrong):
            by_step.setdefault(wrong.step, []).append((f"{result.implementation} {result.dtype}", wrong))
    lines = []
    for step, ways in by_step.items():
        wrong = ways[0][1]
        lines += ["", f"{case.name}, first wrong step {step}", *(f"  {name}: {wrong}" for name, wrong in ways)]
        for title, array in (("expected", wrong.expected), (f"got ({ways[0][0]})", wrong.got)):
            lines += [title, matrix(array.reshape(-1, array.shape[-1]) if array.ndim else array.reshape(1, 1))]
    return lines


# ── as JSON ────────────────────────────────────────────────────────────────────────────────────────────────────


def _as_json(examples: Examples, results: Results, *, with_steps: bool) -> dict[str, Any]:
    entries = []
    for case, of_case in results.items():
        entry: dict[str, Any] = {"name": case.name, "about": case.about, "results": list(map(_result_json, of_case))}
        if with_steps:
            entry["steps"] = {step: _plain_json(array.tolist()) for step, array in plain_steps(case).items()}
        entries.append(entry)
    every = [result for of_case in results.values() for result in of_case]
    return {
        "file": examples.path,
        "tolerance": TOLERANCE,
        "holds": all(result.holds for result in every),
        "examples": entries,
    }


def _result_json(result: Result) -> dict[str, Any]:
    entry: dict[str, Any] = {"implementation": result.implementation, "dtype": result.dtype, "holds": result.holds}
    if result.agreement is None:
        return entry | {"holds": None, "why_not": result.why_not}
    entry["differences"] = _plain_json(result.agreement.differences)
    if wrong := result.agreement.first_wrong:
        numbers = {"expected": wrong.expected.tolist(), "got": wrong.got.tolist()}
        entry["first_wrong"] = {"step": wrong.step, "place": wrong.place, **_plain_json(numbers)}
    return entry


def _plain_json(value: Any) -> Any:
    """Numbers that JSON lacks, infinite ones and NaN, become null."""
    match value:
        case dict():
            return {key: _plain_json(item) for key, item in value.items()}
        case list():
            return [_plain_json(item) for item in value]
        case float() if not math.isfinite(value):
            return None
    return value
