"""Which class of Hugging Face's transformers holds which of this project's networks, and under what names.

Sources: transformers' modules ``modeling_nanochat``, ``modeling_gpt2``, ``modeling_llama`` and ``modeling_qwen3``.
Axes: D model width, K head size, V vocabulary.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from minigpt.config import ModelConfig
from minigpt.errors import UserError
from minigpt.plain import LAYER_NORM_EPSILON, RMS_NORM_EPSILON

Array = np.ndarray[Any, np.dtype[Any]]
ROTARY_BASE = 10_000.0
QK_GAINS = tuple(f"model.layers.{{}}.self_attn.{part}_norm.weight" for part in "qk")


@dataclass(frozen=True)
class Layout:
    """A class of transformers."""

    architecture: str
    model_type: str
    holds: Mapping[str, object]  # key of model.* → the one value that the class can hold
    numbers: Mapping[str, str]  # key of model.* → key of config.json
    modules: Mapping[str, str]  # module here → module there, {} is the block's number; those that share one are stacked
    fixed: Mapping[str, tuple[object, object]]  # key of config.json → (value here, value where a file has no such key)
    turned: bool = False  # rotary angles have the other sign
    input_first: frozenset[str] = field(default=frozenset())  # modules there whose weights are (in, out)

    def misfits(self, config: ModelConfig) -> dict[str, object]:
        """Keys of model.* that the class can't hold, with the value that it could."""
        wrong = {key: value for key, value in self.holds.items() if getattr(config, key) != value}
        if "n_kv_head" not in self.numbers and config.key_value_heads != config.n_head:
            wrong["n_kv_head"] = config.n_head
        return wrong

    def wrong_settings(self, values: Mapping[str, Any]) -> dict[str, object]:
        """What a config.json says that can't be here."""
        said = {key: values.get(key, absent) for key, (_, absent) in self.fixed.items()}
        return {key: found for key, found in said.items() if found != self.fixed[key][0]}

    def pairs(self, config: ModelConfig) -> Iterator[tuple[str, str]]:
        """The names of all modules that hold weights, here and there."""
        for ours, theirs in self.modules.items():
            for i in range(config.n_layer) if "{}" in ours else (0,):
                yield ours.format(i), theirs.format(i)


# ── the classes ────────────────────────────────────────────────────────────────────────────────────────────────

_LLAMA_NUMBERS = {
    "d_model": "hidden_size",
    "d_ff": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_kv_head": "num_key_value_heads",
    "context_length": "max_position_embeddings",
}
_LLAMA_ATTENTION = {
    "token_embedding": "model.embed_tokens",
    "blocks.{}.attn.query_linear": "model.layers.{}.self_attn.q_proj",
    "blocks.{}.attn.key_linear": "model.layers.{}.self_attn.k_proj",
    "blocks.{}.attn.value_linear": "model.layers.{}.self_attn.v_proj",
    "blocks.{}.attn.output_linear": "model.layers.{}.self_attn.o_proj",
    "lm_head": "lm_head",
}
_NANOCHAT = Layout(
    architecture="NanoChatForCausalLM",
    model_type="nanochat",
    holds={
        "position": "rotary", "norm": "rmsnorm", "norm_weight": False, "embedding_norm": True, "embedding_scale": False,
        "mlp": "relu2", "qk_norm": True, "bias": "none",
    },
    numbers=_LLAMA_NUMBERS,
    modules=_LLAMA_ATTENTION
    | {"blocks.{}.mlp.up_linear": "model.layers.{}.mlp.fc1", "blocks.{}.mlp.down_linear": "model.layers.{}.mlp.fc2"},
    fixed={
        "hidden_act": ("relu2", "relu2"), "rms_norm_eps": (RMS_NORM_EPSILON, 1e-6), "attention_bias": (False, False),
    },
    turned=True,
)  # fmt: skip
_LLAMA = Layout(
    architecture="LlamaForCausalLM",
    model_type="llama",
    holds={
        "position": "rotary", "norm": "rmsnorm", "norm_weight": True, "embedding_norm": False, "embedding_scale": False,
        "mlp": "swiglu", "qk_norm": False, "bias": "none", "logit_softcap": 0.0,
    },
    numbers=_LLAMA_NUMBERS,
    modules=_LLAMA_ATTENTION
    | {
        "blocks.{}.attn_norm": "model.layers.{}.input_layernorm",
        "blocks.{}.mlp_norm": "model.layers.{}.post_attention_layernorm",
        "blocks.{}.mlp.up_linear": "model.layers.{}.mlp.up_proj",
        "blocks.{}.mlp.gate_linear": "model.layers.{}.mlp.gate_proj",
        "blocks.{}.mlp.down_linear": "model.layers.{}.mlp.down_proj",
        "final_norm": "model.norm",
    },
    fixed={
        "hidden_act": ("silu", "silu"), "rms_norm_eps": (RMS_NORM_EPSILON, 1e-6), "attention_bias": (False, False),
        "mlp_bias": (False, False),
    },
)  # fmt: skip
_QWEN3 = Layout(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    holds={**_LLAMA.holds, "qk_norm": True},
    numbers=_LLAMA_NUMBERS,
    modules=_LLAMA.modules,
    fixed={
        "hidden_act": ("silu", "silu"), "rms_norm_eps": (RMS_NORM_EPSILON, 1e-6), "attention_bias": (False, False),
        "use_sliding_window": (False, False),
    },
)  # fmt: skip
_GPT2 = Layout(
    architecture="GPT2LMHeadModel",
    model_type="gpt2",
    holds={
        "position": "learned", "norm": "layernorm", "norm_weight": True, "embedding_norm": False,
        "embedding_scale": False, "mlp": "gelu", "qk_norm": False, "bias": "all", "logit_softcap": 0.0,
    },
    numbers={
        "d_model": "n_embd", "d_ff": "n_inner", "n_layer": "n_layer", "n_head": "n_head",
        "context_length": "n_positions",
    },
    modules={
        "token_embedding": "transformer.wte",
        "position_embedding": "transformer.wpe",
        "blocks.{}.attn_norm": "transformer.h.{}.ln_1",
        "blocks.{}.attn.query_linear": "transformer.h.{}.attn.c_attn",
        "blocks.{}.attn.key_linear": "transformer.h.{}.attn.c_attn",
        "blocks.{}.attn.value_linear": "transformer.h.{}.attn.c_attn",
        "blocks.{}.attn.output_linear": "transformer.h.{}.attn.c_proj",
        "blocks.{}.mlp_norm": "transformer.h.{}.ln_2",
        "blocks.{}.mlp.up_linear": "transformer.h.{}.mlp.c_fc",
        "blocks.{}.mlp.down_linear": "transformer.h.{}.mlp.c_proj",
        "final_norm": "transformer.ln_f",
        "lm_head": "lm_head",
    },
    fixed={
        "activation_function": ("gelu", "gelu_new"), "layer_norm_epsilon": (LAYER_NORM_EPSILON, 1e-5),
        "scale_attn_weights": (True, True), "scale_attn_by_inverse_layer_idx": (False, False),
        "add_cross_attention": (False, False),
    },
    input_first=frozenset({"c_attn", "c_proj", "c_fc"}),
)  # fmt: skip
_GPT2_ITSELF = replace(
    _GPT2,
    holds={**_GPT2.holds, "mlp": "gelu_tanh"},
    fixed={**_GPT2.fixed, "activation_function": ("gelu_new", "gelu_new")},
)
LAYOUTS = (_NANOCHAT, _GPT2, _GPT2_ITSELF, _LLAMA, _QWEN3)


# ── out ────────────────────────────────────────────────────────────────────────────────────────────────────────


def layout_of(config: ModelConfig) -> Layout:
    """The class that holds such networks.

    Raises:
        UserError: if there is none, saying what to train instead.
    """
    nearest = min(LAYOUTS, key=lambda layout: len(layout.misfits(config)))
    if wrong := nearest.misfits(config):
        has = ", ".join(f"model.{key} = {_word(getattr(config, key))}" for key in wrong)
        instead = " ".join(f"--model.{key.replace('_', '-')} {_word(value)}" for key, value in wrong.items())
        raise UserError(
            f"no class of transformers holds a network of {has}; for {nearest.architecture} train one with {instead}"
        )
    return nearest


def config_json(layout: Layout, config: ModelConfig, vocab_size: int) -> dict[str, Any]:
    """The content of config.json. Id 0 begins and ends a text."""
    values = {key: value for key, (value, _) in layout.fixed.items()}
    values |= {theirs: getattr(_explicit(config), ours) for ours, theirs in layout.numbers.items()}
    if layout.model_type == "gpt2":
        values |= {"embd_pdrop": config.dropout, "resid_pdrop": config.dropout, "attn_pdrop": 0.0}
    else:
        values |= {"rope_parameters": {"rope_type": "default", "rope_theta": ROTARY_BASE}, "head_dim": config.head_dim}
    if layout is _NANOCHAT:
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
    if layout is _QWEN3:  # the norm of queries and keys has no weights here
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
    layout = next((layout for layout in layouts if not layout.wrong_settings(values)), layouts[0])
    for key, found in layout.wrong_settings(values).items():
        raise UserError(f"{key} = {_word(found)}: this project's network has {_word(layout.fixed[key][0])}")
    model = {ours: values.get(theirs) for ours, theirs in layout.numbers.items()}
    for ours, derived in (("d_ff", 0), ("n_kv_head", 0)):  # null in some files
        model[ours] = model.get(ours) or derived
    _check_rotary(layout, values, model)
    model |= {**layout.holds, "tie_embeddings": values.get("tie_word_embeddings", layout.model_type == "gpt2")}
    if layout is _NANOCHAT:
        model["logit_softcap"] = values.get("final_logit_softcapping", 15.0) or 0.0
    return layout, model


def our_tensors(layout: Layout, arrays: Mapping[str, Array], config: ModelConfig) -> dict[str, Array]:
    """The inverse of ``their_tensors``; what is missing here is told by whoever builds the network.

    Raises:
        UserError: for a tensor that this project's network has no place for.
    """
    if config.n_layer > len(arrays):
        raise UserError(f"{config.n_layer} blocks of which there are no tensors")
    left = dict(arrays)
    if config.tie_embeddings:
        left.pop("lm_head.weight", None)
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
    head_dim = values.get("head_dim", 128 if layout is _QWEN3 else None)
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


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
