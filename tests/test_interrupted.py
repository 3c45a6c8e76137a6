"""Signals where they hurt most: while validating, saving, reading text, learning tokens, writing them."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import Tables
from running import TRAIN, Script, as_options, command, environment
from tiny_runs import begun, contents

from minigpt.checkpoint import list_checkpoints
from minigpt.signals import StopSignal


def signal_at(patch: pytest.MonkeyPatch, place: str, number: int, *, call: int = 1) -> None:
    """From now on that function sends this process the signal when it is called for the so-manyth time."""
    module, _, name = place.rpartition(".")
    real, calls = getattr(sys.modules[module], name), 0

    def interrupted(*words: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            signal.raise_signal(number)
        return real(*words, **named)

    patch.setattr(sys.modules[module], name, interrupted)


@pytest.mark.parametrize(
    ("place", "number"),
    [
        ("training.evaluate", signal.SIGINT),
        ("launch.save_checkpoint", signal.SIGTERM),
        ("checkpoint.write_whole", signal.SIGINT),
        ("launch.prune", signal.SIGTERM),
    ],
)
def test_a_signal_while_validating_or_saving_loses_nothing(
    tiny: Tables, script: Script, place: str, number: int, tmp_path: Path
) -> None:
    tiny["train"] |= {"eval_interval": 4, "max_steps": 12}
    run = tmp_path / "runs" / "tiny"
    with pytest.MonkeyPatch.context() as patch:
        signal_at(patch, f"minigpt.{place}", number, call=2)
        answer = script(TRAIN, *as_options(tiny))
    assert answer.code == 128 + number, answer.err
    saved, complaints = list_checkpoints(run / "checkpoints", verify=True)
    assert not complaints and not list(run.rglob("*.tmp"))
    assert f"step {saved[-1].step} of 12" in answer.out and f"--resume {run}\n" in answer.out
    assert script(TRAIN, "--resume", run).code == 0
    assert contents(run)[1] == contents(begun(tiny, run={"name": "whole"}).path)[1]


@pytest.mark.parametrize(
    ("place", "number"),
    [
        ("minigpt.corpus.split_source", signal.SIGTERM),
        ("minigpt.tokenizer._encoded", signal.SIGINT),
        ("minigpt.corpus.pieces", signal.SIGTERM),
        ("os.replace", signal.SIGINT),
    ],
    ids=["while text is read", "while BPE is learned", "while tokens are written", "while files are moved into place"],
)
def test_a_signal_while_getting_ready_ends_at_once_and_leaves_nothing_half_made(
    tiny: Tables, script: Script, place: str, number: int, tmp_path: Path
) -> None:
    tiny["data"] |= {"tokenizer": "bpe"}
    with pytest.MonkeyPatch.context() as patch:
        signal_at(patch, place, number)
        answer = script(TRAIN, *as_options(tiny))
    assert answer.code == 128 + number and answer.out == ""
    assert not (tmp_path / "runs").exists() and not list((tmp_path / "cache").glob("unfinished-*"))
    assert script(TRAIN, *as_options(tiny)).code == 0
    whole = begun(tiny, run={"name": "whole"}, data={"cache_dir": str(tmp_path / "other")})
    assert contents(tmp_path / "runs" / "tiny")[1] == contents(whole.path)[1]


TWICE_WHILE_SAVING = """
import os, signal, sys
from pathlib import Path
import numpy as np
from minigpt.checkpoint import checkpoint_path, save_checkpoint
from minigpt.signals import StopSignal
def sync(_file):
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGTERM)
with StopSignal() as stop:
    stop()
    for step in (1, 2):
        metadata = {"step": step, "config": {}, "tokenizer": {}}
        save_checkpoint(checkpoint_path(Path(sys.argv[1]), step), {"model.w": np.ones(9)}, metadata)
        os.fsync = sync
"""


def test_the_second_signal_while_saving_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    done = subprocess.run(command("-c", TWICE_WHILE_SAVING, tmp_path), env=environment(), check=False)
    assert done.returncode == 128 + signal.SIGTERM
    saved, complaints = list_checkpoints(tmp_path, verify=True)
    assert [checkpoint.step for checkpoint in saved] == [1] and not complaints


def test_ctrl_break_is_caught_where_it_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(signal, "SIGBREAK", signal.SIGUSR1, raising=False)
    with StopSignal() as stop:
        assert not stop()
        signal.raise_signal(signal.SIGUSR1)
        assert stop() and stop.exit_code == 128 + signal.SIGUSR1
