"""One file holds everything about one moment of a run: weights, optimizer state, configuration and tokenizer.

The format is safetensors: plain arrays behind a JSON header, so that loading executes nothing. Arrays are named
``model.*`` and ``optimizer.*``; the header's metadata has one entry, ``minigpt``, a JSON object. This module needs
no torch: it takes and gives NumPy arrays.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from minigpt import __version__
from minigpt.config import Config, validate
from minigpt.console import say
from minigpt.errors import UserError
from minigpt.files import write_whole

FORMAT = 1
"""Version of the file's layout; a reader refuses any other."""

KINDS = ("model.", "optimizer.")
LONGEST_HEADER = 1 << 25  # bytes, ten times those of the largest vocabulary; what claims more is not read
_NUMBERS = ("val_loss", "best_val_loss", "validations_since_best", "train_loss", "tokens_seen", "seconds")
_FILE_NAME = re.compile(r"step-(\d{8}|[1-9]\d{8,})\.safetensors")


@dataclass(frozen=True)
class Checkpoint:
    """The header of a checkpoint file; arrays are read when asked for.

    ``val_loss`` is NaN where no validation was made at this step. ``metadata`` is all that was saved.
    """

    path: Path
    step: int
    config: Config
    tokenizer: dict[str, Any]
    val_loss: float
    metadata: dict[str, Any]

    def tensors(self, kind: str) -> dict[str, np.ndarray]:
        """The arrays of ``"model"`` or ``"optimizer"``, without that prefix in their names.

        Raises:
            UserError: if the file can no longer be read.
        """
        prefix = kind.removesuffix(".") + "."
        assert prefix in KINDS, kind
        with _opened(self.path) as file:
            names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118 (not a dictionary)
            return {name.removeprefix(prefix): _array(self.path, file, name) for name in names}


def checkpoint_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of ``step`` lives in a run's ``checkpoints`` folder."""
    return folder / f"step-{step:08d}.safetensors"


def versions() -> dict[str, str]:
    """Versions of what decides whether a run can be continued bit for bit."""
    return {"minigpt": __version__, "numpy": np.__version__, "torch": importlib.metadata.version("torch")}


def save_checkpoint(path: Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, Any]) -> None:
    """Write one checkpoint so that ``path`` holds either its old content or the whole new one, never a part.

    Args:
        tensors: arrays of any shape named ``model.*`` and ``optimizer.*``; bfloat16, which NumPy lacks, as float32.
        metadata: plain values, among them ``step``, ``config`` and ``tokenizer`` (dictionaries); numbers that are
            not finite become null. ``format``, ``versions`` and ``checksum`` are added here.

    Raises:
        UserError: if the file can't be written; what was there before is untouched and nothing half-written stays.
    """
    for name in tensors:
        assert name.startswith(KINDS) and "_orig_mod." not in name and ".module." not in name, name
    arrays = {name: _little_endian(array) for name, array in tensors.items()}
    header = _plain({"format": FORMAT, "versions": versions(), **metadata})
    header["checksum"] = _checksum(arrays, header)
    write_whole(path, save(arrays, {"minigpt": _to_json(header)}))


def read_checkpoint(path: Path, *, verify: bool = False) -> Checkpoint:
    """Read the header of a checkpoint file; with ``verify`` also compare every byte with the stored checksum.

    Raises:
        UserError: naming the file, if it is missing, damaged, of another format version, or not a checkpoint.
    """
    with _opened(path) as file:
        header = _header(path, file.metadata())
        if verify:
            arrays = {name: _array(path, file, name) for name in file.keys()}  # noqa: SIM118
            stored = header.get("checksum")
            if stored != _checksum(arrays, {key: value for key, value in header.items() if key != "checksum"}):
                raise UserError(f"{path}: damaged, its content does not match its checksum; use another checkpoint")
        try:
            config = validate(header["config"])
        except UserError as error:
            written_by = header.get("versions", {}).get("minigpt", "?")
            raise UserError(f"{path}: its configuration, of minigpt {written_by}, does not fit here: {error}") from None
    loss = header.get("val_loss")
    return Checkpoint(
        path=path,
        step=header["step"],
        config=config,
        tokenizer=header["tokenizer"],
        val_loss=math.nan if loss is None else float(loss),
        metadata=header,
    )


def list_checkpoints(folder: Path, *, verify: bool = False) -> tuple[list[Checkpoint], list[str]]:
    """The readable checkpoints of a ``checkpoints`` folder by step, and a sentence about each of the others."""
    good: list[Checkpoint] = []
    complaints: list[str] = []
    for step in _steps(folder):
        try:
            good.append(read_checkpoint(checkpoint_path(folder, step), verify=verify))
        except UserError as error:
            complaints.append(str(error))
    return good, complaints


def last(checkpoints: Sequence[Checkpoint]) -> Checkpoint:
    """The one of the highest step."""
    return max(checkpoints, key=lambda checkpoint: checkpoint.step)


def best(checkpoints: Sequence[Checkpoint]) -> Checkpoint | None:
    """The one of the lowest validation loss, the earliest of equals; None if none was validated."""
    validated = [checkpoint for checkpoint in checkpoints if math.isfinite(checkpoint.val_loss)]
    return min(validated, key=lambda checkpoint: (checkpoint.val_loss, checkpoint.step), default=None)


def prune(folder: Path, keep_last: int) -> list[Path]:
    """Delete checkpoints but step 0, the best, and the last ``keep_last`` (0: keep all); return what was deleted.

    A damaged file is left for its owner to judge; leftovers of a process killed while saving go too.
    """
    for leftover in folder.glob(".step-*.tmp"):
        with contextlib.suppress(OSError):
            leftover.unlink()
    if keep_last == 0:
        return []
    checkpoints, _ = list_checkpoints(folder)
    kept = {0, *(checkpoint.step for checkpoint in checkpoints[-keep_last:])}
    if winner := best(checkpoints):
        kept.add(winner.step)
    deleted = []
    for checkpoint in checkpoints:
        if checkpoint.step not in kept:
            with contextlib.suppress(OSError):  # open elsewhere, which Windows refuses: the next call gets it
                checkpoint.path.unlink()
                deleted.append(checkpoint.path)
    return deleted


def find_checkpoint(
    run_or_file: str | Path, which: str = "best", *, verify: bool = False, say: Callable[[str], None] = say
) -> Checkpoint:
    """The checkpoint meant by a run folder and ``"best"``, ``"last"`` or a step, or by one checkpoint file.

    A folder of Hugging Face's transformers is one checkpoint, of step 0.

    Where nothing was validated, the best is the last. Damaged files are passed over, and ``say`` is told.

    Raises:
        UserError: saying what there is instead.
    """
    path = Path(run_or_file)
    if which not in ("best", "last") and not (which.isascii() and which.isdigit()):
        raise UserError(f"checkpoint {which!r}: must be best, last, or the number of a step")
    if os.path.isfile(path):  # unlike the method of Path it has an answer for names that no system takes
        if os.path.isfile(path.with_name("config.json")):
            raise UserError(f"{path}: is part of a folder of transformers: give the folder, {path.parent}")
        found = read_checkpoint(path, verify=verify)
        if which.isdigit() and int(which) != found.step:
            raise UserError(f"{path}: this file is step {found.step}, not {which}")
        return found
    folder = path / "checkpoints"
    steps = _steps(folder)
    if not steps and os.path.isfile(path / "config.json"):
        from minigpt.interop.hugging_face import read_folder  # here: it stands on this module

        return read_folder(path, which)
    if not steps:
        raise UserError(_nothing_there(path))
    if which not in ("best", "last"):
        if int(which) not in steps:
            raise UserError(f"{path}: no checkpoint of step {which}; there are steps {', '.join(map(str, steps))}")
        return read_checkpoint(checkpoint_path(folder, int(which)), verify=verify)
    checkpoints, complaints = list_checkpoints(folder, verify=verify)
    if not checkpoints:
        raise UserError("\n".join([f"{path}: no checkpoint can be read", *complaints]))
    found = (best(checkpoints) if which == "best" else None) or last(checkpoints)
    for complaint in complaints:
        say(f"{complaint} (passed over: using step {found.step})")
    return found


# ── the file ───────────────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with path.open("rb") as raw:
            if (claimed := int.from_bytes(raw.read(8), "little")) > LONGEST_HEADER:
                raise UserError(f"{path}: damaged or not a checkpoint (its header claims {claimed:,} bytes)")
        with safe_open(path, framework="numpy") as file:
            yield file
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (SafetensorError, OSError, RecursionError) as error:
        raise UserError(f"{path}: damaged or not a checkpoint ({error}); use another checkpoint") from None


def _array(path: Path, file: Any, name: str) -> np.ndarray:
    try:
        return file.get_tensor(name)
    except (AttributeError, TypeError, ValueError) as error:  # of a type or a shape that NumPy lacks
        raise UserError(f"{path}: damaged, its array {name} can't be read ({error}); use another checkpoint") from None


def _header(path: Path, metadata: Mapping[str, str] | None) -> dict[str, Any]:
    try:
        header = json.loads((metadata or {})["minigpt"], parse_float=_finite, parse_constant=_finite)
        version = header["format"]
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{path}: holds arrays, but is not a checkpoint of minigpt") from None
    if version != FORMAT:
        found = f"has format {str(version)[:20]}, this minigpt reads format {FORMAT}"
        raise UserError(f"{path}: {found}; use the one that wrote it")
    kinds = {"config": dict, "tokenizer": dict, "step": int, "versions": dict | None, "machine": dict | None}
    kinds |= dict.fromkeys(_NUMBERS, int | float | None)
    wrong = [key for key, kind in kinds.items() if not isinstance(header.get(key), kind)]
    wrong += [key for key, value in header.items() if isinstance(value, int) and not 0 <= value < 2**63]
    if wrong:
        raise UserError(f"{path}: damaged, its header has no valid {', '.join(wrong)}; use another checkpoint")
    return header


def _finite(text: str) -> float:
    """A number of a JSON text, which can be NaN, Infinity or 1e999 in Python alone."""
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text}: not a finite number")
    return number


def _checksum(arrays: Mapping[str, np.ndarray], header: Mapping[str, Any]) -> str:
    """BLAKE2b over the header and over every array's name, type, shape and bytes."""
    digest = hashlib.blake2b(_to_json(header).encode(), digest_size=32)
    for name in sorted(arrays):
        array = _little_endian(arrays[name])
        digest.update(f"\n{name} {array.dtype.name} {array.shape}\n".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _little_endian(array: np.ndarray) -> np.ndarray:
    """The same numbers laid out as the file holds them: in C order (safetensors doesn't look), lowest byte first."""
    return np.asarray(array, dtype=array.dtype.newbyteorder("<"), order="C")


def _plain(value: Any) -> Any:
    """Values that JSON can hold: NumPy's numbers as Python's, and null for what is not finite."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        return _plain(value.item())
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _to_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _steps(folder: Path) -> list[int]:
    """Steps of the checkpoint files in a folder, by their names, ascending."""
    names = [match for path in folder.glob("step-*.safetensors") if (match := _FILE_NAME.fullmatch(path.name))]
    return sorted(int(match[1]) for match in names)


def _nothing_there(path: Path) -> str:
    if not path.exists():
        around, problem = path.parent, "no such run folder or checkpoint file"
    elif (path / "checkpoints").is_dir():
        return f"{path}: this run has no checkpoint yet"
    else:
        around, problem = path, "not a run folder (it has no checkpoints)"
    if not path.exists() and not path.is_absolute() and len(path.parts) <= 2 and not around.is_dir():
        problem += ", and nothing is downloaded: of a model elsewhere give a folder that is here"
    runs = sorted(str(folder.parent) for folder in around.glob("*/checkpoints"))
    there = f"runs here: {', '.join(runs[:20])}" if runs else f"{around} holds no runs; scripts/train.py makes one"
    return f"{path}: {problem}; {there}"
