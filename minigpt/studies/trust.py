"""The table of faults: what is done, how often it was tried, how often it held; by the tests and checks themselves."""

import ast
import fnmatch
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from minigpt.config import DEFAULT_CONFIG
from minigpt.errors import UserError

TESTS = DEFAULT_CONFIG.parent.parent / "tests"
ROWS = {
    "the process is killed at each file operation of a run, in turn": ["crash_points::*"],
    "from each file operation on, in turn, the disk is full, read-only or broken; a folder vanishes": [
        "faults::*disk*", "faults::*limit*", "faults::*vanishes*", "launch::*full_disk*", "checkpoint::*full_disk*",
        "checkpoint::*cannot_be_made*", "run::*failed_write*",
    ],
    "`metrics.jsonl`, TensorBoard, samples or the console can't be written": [
        "faults::*log*", "tracking::*cannot_be_written*", "tracking::*went_away*", "tracking::*full_disk*",
    ],
    "Ctrl-C, SIGTERM, Ctrl-Break: in a step, while validating, saving, getting ready; twice": [
        "interrupted::*", "signals::*signal*",
    ],
    "checkpoints that are cut, zeroed, changed in one byte, of hostile headers": [
        "hostile::*checkpoint*", "hostile::*header*", "hostile::*fit*", "checkpoint::*every*", "checkpoint::*damaged*",
        "checkpoint::*changed*", "resume::*damaged*",
    ],
    "token files, configurations and sources that are damaged or hostile": [
        "hostile::*cache*", "hostile::*configuration*", "hostile::*values*", "hostile::*endless*", "hostile::*archive*",
        "corpus::*damaged*", "sources::*bad_rows*",
    ],
    "random configurations, command lines, tokenizers, texts, options, checkpoints": ["fuzz::*"],
    "NaN or infinity in weights, gradients, loss, logits; a wild rate; a spike; float16 that overflows": [
        "faults::*no_numbers*", "faults::*spike*", "faults::*scale*", "training::*no_number*", "training::*spoiled*",
        "training::*wild*", "launch::*no_number*", "sampling::*not_finite*",
    ],
    "one run or one text in several processes at once": [
        "faults::*at_once*", "faults::*another_process*", "run::*one_process*",
    ],
    "one of the processes under torchrun is killed": ["distributed::*killed*"],
    "code hidden in a file (every module and script is searched for ways to run it)": ["no_code::*execute*"],
}  # fmt: skip


@dataclass
class Count:
    """How often a fault was tried, and how often the promise held."""

    tried: int = 0
    held: int = 0


def counts() -> dict[str, Count]:
    """Run all tests that stand behind the table and count what they tried: a test that tries many faults says so.

    Raises:
        UserError: where the tests are not at hand.
    """
    chosen = {row: list(_names(patterns)) for row, patterns in ROWS.items()}
    with tempfile.TemporaryDirectory() as scratch:
        results = Path(scratch) / "results.xml"
        words = [f"{TESTS / file}::{name}" for names in chosen.values() for file, name in names]
        command = [sys.executable, "-m", "pytest", "--tb=short", f"--junitxml={results}", *dict.fromkeys(words)]
        subprocess.run(command, cwd=TESTS.parent, stdout=sys.stderr, check=False)
        cases = list(ElementTree.parse(results).iter("testcase"))
    return {row: _count(cases, names) for row, names in chosen.items()}


def markdown(rows: Mapping[str, Count]) -> str:
    """The table."""
    lines = ["| what is done | tried | held |", "| --- | ---: | ---: |"]
    return "\n".join([*lines, *(f"| {row} | {count.tried:,} | {count.held:,} |" for row, count in rows.items())])


def _names(patterns: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(file, function) of the tests that patterns mean."""
    for pattern in patterns:
        stem, _, wanted = pattern.partition("::")
        path = TESTS / f"test_{stem}.py"
        if not path.is_file():
            raise UserError(f"{path}: the table needs the project's tests; run this in a checkout")
        tree = ast.parse(path.read_text(encoding="utf-8"))
        functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        found = [name for name in functions if name.startswith("test_") and fnmatch.fnmatch(name, wanted)]
        assert found, pattern
        yield from ((path.name, name) for name in found)


def _count(cases: Sequence[ElementTree.Element], names: Sequence[tuple[str, str]]) -> Count:
    wanted = {(file.removesuffix(".py"), name) for file, name in names}
    count = Count()
    for case in cases:
        place = case.get("classname", "").rpartition(".")[2], case.get("name", "").partition("[")[0]
        if place not in wanted or case.find("skipped") is not None:
            continue
        told = [p.get("value") for p in case.iter("property") if p.get("name") == "tried"]
        tried = int(told[0] or 1) if told else 1
        count.tried += tried
        count.held += tried if case.find("failure") is None and case.find("error") is None else 0
    return count
