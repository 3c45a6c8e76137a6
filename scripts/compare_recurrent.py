"""Recurrent networks against the Transformer: the table that courses end with,
measured. Networks of the same number of parameters, the same data.

  python scripts/compare_recurrent.py --quick      two minutes
  python scripts/compare_recurrent.py              20 minutes on two cores
  python scripts/compare_recurrent.py --rows steps gradients position

Rows: steps, operations, parallelism, generation, long-range, gradients,
position, parity, language. Each tells what it can't say. Each training is a run
of its own in runs/compare-recurrent; the same command again goes on with what
was interrupted.
"""

from minigpt.signals import StopSignal, quiet_interrupts

if __name__ == "__main__":
    quiet_interrupts()  # before the imports below, which take their time

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from minigpt.cli import parse_options, run_script
from minigpt.config import nearest
from minigpt.console import say, wrapped
from minigpt.errors import UserError
from minigpt.files import check_writable, safe_name, write_whole

if TYPE_CHECKING:
    from minigpt.studies.compare_structure import Row

STRUCTURE = ("steps", "operations", "parallelism", "generation", "gradients", "position")
LEARNING = ("long-range", "parity", "language")
ROWS = ("steps", "operations", "parallelism", "generation", "long-range", "gradients", "position", "parity", "language")
KINDS = ("gpt", "rnn", "lstm", "gru")
DEFAULT_TEXT = "tinyshakespeare"  # left out where it can't be had
WIDTH = 80


def main() -> int:
    options = parse_options(make_parser())
    rows = chosen("--rows", options.rows, ROWS)
    kinds = chosen("--kinds", options.kinds, KINDS)
    if options.seeds < 1:
        raise UserError(f"--seeds {options.seeds}: must be at least 1")
    if options.json:
        check_writable("--json", options.json)
    from tqdm import tqdm

    from minigpt.config import validate
    from minigpt.machine import choose_threads, prepare_machine
    from minigpt.studies import compare_learning, compare_structure

    threads = choose_threads(options.threads)
    prepare_machine(validate({"run": {"device": "cpu", "dtype": "float32", "threads": threads}}))
    folder = Path(options.__dict__["run.dir"]) / safe_name(options.__dict__["run.name"])
    found: dict[str, compare_structure.Row] = {}
    rates: dict[str, float] = {}
    stop = StopSignal()

    def advance(what: str) -> None:
        bar.set_postfix_str(what, refresh=False)
        bar.update()

    extent = compare_structure.Extent(
        kinds=kinds,
        quick=options.quick,
        seeds=1 if options.quick else options.seeds,
        text=options.text,
        cache_dir=options.cache_dir,
        threads=threads,
        folder=folder,
        stop=stop,
        advance=advance,
    )
    if "language" in rows and options.text != DEFAULT_TEXT:
        compare_learning.check_text(options.text, options.cache_dir)
    total = compare_learning.trainings(extent, rows)
    with stop, tqdm(total=total, unit="training", leave=False, disable=None, dynamic_ncols=True) as bar:
        try:
            if set(rows) & set(LEARNING):
                bar.set_description("learning rates")
                rates = compare_learning.best_rates(extent)
            for row in rows:
                if stop():
                    raise compare_learning.Interrupted
                bar.set_description(row)
                name = row.replace("-", "_")
                if row in LEARNING:
                    found[row] = getattr(compare_learning, name)(extent, rates)
                else:
                    found[row] = getattr(compare_structure, name)(extent)
                with bar.external_write_mode(file=sys.stdout):
                    show(found[row])
        except compare_learning.Interrupted:
            bar.close()
            say(f"interrupted: what is trained is kept in {folder}; the same command goes on")
            return stop.exit_code
    if options.json:
        numbers = {"kinds": kinds, "threads": threads, "rates": rates, "quick": options.quick}
        numbers |= {"rows": {name: row.numbers for name, row in found.items()}}
        write_whole(options.json, json.dumps(numbers, ensure_ascii=False, indent=1).encode("utf-8"))
    return 0


def show(row: "Row") -> None:
    """Title, table, and what it can't say."""
    lines = [row.title, "", *(f"  {line}" for line in row.lines), ""]
    print("\n".join([*lines, *(f"  {line}" for line in wrapped(row.limits, WIDTH - 2).splitlines()), ""]))


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--quick", action="store_true", help="shorter trainings, one seed, fewer lengths")
    parser.add_argument("--rows", nargs="+", default=ROWS, metavar="ROW", help="these rows alone")
    parser.add_argument("--kinds", nargs="+", default=("gpt", "lstm"), metavar="KIND", help=f"of {', '.join(KINDS)}")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="trainings of each accuracy (default: 3)")
    parser.add_argument("--text", default=DEFAULT_TEXT, metavar="SOURCE", help="second text of the row language")
    parser.add_argument("--run.dir", default="runs", metavar="DIR", help="folder of the folder of runs")
    parser.add_argument("--run.name", default="compare-recurrent", metavar="NAME", help="that folder's name")
    parser.add_argument("--cache-dir", default="auto", metavar="DIR", help="folder for token files and downloads")
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="CPU threads (default: all cores)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all numbers, into a file")
    return parser


def chosen(option: str, words: list[str] | tuple[str, ...], known: tuple[str, ...]) -> tuple[str, ...]:
    """The words, each once, in the order of those known.

    Raises:
        UserError: for one that there is not, with the nearest.
    """
    for word in words:
        if word not in known:
            guess = nearest(word, known)
            rest = "" if "known are" in guess else f"; known are {', '.join(known)}"
            raise UserError(f"{option} {word}: there is none{guess}{rest}")
    return tuple(name for name in known if name in words)


if __name__ == "__main__":
    run_script(main)
