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

from minigpt.cli import add_config_options, config_overrides, parse_options, run_script
from minigpt.config import DEFAULT_CONFIG, merge, read_toml
from minigpt.console import say
from minigpt.errors import UserError
from minigpt.files import safe_name, write_whole
from minigpt.studies import sweep
from minigpt.studies.measure import table
from minigpt.studies.sweep import Result


def main() -> int:
    options = parse_options(make_parser())
    if options.runs and (options.config or options.grid):
        raise UserError("--runs compares runs that there are: leave out the TOML file and --grid")
    if options.seeds < 1:
        raise UserError(f"--seeds {options.seeds}: must be at least 1")
    for option, path in (("--csv", options.csv), ("--picture", options.picture)):
        if path and not path.absolute().parent.is_dir():
            raise UserError(f"{option} {path}: there is no folder {path.parent}")
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
    overrides = config_overrides(options)
    run = overrides.pop("run", {})
    name = run.pop("name", "") or f"{(options.config or DEFAULT_CONFIG).stem}-sweep"
    folder = Path(run.pop("dir", "runs")) / safe_name(name)
    common = merge(merge(read_toml(options.config or DEFAULT_CONFIG), overrides), {"run": run})
    todo = sweep.cells(options.grid, options.seeds, int(run.pop("seed", "1")))
    with StopSignal() as stop:
        found = sweep.run_cells(todo, common, folder, config_path=options.config, stop=stop, say=say)
    results = [result for _, result in found]
    if results:
        show(options, results, sweep.sweep_table(found))
    if stop():
        say(f"interrupted: {len(results)} of {len(todo)} runs in {folder} are done; the same command goes on")
    return stop.exit_code or int(any(result.failed for result in results))


def compare(options: argparse.Namespace) -> int:
    """Runs that there are."""
    if given := config_overrides(options):
        raise UserError(f"--{next(iter(given))}: --runs trains nothing, leave out the options of train.py")
    runs = [path for path in options.runs if path.is_dir() and (path / "checkpoints").is_dir()]
    for path in options.runs:
        if path not in runs:
            say(f"{path}: not a run's folder, passed over")
    if not runs:
        raise UserError("--runs: none of these is a run's folder")
    results = [sweep.result_of(run) for run in runs]
    show(options, results, sweep.runs_table(results))
    if not options.json:
        print("\n".join(sweep.different_settings(runs)))
    return 0


def show(options: argparse.Namespace, results: Sequence[Result], rows: list[list[str]]) -> None:
    """The table, and the files asked for."""
    plain = [sweep.as_plain(result) for result in results]
    print(json.dumps({"runs": plain}, ensure_ascii=False) if options.json else "\n".join(table(rows)))
    if options.csv:
        try:
            with options.csv.open("w", encoding="utf-8", newline="") as file:
                writer = csv.DictWriter(file, list(plain[0]))
                writer.writeheader()
                writer.writerows(plain)
        except OSError as error:
            raise UserError(f"--csv {options.csv}: can't be written ({error.strerror or error})") from None
    if options.picture:
        from io import BytesIO

        from minigpt.studies.curve import draw_curves

        curves = sweep.curves({Path(result.run).name: Path(result.run) for result in results})
        if not curves:
            raise UserError("--picture: none of the runs was validated")
        content = BytesIO()
        draw_curves(curves, x_label="step", y_label="validation loss").save(content, format="PNG")
        write_whole(options.picture, content.getvalue())


if __name__ == "__main__":
    run_script(main)
