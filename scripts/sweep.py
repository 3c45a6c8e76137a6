"""Train a grid of settings, each with several seeds, and compare; or compare
runs that there are.

  python scripts/sweep.py configs/task.toml --grid optim.lr=0.01,0.03 --seeds 3
  python scripts/sweep.py configs/task.toml --grid model.n-layer=1,2
         --grid model.context-length=16,32 --train.max-steps 600 --csv out.csv
  python scripts/sweep.py --runs runs/* --picture runs.png

Every combination is a run of its own in runs/NAME-sweep, NAME being the TOML
file's. The same command again trains what is missing and goes on with what was
interrupted. All options of train.py hold for all.
"""

from minigpt.signals import StopSignal, quiet_interrupts

if __name__ == "__main__":
    quiet_interrupts()  # before the imports below, which take their time

import argparse
import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minigpt.cli import add_config_options, config_overrides, parse_options, run_script
from minigpt.config import DEFAULT_CONFIG, merge, read_toml, validate
from minigpt.console import say
from minigpt.errors import UserError
from minigpt.files import check_writable, safe_name, write_whole
from minigpt.shipped import config_file
from minigpt.studies import sweep
from minigpt.studies.measure import table


def main() -> int:
    options = parse_options(make_parser())
    if options.runs and (options.config or options.grid):
        raise UserError("--runs compares runs that there are: leave out the TOML file and --grid")
    if options.seeds < 1:
        raise UserError(f"--seeds {options.seeds}: must be at least 1")
    if options.runs and options.seeds > 1:
        raise UserError("--runs trains nothing: leave out --seeds")
    if options.picture and options.picture.suffix.lower() != ".png":
        raise UserError(f"--picture {options.picture}: the name must end in .png")
    for option, path in (("--csv", options.csv), ("--picture", options.picture)):
        if path:
            check_writable(option, path)
    return compare(options) if options.runs else train(options)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("config", nargs="?", type=Path, help=f"TOML file of settings (default: {DEFAULT_CONFIG.name})")
    parser.add_argument("--grid", action="append", default=[], metavar="KEY=A,B", help="a key and the values it takes")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="trainings of each combination (default: 1)")
    parser.add_argument("--runs", type=Path, nargs="+", metavar="RUN", help="compare these run folders")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="one row a run, as a table for other programs")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw validation loss over steps into a .png")
    add_config_options(parser)
    return parser


def train(options: argparse.Namespace) -> int:
    """The grid."""
    file = config_file(options.config or DEFAULT_CONFIG)
    common = merge(read_toml(file), config_overrides(options))
    run = validate({"run": common.get("run", {})}).run
    folder = Path(run.dir) / safe_name(run.name or f"{file.stem}-sweep")
    todo = sweep.cells(options.grid, options.seeds, run.seed)
    with StopSignal() as stop:
        found = sweep.run_cells(todo, common, folder, config_path=options.config, stop=stop, say=say)
    if found:
        plain = [sweep.as_plain(result, cell) for cell, result in found]
        show(options, plain, sweep.sweep_table(found))
    if stop():
        say(f"interrupted: {len(found)} of {len(todo)} runs in {folder} are done; the same command goes on")
    return stop.exit_code or int(any(result.failed for _, result in found))


def compare(options: argparse.Namespace) -> int:
    """Runs that there are."""
    if given := config_overrides(options):
        table_name, keys = next(iter(given.items()))
        raise UserError(f"--{table_name}.{next(iter(keys))}: --runs trains nothing, leave out the options of train.py")
    asked = dict.fromkeys(options.runs)  # each once
    runs = [path for path in asked if path.is_dir() and (path / "checkpoints").is_dir()]
    for path in asked:
        if path not in runs:
            say(f"{path}: not a run's folder, passed over")
    if not runs:
        raise UserError("--runs: none of these is a run's folder")
    results = [sweep.result_of(run) for run in runs]
    show(options, list(map(sweep.as_plain, results)), sweep.runs_table(results))
    if not options.json and (lines := sweep.different_settings(runs)):
        print("\n".join(lines))
    return 0


def show(options: argparse.Namespace, plain: Sequence[dict[str, Any]], rows: list[list[str]]) -> None:
    """The table, and the files asked for; ``plain`` has a dictionary a run."""
    print(json.dumps({"runs": plain}, ensure_ascii=False) if options.json else "\n".join(table(rows)))
    if options.csv:
        with options.csv.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(plain[0]))
            writer.writeheader()
            writer.writerows(plain)
    if options.picture:
        from io import BytesIO

        from minigpt.studies.curve import draw_curves

        runs = [Path(result["run"]) for result in plain]
        short = len({run.name for run in runs}) == len(runs)
        curves = sweep.curves({run.name if short else str(run): run for run in runs})
        if not curves:
            say(f"--picture {options.picture}: nothing to draw, none of the runs was validated")
            return
        content = BytesIO()
        draw_curves(curves, x_label="step", y_label="validation loss").save(content, format="PNG")
        write_whole(options.picture, content.getvalue())


if __name__ == "__main__":
    run_script(main)
