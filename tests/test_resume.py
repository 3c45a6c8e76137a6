"""Runs that go on: to the bit after any interruption, with a sentence where they can't, or as the start of another."""

from pathlib import Path

import numpy as np
import pytest
from conftest import Tables
from tiny_runs import after, assert_same_bits, begun, rows, told

from minigpt.checkpoint import find_checkpoint, read_checkpoint, save_checkpoint
from minigpt.config import merge, read_toml, validate
from minigpt.launch import resume, start, verify

# ── going on ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("optimizer", "tied"), [("muon", True), ("muon", False), ("adamw", False)])
def test_interrupted_after_every_step_a_run_ends_in_the_same_bits(
    tiny: Tables, english: str, optimizer: str, tied: bool
) -> None:
    """Dropout, accumulation, validations and an epoch's end lie on the way; each step starts from a file."""
    steps = 10
    changes = {
        "data": {"val_fraction": 0.9},
        "model": {"dropout": 0.1, "tie_embeddings": tied},
        "optim": {"name": optimizer, "warmup_steps": 3, "weight_decay": 0.1},
        "train": {"max_steps": steps, "grad_accumulation": 2, "eval_interval": 4, "save_interval": 1, "keep_last": 0},
    }
    settings = merge(tiny, changes)
    whole = begun(settings, run={"name": "whole"})
    cut = begun(settings, run={"name": "cut"}, stop=after(0))
    for step in range(steps):
        cut = resume(cut.path, {}, stop=after(1))
        assert cut.progress.step == step + 1
    assert cut.progress.step == whole.progress.step == steps
    assert_same_bits(whole.path, cut.path)
    assert rows(cut.path) == rows(whole.path)
    assert [row["step"] for row in rows(cut.path)] == list(range(1, steps + 1))
    assert cut.progress.tokens_seen > 2 * 0.1 * len(english), "two epochs have ended on the way"


@pytest.mark.parametrize("killed_at", [3, 7])
def test_a_killed_run_goes_on_from_its_last_checkpoint(tiny: Tables, killed_at: int) -> None:
    """What it had logged past the checkpoint is logged once in the end."""
    settings = {"max_steps": 12, "eval_interval": 4, "keep_last": 0}

    def kill() -> bool:
        if next(asks) == killed_at:
            raise KeyboardInterrupt
        return False

    asks = iter(range(100))
    whole = begun(tiny, train=settings, run={"name": "whole"})
    with pytest.raises(KeyboardInterrupt):
        begun(tiny, train=settings, stop=kill)
    path = whole.path.with_name("tiny")
    assert [row["step"] for row in rows(path)] == list(range(1, killed_at + 1))
    resume(path, {})
    assert_same_bits(whole.path, path)
    assert rows(path) == rows(whole.path)


def test_more_steps_after_the_end(tiny: Tables, capfd: pytest.CaptureFixture[str]) -> None:
    """Under a constant rate the longer run is the one that was asked for at once."""
    constant = {"schedule": "constant"}
    whole = begun(tiny, optim=constant, train={"max_steps": 14, "eval_interval": 7}, run={"name": "whole"})
    short = begun(tiny, optim=constant, train={"max_steps": 7, "eval_interval": 7})
    assert told(resume, short.path, {}) == (
        f"{short.path}: finished, at step 7 of 7; to go on give more steps, such as --train.max-steps 14"
    )
    capfd.readouterr()
    longer = resume(short.path, {"train": {"max_steps": "14"}})
    assert "train.max_steps: 7 -> 14" in capfd.readouterr().err
    assert_same_bits(whole.path, longer.path)
    assert validate(read_toml(longer.path / "config.toml")).train.max_steps == 14


def test_an_early_end_may_be_gone_past(tiny: Tables) -> None:
    settings = {"max_steps": 12, "eval_interval": 2, "early_stop": 2}
    ended = begun(tiny, optim={"lr": 0.0, "adam_lr": 0.0}, train=settings)
    assert ended.progress.step == 6
    assert resume(ended.path, {"train": {"early_stop": 0}}).progress.step == 12


def test_what_changes_on_the_way_is_told_and_what_may_not_is_refused(
    tiny: Tables, capfd: pytest.CaptureFixture[str]
) -> None:
    run = begun(tiny, stop=after(2))
    refused = told(resume, run.path, {"model": {"n_layer": "4"}, "run": {"seed": "9"}})
    assert "model.n_layer: this run has 1, not 4" in refused
    assert "run.seed: this run has 1, not 9" in refused
    assert told(resume, run.path, {"train": {"max_step": "4"}}).endswith("did you mean train.max_steps?")
    capfd.readouterr()
    resume(run.path, {"optim": {"lr": "1e-3"}, "train": {"eval_interval": "5"}})
    said = capfd.readouterr().err
    assert "optim.lr: 0.03 -> 0.001" in said
    assert "train.eval_interval: 10 -> 5" in said
    assert rows(run.path)[2]["lr"] == pytest.approx(1e-3 * 18 / 20)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            "the clock carries her blue kite again.\n",
            "the text has changed since the run began; to train on with another",
        ),
        (
            "ΩΨ",
            "can't be read as it was when the run began: characters that the tokenizer has never seen: 'Ψ' (U+03A8)",
        ),
    ],
)
def test_a_changed_text_is_noticed(tiny: Tables, change: str, sentence: str) -> None:
    run = begun(tiny, stop=after(2))
    with Path(tiny["data"]["source"]).open("a", encoding="utf-8") as file:
        file.write(change)
    assert told(resume, run.path, {}).startswith(f"{tiny['data']['source']}: {sentence}")


@pytest.mark.parametrize("length", [0, 1000, -1])
def test_a_damaged_checkpoint_is_passed_over(tiny: Tables, capfd: pytest.CaptureFixture[str], length: int) -> None:
    """Empty, cut, or with one changed byte: the one before is taken, and the end is the same."""
    whole = begun(tiny, train={"max_steps": 9, "eval_interval": 3}, run={"name": "whole"})
    run = begun(tiny, train={"max_steps": 9, "eval_interval": 3}, stop=after(6))
    newest = run.path / "checkpoints" / "step-00000006.safetensors"
    content = bytearray(newest.read_bytes())
    content[-1] ^= 1
    newest.write_bytes(content if length < 0 else content[:length])
    capfd.readouterr()
    resume(run.path, {})
    said = capfd.readouterr().err
    assert f"{newest}: damaged" in said and "(passed over: using step 3)" in said
    assert_same_bits(whole.path, run.path)


def test_settings_of_a_resumption_hold_though_it_was_stopped_at_once(
    tiny: Tables, capfd: pytest.CaptureFixture[str]
) -> None:
    """More steps are asked for, and Ctrl-C comes before the first of them: the next resumption knows of it."""
    run = begun(tiny, train={"max_steps": 6, "eval_interval": 3})
    assert resume(run.path, {"train": {"max_steps": "9"}, "optim": {"lr": "0.01"}}, stop=after(0)).progress.step == 6
    capfd.readouterr()
    again = resume(run.path, {})
    assert again.progress.step == 9 and again.config.optim.lr == 0.01
    assert "max_steps" not in capfd.readouterr().err.split("goes on")[1], "nothing new is asked for"
    (run.path / "config.toml").write_text("nonsense", encoding="utf-8")
    assert resume(run.path, {"train": {"max_steps": "10"}}).progress.step == 10, "the checkpoint knows it too"


def test_a_configuration_edited_in_what_a_run_keeps_is_refused(tiny: Tables) -> None:
    run = begun(tiny, stop=after(2))
    file = run.path / "config.toml"
    file.write_text(file.read_text(encoding="utf-8").replace("n_layer = 1", "n_layer = 2"), encoding="utf-8")
    assert told(resume, run.path, {}) == f"{file}: model.n_layer = 2, but the checkpoint has 1; a run keeps this"


def test_a_changed_optimizer_is_told(tiny: Tables, capfd: pytest.CaptureFixture[str]) -> None:
    run = begun(tiny, stop=after(2))
    resume(run.path, {"optim": {"name": "adamw"}})
    said = capfd.readouterr().err
    assert "optim.name: muon -> adamw" in said and "begin with an empty optimizer state" in said
    assert "optim.lr = 0.03 is high for adamw" in said


def test_a_checkpoint_that_fits_nothing_is_damaged(tiny: Tables) -> None:
    """Its checksum is right: it was made so."""
    run = begun(tiny, stop=after(2))
    saved = find_checkpoint(run.path, "last")
    arrays = {f"{kind}.{n}": a for kind in ("model", "optimizer") for n, a in saved.tensors(kind).items()}
    header = {key: value for key, value in saved.metadata.items() if key != "checksum"}
    save_checkpoint(saved.path, arrays, {k: v for k, v in header.items() if k != "tokens_seen"})
    assert "its header lacks tokens_seen" in told(resume, run.path, {})
    name = "model.blocks.0.attn.query_linear.weight"
    damaged = f"{saved.path}: damaged: tensor {name.removeprefix('model.')} "
    save_checkpoint(saved.path, arrays | {name: arrays[name][:, :-1]}, header)
    assert told(resume, run.path, {}).startswith(f"{damaged}has shape (32, 31)")
    del arrays[name]
    save_checkpoint(saved.path, arrays, header)
    assert told(resume, run.path, {}).startswith(f"{damaged}is missing")


# ── weights of another run ─────────────────────────────────────────────────────────────────────────────────────


def test_weights_and_tokenizer_may_come_from_another_run(tiny: Tables, tmp_path: Path) -> None:
    parent = begun(tiny, run={"name": "bard.v1"}, train={"max_steps": 10})
    other = tmp_path / "other.txt"
    other.write_text("the ferryman counts plums near the mill. " * 30, encoding="utf-8")
    overrides: Tables = {"data": {"source": str(other)}, "train": {"max_steps": "5"}, "optim": {"name": "adamw"}}
    child = start(overrides, init_from=parent.path, source_given=True)
    assert child.path.name == "other"
    assert child.progress.step == 5
    first, given = find_checkpoint(child.path, "0"), find_checkpoint(parent.path, "best")
    assert first.tokenizer == given.tokenizer
    for name, array in given.tensors("model").items():
        assert np.array_equal(array, first.tensors("model")[name])
    assert first.metadata["tokens_seen"] == 0
    assert not any("momentum" in name for name in find_checkpoint(child.path, "last").tensors("optimizer"))

    assert start({}, init_from=parent.path).path.name == "bard.v1-next"
    refused = told(start, {"model": {"n_layer": "2"}, "data": {"tokenizer": "bpe"}}, init_from=parent.path)
    assert f"model.n_layer: {given.path} has 1, not 2" in refused
    assert f"data.tokenizer: {given.path} has 'char', not 'bpe'" in refused
    with other.open("a", encoding="utf-8") as file:
        file.write("Ω")
    assert "'Ω' (U+03A9)" in told(start, overrides, init_from=parent.path, source_given=True)
    named = {"data": {"unseen": "skip"}, "run": {"name": "skipping"}}
    skipping = start(merge(overrides, named), init_from=parent.path, source_given=True)
    assert skipping.progress.step == 5


# ── replaying ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_training_anew_gives_the_saved_bits(tiny: Tables) -> None:
    run = begun(tiny, model={"dropout": 0.1}, train={"max_steps": 9, "eval_interval": 3, "keep_last": 0})
    assert verify(run.path, 6) == (3, [])
    assert "no checkpoint of step 5; there are steps 0, 3, 6, 9" in told(verify, run.path, 5)
    assert "no checkpoint before step 0" in told(verify, run.path, 0)

    longer = resume(run.path, {"train": {"max_steps": "15", "eval_interval": "3"}})
    assert verify(longer.path, 12) == (9, []), "the settings of step 9 on"
    for step in (9, 12):
        (run.path / "checkpoints" / f"step-{step:08}.safetensors").unlink()
    assert told(verify, run.path, 15).startswith(
        f"{run.path}: the settings changed at step 9, and the last checkpoint before step 15 is of step 6"
    )

    saved = find_checkpoint(run.path, "6")
    arrays = {f"{kind}.{n}": a for kind in ("model", "optimizer") for n, a in saved.tensors(kind).items()}
    arrays["model.token_embedding.weight"][0, 0] += 1e-6
    save_checkpoint(saved.path, arrays, {k: v for k, v in saved.metadata.items() if k != "checksum"})
    assert read_checkpoint(saved.path, verify=True).step == 6, "a forged file with a right checksum"
    assert verify(run.path, 6) == (3, ["model.token_embedding.weight"])
