"""Faults while a run lives: files that can't be written, numbers that are none, two processes at once."""

import errno
import io
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Tables
from running import EVALUATE, GENERATE, ROOT, TRAIN, Script, command, environment
from tiny_runs import MakeRun, after, begun, contents

from minigpt import corpus
from minigpt.checkpoint import find_checkpoint, list_checkpoints, save_checkpoint
from minigpt.config import DataConfig, merge
from minigpt.corpus import open_corpus
from minigpt.errors import TrainingStopped, UserError
from minigpt.launch import resume
from minigpt.optim import LossScale
from minigpt.training import NonFiniteError, train, train_step

COMPARE = ROOT / "scripts" / "compare_attention.py"
Record = Callable[[str, object], None]

# ── files that can't be written ────────────────────────────────────────────────────────────────────────────────

ERRORS = (errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO)


class FailingDisk:
    """From file operation number ``first`` under a folder on, all fail; TensorBoard's thread has a disk of its own."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path, first: int) -> None:
        self.folder, self.first, self.count = str(folder), first, 0
        for name in ("mkdir", "replace", "rename", "unlink"):
            patch.setattr(os, name, self._failing(getattr(os, name)))
        patch.setattr(io, "open", self._failing(io.open))

    def _failing(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def watched(path: Any, *rest: Any, **named: Any) -> Any:
            if str(path).startswith(self.folder) and "tensorboard" not in str(path):
                self.count += 1
                if self.count >= self.first > 0:
                    number = ERRORS[self.first % len(ERRORS)]
                    raise OSError(number, os.strerror(number), str(path))
            return operation(path, *rest, **named)

        return watched


def test_from_any_file_operation_on_a_failing_disk_is_told_and_harms_nothing(
    tiny: Tables, tmp_path: Path, record_property: Record
) -> None:
    """A full, read-only or broken disk, at each operation of a run; once mended, the run goes on to the same end."""
    keys = {"max_steps": 3, "eval_interval": 2, "save_interval": 1, "keep_last": 1}
    tables = merge(tiny, {"train": keys, "data": {"val_fraction": 0.05}})

    def attempt(name: str, first: int) -> tuple[Path, str, int]:
        folder = tmp_path / name
        with pytest.MonkeyPatch.context() as patch:
            disk = FailingDisk(patch, folder, first)
            try:
                begun(merge(tables, {"run": {"dir": str(folder)}}))
                sentence = ""
            except (UserError, TrainingStopped) as error:
                sentence = str(error)
        return folder / "tiny", sentence, disk.count

    whole, _, total = attempt("whole", 0)
    state = {key: value for key, value in contents(whole)[1].items() if key != "rows"}
    stopped = 0
    for first in range(1, total + 1):
        run, sentence, _ = attempt(f"failing-{first}", first)
        if sentence:
            stopped += 1
            assert str(run) in sentence and "\n" not in sentence, first
        saved, complaints = list_checkpoints(run / "checkpoints", verify=True)
        assert not complaints, first
        if not saved:
            begun(merge(tables, {"run": {"dir": str(run.parent)}}))
        elif saved[-1].step < 3:
            resume(run, {})
        files, found = contents(run)
        assert {key: value for key, value in found.items() if key != "rows"} == state, first
        assert not any(name.endswith(".tmp") for name in files) or first > total - 5, first
    assert 10 < stopped < total, "some end the run, those of its logs and its clearing up do not"
    record_property("tried", total)


LIMITED = """
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no file size limits")
def test_a_file_size_limit_stops_the_script_and_leaves_what_was_saved(tiny: Tables) -> None:
    run = begun(tiny, stop=after(10)).path
    before = {path: path.read_bytes() for path in (run / "checkpoints").iterdir()}
    assert max(map(len, before.values())) > 100_000
    words = command("-c", LIMITED, TRAIN, "--resume", run)
    done = subprocess.run(words, env=environment(), capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 3, done.stderr
    sentence = done.stderr.splitlines()[-1]
    assert sentence.startswith(f"stopped: could not write {run}") and sentence.endswith("is the disk full?")
    assert {path: path.read_bytes() for path in (run / "checkpoints").iterdir()} == before
    assert resume(run, {}).progress.step == 20
    assert contents(run)[1] == contents(begun(tiny, run={"name": "whole"}).path)[1]


def test_a_folder_that_vanishes_is_told_and_its_run_can_go_on(
    tiny: Tables, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run, asked = tmp_path / "runs" / "tiny", iter(range(100))

    def vanish() -> bool:
        if next(asked) == 5:
            shutil.rmtree(run)
        return False

    assert begun(tiny, stop=vanish).progress.step == 20
    assert "could not write samples (No such file or directory); training goes on without it" in capfd.readouterr().err
    assert find_checkpoint(run, "last", verify=True).step == 20
    assert resume(run, {"train": {"max_steps": 22}}).progress.step == 22


def test_a_log_that_cannot_be_read_does_not_stop_a_resumed_run(tiny: Tables, capfd: pytest.CaptureFixture[str]) -> None:
    run = begun(tiny, stop=after(3)).path
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").mkdir()
    shutil.rmtree(run / "tensorboard")
    (run / "tensorboard").write_bytes(b"")
    assert resume(run, {}).progress.step == 20
    said = capfd.readouterr().err
    assert f"{run / 'metrics.jsonl'}: can't be read (Is a directory); rows past step 3 may stand in it twice\n" in said
    for log in ("metrics.jsonl", "tensorboard"):
        assert said.count(f"could not write {log} (") == 1


# ── numbers that are none ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["token_embedding.weight", "blocks.0.attn.query_linear.weight"])
def test_weights_that_are_no_numbers_are_told_by_all_scripts(
    tiny: Tables, script: Script, name: str, value: float
) -> None:
    run = begun(tiny, stop=after(2)).path
    saved = find_checkpoint(run, "last")
    arrays = {f"{kind}.{n}": a for kind in ("model", "optimizer") for n, a in saved.tensors(kind).items()}
    arrays[f"model.{name}"][:, 0] = value
    save_checkpoint(saved.path, arrays, {key: v for key, v in saved.metadata.items() if key != "checksum"})
    for path, words in ((GENERATE, (run,)), (EVALUATE, (run, "--text", "the clock")), (COMPARE, ("heads", run))):
        answer = script(path, *words, "--which", "last")
        assert answer.code == 2 and "not finite" in answer.err and "Traceback" not in answer.err
    answer = script(TRAIN, "--resume", run)
    assert answer.code == 3 and answer.err.splitlines()[-1].startswith("stopped: step 3: loss nan")


@pytest.mark.parametrize(
    ("name", "overflows"),
    [("attn.value_linear", "the attention of layer 0"), ("mlp.down_linear", "the network's output")],
)
def test_finite_weights_that_overflow_are_told_by_all_that_look(
    tiny: Tables, script: Script, name: str, overflows: str
) -> None:
    run = begun(tiny, stop=after(2), data={"tokenizer": "byte"}, model={"context_length": 192}).path
    saved = find_checkpoint(run, "last")
    arrays = {f"{kind}.{n}": a for kind in ("model", "optimizer") for n, a in saved.tensors(kind).items()}
    arrays[f"model.blocks.0.{name}.weight"][:] = 3e38
    save_checkpoint(saved.path, arrays, {key: v for key, v in saved.metadata.items() if key != "checksum"})
    parts: list[tuple[object, ...]] = [("ablate",), ("replace", "--all"), ("links", "--texts", 1, "--fresh", 0)]
    parts += [("heads",), ("sentences", "the boat")] if "attn" in name else []
    for part, *words in parts:
        answer = script(COMPARE, part, run, *words, "--which", "last")
        sentence = f"error: {overflows} overflows: training diverged; take an earlier step"
        assert (answer.code, answer.out, answer.err.splitlines()[-1]) == (2, "", sentence), part


def test_a_loss_spike_is_survived_and_the_best_kept(make_run: MakeRun) -> None:
    """Weights thrown far away once: training goes on, and the best checkpoint is the one before."""
    run, saved = make_run(train={"max_steps": 60, "eval_interval": 10}), {}
    run.save = lambda progress: saved.update({progress.step: progress.val_loss})
    update = run.optimizers.step

    def throw() -> None:
        update()
        if run.progress.step == 29:  # the thirtieth update
            with torch.no_grad():
                for parameter in run.model.parameters():
                    parameter.mul_(5)

    run.optimizers.step = throw
    progress = train(run)
    assert saved[30] > saved[20] + 1 and saved[60] < saved[30] - 1, saved
    assert progress.best_val_loss == min(loss for loss in saved.values() if math.isfinite(loss))


def scaled(make_run: MakeRun) -> Any:
    """A run whose loss is scaled, as float16 needs it; the arithmetic is float32, which needs no GPU."""
    run = make_run(optim={"name": "adamw", "lr": 0.01})
    run.optimizers.scale = LossScale(enabled=True)
    return run


def overflow(run: Any) -> Any:
    """From now on gradients are infinite, until the handle is removed."""
    return run.model.get_parameter("token_embedding.weight").register_hook(lambda gradient: gradient * math.inf)


def test_the_loss_scale_goes_on_where_it_was(make_run: MakeRun) -> None:
    run, resumed = scaled(make_run), scaled(make_run)
    run.optimizers.scale.GROWTH_INTERVAL = resumed.optimizers.scale.GROWTH_INTERVAL = 3
    train_step(run)
    handle = overflow(run)
    train_step(run)
    handle.remove()
    train_step(run)
    assert (run.optimizers.scale.value, run.optimizers.scale.good_updates) == (2**15, 1)
    resumed.model.load_state_dict(run.model.state_dict())
    resumed.optimizers.load_state({name: tensor.clone() for name, tensor in run.optimizers.state().items()})
    resumed.progress.step = run.progress.step
    for _ in range(4):
        assert train_step(run) == train_step(resumed)
    assert run.optimizers.scale.value == resumed.optimizers.scale.value == 2**16, "doubled in both after the third"
    for name, tensor in run.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name


def test_what_overflows_at_every_scale_ends_the_run(make_run: MakeRun) -> None:
    run = scaled(make_run)
    before = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    overflow(run)
    for _ in range(16):
        train_step(run)
    with pytest.raises(NonFiniteError, match=r"step 17: loss .*, gradient norm (inf|nan)"):
        train_step(run)
    assert all(torch.equal(tensor, before[name]) for name, tensor in run.model.state_dict().items())


# ── two at once ────────────────────────────────────────────────────────────────────────────────────────────────

PREPARE = """
import hashlib, sys
from minigpt.config import DataConfig
from minigpt.corpus import open_corpus
data = DataConfig(source=sys.argv[1], tokenizer="bpe", vocab_size=300, cache_dir=sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
for _ in range(int(sys.argv[3])):
    corpus = open_corpus(data, context_length=16, seed=1)
    print(corpus.fingerprint, hashlib.sha256(corpus.train.tobytes() + corpus.val.tobytes()).hexdigest(), flush=True)
"""


@pytest.mark.parametrize("damaged", [False, True], ids=["fresh", "over damaged files"])
def test_processes_that_prepare_one_text_at_once_end_equal(tiny: Tables, tmp_path: Path, damaged: bool) -> None:
    cache = tmp_path / "cache"
    words = command("-c", PREPARE, tiny["data"]["source"], cache, 1)
    if damaged:
        subprocess.run(words, env=environment(), input="\n", capture_output=True, encoding="utf-8", check=True)
        next(cache.glob("tokens-*/train.bin")).write_bytes(b"rubbish")
    processes = [
        subprocess.Popen(words, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8")
        for _ in range(3)
    ]
    for process in processes:
        assert process.stdout and process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin
        process.stdin.write("\n")
        process.stdin.flush()
    answers = {process.communicate(timeout=120)[0] for process in processes}
    assert [process.returncode for process in processes] == [0] * 3
    assert len(answers) == 1 and len(answers.pop().split()) == 2
    assert sorted(path.name.partition("-")[0] for path in cache.iterdir()) == ["tokenizer", "tokens"]


def test_files_that_another_process_has_mended_meanwhile_are_taken(
    tiny: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both saw damage; the other one is done with it when this one moves its own into place."""
    data = DataConfig(source=tiny["data"]["source"], cache_dir=str(tmp_path / "cache"), tokenizer="char")
    good = open_corpus(data, context_length=16, seed=1)
    ids, real, calls = good.train.tolist(), corpus._read_parts, iter(range(9))
    monkeypatch.setattr(corpus, "_read_parts", lambda *words: real(*words) if next(calls) else None)
    folder = next((tmp_path / "cache").glob("tokens-*"))
    inode = folder.stat().st_ino
    assert open_corpus(data, context_length=16, seed=1).train.tolist() == ids
    assert folder.stat().st_ino == inode, "theirs stay where they are"


def test_what_a_killed_process_left_in_the_cache_goes_after_a_day(tmp_path: Path, tiny: Tables) -> None:
    data = DataConfig(source=tiny["data"]["source"], cache_dir=str(tmp_path / "cache"), tokenizer="char")
    for name in ("unfinished-old", "unfinished-new"):
        (tmp_path / "cache" / name / "tokens").mkdir(parents=True)
    os.utime(tmp_path / "cache" / "unfinished-old", (1e9, 1e9))
    open_corpus(data, context_length=16, seed=1)
    assert [path.name for path in (tmp_path / "cache").glob("unfinished-*")] == ["unfinished-new"]
