"""How heads came to be what they are: the frames of attention that a run kept
while it was trained (inspect.interval, inspect.text).

Each head is held against the reference that it is nearest to in the last frame:
the share of its weight that is elsewhere (total variation), frame by frame.

  compare_attention.py film runs/bard --html film.html      every map, to slide
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from minigpt.console import counted
from minigpt.inspection.film import Film, Row, read_film
from minigpt.inspection.labels import filled
from minigpt.inspection.page_option import add_html_option, write_page

ACROSS = 8  # frames side by side in 80 columns


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The run and the form of the answer."""
    parser.add_argument("run", type=Path, help="a run's folder")
    parser.add_argument("--json", action="store_true", help="all frames' numbers as one object")
    add_html_option(parser)


def run(options: argparse.Namespace) -> int:
    """Read and print."""
    film = read_film(options.run)
    if options.json:
        print(json.dumps({"run": str(options.run), "steps": film.steps, "tokens": film.tokens, "rows": film.rows}))
    else:
        print("\n".join(lines(options.run, film)))
    write_page(options, "film", which="last")
    return 0


def lines(run: Path, film: Film) -> Iterator[str]:
    """A table of at most 80 columns; of many frames some, evenly spread."""
    last = len(film.steps) - 1
    count = min(ACROSS, last + 1)
    steps = [film.steps[round(i * last / max(1, count - 1))] for i in range(count)]
    yield f"{run}: {counted(last + 1, 'frame')} of {counted(len(film.tokens), 'token')}; total variation at step"
    yield f"{'head':<7}{'reference':<13}" + "".join(f"{step:>7}" for step in steps)
    rows = {(row["step"], row["head"]): row for row in film.rows}
    for head in dict.fromkeys(row["head"] for row in film.rows):
        reference = nearest(rows.get((film.steps[-1], head)))
        distances = (_distance(rows.get((step, head)), reference) for step in steps)
        yield f"{head:<7}{filled(reference or 'none', 13)}{''.join(distances)}".rstrip()


def nearest(row: Row | None) -> str:
    """The reference of the smallest total variation; empty where none is defined."""
    known = {name: value for name, value in (row or {}).get("total_variation", {}).items() if value is not None}
    return min(known, key=known.__getitem__, default="")


def _distance(row: Row | None, reference: str) -> str:
    value = (row or {}).get("total_variation", {}).get(reference)
    return f"{'-':>7}" if value is None else f"{value:>7.2f}"
