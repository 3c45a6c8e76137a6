"""A checkpoint as one GGUF file, the format of llama.cpp: the layouts ``llama`` and ``gpt2``, with a BPE.

Sources: the specification (github.com/ggml-org/ggml, docs/gguf.md) and llama.cpp's ``convert_hf_to_gguf.py``.
"""

import contextlib
import importlib
import os
import secrets
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from minigpt.bpe import SPLIT_PATTERN
from minigpt.checkpoint import Checkpoint
from minigpt.config import ModelConfig
from minigpt.errors import UserError
from minigpt.interop.fast_tokenizer import END_NAME, merges_of, written
from minigpt.interop.layouts import Layout, layout_of
from minigpt.interop.translation import ROTARY_BASE, their_tensors
from minigpt.normal_form import from_checkpoint
from minigpt.plain import LAYER_NORM_EPSILON, RMS_NORM_EPSILON
from minigpt.tokenizer import BpeTokenizer, Tokenizer, tokenizer_from_dict

Array = np.ndarray[Any, np.dtype[Any]]
TYPES = {"f32": 0, "f16": 1}  # general.file_type
NORMAL, CONTROL, UNUSED = 1, 3, 5  # tokenizer.ggml.token_type

_BLOCK = {
    "token_embedding": "token_embd",
    "blocks.{}.attn_norm": "blk.{}.attn_norm",
    "blocks.{}.attn.output_linear": "blk.{}.attn_output",
    "blocks.{}.mlp_norm": "blk.{}.ffn_norm",
    "blocks.{}.mlp.up_linear": "blk.{}.ffn_up",
    "blocks.{}.mlp.down_linear": "blk.{}.ffn_down",
    "final_norm": "output_norm",
    "lm_head": "output",
}
MODULES = {
    "llama": _BLOCK
    | {f"blocks.{{}}.attn.{part}_linear": f"blk.{{}}.attn_{part[0]}" for part in ("query", "key", "value")}
    | {"blocks.{}.mlp.gate_linear": "blk.{}.ffn_gate"},
    "gpt2": _BLOCK
    | {f"blocks.{{}}.attn.{part}_linear": "blk.{}.attn_qkv" for part in ("query", "key", "value")}
    | {"position_embedding": "position_embd"},
}


def write_gguf(checkpoint: Checkpoint, path: Path, dtype: str) -> str:
    """Write a trained network and its tokenizer as one file, whole or not at all; a sentence on what differs there.

    Args:
        checkpoint: of the layout ``llama`` or ``gpt2``.
        path: the new file.
        dtype: ``f32`` or ``f16``, of the matrices; vectors and the table of positions stay f32.

    Raises:
        UserError: if the format can't hold it, the checkpoint is damaged, or the file is there or can't be written.
    """
    if os.path.lexists(path):
        raise UserError(f"--out {path}: there is something of that name; name a new file")
    from_checkpoint(checkpoint)  # refuses what is damaged
    config, tokenizer = checkpoint.config.model, tokenizer_from_dict(checkpoint.tokenizer)
    try:
        kind = layout_of(config)
        layout, bpe = _held(kind), _bpe(tokenizer)
    except UserError as error:
        raise UserError(f"{checkpoint.path}: {error}") from None
    tensors = _paired(layout, their_tensors(layout, checkpoint.tensors("model"), config), config)
    gguf = _library()
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        writer = gguf.GGUFWriter(beside, layout.model_type)
        writer.add_name(checkpoint.config.run.name or path.stem)
        writer.add_file_type(TYPES[dtype])
        _add_numbers(writer, layout, config, tokenizer.vocab_size)
        _add_tokenizer(writer, bpe)
        for name, array in tensors.items():
            half = dtype == "f16" and array.ndim == 2 and not name.startswith("position")
            writer.add_tensor(name, array.astype(np.float16 if half else np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        os.replace(beside, path)
    except OSError as error:
        raise UserError(f"could not write {path} ({error.strerror or error}); name another --out") from None
    finally:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
    return "llama.cpp computes GELU by tanh, this network exactly: it differs a little" if config.mlp == "gelu" else ""


def _library() -> Any:
    try:
        return importlib.import_module("gguf")  # by its name: a type check can do without it
    except ImportError:
        raise UserError('--format gguf needs the library gguf: pip install "minigpt[interop]"') from None


def _held(layout: Layout) -> Layout:
    """The layout under GGUF's names, all weights as (out, in)."""
    if layout.model_type not in MODULES:
        raise UserError(
            f"--format gguf holds the layouts llama and gpt2, not that of {layout.architecture}; train one with "
            "configs/llama.toml, or take --format hf"
        )
    return replace(layout, modules=MODULES[layout.model_type], input_first=frozenset())


def _bpe(tokenizer: Tokenizer) -> BpeTokenizer:
    if not isinstance(tokenizer, BpeTokenizer) or tokenizer.pattern != SPLIT_PATTERN or not merges_of(tokenizer.tokens):
        raise UserError(
            f"data.tokenizer = {tokenizer.name}: --format gguf holds a bpe alone; train with --data.tokenizer bpe, or "
            "take --format hf"
        )
    return tokenizer


def _paired(layout: Layout, tensors: Mapping[str, Array], config: ModelConfig) -> dict[str, Array]:
    """llama.cpp turns neighbours, this project (i, i + K/2): rows of queries and keys in the other order."""
    if layout.model_type != "llama":
        return dict(tensors)
    half = config.head_dim // 2
    return {
        name: array.reshape(-1, 2, half, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        if name.endswith(("attn_q.weight", "attn_k.weight"))
        else array
        for name, array in tensors.items()
    }


def _add_numbers(writer: Any, layout: Layout, config: ModelConfig, vocab_size: int) -> None:
    writer.add_context_length(config.context_length)
    writer.add_embedding_length(config.d_model)
    writer.add_block_count(config.n_layer)
    writer.add_feed_forward_length(config.feed_forward_width)
    writer.add_head_count(config.n_head)
    writer.add_vocab_size(vocab_size)
    if layout.model_type == "gpt2":
        writer.add_layer_norm_eps(LAYER_NORM_EPSILON)
        return
    writer.add_head_count_kv(config.key_value_heads)
    writer.add_layer_norm_rms_eps(RMS_NORM_EPSILON)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(ROTARY_BASE)


def _add_tokenizer(writer: Any, tokenizer: BpeTokenizer) -> None:
    texts = [
        END_NAME,
        *(f"[unused{rank}]" if token is None else written(token) for rank, token in enumerate(tokenizer.tokens)),
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(texts)
    writer.add_token_types([CONTROL, *(UNUSED if token is None else NORMAL for token in tokenizer.tokens)])
    writer.add_token_merges([f"{written(left)} {written(right)}" for left, right in merges_of(tokenizer.tokens)])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)
