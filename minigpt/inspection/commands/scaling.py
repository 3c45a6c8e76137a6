"""Why attention divides its scores by sqrt(d), d the size of query and key.

Queries and keys of random standard normal numbers, for d = 2, 4, ... 1024, each
query with 8 keys, their scores as they are and divided. Shown are the standard
deviation of the scores, the mean of the largest weight that softmax gives, and
the mean Frobenius norm of softmax's Jacobian, through which every gradient of
query and key goes.
"""

import argparse
import dataclasses
import json
import textwrap

from minigpt.errors import UserError
from minigpt.inspection.worked.scaling import N_KEY, ScalingRow, Spread, scaling_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What is drawn, and how it is shown."""
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the random numbers (default: 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    """Draw and print; there is nothing that could fail to hold."""
    if options.seed < 0:
        raise UserError(f"--seed = {options.seed}: must be at least 0")
    rows = scaling_table(options.seed)
    if options.json:
        print(json.dumps({"seed": options.seed, "keys": N_KEY, "rows": list(map(dataclasses.asdict, rows))}))
    else:
        print(_table(rows))
    return 0


def _table(rows: list[ScalingRow]) -> str:
    columns = "   spread  largest weight  Jacobian"
    titles = f"{'Q K^T':^{len(columns)}}  {'Q K^T / sqrt(d)':^{len(columns)}}".rstrip()
    lines = [f"{'':6}{titles}", f"{'d':>6}{columns}  {columns}"]
    lines += [f"{row.size:>6}{_cells(row.raw)}  {_cells(row.scaled)}" for row in rows]
    first, last = rows[0].raw, rows[-1].raw
    closing = (
        f"Undivided, the scores spread as sqrt(d), to {last.deviation:.0f} at d = {rows[-1].size}: softmax then gives "
        f"{last.largest_weight:.0%} to one of {N_KEY} keys, and its Jacobian, with it what training can change, "
        f"shrinks from {first.jacobian:.2f} to {last.jacobian:.2f}; divided, all three stay as they are whatever d is."
    )
    return "\n".join([*lines, "", textwrap.fill(closing, 80)])


def _cells(spread: Spread) -> str:
    return f"{spread.deviation:9.2f}{spread.largest_weight:16.3f}{spread.jacobian:10.3f}"
