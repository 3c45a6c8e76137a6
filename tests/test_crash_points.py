"""A training is killed at every single file operation it makes; it goes on and ends as if nothing had been.

A forked process counts its operations on the run's folder and leaves without a word at the one it is told to.
"""

import io
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from conftest import Tables
from tiny_runs import begun, contents

from minigpt import launch
from minigpt.checkpoint import find_checkpoint
from minigpt.config import merge

if sys.platform != "linux":
    pytest.skip("needs fork, and processes that may be forked after torch is loaded", allow_module_level=True)

OPERATIONS = ("mkdir", "replace", "rename", "unlink", "fsync")
DIED = 9
SETTINGS: Tables = {
    "model": {"dropout": 0.1},
    "data": {"val_fraction": 0.05},
    "train": {"grad_accumulation": 2, "max_steps": 4, "eval_interval": 2, "save_interval": 1, "keep_last": 1},
}


class Saboteur:
    """Counts file operations under a folder, and ends the process in the middle of operation number ``fatal``."""

    def __init__(self, folder: Path, fatal: int) -> None:
        self.folder, self.fatal, self.count = str(folder), fatal, 0

    def strikes(self, path: object) -> bool:
        """Whether this operation is the last one; those on TensorBoard's files, in a thread of its own, don't count."""
        if not isinstance(path, str | Path) or not str(path).startswith(self.folder) or "tensorboard" in str(path):
            return False
        self.count += 1
        return self.count == self.fatal

    def install(self) -> None:
        for name in OPERATIONS:
            setattr(os, name, self._before(getattr(os, name)))
        plain_open = io.open

        def open_and_watch(file: Any, *rest: Any, **named: Any) -> Any:
            if self.strikes(file):
                os._exit(DIED)
            opened = plain_open(file, *rest, **named)
            return Watched(opened, self) if isinstance(opened, io.BufferedWriter) else opened

        io.open = open_and_watch

    def _before(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def watched(first: Any, *rest: Any, **named: Any) -> Any:
            path = os.readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else first
            if self.strikes(path):
                os._exit(DIED)
            return operation(first, *rest, **named)

        return watched


class Watched:
    """A binary file whose writing may be cut in half."""

    def __init__(self, file: io.BufferedWriter, saboteur: Saboteur) -> None:
        self._file, self._saboteur = file, saboteur

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> "Watched":
        return self

    def __exit__(self, *_error: object) -> None:
        self._file.close()

    def write(self, content: bytes) -> int:
        if self._saboteur.strikes(self._file.name):
            self._file.write(content[: len(content) // 2])
            self._file.flush()
            os._exit(DIED)
        return self._file.write(content)

    def flush(self) -> None:
        if self._saboteur.strikes(self._file.name):
            os._exit(DIED)
        self._file.flush()


def in_processes(*works: Callable[[], int]) -> list[int]:
    """The exit codes of forks that do the works at once."""
    children = [forked(work) for work in works]
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def forked(work: Callable[[], int]) -> int:
    """A fork that does the work and exits with what it gives."""
    child = os.fork()
    if child:
        return child
    try:
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, 1)
        os.dup2(devnull, 2)
        os._exit(work())
    except BaseException:
        os._exit(1)


def train(tables: Tables, fatal: int) -> int:
    """Begin, or go on; to the end, or to the fatal operation. The count of operations goes to a file."""
    folder = Path(tables["run"]["dir"])
    path = folder / tables["run"]["name"]
    saboteur = Saboteur(folder, fatal)
    saboteur.install()
    if not any(path.glob("checkpoints/step-*.safetensors")):
        launch.start(tables)
    elif find_checkpoint(path, "last").step < tables["train"]["max_steps"]:
        launch.resume(path, {})
    (folder.parent / "operations").write_text(str(saboteur.count), encoding="ascii")
    return 0


def test_a_run_killed_at_any_file_operation_ends_as_the_undisturbed_one(
    tiny: Tables, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    tables = merge(tiny, SETTINGS)
    begun(merge(tables, {"run": {"name": "first"}}))  # what training loads late is then there for all forks

    def in_folder(name: str) -> Tables:
        return merge(tables, {"run": {"dir": str(tmp_path / name)}})

    assert in_processes(lambda: train(in_folder("whole"), fatal=0)) == [0]
    total = int((tmp_path / "operations").read_text(encoding="ascii"))
    assert total > 60
    record_property("tried", total)
    files, state = contents(tmp_path / "whole" / "tiny")
    runs = {fatal: in_folder(f"broken-{fatal}") for fatal in range(1, total + 1)}
    for first in range(1, total + 1, 2):  # two at a time
        pair = {fatal: runs[fatal] for fatal in (first, first + 1) if fatal in runs}
        killed = in_processes(*(partial(train, tables, fatal) for fatal, tables in pair.items()))
        assert killed == [DIED] * len(pair), pair.keys()
        ended = in_processes(*(partial(train, tables, fatal=0) for tables in pair.values()))
        assert ended == [0] * len(pair), pair.keys()
    for fatal in runs:
        found_files, found = contents(tmp_path / f"broken-{fatal}" / "tiny")
        assert found == state, fatal
        # only what the very last clearing-up would have removed may still be there
        assert found_files == files or (found_files > files and fatal > total - 10), fatal
