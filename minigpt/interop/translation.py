"""Configurations and tensors in this project's terms ↔ in those of a class of transformers.

Axes: K head size, V vocabulary.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from minigpt.config import ModelConfig
from minigpt.errors import UserError
from minigpt.interop.layouts import LAYOUTS, Layout, word

Array = np.ndarray[Any, np.dtype[Any]]
ROTARY_BASE = 10_000.0
QK_GAINS = tuple(f"model.layers.{{}}.self_attn.{part}_norm.weight" for part in "qk")


def config_json(layout: Layout, config: ModelConfig, vocab_size: int) -> dict[str, Any]:
    """The content of config.json. Id 0 begins and ends a text."""
    values = {key: value for key, (value, _) in layout.fixed.items()}
    values |= {theirs: getattr(_explicit(config), ours) for ours, theirs in layout.numbers.items()}
    if layout.model_type == "gpt2":
        values |= {"embd_pdrop": config.dropout, "resid_pdrop": config.dropout, "attn_pdrop": 0.0}
    else:
        values |= {"rope_parameters": {"rope_type": "default", "rope_theta": ROTARY_BASE}, "head_dim": config.head_dim}
    if layout.model_type == "nanochat":
        values["final_logit_softcapping"] = config.logit_softcap or None
    return values | {
        "architectures": [layout.architecture],
        "model_type": layout.model_type,
        "vocab_size": vocab_size,
        "tie_word_embeddings": config.tie_embeddings,
        "dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": None,
    }


def their_tensors(layout: Layout, tensors: Mapping[str, Array], config: ModelConfig) -> dict[str, Array]:
    """A network's tensors under the class's names, in its order of rows and axes."""
    stacks: dict[str, list[Array]] = {}
    for ours, theirs in layout.pairs(config):
        for kind in ("weight", "bias"):
            if (array := tensors.get(f"{ours}.{kind}")) is not None:
                stacks.setdefault(f"{theirs}.{kind}", []).append(_turned(layout, ours, array, config))
    arrays = {name: np.concatenate(parts) for name, parts in stacks.items()}
    arrays = {name: np.ascontiguousarray(_swapped(layout, name, array)) for name, array in arrays.items()}
    if layout.model_type == "qwen3":  # the norm of queries and keys has no weights here
        gain = np.ones(config.head_dim, np.float32)
        arrays |= {name.format(i): gain for name in QK_GAINS for i in range(config.n_layer)}
    return arrays


# ── in ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def model_values(values: Mapping[str, Any]) -> tuple[Layout, dict[str, Any]]:
    """The class that a config.json names, and the keys of model.* that make the same network here.

    Raises:
        UserError: for what this project's network can't hold.
    """
    layouts = [layout for layout in LAYOUTS if layout.model_type == values.get("model_type")]
    if not layouts:
        known = ", ".join(dict.fromkeys(layout.model_type for layout in LAYOUTS))
        raise UserError(f"model_type = {values.get('model_type')!r}: this project can hold {known}")
    if values.get("activation_function") == "gelu_pytorch_tanh":  # another name
        values = {**values, "activation_function": "gelu_new"}
    layout = next((layout for layout in layouts if not layout.wrong_settings(values)), layouts[0])
    for key, found in layout.wrong_settings(values).items():
        known = " or ".join(dict.fromkeys(word(layout.fixed[key][0]) for layout in layouts))
        raise UserError(f"{key} = {word(found)}: this project's network has {known}; such weights can't be read")
    model = {ours: values.get(theirs) for ours, theirs in layout.numbers.items()}
    for ours, derived in (("d_ff", 0), ("n_kv_head", 0)):  # null in some files
        model[ours] = model.get(ours) or derived
    _check_rotary(layout, values, model)
    model |= {**layout.holds, "tie_embeddings": values.get("tie_word_embeddings", layout.model_type == "gpt2")}
    if layout.model_type == "nanochat":
        model["logit_softcap"] = values.get("final_logit_softcapping", 15.0) or 0.0
    return layout, model


def our_tensors(layout: Layout, arrays: Mapping[str, Array], config: ModelConfig) -> dict[str, Array]:
    """The inverse of ``their_tensors``; what is missing here is told by whoever builds the network.

    Raises:
        UserError: for a tensor that this project's network has no place for.
    """
    if config.n_layer > len(arrays):
        raise UserError(f"model.n_layer = {config.n_layer}: there are no tensors of so many blocks")
    left = dict(arrays)
    for name, array in arrays.items():
        if not array.ndim:
            raise UserError(f"tensor {name} is a single number")
    head, embedding = left.get("lm_head.weight"), left.get(f"{layout.modules['token_embedding']}.weight")
    if config.tie_embeddings and head is not None and embedding is not None:
        if not np.array_equal(head, embedding):
            raise UserError("tie_word_embeddings is true, and lm_head.weight is another matrix than the embedding's")
        del left["lm_head.weight"]
    for name in (name.format(i) for name in QK_GAINS for i in range(config.n_layer)):
        if not np.all(left.pop(name, np.ones(1)) == 1):
            raise UserError(f"{name}: this project's norm of queries and keys has no weights; these are not all 1")
    homes: dict[str, list[str]] = {}
    for ours, theirs in layout.pairs(config):
        homes.setdefault(theirs, []).append(ours)
    tensors: dict[str, Array] = {}
    for theirs, modules in homes.items():
        for kind in ("weight", "bias"):
            if (array := left.pop(f"{theirs}.{kind}", None)) is None:
                continue
            parts = np.array_split(_swapped(layout, f"{theirs}.{kind}", array), len(modules))
            for ours, part in zip(modules, parts, strict=True):
                tensors[f"{ours}.{kind}"] = np.ascontiguousarray(_turned(layout, ours, part, config))
    if left:
        raise UserError(f"tensor {min(left)}: this project's network has no place for it")
    return tensors


def _check_rotary(layout: Layout, values: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    if layout.model_type == "gpt2":
        return
    told = values.get("rope_parameters") or values.get("rope_scaling") or {}
    base = told.get("rope_theta", values.get("rope_theta", ROTARY_BASE))
    kind = told.get("rope_type", told.get("type", "default"))
    if (kind, float(base), told.get("partial_rotary_factor", 1.0)) != ("default", ROTARY_BASE, 1.0):
        raise UserError(f"rotary positions of kind {kind} with base {base}: this project's have base {ROTARY_BASE:g}")
    head_dim = values.get("head_dim", 128 if layout.model_type == "qwen3" else None)
    if head_dim and head_dim * model["n_head"] != model["d_model"]:
        raise UserError(f"head_dim = {head_dim}: this project's heads share the width, {model['d_model']}, evenly")


def _explicit(config: ModelConfig) -> ModelConfig:
    """What 0 stands for, as a number."""
    return config.model_copy(update={"d_ff": config.feed_forward_width, "n_kv_head": config.key_value_heads})


def _turned(layout: Layout, module: str, array: Array, config: ModelConfig) -> Array:
    """Rows of queries and keys for the other sign of rotation: each head's second half negated; twice is the same."""
    if not layout.turned or not module.endswith(("query_linear", "key_linear")):
        return array
    sign = np.where(np.arange(len(array)) % config.head_dim < config.head_dim // 2, 1, -1).astype(array.dtype)
    return array * sign[:, None]


def _swapped(layout: Layout, name: str, array: Array) -> Array:
    """(out, in) ↔ (in, out) where the class has it so."""
    module, kind = name.split(".")[-2:]
    return array.T if kind == "weight" and module in layout.input_first else array
