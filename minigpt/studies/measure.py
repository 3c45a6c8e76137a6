"""Measuring so that a figure can be believed: contenders in turn, medians with quartiles, a look at who else computes.

Neither NumPy nor torch is imported here: a process that measures another's memory has to be small itself.
"""

import importlib.metadata
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from minigpt.threads import core_count

QUIET = 0.05  # part of the machine that others may use without disturbing the figures
SAMPLE_SECONDS = 1.0


@dataclass
class Report:
    """What a benchmark found: lines of at most 80 columns, numbers for ``--json``, and whether its proof held."""

    lines: list[str]
    numbers: dict[str, Any]
    holds: bool = True


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of a few values."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Of at least one value; quartiles are interpolated between the values."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)

    @classmethod
    def of_ratios(cls, above: Sequence[float], below: Sequence[float]) -> Self:
        """Of the ratios round by round, from which slow drifts of the machine cancel."""
        return cls.of([a / b for a, b in zip(above, below, strict=True)])

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}–{self.high:.2f})"


def alternate(
    contenders: Mapping[str, Callable[[], object]], repeats: int, steady: float = 0.0
) -> dict[str, list[float]]:
    """Seconds of each call in ``repeats`` rounds, after one round that does not count.

    In a round each contender has one turn; every other round takes them in reverse order. ``steady``: for calls of
    milliseconds, how many seconds a turn lasts, after as many that do not count, in which cores that rested come up to
    speed and the threads of the contender before go to sleep.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(-1, repeats):
        for name in list(contenders)[:: -1 if number % 2 else 1]:
            if steady:
                seconds_a_call(contenders[name], steady)
            taken = seconds_a_call(contenders[name], steady)
            if number >= 0:
                seconds[name].append(taken)
    return seconds


def seconds_a_call(call: Callable[[], object], seconds: float) -> float:
    """Of as many calls as begin within so many seconds, one at least."""
    begun, calls = time.perf_counter(), 0
    while calls == 0 or time.perf_counter() - begun < seconds:
        call()
        calls += 1
    return (time.perf_counter() - begun) / calls


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table; the first column is aligned left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(zip(row, widths)))  # noqa: B905
        for row in rows
    ]


# ── the machine ────────────────────────────────────────────────────────────────────────────────────────────────


def machine_facts(threads: int) -> dict[str, str]:
    """What has to be told beside any time."""
    return {
        "cpu": _cpu_name(),
        "cores": str(core_count()),
        "threads": str(threads),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "numpy": importlib.metadata.version("numpy"),
    }


class OthersWatch:
    """How much of this process's cores other processes use, from the start of the watch on."""

    def __init__(self) -> None:
        self._begun = time.perf_counter()
        self._busy, self._own = _busy_seconds(), _own_seconds()

    def share(self) -> float | None:
        """Part of the cores' time, 0 to 1; None where the system does not tell. Children count when they ended."""
        busy = _busy_seconds()
        if busy is None or self._busy is None:
            return None
        others = (busy - self._busy) - (_own_seconds() - self._own)
        return max(0.0, others / (time.perf_counter() - self._begun) / core_count())


def share_now() -> float | None:
    """What others use during the next second."""
    watch = OthersWatch()
    time.sleep(SAMPLE_SECONDS)
    return watch.share()


def verdict(shares: Mapping[str, float | None]) -> tuple[bool, str]:
    """Whether the figures may be claimed, and why, from what others used ``before`` and ``during`` the measuring."""
    known = {when: share for when, share in shares.items() if share is not None}
    if not known:
        return True, "could not check whether other processes were busy: make sure of it yourself"
    used = ", ".join(f"{100 * share:.0f} % {when}" for when, share in known.items())
    if max(known.values()) > QUIET:
        return False, f"not a claim: machine was busy (others used {used})"
    return True, f"the machine was quiet (others used {used})"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _core_numbers() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _busy_seconds() -> float | None:
    """Seconds that this process's cores have computed, for whomever; Linux alone tells."""
    try:
        lines = Path("/proc/stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    cores = {f"cpu{number}" for number in _core_numbers()}
    ticks = 0
    for name, *fields in (line.split() for line in lines if line):
        if name in cores:
            _user, _nice, _system, idle, iowait, *_ = times = [int(field) for field in fields[:8]]
            ticks += sum(times) - idle - iowait
    return ticks / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
