"""What a person waits for: the help of a script, the first step of a training, the first token of a text."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from minigpt.errors import UserError
from minigpt.studies.measure import Report, Spread, table
from minigpt.studies.whole_runs import SCRIPTS, first_token_seconds, train_process

UTF8 = {"PYTHONUTF8": "1"}
LOOK_SECONDS = 0.005  # between two looks whether the first step is done


def startup(*, repeats: int, flags: Sequence[str]) -> Report:
    """Seconds from Enter to the help of each script, to the first step of ``train.py``, to the first token.

    The text is tokenized before, so that ``train.py`` finds its token files; the run that writes is saved by it.

    Args:
        repeats: rounds, of which medians are told, after one that does not count.
        flags: options handed on to ``train.py``.
    """
    waits: dict[str, Callable[[], float]] = {
        f"{script.name} --help": partial(help_seconds, script) for script in sorted(SCRIPTS.glob("*.py"))
    }
    with tempfile.TemporaryDirectory() as scratch:
        cached = [*flags, "--data.cache-dir", str(Path(scratch) / "cache")]
        run = train_process([*cached, "--train.max-steps", "1"], Path(scratch) / "saved").path
        waits["train.py, its first step done"] = partial(first_step_seconds, cached, Path(scratch))
        waits["generate.py, its first token"] = partial(first_token_seconds, run, "A")
        seconds = in_turn(waits, repeats)
    rows = [["seconds after Enter until", "median", "quartiles"]]
    for name, times in seconds.items():
        spread = Spread.of(times)
        rows.append([name, f"{spread.median:.2f}", f"{spread.low:.2f}–{spread.high:.2f}"])
    return Report(["scripts/train.py " + " ".join(flags), *table(rows)], {"seconds": seconds})


def in_turn(waits: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """The seconds that each call answers in ``repeats`` rounds, after one that does not count."""
    rounds = [{name: wait() for name, wait in waits.items()} for _ in range(repeats + 1)]
    return {name: [answers[name] for answers in rounds[1:]] for name in waits}


def help_seconds(script: Path) -> float:
    """Seconds that a script takes to show its help.

    Raises:
        UserError: if it fails.
    """
    begun = time.perf_counter()
    done = subprocess.run([sys.executable, str(script), "--help"], capture_output=True, env=os.environ | UTF8)
    if done.returncode:
        raise UserError(f"scripts/{script.name} --help failed: {done.stderr.decode('utf-8', 'replace').strip()}")
    return time.perf_counter() - begun


def first_step_seconds(flags: Sequence[str], scratch: Path) -> float:
    """Seconds from starting ``scripts/train.py`` until the row of its first step is in ``metrics.jsonl``.

    Raises:
        UserError: if it ends without one.
    """
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        options = [*flags, "--train.log-interval", "1", "--run.dir", folder, "--run.name", "run"]
        metrics = Path(folder) / "run" / "metrics.jsonl"
        begun = time.perf_counter()
        with subprocess.Popen(
            [sys.executable, str(SCRIPTS / "train.py"), *options],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | UTF8,
        ) as process:
            try:
                while not (metrics.is_file() and metrics.stat().st_size):
                    if process.poll() is not None:
                        raise UserError(f"scripts/train.py {' '.join(flags)} ended without a step: try it by itself")
                    time.sleep(LOOK_SECONDS)
                return time.perf_counter() - begun
            finally:
                process.kill()
