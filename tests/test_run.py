"""The run folder: never overwritten, never shared, resumable."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minigpt.config import Config, read_toml, validate
from minigpt.errors import UserError
from minigpt.run import RunFolder, create_run, open_run, resume_config, run_name


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config().with_values(run={"dir": str(tmp_path / "runs"), "name": "bard"})


def told(call, *args, **options) -> str:
    with pytest.raises(UserError) as caught:
        call(*args, **options)
    return str(caught.value)


def finished_run(config: Config) -> Path:
    with create_run(config) as run:
        run.checkpoints.mkdir()
        (run.checkpoints / "step-00000000.safetensors").write_bytes(b"weights")
    return run.path


# ── names ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("tales", "tales"),
        ("other.txt", "other"),
        ("my-texts/", "my-texts"),
        ("texts/日本語.txt", "日本語"),
        ("texts/*.txt", "texts"),
        ("texts/**/[ab]?.md", "texts"),
        ("a/con.txt", "_con"),
        ("a/what: a book?.txt", "a"),
        ("a/one<two>.txt", "one_two_"),
    ],
)
def test_a_run_is_named_by_its_source(source, name):
    config = Config().with_values(data={"source": source})
    assert run_name(config, "configs/tiny.toml", True) == name


def test_a_run_is_named_by_its_config_or_as_told():
    config = Config()
    assert run_name(config, None, False) == "tales"
    assert run_name(config, Path("configs/shakespeare_char.toml"), False) == "shakespeare_char"
    assert run_name(config.with_values(run={"name": "my run"}), "configs/tiny.toml", True) == "my run"


@pytest.mark.parametrize("name", ["a/b", "..", ".", "a\\b", "nul", "a.", " a", "x" * 200, "a:b"])
def test_names_that_are_no_folder_names_are_refused(name):
    assert told(run_name, Config().with_values(run={"name": name}), None, False).startswith(f"run.name = {name}: must")


@settings(max_examples=100, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="*?[]\0"), min_size=1))
def test_any_source_gives_an_allowed_name(text):
    name = run_name(Config().with_values(data={"source": text}), None, True)
    assert 0 < len(name.encode()) <= 101
    assert run_name(Config().with_values(run={"name": name}), None, True) == name
    assert Path("runs", name).parent == Path("runs")


# ── folders ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_new_run_holds_its_configuration(config):
    with create_run(config) as run:
        assert run.path == Path(config.run.dir, "bard")
        assert validate(read_toml(run.config_file)) == config
        run.write_config(config.with_values(optim={"lr": 0.5}))
        assert read_toml(run.config_file)["optim"]["lr"] == 0.5
        assert {path.name for path in run.path.iterdir()} <= {"config.toml", ".lock"}


def test_a_run_is_not_overwritten(config):
    path = finished_run(config)
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    sentence = told(create_run, config)
    for way in (f"--resume {path}", "--run.name", "--run.overwrite true"):
        assert way in sentence
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before


def test_overwriting_moves_the_old_run_aside(config):
    path = finished_run(config)
    again = config.with_values(run={"overwrite": True})
    for number in (1, 2):
        with create_run(again) as run:
            assert run.path == path
            assert not run.checkpoints.exists()
        assert (path.parent / f"bard.old-{number}" / "config.toml").is_file()
    assert (path.parent / "bard.old-1/checkpoints/step-00000000.safetensors").read_bytes() == b"weights"


def test_folders_and_files_of_others_are_left_alone(config):
    path = Path(config.run.dir, "bard")
    path.mkdir(parents=True)
    (path / "thesis.txt").write_text("years of work", encoding="utf-8")
    for overwrite in (False, True):
        assert "other files" in told(create_run, config.with_values(run={"overwrite": overwrite}))
    assert [file.name for file in path.iterdir()] == ["thesis.txt"]
    assert "can't make" in told(create_run, config.with_values(run={"dir": str(path / "thesis.txt")}))


def test_an_empty_folder_is_used(config):
    path = Path(config.run.dir, "bard")
    path.mkdir(parents=True)
    (path / ".DS_Store").write_bytes(b"what a file browser leaves")
    create_run(config).close()


def test_opening(config, tmp_path):
    path = finished_run(config)
    with open_run(path) as run:
        assert run.path == path
    for wrong in (tmp_path, tmp_path / "missing", path / "config.toml"):
        assert f"{wrong}: not a run's folder" in told(open_run, wrong)
    assert not (tmp_path / ".lock").exists()


def test_one_process_at_a_time(config):
    path = finished_run(config)
    code = f"from minigpt.run import open_run; run = open_run({str(path)!r}); print('open', flush=True); input()"
    other = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
    )
    with other:
        assert other.stdout is not None
        assert other.stdout.readline() == "open\n"
        for call, argument in ((open_run, path), (create_run, config.with_values(run={"overwrite": True}))):
            assert "another process is training this run" in told(call, argument)
        other.kill()
    open_run(path).close()  # the lock went with the process
    with open_run(path):
        assert "another process" in told(open_run, path)  # the same process, twice
    open_run(path).close()


def test_rows_past_the_step_are_cut(config):
    with create_run(config) as run:
        run.cut_metrics(5)  # nothing there yet
        assert not run.metrics.exists()
        rows = [json.dumps({"step": step, "train_loss": step / 10}) for step in range(1, 9)]
        run.metrics.write_text("\n".join([*rows, '{"step": 3, "train_lo']), encoding="utf-8")
        run.cut_metrics(5)
        assert run.metrics.read_text(encoding="utf-8") == "".join(row + "\n" for row in rows[:5])
        run.metrics.write_bytes(b'[1]\n3\n{"step": "3"}\n\xff\n{"step": 2}')
        run.cut_metrics(5)
        assert run.metrics.read_bytes() == b'{"step": 2}\n'


def test_a_failed_write_leaves_the_old_file(config, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    with create_run(config) as run:
        before = run.config_file.read_bytes()
        monkeypatch.setattr(os, "replace", full)
        assert "No space left on device" in told(run.write_config, config)
        assert run.config_file.read_bytes() == before
        assert not list(run.path.glob("*.tmp"))
        assert not list(run.path.glob(".*.tmp"))


FOREIGN = """
import sys, warnings
warnings.filterwarnings("error", category=EncodingWarning, module=r"minigpt\\.")
from pathlib import Path
import numpy as np
from minigpt.checkpoint import find_checkpoint, checkpoint_path, save_checkpoint
from minigpt.cli import unescape
from minigpt.config import read_toml, validate
from minigpt.run import RunFolder, create_run, open_run, resume_config, run_name
from minigpt.tracking import Tracker
config = validate(read_toml(sys.argv[1])).with_values(run={"dir": sys.argv[2], "name": "foreign"})
text = config.train.sample_prompt
assert unescape(sys.argv[3]) == text == "\\u00e9\\u4e2d\\U0001f600", ascii(sys.argv[3])
with create_run(config) as run:
    metadata = {"step": 0, "config": config.model_dump(), "tokenizer": {"vocabulary": list(text)}}
    save_checkpoint(checkpoint_path(run.checkpoints, 0), {"model.w": np.zeros(1)}, metadata)
    with Tracker(run, total_steps=2, config_text=text) as tracker:
        tracker.log(1, train_loss=1.0)
        tracker.text("sample", text, 1)
        tracker.say(text)
with open_run(run.path) as run:
    run.cut_metrics(0)
    checkpoint = find_checkpoint(run.path)
    assert checkpoint.config == config == validate(read_toml(run.config_file))
    assert checkpoint.tokenizer == {"vocabulary": list(text)}
"""


def test_a_foreign_locale_changes_nothing(tmp_path):
    text = "é中😀"
    toml = tmp_path / "config.toml"
    toml.write_text(f'\ufeff[train]\nsample_prompt = "{text}"\n', encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-X", "warn_default_encoding", "-c", FOREIGN, str(toml), str(tmp_path), text],
        env={**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    assert rb"\xe9\u4e2d\U0001f600" in done.stderr
    assert (tmp_path / "foreign/samples/step-00000001.txt").read_bytes() == text.encode()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere file names are Unicode")
def test_names_that_are_no_unicode_are_kept(config, tmp_path):
    odd = config.with_values(data={"source": os.fsdecode(b"caf\xe9.txt")})
    with create_run(odd) as run:
        assert b'source = "caf\xe9.txt"' in run.config_file.read_bytes()


# ── going on ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_training_knobs_may_change_and_are_told():
    saved = Config().with_values(model={"n_layer": 2}, train={"max_steps": 500, "eval_interval": 100})
    config, changes = resume_config(
        saved,
        {"optim": {"lr": "0.01"}, "train": {"max_steps": "900", "eval_interval": "50"}, "model": {"n_layer": "2"}},
    )
    assert changes == ["optim.lr: 0.03 -> 0.01", "train.max_steps: 500 -> 900", "train.eval_interval: 100 -> 50"]
    assert (config.optim.lr, config.train.max_steps, config.model.n_layer) == (0.01, 900, 2)
    assert resume_config(saved, {}) == (saved, [])


@pytest.mark.parametrize(
    ("table", "key", "value", "told_values"),
    [
        ("model", "n_layer", "4", "model.n_layer: this run has 2, not 4"),
        ("data", "tokenizer", "char", "data.tokenizer: this run has 'bpe', not 'char'"),
        ("run", "seed", "7", "run.seed: this run has 1, not 7"),
        ("run", "dtype", "float16", "run.dtype: this run has 'auto', not 'float16'"),
        ("run", "name", "x", "run.name: this run has '', not 'x'"),
        ("run", "dir", "x", "run.dir: this run has 'runs', not 'x'"),
    ],
)
def test_what_a_run_is_may_not_change(table, key, value, told_values):
    saved = Config().with_values(model={"n_layer": 2})
    assert told_values in told(resume_config, saved, {"optim": {"lr": "1"}, table: {key: value}})


def test_every_refused_key_is_told_and_values_are_checked():
    sentence = told(resume_config, Config(), {"model": {"n_layer": "3", "d_model": "64"}, "run": {"seed": "7"}})
    assert [line.split(":")[0] for line in sentence.splitlines()[:-1]] == ["run.seed", "model.n_layer", "model.d_model"]
    assert "optim.lr = fast: must be" in told(resume_config, Config(), {"optim": {"lr": "fast"}})


def test_a_run_may_move_to_another_machine():
    config, changes = resume_config(Config(), {"data": {"cache_dir": "elsewhere"}, "run": {"device": "cuda"}})
    assert (config.data.cache_dir, config.run.device, len(changes)) == ("elsewhere", "cuda", 2)


def test_parts_of_a_folder(config):
    with create_run(config) as run:
        assert isinstance(run, RunFolder)
        for part in ("checkpoints", "samples", "tensorboard", "attention"):
            assert getattr(run, part) == run.path / part
        assert run.metrics == run.path / "metrics.jsonl"
