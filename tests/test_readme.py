"""The README's commands, copied from it and run in its order in one folder; training lines are cut to two steps."""

import re
import shlex
from collections import Counter
from pathlib import Path

import pytest
from running import ROOT, Script

from minigpt import planning
from minigpt.pace import Pace

README, JAPANESE = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.ja.md"))


def commands_of(readme: str) -> list[str]:
    """The lines of its bash blocks, without comments and blank ones."""
    return [
        line
        for block in re.findall(r"```bash\n(.*?)```", readme, re.DOTALL)
        for line in block.splitlines()
        if line.strip() and not line.startswith("#")
    ]


COMMANDS = commands_of(README)
SCRIPTS = [line for line in COMMANDS if line.startswith("python scripts/") and "benchmark" not in line]

STUDENT = """
import numpy as np

def attention(q, k, v, mask=None):
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    if mask is not None:
        scores = np.where(mask, scores, -1e9)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True) @ v
"""


def test_the_two_lines_that_do_all() -> None:
    """One installs and trains, one installs and tests; both install from the project's own files."""
    start = "python -m venv .venv && . .venv/bin/activate && pip install -c constraints.txt -e "
    assert COMMANDS[0] == f"{start}. && python scripts/train.py"
    assert COMMANDS[1] == f'{start}".[test]" && pytest -n 2'
    assert "python -m venv .venv; .venv\\Scripts\\Activate.ps1; pip install -c constraints.txt -e .;" in README


def test_every_command(script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "README.md").read_text(encoding="utf-8") + "ROMEO: JULIET:\n" * 20
    (tmp_path / "my-texts").mkdir()
    (tmp_path / "student.py").write_text(STUDENT, encoding="utf-8")
    first = COMMANDS[0].split("python ")[-1]
    assert script(ROOT / first, "--train.max-steps", "2", "--run.threads", "1", "--data.cache-dir", "cache").code == 0
    for name in ("my-texts/one.txt", "my-texts/two.md", "other.txt", "bard.txt"):
        (tmp_path / name).write_text(text, encoding="utf-8")
    step = 0
    for line in SCRIPTS:
        words = [str(ROOT / word) if word.startswith("configs/") else word for word in shlex.split(line)[1:]]
        if "--train.minutes" in words:
            monkeypatch.setattr(planning, "REHEARSAL_SHARE", 0.0)
            monkeypatch.setattr(Pace, "steps", lambda *_: 2)
            words += ["--model.n-layer", "1", "--model.d-model", "16"]
            words += ["--run.threads", "1", "--data.cache-dir", "cache"]
        elif "configs/task.toml" in line:
            words += ["--train.max-steps", "2", "--run.threads", "1", "--task.examples", "200", "--task.held-out", "20"]
        elif words[0] == "scripts/train.py":
            step += 2 if "--resume" in words or step == 0 else 0
            words += ["--train.max-steps", str(step), "--run.threads", "1", "--data.cache-dir", "cache"]
            if "shakespeare_char" in line:  # its text comes from the network
                words += ["--data.source", "bard.txt"]
        if "--verify" in words:
            words[words.index("--verify") + 1] = "2"
        if "runs/bard" in words and words[0] == "scripts/compare_attention.py":
            words += ["--sequences", "2", "--length", "16"]
        if "scripts/compare_recurrent.py" in words:  # its rows that are learned: tests/test_compare_recurrent.py
            words += ["--rows", "gradients", "position"]
        if "links" in words:
            words += ["--texts", "2"]
        answer = script(ROOT / words[0], *words[1:])
        assert answer.code == 0, f"{line}\n{answer.err}"
        assert answer.out
    assert {path.name for path in Path("runs").iterdir()} == {
        "tales", "bard", "my-texts", "other", "tuned", "induction", "recall", "lstm", "task-sweep", "curves.png",
    }  # fmt: skip


def test_the_japanese_readme_has_the_same_commands_and_the_same_numbers_in_its_tables() -> None:
    assert commands_of(JAPANESE) == COMMANDS
    numbers, japanese = (
        [Counter(re.findall(r"\d+(?:[.,]\d+)*", line)) for line in readme.splitlines() if line.startswith("|")]
        for readme in (README, JAPANESE)
    )
    assert japanese == numbers


def test_the_file_map_names_every_module_and_nothing_else() -> None:
    named = set(re.findall(r"\b[a-z_]+\.py\b", README.split("## Where things are")[1].split("```")[1]))
    there = {path.name for path in (ROOT / "minigpt").glob("*.py")} - {"__init__.py", "errors.py", "cli.py"}
    assert named == there
    for folder in ("tasks", "inspection", "explorer", "interop", "studies"):
        assert f"minigpt/{folder}/" in README


def test_every_shipped_configuration_is_named() -> None:
    for path in (ROOT / "configs").glob("*.toml"):
        assert path.stem in README
