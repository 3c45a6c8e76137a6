"""The scripts by name, and minigpt as its wheel lays it out: away from the repository."""

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from running import FOREIGN, GENERATE, ROOT, TRAIN, Script, Trained, environment

from minigpt import shipped
from minigpt.checkpoint import find_checkpoint
from minigpt.shipped import config_file

MAIN = ROOT / "minigpt" / "__main__.py"
HATCH = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]
WHEEL = HATCH["build"]["targets"]["wheel"]
SHORT = ("--run.name", "tiny", "--run.threads", "1", "--train.max-steps", "2", "--data.source", "story.txt")


def test_every_script_is_called_by_its_name(trained: Trained, script: Script) -> None:
    overview = script(MAIN).out
    for path in (ROOT / "scripts").glob("*.py"):
        assert f"\n  {path.stem} " in overview
    assert script(MAIN, "--help").out == overview
    words = (trained.path, "--prompt", "the", "--max-new-tokens", 20)
    assert script(MAIN, "generate", *words) == script(GENERATE, *words)
    refused = script(MAIN, "generat", *words)
    assert (refused.code, refused.err) == (2, "error: generat: no such script; did you mean generate?\n")
    assert script(MAIN, "evaluate", trained.path / "none").code == 2


def test_a_shipped_configuration_is_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tiny = Path("configs/tiny.toml")
    assert config_file(tiny) == ROOT / tiny
    for other in ("tiny.toml", "my/tiny.toml", "configs/none.toml", "data/sources.toml", str(tmp_path / tiny)):
        assert config_file(Path(other)) == Path(other)
    (tmp_path / "configs").mkdir()
    (tmp_path / tiny).write_text("", encoding="utf-8")
    assert config_file(tiny) == tiny, "one's own comes first"


def test_a_run_begins_from_there(script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, english: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "story.txt").write_text(english, encoding="utf-8")
    answer = script(TRAIN, "configs/tiny.toml", *SHORT, "--data.cache-dir", "cache")
    assert find_checkpoint("runs/tiny").config.model.d_model == 32
    assert answer.code == 0 and "next: python scripts/generate.py runs/tiny\n" in answer.out.replace("\\", "/")


def test_the_wheel_brings_what_the_package_looks_for() -> None:
    """Building it takes too long here; it holds each of these under the other name."""
    moved = {path: path.replace(old, new, 1) for path in WHEEL["only-include"] for old, new in WHEEL["sources"].items()
             if path.startswith(old)}  # fmt: skip
    assert moved == {
        "configs": "minigpt/configs", "scripts": "minigpt/scripts", "data/sources.toml": "minigpt/data/sources.toml",
    }  # fmt: skip
    assert all((ROOT / path).exists() for path in WHEEL["only-include"])
    assert shipped.HOME == ROOT and not shipped.INSTALLED


def test_laid_out_as_the_wheel_does_it_trains_and_writes(tmp_path: Path, english: str) -> None:
    (tmp_path / "story.txt").write_text(english, encoding="utf-8")
    site = tmp_path / "site"
    shutil.copytree(ROOT / "minigpt", site / "minigpt", ignore=shutil.ignore_patterns("__pycache__"))
    for folder in ("configs", "scripts"):
        shutil.copytree(ROOT / folder, site / "minigpt" / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (site / "minigpt" / "data").mkdir()
    shutil.copy(ROOT / "data" / "sources.toml", site / "minigpt" / "data")
    places = {name: str(tmp_path / "home") for name in ("HOME", "USERPROFILE", "LOCALAPPDATA", "XDG_CACHE_HOME")}

    def called(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "minigpt", *words], cwd=tmp_path, capture_output=True, encoding="utf-8",
            env=environment(**FOREIGN, **places, PYTHONPATH=str(site)),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    told = called("train", "configs/tiny.toml", *SHORT).replace("\\", "/")
    assert "next: minigpt generate runs/tiny\n" in told
    assert called("generate", "runs/tiny", "--prompt", "the ", "--max-new-tokens", "5").startswith("the ")
    assert list((tmp_path / "home").rglob("tokens.json")), "token files are in the user's cache"
    assert not (site / "minigpt" / "data" / "cache").exists()
