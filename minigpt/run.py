"""The folder of a run: making it, locking it, going on with it.

run.dir/run.name/
    config.toml     every key, as resolved
    metrics.jsonl   one row of numbers a line
    checkpoints/    step-00000500.safetensors, ...
    samples/  tensorboard/  attention/
    .lock           held by the process that trains
"""

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from filelock import FileLock, Timeout

from minigpt.config import DEFAULT_CONFIG, Config, differences, merge, read_toml, to_toml, validate
from minigpt.errors import UserError
from minigpt.files import move_aside, safe_name, write_whole


@dataclass(frozen=True)
class RunFolder:
    """A run's folder, locked until ``close`` or the end of the process; also a context manager."""

    path: Path
    lock: FileLock

    @property
    def config_file(self) -> Path:
        return self.path / "config.toml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def samples(self) -> Path:
        return self.path / "samples"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def attention(self) -> Path:
        return self.path / "attention"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Let other processes have the folder."""
        self.lock.release()

    def write_config(self, config: Config) -> None:
        """Save the whole configuration as ``config.toml``.

        Raises:
            UserError: if it can't be written; the old file stays.
        """
        # Paths on Linux may hold bytes that are no UTF-8; they come as surrogates and go out as they came.
        write_whole(self.config_file, to_toml(config).encode("utf-8", "surrogateescape"))

    def cut_metrics(self, step: int) -> None:
        """Drop the rows past ``step``, and what a killed process wrote half, so that a resumed run has each once.

        Raises:
            UserError: if the file can't be read or rewritten; the old one stays.
        """
        if not self.metrics.exists():
            return
        try:
            lines = self.metrics.read_bytes().splitlines()
        except OSError as error:
            raise UserError(f"{self.metrics}: can't be read ({error.strerror or error})") from None
        write_whole(self.metrics, b"".join(line + b"\n" for line in lines if _step(line) <= step))


# ── making and opening ─────────────────────────────────────────────────────────────────────────────────────────


def run_name(config: Config, config_path: str | Path | None, source_given: bool) -> str:
    """``run.name``, else the stem of ``data.source`` where that was given, else the stem of the TOML file.

    Raises:
        UserError: if ``run.name`` can't be a folder's name on every system.
    """
    name = config.run.name
    if name:
        if name != safe_name(name):
            raise UserError(f"run.name = {name}: must be a folder name that every system allows, as {safe_name(name)}")
        return name
    if not source_given:
        return safe_name(Path(config_path or DEFAULT_CONFIG).stem)
    parts = Path(os.path.abspath(config.data.source.removeprefix("task:"))).parts[1:]
    plain = [part for part in parts if not re.search(r"[*?\[\]]", part)]  # a glob is named by its folder
    return safe_name(Path(plain[-1]).stem if plain else "")


def create_run(config: Config) -> RunFolder:
    """Make and lock the new folder ``run.dir/run.name`` and write its ``config.toml``.

    Call it when everything that can fail by a user's mistake has been built: only then a folder appears.

    Raises:
        UserError: if the folder holds a run (unless ``run.overwrite``, which moves that one aside), holds something
            else, is in use, or can't be made.
    """
    assert config.run.name, "see run_name"
    path = Path(config.run.dir) / config.run.name
    try:
        if _is_run(path) and config.run.overwrite:
            _locked(path).release()  # not from under a process that trains
            move_aside(path)
        _refuse_used(path)
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path}: can't make the run's folder ({error.strerror or error}); see --run.dir") from None
    run = RunFolder(path, _locked(path))
    try:
        _refuse_used(path)  # another process may have come first, made a run here and gone
        run.write_config(config.with_values(run={"overwrite": False}))  # it was meant for once
    except BaseException:
        run.close()
        raise
    return run


def open_run(path: str | Path) -> RunFolder:
    """Lock an existing run's folder, to go on with it.

    Raises:
        UserError: if it isn't a run's folder or another process has it.
    """
    path = Path(path)
    if not _is_run(path):
        raise UserError(f"{path}: not a run's folder (there is no config.toml or checkpoints in it)")
    return RunFolder(path, _locked(path))


def as_word(path: Path) -> str:
    """The path as one word of a command line."""
    return f'"{path}"' if " " in str(path) else str(path)


def _is_run(path: Path) -> bool:  # by os.path, which unlike Path has an answer for names that no system takes
    return os.path.isfile(path / "config.toml") or os.path.isdir(path / "checkpoints")


def _refuse_used(path: Path) -> None:
    if any(path.glob("checkpoints/step-*.safetensors")):
        raise UserError(
            f"{path} already holds a run; go on with it by --resume {as_word(path)}, give the new one another name by "
            "--run.name NAME, or move the old one aside by --run.overwrite true"
        )
    if not _is_run(path) and path.is_dir() and any(not entry.name.startswith(".") for entry in path.iterdir()):
        raise UserError(f"{path}: this folder holds other files and is no run; choose another --run.name or --run.dir")


def _locked(path: Path) -> FileLock:
    lock = FileLock(path / ".lock", thread_local=False)  # any thread may close the run
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise UserError(f"{path}: another process is training this run; wait for it or stop it first") from None
    except (OSError, NotImplementedError) as error:  # the latter: a file system without locks
        raise UserError(f"{path}: can't lock the run's folder ({error})") from None
    return lock


def _step(line: bytes) -> float:
    """The step of a row; infinite if it isn't a row."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return math.inf
    step = row.get("step") if isinstance(row, dict) else None
    return step if isinstance(step, int) else math.inf


# ── going on ───────────────────────────────────────────────────────────────────────────────────────────────────


def last_settings(path: Path, saved: Config) -> Config:
    """What the run was last told to do: its ``config.toml``, or where that can't be read the checkpoint's ``saved``.

    Raises:
        UserError: if the file was changed in what a run can't change.
    """
    file = path / "config.toml"
    try:
        told = validate(merge(saved.model_dump(), read_toml(file)))  # a file that was cut leaves the rest as it was
    except UserError:
        return saved
    refused = [
        f"{file}: {key} = {new!r}, but the checkpoint has {old!r}; a run keeps this"
        for key, (old, new) in differences(saved, told).items()
        if _is_fixed(key) and key not in ("run.name", "run.dir")  # a folder may be moved
    ]
    if refused:
        raise UserError("\n".join(refused))
    return told.with_values(run={"name": saved.run.name, "dir": saved.run.dir})


def resume_config(saved: Config, overrides: Mapping[str, Mapping[str, Any]]) -> tuple[Config, list[str]]:
    """The configuration of a resumed run: the saved one under the command line's values.

    Returns:
        It and a sentence for each change, such as ``optim.lr: 0.02 -> 0.01``.

    Raises:
        UserError: naming both values of every key that a run can't change on the way, or what is no valid value.
    """
    config = validate(merge(saved.model_dump(), overrides))
    changes = differences(saved, config)
    refused = [f"{key}: this run has {old!r}, not {new!r}" for key, (old, new) in changes.items() if _is_fixed(key)]
    if refused:
        hint = "a resumed run keeps these: leave them out, or start a new run (--init-from takes over its weights)"
        raise UserError("\n".join([*refused, hint]))
    return config, [f"{key}: {old} -> {new}" for key, (old, new) in changes.items()]


def _is_fixed(key: str) -> bool:
    if key == "data.cache_dir":  # where token files lie changes nothing, and a run may move to another machine
        return False
    return key.startswith(("model.", "data.", "task.")) or key in ("run.seed", "run.dtype", "run.name", "run.dir")
