"""The checkpoint file: exact, complete or absent, readable without running anything."""

import json
import math
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from minigpt.checkpoint import (
    best,
    checkpoint_path,
    find_checkpoint,
    last,
    list_checkpoints,
    prune,
    read_checkpoint,
    save_checkpoint,
)
from minigpt.config import Config
from minigpt.errors import UserError

ARRAYS = {
    "model.lm_head.weight": np.arange(12, dtype=np.float32).reshape(3, 4) / 7,
    "model.transposed": np.arange(6, dtype=np.float32).reshape(2, 3).T,
    "model.sliced": np.arange(20, dtype=np.float32)[::3],
    "model.gain": np.float32(0.5).reshape(()),
    "model.none": np.zeros((0, 4), np.float32),
    "optimizer.step": np.int64(7).reshape(()),
    "optimizer.half": np.array([1.5, np.inf], np.float16),
    "optimizer.big_endian": np.array([1.0, 2.0], ">f4"),
}


def save(folder: Path, step: int, val_loss: float = math.nan, **more) -> Path:
    """One small checkpoint of ``step`` in ``folder``."""
    config = Config().with_values(run={"name": "é中😀"}).model_dump()
    metadata = {"step": step, "config": config, "tokenizer": {"kind": "byte"}, "val_loss": val_loss, **more}
    path = checkpoint_path(folder, step)
    save_checkpoint(path, ARRAYS, metadata)
    return path


def run(folder: Path, losses: dict[int, float]) -> Path:
    """A run folder with a checkpoint for each step."""
    for step, loss in losses.items():
        save(folder / "checkpoints", step, loss)
    return folder


def steps(folder: Path) -> list[int]:
    return [checkpoint.step for checkpoint in list_checkpoints(folder / "checkpoints")[0]]


def told(call, *args, **options) -> str:
    with pytest.raises(UserError) as caught:
        call(*args, **options)
    return str(caught.value)


# ── what goes in comes out ─────────────────────────────────────────────────────────────────────────────────────


def test_arrays_come_back_bit_for_bit(tmp_path):
    checkpoint = read_checkpoint(save(tmp_path, 500), verify=True)
    for kind in ("model", "optimizer"):
        arrays = checkpoint.tensors(kind)
        assert {f"{kind}.{name}" for name in arrays} == {name for name in ARRAYS if name.startswith(kind)}
        for name, array in arrays.items():
            saved = ARRAYS[f"{kind}.{name}"]
            assert (array.shape, array.dtype) == (saved.shape, saved.dtype.newbyteorder("="))
            np.testing.assert_array_equal(array, saved)


def test_header_comes_back(tmp_path):
    checkpoint = read_checkpoint(save(tmp_path, 500, 1.25, tokens_seen=np.int64(3), seconds=np.float32(0.5), best=None))
    assert (checkpoint.step, checkpoint.val_loss, checkpoint.tokenizer) == (500, 1.25, {"kind": "byte"})
    assert checkpoint.config == Config().with_values(run={"name": "é中😀"})
    assert (checkpoint.metadata["tokens_seen"], checkpoint.metadata["seconds"]) == (3, 0.5)
    assert checkpoint.metadata["versions"].keys() == {"minigpt", "numpy", "torch"}
    assert checkpoint.path.name == "step-00000500.safetensors"


@pytest.mark.parametrize("loss", [math.nan, math.inf, np.float64("nan")])
def test_a_loss_that_is_no_number_is_null_in_the_file_and_nan_here(tmp_path, loss):
    path = save(tmp_path, 1, loss, train_loss=math.inf)
    checkpoint = read_checkpoint(path, verify=True)
    assert math.isnan(checkpoint.val_loss)
    assert checkpoint.metadata["train_loss"] is None


def test_equal_content_makes_equal_files(tmp_path):
    assert save(tmp_path / "a", 1, 2.0).read_bytes() == save(tmp_path / "b", 1, 2.0).read_bytes()


def test_safetensors_alone_reads_the_file(tmp_path):
    path = save(tmp_path, 1)
    assert set(load_file(path)) == set(ARRAYS)
    length = int.from_bytes(path.read_bytes()[:8], "little")
    header = json.loads(path.read_bytes()[8 : 8 + length])
    assert header["__metadata__"].keys() == {"minigpt"}
    assert json.loads(header["__metadata__"]["minigpt"])["format"] == 1


@pytest.mark.parametrize("name", ["model._orig_mod.x", "model.module.x", "module.model.x", "x"])
def test_names_of_wrapped_models_are_refused(tmp_path, name):
    with pytest.raises(AssertionError, match=name):
        save_checkpoint(tmp_path / "x.safetensors", {name: np.zeros(1)}, {})
    assert not list(tmp_path.iterdir())


def test_reading_needs_no_torch():
    code = "import sys, minigpt.checkpoint, minigpt.run; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ── damage ─────────────────────────────────────────────────────────────────────────────────────────────────────


def rewrite_header(path: Path, **changes) -> None:
    """Save the file anew with a changed header."""
    header = {**read_checkpoint(path).metadata, **changes}
    save_file(load_file(path), path, {"minigpt": json.dumps(header)})


def test_every_length_of_a_cut_file_is_noticed(tmp_path):
    path = save(tmp_path, 1)
    content = path.read_bytes()
    for length in [*range(0, len(content), 97), len(content) - 1]:
        path.write_bytes(content[:length])
        assert str(path) in told(read_checkpoint, path)


def test_every_changed_byte_is_noticed(tmp_path):
    path = save(tmp_path, 1, 2.0)
    content = path.read_bytes()
    for position in [*range(0, len(content), 53), *range(len(content) - 60, len(content))]:
        path.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
        assert str(path) in told(read_checkpoint, path, verify=True)


def test_a_changed_header_is_noticed(tmp_path):
    path = save(tmp_path, 1, 2.0)
    rewrite_header(path, val_loss=1.0)
    assert read_checkpoint(path).val_loss == 1.0
    assert "does not match its checksum" in told(read_checkpoint, path, verify=True)


def test_files_of_others_are_told_apart(tmp_path):
    path = save(tmp_path, 1)
    rewrite_header(path, format=2)
    assert "has format 2, this minigpt reads format 1" in told(read_checkpoint, path)
    rewrite = tmp_path / "foreign.safetensors"
    save_file({"weight": np.zeros(3)}, rewrite)
    assert f"{rewrite}: holds arrays, but is not a checkpoint" in told(read_checkpoint, rewrite)
    text = tmp_path / "text.txt"
    text.write_text("To be, or not to be" * 100, encoding="utf-8")
    for wrong in (text, tmp_path, tmp_path / "missing.safetensors"):
        assert str(wrong) in told(read_checkpoint, wrong)


def test_configuration_of_another_version_is_told(tmp_path):
    path = save(tmp_path, 1)
    config = Config().model_dump()
    rewrite_header(path, config={**config, "model": {**config["model"], "n_experts": 4}}, versions={"minigpt": "9.9"})
    sentence = told(read_checkpoint, path)
    assert str(path) in sentence
    assert "minigpt 9.9" in sentence
    assert "model.n_experts: unknown key" in sentence


def test_a_header_without_its_parts_is_damaged(tmp_path):
    path = save(tmp_path, 1)
    rewrite_header(path, tokenizer=1)
    assert "damaged" in told(read_checkpoint, path)


def test_a_file_gone_after_its_header_was_read(tmp_path):
    checkpoint = read_checkpoint(save(tmp_path, 1))
    checkpoint.path.unlink()
    assert "no such file" in told(checkpoint.tensors, "model")


# ── which one ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_best_and_last_are_derived(tmp_path):
    run(tmp_path, {0: 5.0, 10: 2.0, 20: math.nan, 30: 2.0, 40: 3.0})
    found, complaints = list_checkpoints(tmp_path / "checkpoints")
    assert not complaints
    winner = best(found)
    assert winner is not None
    assert (last(found).step, winner.step) == (40, 10)
    assert best([checkpoint for checkpoint in found if checkpoint.step == 20]) is None


@pytest.mark.parametrize(("which", "step"), [("best", 10), ("last", 20), ("0", 0), ("10", 10), ("00000020", 20)])
def test_find(tmp_path, which, step):
    run(tmp_path, {0: 5.0, 10: 2.0, 20: 3.0})
    assert find_checkpoint(tmp_path, which).step == step
    file = checkpoint_path(tmp_path / "checkpoints", step)
    assert find_checkpoint(file, which).step == step
    assert f"this file is step {step}, not 7" in told(find_checkpoint, file, "7")


def test_without_validation_the_best_is_the_last(tmp_path):
    assert find_checkpoint(run(tmp_path, {0: math.nan, 10: math.nan})).step == 10


def test_what_there_is_instead(tmp_path):
    bard = run(tmp_path / "bard", {0: 5.0, 10: 2.0})
    run(tmp_path / "tales", {0: 5.0})
    assert "there are steps 0, 10" in told(find_checkpoint, bard, "7")
    assert "'worst': must be best, last, or the number of a step" in told(find_checkpoint, bard, "worst")
    for wrong in (tmp_path, tmp_path / "brad"):
        sentence = told(find_checkpoint, wrong)
        assert str(wrong) in sentence
        assert str(bard) in sentence
        assert str(tmp_path / "tales") in sentence
    empty = tmp_path / "empty"
    (empty / "checkpoints").mkdir(parents=True)
    assert "no checkpoint yet" in told(find_checkpoint, empty)
    assert "holds no runs" in told(find_checkpoint, empty / "checkpoints")


@pytest.mark.parametrize("length", [0.0, 0.5])
def test_damaged_files_are_passed_over_and_named(tmp_path, length):
    run(tmp_path, {0: 5.0, 10: 3.0, 20: 2.0})
    newest = checkpoint_path(tmp_path / "checkpoints", 20)
    newest.write_bytes(newest.read_bytes()[: int(newest.stat().st_size * length)])
    for which in ("best", "last"):
        said: list[str] = []
        assert find_checkpoint(tmp_path, which, say=said.append).step == 10
        (sentence,) = said
        assert str(newest) in sentence
        assert sentence.endswith("using step 10)")
    for step in (0, 10):
        checkpoint_path(tmp_path / "checkpoints", step).write_bytes(b"")
    sentence = told(find_checkpoint, tmp_path, "last")
    assert all(str(checkpoint_path(tmp_path / "checkpoints", step)) in sentence for step in (0, 10, 20))


def test_one_changed_byte_is_passed_over_when_verified(tmp_path):
    run(tmp_path, {0: 5.0, 10: 3.0})
    newest = checkpoint_path(tmp_path / "checkpoints", 10)
    content = bytearray(newest.read_bytes())
    content[-1] ^= 1
    newest.write_bytes(content)
    assert find_checkpoint(tmp_path, "last").step == 10
    assert find_checkpoint(tmp_path, "last", verify=True, say=[].append).step == 0


def test_other_files_are_no_checkpoints(tmp_path):
    run(tmp_path, {10: 3.0})
    for name in (".step-00000020.tmp", "step-20.safetensors", "step-00000020.safetensors.bak", "notes.txt"):
        (tmp_path / "checkpoints" / name).write_bytes(b"x")
    assert steps(tmp_path) == [10]


@pytest.mark.parametrize(
    ("keep_last", "kept"),
    [(0, [0, 10, 20, 30, 40, 50]), (1, [0, 20, 50]), (2, [0, 20, 40, 50]), (9, [0, 10, 20, 30, 40, 50])],
)
def test_prune_keeps_the_first_the_best_and_the_last(tmp_path, keep_last, kept):
    run(tmp_path, {0: 5.0, 10: 3.0, 20: 2.0, 30: math.nan, 40: 2.5, 50: math.nan})
    (tmp_path / "checkpoints" / ".step-00000020.tmp").write_bytes(b"left by a killed process")
    deleted = prune(tmp_path / "checkpoints", keep_last)
    assert steps(tmp_path) == kept
    assert len(deleted) == 6 - len(kept)
    assert len(list((tmp_path / "checkpoints").iterdir())) == len(kept)


# ── faults while saving ────────────────────────────────────────────────────────────────────────────────────────

SAVE_LOOP = """
import sys
from pathlib import Path
import numpy as np
from minigpt.checkpoint import checkpoint_path, save_checkpoint
from minigpt.config import Config
folder, count = Path(sys.argv[1]), int(sys.argv[2])
for step in range(count):
    metadata = {"step": step, "config": Config().model_dump(), "tokenizer": {}}
    save_checkpoint(checkpoint_path(folder, step), {"model.w": np.full(200_000, step, np.float32)}, metadata)
"""


def test_killed_while_saving_leaves_only_whole_files(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", SAVE_LOOP, str(tmp_path), "100000"])
    try:
        while not checkpoint_path(tmp_path, 20).exists():
            assert process.poll() is None
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()
    found, complaints = list_checkpoints(tmp_path, verify=True)
    assert not complaints
    assert len(found) > 20
    prune(tmp_path, 1)
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000000.safetensors", last(found).path.name}


LIMITED = """
import resource, sys
from pathlib import Path
import numpy as np
from minigpt.checkpoint import checkpoint_path, save_checkpoint
from minigpt.config import Config
from minigpt.errors import UserError
folder = Path(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
for step in (1, 2):
    try:
        metadata = {"step": step, "config": Config().model_dump(), "tokenizer": {}}
        save_checkpoint(checkpoint_path(folder, step), {"model.w": np.zeros(2**19, np.float32)}, metadata)
    except UserError as error:
        print(error)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no file size limits")
def test_a_full_disk_is_told_and_harms_nothing(tmp_path):
    old = save(tmp_path, 1).read_bytes()
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, encoding="utf-8", check=True
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    for step, line in enumerate(lines, 1):
        assert line.startswith(f"could not write {checkpoint_path(tmp_path, step)} (")
        assert line.endswith("): is the disk full?")
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001.safetensors"]
    assert checkpoint_path(tmp_path, 1).read_bytes() == old


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    assert "could not write" in told(save, tmp_path / "file" / "checkpoints", 1)
