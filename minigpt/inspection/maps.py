"""Attention maps made elsewhere, and the tokens they are of, from files; everything in them is checked."""

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minigpt.console import counted
from minigpt.errors import UserError
from minigpt.inspection.patterns import Tokens

TOLERANCE = 0.01  # of the sum of a row: maps may have been kept in bfloat16


@dataclass(frozen=True)
class ForeignMaps:
    """Maps of one text."""

    maps: NDArray[np.float32]  # (layers, H, T, T), rows summing to 1
    causal: bool  # whether no row has weight on a later token


@dataclass(frozen=True)
class ForeignTokens:
    """The tokens of one text, numbered by their first place."""

    ids: Tokens  # (T,)
    texts: tuple[str, ...]  # of each number; empty if only numbers were given

    def token_bytes(self, token: int) -> bytes:
        """As a tokenizer's."""
        return self.texts[token].encode("utf-8", errors="replace")


def read_foreign_maps(path: Path) -> ForeignMaps:
    """Maps from an ``.npy``, ``.pt`` or ``.json`` file: layers × heads × T × T.

    Also taken: one layer after the other with a batch of one text, (layers, 1, H, T, T), as transformers gives them.

    Raises:
        UserError: if the file can't be read, or the maps have another shape or are no attention.
    """
    readers = {".npy": _read_npy, ".pt": _read_pt, ".json": _read_json}
    if path.suffix.lower() not in readers:
        raise UserError(f"{path}: maps are read from {', '.join(readers)} files")
    try:
        maps = np.asarray(readers[path.suffix.lower()](path))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from None
    except _Unreadable as error:
        raise UserError(f"{path}: {error}") from None
    except ValueError as error:  # rows of different lengths, among others
        raise UserError(f"{path}: holds no array of numbers ({error})") from None
    if maps.ndim == 5 and maps.shape[1] == 1:
        maps = maps[:, 0]
    if maps.ndim != 4 or maps.shape[-1] != maps.shape[-2] or maps.shape[-1] < 2 or not maps.size:
        raise UserError(f"{path}: has shape {maps.shape}; must be layers x heads x T x T, T at least 2")
    if maps.dtype.kind not in "fiu":
        raise UserError(f"{path}: holds {maps.dtype}, not numbers")
    with np.errstate(over="ignore"):  # what is too large becomes infinite, and is told with its place
        maps = maps.astype(np.float32)
    _check(path, maps)
    return ForeignMaps(maps, causal=not np.triu(maps, 1).any())


def read_foreign_tokens(path: Path, length: int) -> ForeignTokens:
    """The tokens of a text: a JSON list of texts or of whole numbers, or a text file with one token a line.

    Raises:
        UserError: if the file can't be read, holds something else, or not ``length`` tokens.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
        found: Any = json.loads(text) if path.suffix.lower() == ".json" else _lines(text)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: holds no tokens in UTF-8 ({error})") from None
    kinds = {type(token) for token in found} if isinstance(found, list) else set()
    if kinds not in ({str}, {int}):
        raise UserError(f"{path}: must be a list of texts or of whole numbers")
    if len(found) != length:
        raise UserError(f"{path}: has {counted(len(found), 'token')}, but the maps are of {length}")
    numbers = {token: number for number, token in enumerate(dict.fromkeys(found))}
    ids = np.array([numbers[token] for token in found], dtype=np.int64)
    return ForeignTokens(ids, tuple(numbers) if kinds == {str} else ())


class _Unreadable(Exception):
    """A file that is not what its name says."""


def _read_npy(path: Path) -> Any:
    try:
        return np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise _Unreadable(f"not an .npy file of numbers ({error})") from None


def _read_pt(path: Path) -> Any:
    import torch

    try:
        with warnings.catch_warnings(action="ignore"):  # of its format: it is read or refused
            found = torch.load(path, map_location="cpu", weights_only=True)  # executes nothing of the file
    except OSError:
        raise
    except Exception:  # what a file that is none raises differs with what is wrong in it
        raise _Unreadable("not a .pt file of tensors alone; write them by torch.save") from None
    tensors = list(found) if isinstance(found, list | tuple) else [found]
    if not tensors or not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        raise _Unreadable("must hold one tensor, or a list of one tensor a layer")
    for tensor in tensors:
        if tensor.dtype is torch.bool or tensor.is_complex() or tensor.is_quantized:
            raise _Unreadable(f"holds {str(tensor.dtype).removeprefix('torch.')}, not numbers")
        if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_nested:
            raise _Unreadable("holds a sparse tensor or one without numbers; save maps.to_dense()")
    arrays = [tensor.detach().float().numpy() for tensor in tensors]
    return np.stack(arrays) if isinstance(found, list | tuple) else arrays[0]


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise _Unreadable(f"not a valid JSON file ({error})") from None


def _check(path: Path, maps: NDArray[np.float32]) -> None:
    for wrong, what in (
        (~np.isfinite(maps), "is not a finite number"),
        (maps < 0, "is below 0"),
    ):
        if wrong.any():
            raise UserError(f"{path}: {_place(wrong)} {what}: these are no attention weights (scores before softmax?)")
    sums = maps.sum(axis=-1, dtype=np.float64)
    off = np.abs(sums - 1) > TOLERANCE
    if off.any():
        place, total = _place(off), float(sums[off][0])
        raise UserError(f"{path}: {place} sums to {total:.4g}, not 1: these are no attention weights (after dropout?)")


def _place(wrong: NDArray[np.bool_]) -> str:
    """The first place that is wrong, in words."""
    layer, head, row, *key = (int(number) for number in np.argwhere(wrong)[0])
    return f"L{layer}H{head}, row {row}" + (f", key {key[0]}" if key else "")


def _lines(text: str) -> list[str]:
    return text.replace("\r\n", "\n").removesuffix("\n").split("\n")
