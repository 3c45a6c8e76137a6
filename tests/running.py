"""What tests of the scripts share: how one is run, and how it answers."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TRAIN, GENERATE, EVALUATE = (ROOT / "scripts" / f"{name}.py" for name in ("train", "generate", "evaluate"))
FOREIGN = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@dataclass(frozen=True)
class Answer:
    """How a script ended, and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict:
        return json.loads(self.out)


Script = Callable[..., Answer]


def command(*words: object, python: tuple[str, ...] = ()) -> list[str]:
    return [sys.executable, *python, *map(str, words)]


def environment(**variables: str) -> dict[str, str]:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("LC_", "PYTHON"))}
    return {**inherited, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8", **variables}


def as_options(tables: dict[str, dict[str, Any]]) -> list[str]:
    return [
        word
        for section, keys in tables.items()
        for key, value in keys.items()
        for word in (f"--{section}.{key.replace('_', '-')}", str(value))
    ]


@dataclass(frozen=True)
class Trained:
    """One run made by ``train.py`` in a process of its own, and the options it was made with."""

    path: Path
    options: list[str]
    text: Path
    done: subprocess.CompletedProcess[str]
