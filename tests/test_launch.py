"""Runs from start to end: small texts, mistakes, and saved however they end."""

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Tables
from tiny_runs import assert_same_bits, begun, rows, told
from torch import Tensor, nn

from minigpt import launch
from minigpt.checkpoint import find_checkpoint, list_checkpoints
from minigpt.config import read_toml, validate
from minigpt.errors import TrainingStopped
from minigpt.launch import is_out_of_memory, resume
from minigpt.model import GPT

# ── small and strange texts and settings ───────────────────────────────────────────────────────────────────────


def test_there_is_a_last_checkpoint_whatever_the_intervals(tiny: Tables) -> None:
    run = begun(tiny, train={"max_steps": 3, "eval_interval": 1000, "save_interval": 1000})
    checkpoints, _ = list_checkpoints(run.path / "checkpoints")
    assert [c.step for c in checkpoints] == [0, 3]
    assert math.isfinite(checkpoints[-1].val_loss)


@pytest.mark.parametrize(
    ("fraction", "note", "validated"),
    [
        (0.05, "validation reads one window of 9 tokens, shorter than model.context_length = 16", True),
        (0.005, "validation is off: its part of the text has no two tokens", False),
        (0.0, "", False),
    ],
)
def test_a_tiny_validation_part(
    tiny: Tables, capfd: pytest.CaptureFixture[str], fraction: float, note: str, validated: bool
) -> None:
    Path(tiny["data"]["source"]).write_text("seven lanterns; " * 12 + "a clock.", encoding="utf-8")
    run = begun(tiny, data={"val_fraction": fraction}, train={"max_steps": 4, "eval_interval": 2})
    said = capfd.readouterr().err
    assert note in said[: said.index("step 1/")], "told before the first step"
    assert "nan" not in said
    losses = [row["val_loss"] for row in rows(run.path) if "val_loss" in row]
    assert len(losses) == (2 if validated else 0)
    assert all(loss > 0.1 for loss in losses)
    assert find_checkpoint(run.path, "last").step == 4
    assert find_checkpoint(run.path, "best").tensors("model")


def test_a_folder_with_a_run_is_not_trained_into(tiny: Tables) -> None:
    run = begun(tiny, train={"max_steps": 2})
    files = {path: path.stat().st_mtime_ns for path in run.path.rglob("*") if path.is_file()}
    sentence = told(begun, tiny)
    assert all(way in sentence for way in ("--resume", "--run.name", "--run.overwrite"))
    assert files == {path: path.stat().st_mtime_ns for path in run.path.rglob("*") if path.is_file()}
    again = begun(tiny, run={"overwrite": True}, train={"max_steps": 2})
    assert again.path == run.path
    assert_same_bits(run.path.with_name("tiny.old-1"), again.path)


def test_a_run_in_a_folder_that_lost_its_checkpoints_begins_its_own_rows_and_curves(tiny: Tables) -> None:
    run = begun(tiny, train={"max_steps": 4})
    curves = {path.name for path in (run.path / "tensorboard").iterdir()}
    shutil.rmtree(run.path / "checkpoints")
    again = begun(tiny, train={"max_steps": 2})
    assert [row["step"] for row in rows(again.path)] == [1, 2]
    assert curves.isdisjoint(path.name for path in (run.path / "tensorboard").iterdir())


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"train": {"sample_prompt": "Ω"}}, "train.sample_prompt: characters that the tokenizer has never seen"),
        ({"model": {"context_length": 5000}}, "the largest context that works is"),
        ({"run": {"device": "cuda:7"}}, "run.device = cuda:7: torch sees"),
        ({"model": {"n_head": 3}}, "model.d_model = 32: must be a multiple of model.n_head = 3"),
        ({"data": {"source": "nowhere.txt"}}, "nowhere.txt"),
    ],
)
def test_a_mistake_leaves_no_folder(tiny: Tables, sections: dict[str, Any], sentence: str) -> None:
    assert sentence in told(begun, tiny, **sections)
    assert not Path(tiny["run"]["dir"]).exists()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_derived_values_are_saved(tiny: Tables, dtype: str) -> None:
    """The file of a run says what it ran with; nothing in it is left to derive."""
    run = begun(tiny, run={"dtype": dtype}, data={"tokenizer": "bpe"}, train={"max_steps": 2})
    config = validate(read_toml(run.path / "config.toml"))
    assert (config.run.device, config.run.dtype, config.run.threads) == ("cpu", dtype, 1)
    assert (config.model.n_kv_head, config.model.d_ff) == (2, 128)
    assert 257 < config.data.vocab_size < 2048


# ── when it ends otherwise ─────────────────────────────────────────────────────────────────────────────────────


def test_a_loss_that_is_no_number_keeps_the_good_checkpoint(tiny: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    passes, real = iter(range(1000)), launch.train

    def spoiled(run: Any) -> Any:
        def forward(tokens: Tensor) -> Tensor:
            return run.model(tokens) * (math.nan if next(passes) == 7 else 1)

        run.forward = forward
        return real(run)

    monkeypatch.setattr(launch, "train", spoiled)
    sentence = told(begun, tiny, train={"save_interval": 3}, error=TrainingStopped)
    path = Path(tiny["run"]["dir"]) / "tiny"
    assert sentence.startswith("step 8: loss nan, gradient norm nan; the checkpoint of step 6 is kept")
    assert f"--resume {path} --optim.lr 0.01" in sentence
    assert find_checkpoint(path, "last", verify=True).step == 6
    assert [row["step"] for row in rows(path)] == list(range(1, 8))


def failing(error: Exception) -> Callable[..., None]:
    def fail(*_arguments: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), True),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 8.00 GB, max allowed: 9.07 GB)"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
    ],
    ids=["cuda", "linux", "windows", "mps", "another"],
)
def test_out_of_memory_is_known_on_every_system(error: RuntimeError, is_memory: bool) -> None:
    assert is_out_of_memory(error) == is_memory


@pytest.mark.parametrize(
    ("batch", "passes", "remedy"),
    [
        (64, 1, "batch 64 -> 16 with accumulation 4 gives the same result"),
        (12, 2, "batch 6 -> 1 with accumulation 12 gives the same result"),
        (6, 1, "batch 6 -> 1 with accumulation 6 gives the same result"),
        (4, 4, "out of memory with one sequence a pass: choose a smaller"),
    ],
)
def test_out_of_memory_tells_exact_numbers(
    tiny: Tables, monkeypatch: pytest.MonkeyPatch, batch: int, passes: int, remedy: str
) -> None:
    monkeypatch.setattr("minigpt.training.loss_sum", failing(torch.OutOfMemoryError("CUDA out of memory")))
    keys = {"batch_size": batch, "grad_accumulation": passes}
    sentence = told(begun, tiny, train=keys, error=TrainingStopped)
    assert remedy in sentence
    if "same result" in remedy:
        run, more = Path(tiny["run"]["dir"]) / "tiny", remedy.split()[6]
        assert sentence.endswith(f"--resume {run} --train.grad-accumulation {more}")
        monkeypatch.undo()
        assert resume(run, {"train": {"grad_accumulation": more, "max_steps": 1}}).progress.step == 1


def test_other_errors_are_bugs_and_keep_their_traceback(tiny: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minigpt.training.loss_sum", failing(RuntimeError("shapes do not fit")))
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        begun(tiny)


def test_a_full_disk_stops_training_and_harms_no_checkpoint(tiny: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int) -> None:
        if (Path(tiny["run"]["dir"]) / "tiny/checkpoints/step-00000010.safetensors").exists():
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    sentence = told(begun, tiny, error=TrainingStopped)
    monkeypatch.undo()
    path = Path(tiny["run"]["dir"]) / "tiny"
    assert "could not write" in sentence and "is the disk full?" in sentence
    assert sorted(file.name for file in (path / "checkpoints").iterdir()) == [
        "step-00000000.safetensors",
        "step-00000010.safetensors",
    ]
    assert resume(path, {}).progress.step == 20


# ── compiling ──────────────────────────────────────────────────────────────────────────────────────────────────


class Broken(nn.Module):
    """What torch.compile gives without a compiler: it fails at the first call."""

    def forward(self, tokens: Tensor) -> Tensor:
        raise RuntimeError("InvalidCxxCompiler: no working C++ compiler found\nand ten lines more")


class Counting(nn.Module):
    """A stand-in for a compiled model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._orig_mod, self.calls = model, 0

    def __len__(self) -> int:
        raise TypeError("GPT does not support len(), as torch's compiled models answer")

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        return self._orig_mod(tokens)


@pytest.mark.parametrize("error", ["at once", "at the first call"])
def test_without_a_compiler_training_goes_on(
    tiny: Tables, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], error: str
) -> None:
    def compile(model: GPT) -> nn.Module:
        if error == "at once":
            raise RuntimeError
        return Broken()

    plain = begun(tiny, run={"name": "plain"}, train={"max_steps": 3})
    monkeypatch.setattr(torch, "compile", compile)
    capfd.readouterr()
    run = begun(tiny, run={"compile": True}, train={"max_steps": 3})
    reason = "RuntimeError" if error == "at once" else "InvalidCxxCompiler: no working C++ compiler found"
    said = capfd.readouterr().err
    assert said.count("torch.compile does not work here") == 1
    assert f"torch.compile does not work here ({reason}): training goes on without it\n" in said
    assert_same_bits(plain.path, run.path)


def test_a_compiled_run_saves_plain_names(tiny: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    handles: list[Counting] = []
    monkeypatch.setattr(torch, "compile", lambda model: handles.append(Counting(model)) or handles[-1])
    run = begun(tiny, run={"compile": True}, train={"max_steps": 3})
    assert handles[0].calls == 1 + 3, "once to try, then each step"
    tensors = find_checkpoint(run.path, "last").tensors("model")
    assert "token_embedding.weight" in tensors and not any("_orig_mod" in name for name in tensors)
    more = resume(run.path, {"run": {"compile": "false"}, "train": {"max_steps": "4"}})
    assert more.progress.step == 4
