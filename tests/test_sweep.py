"""Grids of trainings: cells, means, what is skipped, gone on with, or refused; and runs side by side."""

import csv
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
from conftest import Tables
from PIL import Image
from running import ROOT, Script, as_options
from tiny_runs import begun, told

from minigpt.checkpoint import find_checkpoint
from minigpt.studies.sweep import Mean, cells, is_finished, run_cells, saved_checkpoint

SWEEP = ROOT / "scripts" / "sweep.py"


@pytest.fixture
def options(tiny: Tables, tmp_path: Path) -> list[Any]:
    """Words for a sweep of two cells, 6 steps each, in ``runs/tiny``."""
    empty = tmp_path / "empty.toml"
    empty.write_text("", encoding="utf-8")
    tiny["train"] |= {"max_steps": 6, "eval_interval": 3}
    return [empty, *as_options(tiny)]


def test_cells() -> None:
    found = cells(["optim.lr=1e-3, 3e-3", "model.n-layer=1,2"], 2)
    assert [cell.name for cell in found[:3]] == [
        "lr-1e-3_n_layer-1_seed-1", "lr-1e-3_n_layer-1_seed-2", "lr-1e-3_n_layer-2_seed-1",
    ]  # fmt: skip
    assert len(found) == 8 and [cell.name for cell in cells([], 2)] == ["seed-1", "seed-2"]
    tables = found[2].overrides({"model": {"d_model": 8}}, Path("runs/x"))
    assert tables["model"] == {"d_model": 8, "n_layer": "2"} and tables["optim"] == {"lr": "1e-3"}
    assert tables["run"] == {"dir": str(Path("runs/x")), "name": found[2].name, "seed": 1}
    for word in ("optim.lr", "lr=3", "optim.lr=", "optim.lr=,"):
        assert told(cells, [word], 1).startswith(f"--grid {word}: must be a key and its values")
    assert "is set twice" in told(cells, ["optim.lr=1", "optim.lr=2"], 1)
    assert "by the sweep itself" in told(cells, ["run.seed=1,2"], 1)
    assert "by the sweep itself" in told(cells, ["run.overwrite=true"], 1)


def test_no_two_cells_have_one_name() -> None:
    long = [f"optim.{key}=0.125" for key in ("lr", "adam_lr", "beta1", "beta2", "eps", "momentum", "weight_decay")]
    found = cells([*long, "optim.min_lr_fraction=0.01,0.02"], 2)
    assert len({cell.name for cell in found}) == 4 and all(len(cell.name) < 100 for cell in found)
    found = cells(["data.source=x/a.txt,x_a.txt"], 1)
    assert len({cell.name for cell in found}) == 2 and all("/" not in cell.name for cell in found)


def test_means() -> None:
    mean = Mean.of([1.0, 2.0, 4.0])
    assert mean.mean == pytest.approx(7 / 3) and mean.error == pytest.approx(math.sqrt(7 / 3) / math.sqrt(3))
    assert str(mean) == "2.3333 ± 0.8819" and str(Mean.of([0.5])) == "0.5000"
    assert str(Mean.of([0.5, math.nan])) == "nan"


def test_a_sweep_trains_skips_and_compares(script: Script, options: list[Any], tmp_path: Path) -> None:
    grid = ["--grid", "optim.lr=0.01,0.03", "--grid", "model.kind=gpt", "--seeds", "2"]
    first = script(SWEEP, *options, *grid)
    assert first.code == 0, first.err
    assert [line.split()[0] for line in first.err.splitlines()] == [f"{n}/4" for n in (1, 1, 2, 2, 3, 3, 4, 4)]
    head, *lines = first.out.splitlines()
    assert head.split() == ["lr", "kind", "seeds", "parameters", "loss", "bits/byte", "seconds"]
    losses = [float(line.split("±")[0].split()[-1]) for line in lines]
    assert len(lines) == 2 and losses == sorted(losses) and all("±" in line for line in lines)
    runs = sorted((tmp_path / "runs" / "tiny").iterdir())
    assert [run.name for run in runs] == [f"lr-0.0{n}_kind-gpt_seed-{s}" for n in (1, 3) for s in (1, 2)]
    mean = sum(find_checkpoint(run, "best").val_loss for run in runs[2:]) / 2
    assert any(line.split()[0] == "0.03" and f"{mean:.4f}" in line for line in lines)

    files = {path: path.stat().st_mtime_ns for run in runs for path in run.rglob("*.safetensors")}
    table, picture = tmp_path / "out.csv", tmp_path / "out.png"
    again = script(SWEEP, *options, *grid, "--csv", table, "--picture", picture, "--json")
    assert {path: path.stat().st_mtime_ns for run in runs for path in run.rglob("*.safetensors")} == files
    assert [run["run"] for run in again.json["runs"]] == list(map(str, runs))
    assert again.json["runs"][0]["accuracy"] is None and again.json["runs"][0]["steps"] == 6
    with table.open(encoding="utf-8", newline="") as file:
        written = list(csv.DictReader(file))
    assert [row["run"] for row in written] == list(map(str, runs)) and float(written[0]["loss"]) > 0
    expected = [("0.01", "1"), ("0.01", "2"), ("0.03", "1"), ("0.03", "2")]
    assert [(row["optim.lr"], row["seed"]) for row in written] == expected
    assert again.json["runs"][3]["optim.lr"] == "0.03" and again.json["runs"][3]["failed"] is None
    assert "is trained" not in again.err
    with Image.open(picture) as drawn:
        assert drawn.size == (900, 540)

    other = script(SWEEP, *options, *grid, "--optim.momentum", "0.5")
    assert other.code == 2 and "was trained with optim.momentum = 0.95, not 0.5" in other.err

    side = script(SWEEP, "--runs", *runs, tmp_path)
    assert side.code == 0 and side.err == f"{tmp_path}: not a run's folder, passed over\n"
    assert all(str(run) in side.out for run in runs) and "optim.lr = 0.03" in side.out


def test_what_was_interrupted_is_gone_on_with(tiny: Tables, tmp_path: Path) -> None:
    todo, said = cells(["train.batch_size=4,8"], 1), []
    folder, asked = tmp_path / "runs" / "sweep", {**tiny, "run": {"threads": 1, "device": "cpu"}}

    def sweep(stop: Any) -> list[Any]:
        return run_cells(todo, asked, folder, config_path=None, stop=stop, say=said.append)

    asked_so_far = itertools.count()
    assert len(sweep(lambda: next(asked_so_far) > 34)) == 1, "each training asks before each of its 20 steps"
    first, second = (folder / cell.name for cell in todo)
    saved = saved_checkpoint(second)
    assert saved and 0 < saved.step < 20 and not is_finished(second, saved)
    found = sweep(lambda: False)
    assert len(found) == 2 and find_checkpoint(second, "last").step == 20
    assert find_checkpoint(first, "last").step == 20
    whole = begun(tiny, train={"batch_size": 8})
    tensors, same = (find_checkpoint(run, "last").tensors("model") for run in (second, whole.path))
    assert all(tensors[name].tobytes() == same[name].tobytes() for name in tensors), "as if never interrupted"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--grid", "optm.lr=1"], "lr-1_seed-1: optm: unknown table; did you mean optim?"),
        (["--grid", "optim.lr=x"], "lr-x_seed-1: optim.lr = x: must be a number, at least 0"),
        (["--grid", "model.kind=gpt,lstm"], "kind-lstm_seed-1: optim.name = muon: "),
        (["--seeds", "0"], "--seeds 0: must be at least 1"),
        (["--runs", "."], "--runs compares runs that there are: leave out the TOML file"),
        (["--csv", "no/such/file.csv"], "--csv no/such/file.csv: can't be written"),
        (["--csv", "."], "--csv .: can't be written"),
        (["--picture", "a.jpg"], "--picture a.jpg: the name must end in .png"),
        (["--run.seed", "x"], "run.seed = x: must be a whole number"),
        (["--grid", "optim.lr=0.01,0.010"], "lr-0.010_seed-1: is lr-0.01_seed-1 once more"),
        (
            ["--grid", "data.source=task:copy,task:foo"],
            "source-task_foo_02022a7a_seed-1: data.source = task:foo: no such task",
        ),
        (["--train.minutes", "1"], "seed-1: train.minutes chooses a network for each run"),
    ],
)
def test_mistakes_are_told_before_anything_is_trained(
    script: Script, options: list[Any], tmp_path: Path, words: list[str], sentence: str
) -> None:
    answer = script(SWEEP, *options, *words)
    assert answer.code == 2 and answer.err.startswith(f"error: {sentence}"), answer.err
    assert not (tmp_path / "runs").exists()


def test_the_file_s_own_run_table_counts(script: Script, tiny: Tables, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(f"[run]\nseed = 7\ndir = '{tmp_path}/elsewhere'\n", encoding="utf-8")
    words = as_options({**tiny, "run": {"threads": 1}, "train": {"max_steps": 2}})
    assert script(SWEEP, file, *words).code == 0
    assert [run.name for run in (tmp_path / "elsewhere" / "mine-sweep").iterdir()] == ["seed-7"]


def test_runs_that_were_never_validated_have_a_table(script: Script, options: list[Any], tmp_path: Path) -> None:
    picture = tmp_path / "n.png"
    answer = script(SWEEP, *options, "--data.val-fraction", "0", "--seeds", "2", "--picture", picture)
    assert answer.code == 0 and "nan" in answer.out and "nothing to draw" in answer.err


def test_a_training_that_stops_itself_is_a_row(script: Script, options: list[Any]) -> None:
    answer = script(SWEEP, *options, "--grid", "optim.lr=0.01,1e30", "--optim.grad-clip", "0")
    assert answer.code == 1, answer.err
    assert "stopped: step " in answer.err and "(1 stopped)" in answer.out
    assert answer.out.splitlines()[1].split()[0] == "0.01", "what is no number comes last"
