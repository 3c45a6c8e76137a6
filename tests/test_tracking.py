"""What is told: rows, TensorBoard and the console agree, a resumed run has no doubles, and telling never kills."""

import io
import itertools
import json
import math
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from minigpt.config import Config
from minigpt.run import RunFolder, create_run
from minigpt.tracking import METRICS, Tracker


class Terminal(io.StringIO):
    """A console that says it is one."""

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return 2


@pytest.fixture(autouse=True)
def a_second_between_event_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorBoard reads files in the order of their names: second, then a counter as text, where 10 is before 9."""
    clock = SimpleNamespace(time=partial(next, itertools.count(1_800_000_000.0)))
    monkeypatch.setattr("tensorboard.summary.writer.event_file_writer.time", clock)


@pytest.fixture
def run(tmp_path: Path):
    with create_run(Config().with_values(run={"dir": str(tmp_path), "name": "run"})) as folder:
        yield folder


def rows(run: RunFolder) -> list[dict]:
    return [json.loads(line) for line in run.metrics.read_text(encoding="utf-8").splitlines()]


def events(run: RunFolder) -> EventAccumulator:
    return EventAccumulator(str(run.tensorboard)).Reload()


def scalars(run: RunFolder, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in events(run).Scalars(tag)]


def train(run: RunFolder, start: int, stop: int) -> None:
    """Log a made-up run from step ``start`` to ``stop``."""
    with Tracker(run, total_steps=10, start_step=start, config_text="lr = 1", stream=io.StringIO()) as tracker:
        for step in range(start + 1, stop + 1):
            tracker.log(step, train_loss=1 / step, lr=np.float32(0.5))


# ── rows and TensorBoard ───────────────────────────────────────────────────────────────────────────────────────


def test_a_row_has_the_known_numbers_in_order(run):
    with Tracker(run, total_steps=2, stream=io.StringIO()) as tracker:
        tracker.log(1, seconds=1.5, extra=3, tokens_seen=np.int64(768), train_loss=np.float32(2.5), val_loss=None)
        tracker.log(2, **dict.fromkeys(reversed(METRICS), 1.0))
    assert run.metrics.read_text(encoding="utf-8").splitlines()[0] == (
        '{"step": 1, "train_loss": 2.5, "tokens_seen": 768, "seconds": 1.5, "extra": 3}'
    )
    assert list(rows(run)[1]) == ["step", *METRICS]


def test_a_row_is_there_at_once(run):
    with Tracker(run, total_steps=2, stream=io.StringIO()) as tracker:
        tracker.log(1, train_loss=2.5)
        assert rows(run) == [{"step": 1, "train_loss": 2.5}]
        assert scalars(run, "train/loss") == [(1, 2.5)]


def test_what_is_not_finite_is_null(run):
    with Tracker(run, total_steps=1, stream=io.StringIO()) as tracker:
        tracker.log(1, train_loss=math.nan, grad_norm=math.inf)
    assert rows(run) == [{"step": 1, "train_loss": None, "grad_norm": None}]
    assert math.isnan(scalars(run, "train/loss")[0][1])


def test_tensorboard_has_the_same_numbers(run):
    numbers = {key: float(place) for place, key in enumerate(METRICS)}
    with Tracker(run, total_steps=1, stream=io.StringIO()) as tracker:
        tracker.log(7, **numbers, **{"attention/previous": 0.25})
    assert set(events(run).Tags()["scalars"]) == {*METRICS.values(), "attention/previous"}
    assert {tag.partition("/")[0] for tag in METRICS.values()} == {"train", "val", "speed"}
    for key, tag in METRICS.items():
        assert scalars(run, tag) == [(7, numbers[key])]


def test_a_resumed_run_has_every_step_once(run):
    train(run, 0, 8)  # killed here; the checkpoint is of step 5
    run.cut_metrics(5)
    train(run, 5, 10)
    expected = [(step, 1 / step) for step in range(1, 11)]
    assert [(row["step"], row["train_loss"]) for row in rows(run)] == expected
    assert scalars(run, "train/loss") == [(step, pytest.approx(value)) for step, value in expected]


def test_a_run_resumed_from_its_start_has_every_step_once(run):
    train(run, 0, 4)
    run.cut_metrics(0)
    train(run, 0, 2)
    assert [row["step"] for row in rows(run)] == [1, 2]
    assert [step for step, _ in scalars(run, "train/lr")] == [1, 2]


def test_texts_and_pictures(run):
    text = "<b>*é*\n\n    中😀 ```\n# no title\n"
    picture = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)
    with Tracker(run, total_steps=1, config_text="[run]\nname = 'a'", stream=io.StringIO()) as tracker:
        tracker.text("sample", text, 500)
        tracker.image("attention", picture, 500)
    assert (run.samples / "step-00000500.txt").read_bytes() == text.encode()
    board = events(run)
    (shown,) = board.Tensors("sample/text_summary")
    block = shown.tensor_proto.string_val[0].decode()
    assert block == "\n".join("    " + line for line in text.split("\n"))
    (config,) = board.Tensors("config/text_summary")
    assert config.tensor_proto.string_val[0] == b"    [run]\n    name = 'a'"
    (image,) = board.Images("attention")
    assert (image.step, image.height, image.width) == (500, 4, 5)


# ── the console ────────────────────────────────────────────────────────────────────────────────────────────────

LONG = {"train_loss": 10.12345, "val_loss": 10.12345, "tokens_per_second": 123456.7}


def test_lines_where_there_is_no_terminal(run):
    console = io.StringIO()
    with Tracker(run, total_steps=20000, start_step=10, stream=console) as tracker:
        tracker.say("resuming at step 10")
        tracker.log(10, train_loss=2.0)
        tracker.log(20, **LONG)
        tracker.advance(25)
        tracker.log(30, train_loss=2.0)
    lines = console.getvalue().splitlines()
    assert lines[:2] == ["resuming at step 10", "step 10/20000  train 2.0000  ? left"]
    assert lines[2].startswith("step 20/20000  train 10.1235  val 10.1235  123,457 tok/s  ")
    assert lines[3].startswith("step 30/20000  train 2.0000  val 10.1235  ")  # the newest validation stays
    assert len(lines) == 4
    assert all(line.endswith(" left") and len(line) <= 80 for line in lines[1:])


def test_the_bar_fits_80_columns(run, monkeypatch):
    monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((80, 24)))
    console = Terminal()
    with Tracker(run, total_steps=20000, start_step=19990, stream=console) as tracker:
        tracker.log(19995, **LONG)
        tracker.say("saved")
        tracker.advance(20000)
    shown = console.getvalue().replace("\n", "\r").split("\r")
    assert max(len(line) for line in shown) <= 80
    assert "saved" in [line.strip() for line in shown]
    last = [line for line in shown if line.strip()][-1]
    for part in ("100%|", "20000/20000", "train 10.1235", "val 10.1235", "123,457 tok/s", "left"):
        assert part in last


def test_a_console_that_cannot_show_a_text(run):
    raw = io.BytesIO()
    console = io.TextIOWrapper(raw, encoding="ascii", newline="\n")
    with Tracker(run, total_steps=1, stream=console) as tracker:
        tracker.say("é中")
    assert raw.getvalue() == b"\\xe9\\u4e2d\n"


# ── faults ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_places_that_cannot_be_written_are_told_once(run):
    for place in (run.tensorboard, run.samples):
        place.write_bytes(b"a file where a folder should be")
    run.metrics.mkdir()
    console = io.StringIO()
    with Tracker(run, total_steps=3, config_text="x", stream=console) as tracker:
        for step in (1, 2, 3):
            tracker.log(step, train_loss=1.0)
            tracker.text("sample", "text", step)
            tracker.image("picture", np.zeros((2, 2, 3), np.uint8), step)
    lines = console.getvalue().splitlines()
    complaints = [line for line in lines if line.startswith("could not write")]
    assert sorted(line.split()[3] for line in complaints) == ["metrics.jsonl", "samples", "tensorboard"]
    assert all(line.endswith("training goes on without it") for line in complaints)
    assert len(lines) == 3 + 3


class ClosedPipe(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


@pytest.mark.parametrize("terminal", [False, True])
def test_a_console_that_went_away(run, monkeypatch, terminal):
    monkeypatch.setattr(ClosedPipe, "isatty", lambda self: terminal)
    with Tracker(run, total_steps=2, stream=ClosedPipe()) as tracker:
        tracker.log(1, train_loss=1.0)
        tracker.say("x")
        tracker.log(2, train_loss=1.0)
    assert len(rows(run)) == 2


LIMITED = """
import resource, sys
from minigpt.config import Config
from minigpt.run import create_run
from minigpt.tracking import Tracker
config = Config().with_values(run={"dir": sys.argv[1], "name": "full"})
with create_run(config) as run:
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
    with Tracker(run, total_steps=400) as tracker:
        for step in range(1, 401):
            tracker.log(step, train_loss=1.0, lr=0.1)
            tracker.text("sample", "word " * 2000, step)
print("trained to the end")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no file size limits")
def test_a_full_disk_does_not_end_the_run(tmp_path):
    command = [sys.executable, "-c", LIMITED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", check=False, timeout=120)
    assert (done.returncode, done.stdout) == (0, "trained to the end\n"), done.stderr
    complaints = re.findall(r"could not write (\S+) \(", done.stderr)  # TensorBoard's thread writes in between
    assert sorted(complaints) == ["metrics.jsonl", "samples", "tensorboard"]
    whole = (tmp_path / "full/metrics.jsonl").read_bytes().splitlines()[:-1]
    assert [json.loads(line)["step"] for line in whole] == list(range(1, len(whole) + 1))
