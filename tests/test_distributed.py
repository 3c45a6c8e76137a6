"""Two processes under torchrun train as one does: the same losses, the same files, one after the other."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Tables
from running import TRAIN, as_options, environment
from tiny_runs import begun, rows

from minigpt.checkpoint import find_checkpoint
from minigpt.config import merge
from minigpt.distributed import World, check_divisible
from minigpt.errors import UserError
from minigpt.launch import resume

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(TRAIN))

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="torch for Windows has no gloo by default")


def together(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """``train.py`` in two processes."""
    return subprocess.run(
        [*TORCHRUN, *words], env=environment(), capture_output=True, encoding="utf-8", check=False, cwd=folder
    )


def losses(path: Path) -> list[float]:
    return [row[key] for row in rows(path) for key in ("train_loss", "val_loss") if key in row]


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_two_processes_train_as_one_and_either_goes_on_with_the_other_s_run(
    tiny: Tables, tmp_path: Path, optimizer: str
) -> None:
    """20 steps with accumulation: alone; 1 → 2 processes after 10 steps; 2 → 1."""
    changes: Tables = {
        "optim": {"name": optimizer, "schedule": "constant"},
        "train": {"grad_accumulation": 2},
        "model": {"n_layer": 2},
    }
    tables = merge(tiny, changes)
    alone = begun(tables, run={"name": "alone"}).path
    first, second = (begun(tables, run={"name": "first"}, train={"max_steps": 10}).path, tmp_path / "runs" / "second")
    done = together(tmp_path, "--resume", str(first), "--train.max-steps", "20")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("goes on from step 10") == 1, "one process speaks for both"
    assert "processes was 1, is 2" in done.stderr
    done = together(tmp_path, *as_options(merge(tables, {"run": {"name": "second"}, "train": {"max_steps": 10}})))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("next: python scripts/generate.py") == 1
    resume(second, {"train": {"max_steps": "20"}})
    for path in (first, second):
        assert [row["step"] for row in rows(path)] == list(range(1, 21))
        assert losses(path) == pytest.approx(losses(alone), abs=1e-5)
    weights = [find_checkpoint(path, "last").tensors("model") for path in (alone, first, second)]
    for name, tensor in weights[0].items():
        assert all(other[name] == pytest.approx(tensor, abs=2e-3) for other in weights[1:]), name


def test_a_batch_that_does_not_divide_is_one_sentence(tiny: Tables, tmp_path: Path) -> None:
    done = together(tmp_path, *as_options(merge(tiny, {"train": {"batch_size": 5}})))
    assert done.returncode != 0
    sentence = (
        "error: train.batch_size = 5: 2 processes with train.grad_accumulation = 1 need a multiple of 2, such as 4"
    )
    assert done.stderr.count(sentence) == 1
    assert not (tmp_path / "runs").exists()
    with pytest.raises(UserError, match="need a multiple of 6, such as 6"):
        check_divisible(4, 3, 2)
    check_divisible(12, 3, 2)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="children are found in /proc")
def test_when_one_process_is_killed_all_end_and_the_run_can_go_on(tiny: Tables, tmp_path: Path) -> None:
    endless = merge(tiny, {"train": {"max_steps": 1_000_000, "save_interval": 5}})
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([*TORCHRUN, *as_options(endless)], env=environment(), stdout=log, stderr=log)
        try:
            path, deadline = tmp_path / "runs" / "tiny", time.monotonic() + 60
            while len(list(path.glob("checkpoints/step-*[05].safetensors"))) < 3 and time.monotonic() < deadline:
                time.sleep(0.05)
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(encoding="ascii").split()
            os.kill(int(children[-1]), signal.SIGKILL)
            assert process.wait(30) != 0
        finally:
            process.kill()
    saved = find_checkpoint(path, "last", verify=True).step
    assert saved >= 10
    assert resume(path, {"train": {"max_steps": str(saved + 3)}}).progress.step == saved + 3


def test_shares_make_up_the_batch() -> None:
    rows_BT: Any = torch.arange(24).view(6, 4)
    assert torch.equal(torch.cat([World(rank, 3).share(rows_BT) for rank in range(3)]), rows_BT)
    assert World().share(rows_BT) is not None and World().any(True) and not World().any(False)
    assert torch.equal(World().sum(rows_BT), rows_BT)
