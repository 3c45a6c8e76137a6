"""Which class of Hugging Face's transformers holds which of this project's networks, and under what names.

Sources: transformers' modules ``modeling_nanochat``, ``modeling_gpt2``, ``modeling_llama`` and ``modeling_qwen3``.
Axes: D model width, K head size, V vocabulary.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from minigpt.config import ModelConfig
from minigpt.errors import UserError
from minigpt.plain import LAYER_NORM_EPSILON, RMS_NORM_EPSILON


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
        has = ", ".join(f"model.{key} = {word(getattr(config, key))}" for key in wrong)
        instead = " ".join(f"--model.{key.replace('_', '-')} {word(value)}" for key, value in wrong.items())
        raise UserError(
            f"no class of transformers holds a network of {has}; for {nearest.architecture} train one with {instead}"
        )
    return nearest


def word(value: object) -> str:
    """A value as it stands on a command line."""
    return str(value).lower() if isinstance(value, bool) else str(value)
