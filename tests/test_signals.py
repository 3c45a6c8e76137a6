"""Scripts that are told to end: what is done is saved, and how to go on is said."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Tables
from running import EVALUATE, GENERATE, ROOT, TRAIN, Answer, Script, Trained, as_options, command, environment
from tiny_runs import begun, rows

from minigpt import scoring
from minigpt.checkpoint import find_checkpoint
from minigpt.inspection import capture
from minigpt.signals import quiet_interrupts, raised_interrupts

COMPARE = ROOT / "scripts" / "compare_attention.py"
BENCHMARK = ROOT / "scripts" / "benchmark.py"


@pytest.mark.skipif(sys.platform == "win32", reason="a closed pipe is another error there")
def test_a_reader_who_has_had_enough_is_no_error(trained: Trained) -> None:
    process = subprocess.Popen(
        command(GENERATE, trained.path, "--max-new-tokens", 3000, "--num-samples", 20),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout and process.stderr
    assert process.stdout.read(10)
    process.stdout.close()
    complaints = process.stderr.read()
    process.stderr.close()
    assert (process.wait(60), complaints) == (0, b"")


def interrupted(words: list[str], number: int, folder: Path, at: str) -> Answer:
    """Start training, and send the signal when ``at`` is told."""
    log = folder / "stderr.txt"
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            command(TRAIN, *words), env=environment(), stdout=subprocess.PIPE, stderr=stderr, cwd=folder
        )
        try:
            deadline = time.monotonic() + 60
            while at not in log.read_text(encoding="utf-8") and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.02)
            process.send_signal(number)
            out, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    return Answer(process.returncode, out.decode(), log.read_text(encoding="utf-8"))


@pytest.mark.skipif(sys.platform == "win32", reason="a signal can't be sent to one process there")
def test_signals_save_and_say_how_to_go_on(tiny: Tables, tmp_path: Path) -> None:
    """Ctrl-C in a new run, then a request to end in the resumed one; what they leave is an uncut run's."""
    tiny["train"] |= {"max_steps": 100_000, "eval_interval": 0}
    tiny["optim"] = {"schedule": "constant"}
    run = tmp_path / "runs" / "tiny"
    answer = interrupted(as_options(tiny), signal.SIGINT, tmp_path, "step 5/")
    assert answer.code == 130, answer.err
    first = find_checkpoint(run, "last", verify=True).step
    assert 5 <= first < 100_000
    assert f"interrupted and saved; go on with: python scripts/train.py --resume {run}\n" in answer.out
    answer = interrupted(["--resume", str(run)], signal.SIGTERM, tmp_path, f"step {first + 2}/")
    assert answer.code == 143, answer.err
    last = find_checkpoint(run, "last", verify=True)
    assert last.step >= first + 2
    assert [row["step"] for row in rows(run)] == list(range(1, last.step + 1))
    whole = begun(tiny, run={"name": "whole"}, train={"max_steps": last.step})
    for name, array in find_checkpoint(whole.path, "last").tensors("model").items():
        assert np.array_equal(array, last.tensors("model")[name]), name


TWICE = """
import signal
from minigpt.signals import StopSignal
with StopSignal() as stop:
    stop()
    signal.raise_signal(signal.SIGINT)
    print(stop(), stop.exit_code, flush=True)
    signal.raise_signal(signal.SIGTERM)
    print("still here", flush=True)
"""


def test_the_second_signal_ends_at_once() -> None:
    done = subprocess.run(
        [sys.executable, "-c", TWICE], env=environment(), capture_output=True, encoding="utf-8", check=False
    )
    assert done.returncode == 128 + signal.SIGTERM
    assert done.stdout == "True 130\n"


# ── scripts that save nothing ──────────────────────────────────────────────────────────────────────────────────


def interrupt(*_words: object) -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(
    ("words", "module"),
    [
        *(((path,), "pydantic") for path in (TRAIN, GENERATE, EVALUATE, COMPARE, BENCHMARK)),
        ((COMPARE, "scaling"), "numpy"),
        ((COMPARE, "heads", "runs/none"), "numpy"),
        ((TRAIN,), "torch"),
    ],
    ids=lambda value: Path(value[-1]).stem if isinstance(value, tuple) else value,
)
def test_ctrl_c_while_a_script_loads_is_one_line(tmp_path: Path, words: tuple[Path | str, ...], module: str) -> None:
    """The module that takes long to load is one that presses Ctrl-C."""
    (tmp_path / f"{module}.py").write_text("import signal; signal.raise_signal(signal.SIGINT)", encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        command(*words), env=environment(PYTHONPATH=path), capture_output=True, encoding="utf-8", check=False
    )
    line = "\nended before the training began\n" if module == "torch" else "interrupted\n"
    assert (done.returncode, done.stdout, done.stderr) == (130, "", line)


@pytest.mark.parametrize(
    ("words", "module", "name"),
    [
        ((EVALUATE,), scoring, "_score_window"),
        ((COMPARE, "heads"), capture, "attention"),
        ((COMPARE, "ablate"), capture, "attention"),
    ],
    ids=["evaluate", "heads", "ablate"],
)
def test_ctrl_c_in_the_middle_of_a_computation_is_one_line(
    trained: Trained, script: Script, monkeypatch: pytest.MonkeyPatch, words: tuple[Any, ...], module: Any, name: str
) -> None:
    monkeypatch.setattr(module, name, interrupt)
    answer = script(*words, trained.path)
    assert (answer.code, answer.out, answer.err) == (130, "", "interrupted\n")


def test_an_ignored_ctrl_c_stays_ignored() -> None:
    """As in a script's background, where another program is meant."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        quiet_interrupts()
        raised_interrupts()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
