"""A folder as Hugging Face's transformers reads and writes it ↔ a checkpoint.

The folder holds config.json, generation_config.json, model.safetensors, tokenizer.json and tokenizer_config.json.
Nothing in it is executed, and transformers itself is not needed.
"""

import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save

from minigpt.checkpoint import Checkpoint
from minigpt.config import Config, validate
from minigpt.errors import UserError
from minigpt.files import safe_name, write_whole
from minigpt.interop.fast_tokenizer import read_fast, tokenizer_files
from minigpt.interop.layouts import Layout, layout_of
from minigpt.interop.translation import config_json, model_values, our_tensors, their_tensors
from minigpt.normal_form import from_checkpoint, from_tensors
from minigpt.tokenizer import LARGEST_VOCAB, tokenizer_from_dict

Array = np.ndarray[Any, np.dtype[Any]]
Read = TypeVar("Read")
FINE_TUNING = {"name": "adamw", "lr": 3e-4, "warmup_steps": 20, "weight_decay": 0.1}  # for weights from elsewhere
_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}
_MASKS = re.compile(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)|.*\.rotary_emb\.inv_freq")  # no weights


# ── out ────────────────────────────────────────────────────────────────────────────────────────────────────────


def write_folder(checkpoint: Checkpoint, folder: Path) -> Layout:
    """Write a trained network and its tokenizer as a new folder, whole or not at all; the class that will hold it.

    Raises:
        UserError: if no class can, the checkpoint is damaged, or the folder can't be written or holds something.
    """
    if os.path.lexists(folder) and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"--out {folder}: there is something of that name; name a new folder")
    form = from_checkpoint(checkpoint)  # refuses what is damaged
    config = checkpoint.config.model
    try:
        layout = layout_of(config)
        texts = tokenizer_files(tokenizer_from_dict(checkpoint.tokenizer), config.context_length)
    except UserError as error:
        raise UserError(f"{checkpoint.path}: {error}") from None
    tensors = their_tensors(layout, checkpoint.tensors("model"), config)
    generation = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    texts["config.json"] = json.dumps(config_json(layout, config, form.vocab_size), indent=2)
    texts["generation_config.json"] = json.dumps(generation, indent=2)
    files = {name: text.encode() for name, text in texts.items()}
    files["model.safetensors"] = save(tensors, {"format": "pt"})
    _write_folder(folder, files)
    return layout


def _write_folder(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write beside, then rename."""
    folder = Path(os.path.abspath(folder))  # "." has no name to write beside
    beside = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.tmp")
    try:
        beside.mkdir(parents=True)
        for name, content in files.items():
            write_whole(beside / name, content)
        if folder.is_dir():
            folder.rmdir()
        beside.rename(folder)
    except OSError as error:
        raise UserError(f"could not write {folder} ({error.strerror or error}); name another --out") from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)


# ── in ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class FolderCheckpoint(Checkpoint):
    """Weights of such a folder, read when asked for, under this project's names and in its order of ids."""

    layout: Layout
    rows: list[int]  # of each id here the id there

    def tensors(self, kind: str) -> dict[str, Array]:
        """Those of the model, by this project's names; a folder holds no optimizer's."""
        if kind != "model":
            return {}
        try:
            tensors = our_tensors(self.layout, _weights(self.path), self.config.model)
            for name in tensors.keys() & {"token_embedding.weight", "lm_head.weight"}:
                if len(tensors[name]) != len(self.rows):
                    raise UserError(
                        f"vocab_size = {len(self.rows)}, but the tensor {name} has {len(tensors[name])} rows"
                    )
                tensors[name] = tensors[name][self.rows]
            from_tensors(tensors, self.config.model, np.float32)  # refuses what does not fit
        except UserError as error:
            raise UserError(f"{self.path}: {error}") from None
        except (MemoryError, ValueError, OverflowError) as error:
            raise UserError(f"{self.path}: its configuration asks for absurd arrays ({error})") from None
        return tensors


def read_folder(folder: Path, which: str) -> FolderCheckpoint:
    """The network and the tokenizer of a folder that transformers wrote, as a checkpoint of step 0.

    Raises:
        UserError: naming what is damaged or missing, or what this project's network can't hold.
    """
    if which not in ("best", "last", "0"):
        raise UserError(f"{folder}: no checkpoint of step {which}; a Hugging Face folder holds one, step 0")
    values = _told_of(folder, lambda: _json(folder, "config.json"))
    try:
        layout, model = model_values(values)
    except UserError as error:
        raise UserError(f"{folder / 'config.json'}: {error}") from None
    except (TypeError, ValueError, AttributeError, KeyError):
        raise UserError(
            f"{folder / 'config.json'}: values are missing, or of another kind than transformers writes them"
        ) from None
    end, size = _end(folder, values), values.get("vocab_size")
    if not isinstance(size, int) or not 2 <= size <= LARGEST_VOCAB:
        raise UserError(f"{folder / 'config.json'}: vocab_size = {size}: must be from 2 to {LARGEST_VOCAB}")
    spec = _told_of(folder, lambda: _json(folder, "tokenizer.json"))
    tokenizer, rows = _told_of(folder / "tokenizer.json", lambda: read_fast(spec, end, size))
    return FolderCheckpoint(
        path=folder,
        step=0,
        config=_config(folder, model, tokenizer.name, 0 if tokenizer.name == "char" else size),
        tokenizer=tokenizer.to_dict(),
        val_loss=float("nan"),
        metadata={},
        layout=layout,
        rows=rows,
    )


def _config(folder: Path, model: Mapping[str, Any], tokenizer: str, size: int) -> Config:
    """A run's settings for weights from elsewhere; the text to train on is not known."""
    try:
        return validate(
            {
                "run": {"name": safe_name(folder.resolve().name)},
                "data": {"source": "", "tokenizer": tokenizer, "vocab_size": size},
                "model": model,
                "optim": FINE_TUNING,
            }
        )
    except UserError as error:
        raise UserError(f"{folder / 'config.json'}: " + "; ".join(str(error).splitlines())) from None


def _told_of(path: Path, read: Callable[[], Read]) -> Read:
    """What ``read`` gives; the path stands in front of what it complains of."""
    try:
        return read()
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _json(folder: Path, name: str) -> dict[str, Any]:
    try:
        values = json.loads((folder / name).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"{name}: {error.strerror or error}; a Hugging Face folder with a fast tokenizer has this file"
        ) from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name}: not valid JSON ({error})") from None
    if not isinstance(values, dict):
        raise UserError(f"{name}: not a JSON object")
    return values


def _end(folder: Path, values: Mapping[str, Any]) -> int:
    """The id that ends a text there."""
    end = values.get("eos_token_id")
    if end is None and (folder / "generation_config.json").is_file():
        end = _told_of(folder, lambda: _json(folder, "generation_config.json")).get("eos_token_id")
    end = end[0] if isinstance(end, list) and end else end
    if not isinstance(end, int):
        raise UserError(f"{folder / 'config.json'}: eos_token_id = {end!r}: must be the id that ends a text")
    return end


def _weights(folder: Path) -> dict[str, Array]:
    """All tensors of a folder in float32, under the names that its class has them by."""
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise UserError(
            "there is no model.safetensors in it; weights in other files are not read: save them anew, by "
            "save_pretrained of transformers"
        )
    if (folder / "model.safetensors.index.json").is_file():
        there = set(_json(folder, "model.safetensors.index.json").get("weight_map", {}).values())
        if missing := sorted(there - {path.name for path in files}):
            raise UserError(f"{missing[0]} is missing, a part of the weights")
    tensors: dict[str, Array] = {}
    for path in files:
        try:
            entries = deserialize(path.read_bytes())
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path.name} is damaged ({getattr(error, 'strerror', None) or error})") from None
        tensors |= {name: _array(name, entry) for name, entry in entries}
    if "wte.weight" in tensors:  # of the class without a head
        tensors = {f"transformer.{name}": array for name, array in tensors.items()}
    return {name: array for name, array in tensors.items() if not _MASKS.fullmatch(name)}


def _array(name: str, entry: Mapping[str, Any]) -> Array:
    if entry["dtype"] == "BF16":  # the upper half of a float32
        flat = (np.frombuffer(entry["data"], "<u2").astype("<u4") << 16).view("<f4")
    elif entry["dtype"] in _DTYPES:
        flat = np.frombuffer(entry["data"], _DTYPES[entry["dtype"]])
    elif _MASKS.fullmatch(f"transformer.{name}") or _MASKS.fullmatch(name):
        return np.frombuffer(entry["data"], np.uint8)  # of truth values, and not kept
    else:
        raise UserError(f"tensor {name} is of type {entry['dtype']}; weights are read as F32, F16, BF16 or F64")
    return flat.astype(np.float32).reshape(entry["shape"])
