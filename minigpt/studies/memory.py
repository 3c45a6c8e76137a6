"""A long training with everything on: resident memory, step by step."""

import contextlib
import itertools
import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from minigpt.errors import UserError
from minigpt.launch import start
from minigpt.tasks import tales

SETTLED = 2_000  # steps after which memory may grow no more
EVERY = 1_000
LARGEST_GROWTH = 2.0  # MB in 1,000 steps


@dataclass(frozen=True)
class Reading:
    """Resident memory after so many steps."""

    step: int
    megabytes: float


def readings(steps: int, *, tell: Callable[[Reading], None] = lambda reading: None) -> list[Reading]:
    """Train a tiny model for so many steps, with all that a run can do on the way; one reading every 1,000.

    Dropout, accumulation, validation, checkpoints, samples, attention pictures, a logged row a step, TensorBoard.

    Raises:
        UserError: where this process's memory can't be read.
    """
    found: list[Reading] = []
    steps_done = itertools.count()

    def look() -> bool:
        if (step := next(steps_done)) % EVERY == 0:
            note(step)
        return False

    def note(step: int) -> None:
        found.append(Reading(step, resident_megabytes()))
        tell(found[-1])

    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "tales.txt"
        source.write_text("\n".join(tales.corpus(size=50_000)), encoding="utf-8")
        tables = {
            "run": {"dir": scratch, "name": "long", "device": "cpu", "threads": 1},
            "data": {"source": str(source), "tokenizer": "char", "cache_dir": scratch},
            "model": {"n_layer": 1, "n_head": 2, "d_model": 16, "context_length": 16, "dropout": 0.1},
            "train": {"batch_size": 4, "grad_accumulation": 2, "max_steps": steps, "log_interval": 1,
                      "eval_interval": 200, "eval_tokens": 500},
        }  # fmt: skip
        with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stderr(nowhere):
            outcome = start(tables, stop=look)
        assert outcome.progress.step == steps
    if found[-1].step < steps:
        note(steps)
    return found


def growth(series: Sequence[Reading]) -> float:
    """MB in 1,000 steps, from the end of step ``SETTLED`` on."""
    first = next(reading for reading in series if reading.step >= SETTLED)
    return (series[-1].megabytes - first.megabytes) / (series[-1].step - first.step) * 1_000


def resident_megabytes() -> float:
    """Memory of this process that lies in RAM.

    Raises:
        UserError: on a system that tells it in no known way.
    """
    with contextlib.suppress(OSError):
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        return int(status.partition("VmRSS:")[2].split()[0]) / 1024
    try:
        words = ["ps", "-o", "rss=", "-p", str(os.getpid())]
        return int(subprocess.run(words, capture_output=True, check=True, encoding="ascii").stdout) / 1024
    except (OSError, ValueError, subprocess.SubprocessError):
        raise UserError("this system does not tell a process's memory; try Linux or macOS") from None
