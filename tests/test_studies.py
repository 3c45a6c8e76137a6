"""The benchmarks of start-up, tokens and growth: their arithmetic, and each once on something tiny."""

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from running import ROOT

from minigpt.config import Config, validate
from minigpt.errors import UserError
from minigpt.studies import curve, growth, startup, tokens, whole_runs
from minigpt.studies.growth import PowerLaw
from minigpt.studies.made_text import made_text

TEXT = "".join(f"{number} green bottles\nhanging on the wall,\n" for number in range(100))
TRAIN = """
import argparse, pathlib, time
parser = argparse.ArgumentParser()
for name in ("--data.cache-dir", "--train.max-steps", "--train.log-interval", "--run.dir", "--run.name"):
    parser.add_argument(name)
options = vars(parser.parse_args())
run = pathlib.Path(options["run.dir"], options["run.name"])
run.mkdir(parents=True)
(run / "metrics.jsonl").write_text("{}", encoding="utf-8")
time.sleep(0 if options["train.max_steps"] else 60)  # it is not waited for its end
"""
GENERATE = "import argparse, sys; p = argparse.ArgumentParser(); p.parse_known_args(); print('A', 'story')"


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Scripts with the same manners that do nothing."""
    for name, code in (("train.py", TRAIN), ("generate.py", GENERATE)):
        (tmp_path / name).write_text(code, encoding="utf-8")
    for module in (startup, whole_runs):
        monkeypatch.setattr(module, "SCRIPTS", tmp_path)
    return tmp_path


def test_startup_waits_for_help_first_step_and_first_token(stand_ins: Path) -> None:
    report = startup.startup(repeats=2, flags=[])
    names = ["generate.py --help", "train.py --help", "train.py, its first step done", "generate.py, its first token"]
    assert list(report.numbers["seconds"]) == names
    assert all(len(times) == 2 and 0 < min(times) < 30 for times in report.numbers["seconds"].values())
    assert max(map(len, report.lines)) <= 80


def test_a_training_that_ends_before_its_first_step_is_told(stand_ins: Path) -> None:
    (stand_ins / "train.py").write_text("", encoding="utf-8")
    with pytest.raises(UserError, match="ended without a step"):
        startup.first_step_seconds([], stand_ins)
    (stand_ins / "train.py").write_text("raise SystemExit('no help')", encoding="utf-8")
    with pytest.raises(UserError, match=r"train\.py --help failed: no help"):
        startup.help_seconds(stand_ins / "train.py")


def test_tokens_are_those_in_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bottles.txt"
    path.write_text(TEXT, encoding="utf-8")
    report = tokens.tokens(source=path, megabytes=1, repeats=1)
    assert report.holds
    by_kind = {case["tokenizer"]: case for case in report.numbers["cases"]}
    assert by_kind["char"]["ids"] == by_kind["byte"]["ids"] == len(TEXT) + 1 > by_kind["bpe"]["ids"]
    assert max(map(len, report.lines)) <= 80
    monkeypatch.setattr(tokens, "prepare_apart", lambda path, kind: {**tokens.prepare(path, kind), "checksum": 0})
    report = tokens.tokens(source=path, megabytes=1, repeats=1)
    assert not report.holds and report.lines[-1] == "bottles.txt, bpe: ids in files DIFFER from encode's"


@pytest.mark.parametrize(("script", "bytes_a_character"), [("English", 1), ("Japanese", 3)])
def test_made_text_has_its_size_and_is_always_the_same(script: str, bytes_a_character: int) -> None:
    text = made_text(script, 100_000)
    assert 100_000 <= len(text.encode("utf-8")) < 300_000
    assert len(text.encode("utf-8")) / len(text) == pytest.approx(bytes_a_character, rel=0.1)
    assert text == made_text(script, 100_000) and len(set(text)) > 20


# ── growth ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_power_law_is_found_with_its_interval() -> None:
    x = [1, 2, 4, 8, 16]
    law = PowerLaw.through(x, [3 * value**1.5 for value in x])
    assert (law.factor, law.exponent, law.low, law.high) == pytest.approx((3, 1.5, 1.5, 1.5))
    assert law.departure(2, 2 * 3 * 2**1.5) == pytest.approx(1.0)
    assert PowerLaw.through([1, 2], [5, 10]).low == -math.inf


def test_the_interval_holds_the_exponent_nineteen_times_in_twenty() -> None:
    lots = np.random.default_rng(0)
    x = np.array([1, 2, 4, 8, 16])
    laws = [PowerLaw.through(x.tolist(), (x**0.5 * np.exp(lots.normal(0, 0.1, 5))).tolist()) for _ in range(400)]
    assert sum(law.low < 0.5 < law.high for law in laws) / 400 == pytest.approx(0.95, abs=0.03)


def test_growth_tells_exponents_and_bends(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = {"model": {"d_model": 16, "n_head": 2, "context_length": 8}, "train": {"batch_size": 2}}

    def cost(config: Config) -> int:
        layers = config.model.n_layer
        return 1000 * layers * (10 if layers == 3 else 1)

    axes = {"layers": {n: {"model": {"n_layer": n}} for n in (1, 2, 3, 4, 5)}}
    monkeypatch.setattr(growth, "AXES", axes)
    monkeypatch.setattr(growth, "_bytes_apart", lambda values: cost(validate(values)))
    report = growth.growth(repeats=1, threads=1, overrides=tiny)
    layers = report.numbers["axes"]["layers"]
    assert [point["kilobytes"] for point in layers["points"]] == [layer / 16 for layer in (1, 2, 30, 4, 5)]
    assert 3 in layers["bends"]["memory"]
    assert any(line.startswith("3 ") and "memory +" in line for line in report.lines)
    assert report.numbers["axes"]["threads"]["laws"] == {}, "there is no line through a single point"
    assert max(map(len, report.lines)) <= 80


def test_memory_is_counted_from_the_start_of_a_process(tmp_path: Path) -> None:
    script = (
        "from minigpt.studies.tokens import peak_bytes; before = peak_bytes(); held = bytearray(80_000_000)\n"
        "print((peak_bytes() or 80_000_000) - (before or 0))"
    )
    held = bytearray(300_000_000)  # which the other process must not be charged with
    more = int(subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, cwd=ROOT).stdout)
    assert more == pytest.approx(80e6, rel=0.1) and len(held)
    path = tmp_path / "bottles.txt"
    path.write_text(TEXT, encoding="utf-8")
    data = {"source": str(path), "tokenizer": "char", "cache_dir": str(tmp_path / "cache")}
    small = {"n_layer": 1, "d_model": 32, "n_head": 2, "context_length": 8}
    assert (growth.step_bytes({"data": data, "model": small, "run": {"device": "cpu", "threads": 1}}) or 0) >= 0


def test_curves_are_drawn_where_their_numbers_are() -> None:
    """A curve that falls from left to right: its colour is at the top on the left, at the bottom on the right."""
    picture = curve.draw_curves({"ours": [(1.0, 4.0), (100.0, 1.0)]}, x_label="seconds", y_label="loss")
    colour = tuple(int(curve.COLOURS[0][i : i + 2], 16) for i in (1, 3, 5))
    painted = np.argwhere((np.asarray(picture) == colour).all(axis=-1))
    first, last = painted[painted[:, 1].argmin()], painted[painted[:, 1].argmax()]
    assert first[0] < curve.SIZE[1] / 2 < last[0] and first[1] < curve.SIZE[0] / 2 < last[1]


def test_ticks_are_round_and_take_in_the_numbers() -> None:
    assert curve.ticks_1_2_5(3, 120) == [5, 10, 20, 50, 100]
    assert curve.ticks_1_2_5(3.1, 3.2) == [2]
    assert curve.even_ticks(1.72, 4.3) == pytest.approx([1.5, 2, 2.5, 3, 3.5, 4, 4.5])
    assert len(curve.even_ticks(2.0, 2.0)) >= 2
