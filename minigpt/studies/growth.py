"""How a training step grows: time and memory for each token against size, context, batch and threads.

One thing is changed at a time, from the shape of ``configs/shakespeare_char.toml``. Through the points of each goes a
power law, a straight line when both are logarithms; a point far from it is a bend.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minigpt.assembly import assembled
from minigpt.config import DEFAULT_CONFIG, merge, read_toml
from minigpt.errors import UserError
from minigpt.studies.made_text import write_text
from minigpt.studies.measure import Report, Spread, alternate, table
from minigpt.studies.tokens import peak_bytes
from minigpt.training import Run, train_step

SHAPE = DEFAULT_CONFIG.parent / "shakespeare_char.toml"
BEND = 0.25  # part by which a point has to miss the line
TOKENS = 1536  # in a step while the context changes: what each costs is then no matter of the batch
AXES = {
    "layers": {n: {"model": {"n_layer": n}} for n in (1, 2, 4, 8, 16)},
    "width": {n: {"model": {"d_model": n}} for n in (64, 96, 128, 192, 256, 384)},
    "context": {
        n: {"model": {"context_length": n}, "train": {"batch_size": TOKENS // n}} for n in (32, 64, 128, 256, 512)
    },
    "batch": {n: {"train": {"batch_size": n}} for n in (1, 2, 4, 8, 16, 32, 64)},
}
# Student's t: 95 % of a slope's estimates, by the points beyond the two that a line needs
T_95 = (math.inf, 12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18)


@dataclass(frozen=True)
class PowerLaw:
    """y = factor · x^exponent; ``low`` to ``high`` holds the exponent in 95 % of cases (infinite for two points)."""

    factor: float
    exponent: float
    low: float
    high: float

    @classmethod
    def through(cls, x: Sequence[float], y: Sequence[float]) -> "PowerLaw":
        """The line of least squares through the logarithms of at least two points."""
        u, v = np.log(x), np.log(y)
        spread = ((u - u.mean()) ** 2).sum()
        slope = ((u - u.mean()) * (v - v.mean())).sum() / spread
        start = v.mean() - slope * u.mean()
        free = len(u) - 2
        missed = ((v - start - slope * u) ** 2).sum()
        half = T_95[free] * math.sqrt(missed / free / spread) if free else math.inf
        return cls(math.exp(start), float(slope), float(slope - half), float(slope + half))

    def departure(self, x: float, y: float) -> float:
        """Part by which a point lies above the line (below: negative)."""
        return y / (self.factor * x**self.exponent) - 1

    def __str__(self) -> str:
        known = f" ({self.low:.2f} to {self.high:.2f})" if math.isfinite(self.low) else ""
        return f"^{self.exponent:.2f}{known}"


@dataclass(frozen=True)
class Point:
    """One training step, cost by the token."""

    value: int
    parameters: int
    tokens: int
    microseconds: float
    kilobytes: float | None  # above what the process holds before the network is built; None: the system doesn't tell


def growth(*, repeats: int, threads: int, overrides: Mapping[str, Any]) -> Report:
    """Tables of what a step costs, a line for each point, and the exponents.

    Args:
        repeats: steps timed of each, in turn.
        threads: CPU threads, but for the axis ``threads``, which goes up to them.
        overrides: tables of keys on top of the shipped configuration and below what an axis sets.
    """
    axes: dict[str, dict[int, Any]] = {**AXES, "threads": {n: {"run": {"threads": n}} for n in _doubled_up_to(threads)}}
    with tempfile.TemporaryDirectory() as scratch:
        text = Path(scratch) / "text.txt"
        write_text(text, "English", 1_000_000)
        data = {"source": str(text), "cache_dir": str(Path(scratch) / "cache")}
        fixed = {"data": data, "run": {"device": "cpu", "dtype": "float32", "threads": threads}}
        values = merge(merge(read_toml(SHAPE), overrides), fixed)
        jobs = {(axis, n): merge(values, change) for axis, points in axes.items() for n, change in points.items()}
        points = _measured(jobs, repeats)
    lines, numbers = ["A training step: time and memory for each token; one thing changed at a time"], {}
    for axis in axes:
        told, numbers[axis] = _axis(axis, [point for (name, _), point in points.items() if name == axis])
        lines += told
    return Report(lines, {"axes": numbers})


def _measured(jobs: Mapping[tuple[str, int], Mapping[str, Any]], repeats: int) -> dict[tuple[str, int], Point]:
    """All points; equal configurations on several axes are measured once."""
    distinct = {json.dumps(values, sort_keys=True): values for values in jobs.values()}
    steps = {key: TimedStep(values) for key, values in distinct.items()}
    seconds = alternate({key: step.once for key, step in steps.items()}, repeats)
    memory = {key: _bytes_apart(values) for key, values in distinct.items()}
    points = {}
    for (axis, value), values in jobs.items():
        key = json.dumps(values, sort_keys=True)
        step, peak = steps[key], memory[key]
        points[axis, value] = Point(
            value=value,
            parameters=step.parameters,
            tokens=step.tokens,
            microseconds=1e6 * Spread.of(seconds[key]).median / step.tokens,
            kilobytes=None if peak is None else peak / 1000 / step.tokens,
        )
    return points


def _doubled_up_to(most: int) -> list[int]:
    """1, 2, 4, ... and ``most`` itself."""
    return sorted({most, *(2**n for n in range(most.bit_length()))})


# ── one step ───────────────────────────────────────────────────────────────────────────────────────────────────


class TimedStep:
    """A network and all that trains it."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        parts = assembled(values, config_path=SHAPE, source_given=False, init_from=None)
        self.run = Run(config=parts.config, corpus=parts.corpus, model=parts.model, optimizers=parts.optimizers)
        self.parameters = parts.model.n_parameter
        self.tokens = parts.config.train.batch_size * parts.config.model.context_length

    def once(self) -> None:
        """One update, on as many threads as its configuration says."""
        torch.set_num_threads(self.run.config.run.threads)
        train_step(self.run)


def _bytes_apart(values: Mapping[str, Any]) -> int | None:
    """What ``step_bytes`` answers in a new process.

    Raises:
        UserError: if it fails, with what it said last.
    """
    command = [sys.executable, "-m", "minigpt.studies.growth", json.dumps(values)]
    done = subprocess.run(command, capture_output=True, env=os.environ | {"PYTHONUTF8": "1"})
    if done.returncode:
        raise UserError(f"measuring the memory of a step failed: {done.stderr.decode('utf-8', 'replace').strip()}")
    return json.loads(done.stdout)


def step_bytes(values: Mapping[str, Any]) -> int | None:
    """Memory that network, optimizer and a few steps add to the process; None where the system doesn't tell."""
    smallest = {"model": {"n_layer": 1, "d_model": 32, "context_length": 8}, "train": {"batch_size": 1}}
    TimedStep(merge(values, smallest)).once()  # loads what any step needs
    before = peak_bytes()
    step = TimedStep(values)
    for _ in range(3):
        step.once()
    after = peak_bytes()
    return None if before is None or after is None else after - before


# ── what is told ───────────────────────────────────────────────────────────────────────────────────────────────


def _axis(axis: str, points: Sequence[Point]) -> tuple[list[str], dict[str, Any]]:
    """The table of one axis and its numbers."""
    values = [point.value for point in points]
    costs = {"time": [point.microseconds for point in points]}
    kilobytes = [point.kilobytes for point in points if point.kilobytes]
    if len(kilobytes) == len(points):
        costs["memory"] = kilobytes
    laws = {what: PowerLaw.through(values, cost) for what, cost in costs.items() if len(points) > 1}
    bends = {
        what: [value for value, cost in zip(values, costs[what], strict=True) if abs(law.departure(value, cost)) > BEND]
        for what, law in laws.items()
    }
    rows = [[axis, "parameters", "tokens", "µs/token", "kB/token", "bend"]]
    for point in points:
        memory = "?" if point.kilobytes is None else f"{point.kilobytes:.1f}"
        bent = [
            f"{what} {100 * laws[what].departure(point.value, costs[what][values.index(point.value)]):+.0f} %"
            for what, places in bends.items()
            if point.value in places
        ]
        cells = [f"{point.parameters:,}", str(point.tokens), f"{point.microseconds:.1f}", memory]
        rows.append([str(point.value), *cells, ", ".join(bent)])
    exponents = [f"{what} a token ~ {axis}{law}" for what, law in laws.items()]
    numbers = {
        "points": [asdict(point) for point in points],
        "laws": {what: asdict(law) for what, law in laws.items()},
        "bends": bends,
    }
    return ["", *(line.rstrip() for line in table(rows)), *exponents], numbers


if __name__ == "__main__":
    print(json.dumps(step_bytes(json.loads(sys.argv[1]))))
