"""The normal form: the weights of every layout of the decoder as the same named arrays and a few flags.

What a layout lacks is present as zeros or ones, so that no later code asks how a model was configured: the NumPy
decoder, its compiled step, the page and the exporters all start here.

Axes: H query heads, G key/value heads, D model width, K head size, F feed-forward width, V vocabulary, C context
length, L layers. Weights are (out, in): y = x Wᵀ + b.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

from minigpt.checkpoint import Checkpoint
from minigpt.config import ModelConfig
from minigpt.errors import UserError
from minigpt.tokenizer import tokenizer_from_dict

Array = np.ndarray[Any, np.dtype[Any]]
Float = type[np.floating[Any]]


class Layer(NamedTuple):
    """Weights of one block, or of all blocks with a leading axis L."""

    attn_gain: Array  # (D,)
    attn_shift: Array  # (D,)
    qkv_weight: Array  # ((H + 2G)·K, D): rows of the query heads, then the key heads, then the value heads
    qkv_bias: Array  # ((H + 2G)·K,)
    output_weight: Array  # (D, D)
    output_bias: Array  # (D,)
    mlp_gain: Array  # (D,)
    mlp_shift: Array  # (D,)
    up_weight: Array  # (F, D)
    up_bias: Array  # (F,)
    gate_weight: Array  # (F, D), or (0, D) for an ungated feed-forward
    gate_bias: Array  # (F,) or (0,)
    down_weight: Array  # (D, F)
    down_bias: Array  # (D,)


@dataclass(frozen=True)
class NormalForm:
    """Any trained decoder as plain arrays and five flags."""

    token_table: Array  # (V, D), already times sqrt(D) where the layout scales embeddings
    position_table: Array  # (C, D), zeros unless positions are learned or sinusoidal
    cos: Array  # (C, K/2), ones unless positions are rotary
    sin: Array  # (C, K/2), zeros unless positions are rotary
    embedding_gain: Array  # (D,)
    embedding_shift: Array  # (D,)
    layers: Layer  # every array with a leading axis L
    key_head: Array  # (H,): the key/value head that each query head uses
    final_gain: Array  # (D,)
    final_shift: Array  # (D,)
    head: Array  # (V, D), a copy of the token embedding when tied
    centred: bool  # LayerNorm rather than RMSNorm
    embedding_norm: bool
    qk_norm: bool
    activation: str  # relu2, relu, gelu, gelu_tanh or swiglu
    softcap: float  # 0: off

    @property
    def context_length(self) -> int:
        """C, most tokens the model sees at once."""
        return len(self.position_table)

    @property
    def vocab_size(self) -> int:
        """V, length of the logits."""
        return len(self.token_table)

    @property
    def n_head(self) -> int:
        """H, query heads a block."""
        return len(self.key_head)

    @property
    def n_kv_head(self) -> int:
        """G, key/value heads a block."""
        return int(self.key_head[-1]) + 1

    @property
    def head_dim(self) -> int:
        """K, size of one head."""
        return self.token_table.shape[1] // self.n_head

    def per_layer(self) -> list[Layer]:
        """The weights of each block."""
        return [Layer(*arrays) for arrays in zip(*self.layers, strict=True)]

    def astype(self, dtype: Float) -> "NormalForm":
        """The same numbers in another float type; arrays already of that type are shared."""
        arrays = {
            field.name: value.astype(dtype, copy=False)
            for field in fields(self)
            if field.name != "key_head" and isinstance(value := getattr(self, field.name), np.ndarray)
        }
        return replace(self, **arrays, layers=Layer(*(array.astype(dtype, copy=False) for array in self.layers)))


def from_checkpoint(checkpoint: Checkpoint) -> NormalForm:
    """The normal form of a saved model, in float32.

    Raises:
        UserError: if the file is damaged: weights, configuration and tokenizer do not fit each other; or if it holds no
            Transformer.
    """
    kind = checkpoint.config.model.kind
    if kind != "gpt":
        raise UserError(
            f"{checkpoint.path}: a recurrent network (model.kind = {kind}); only a Transformer can be read here"
        )
    tensors = checkpoint.tensors("model")
    try:
        model = from_tensors(tensors, checkpoint.config.model, np.float32)
        ids = tokenizer_from_dict(checkpoint.tokenizer).vocab_size
    except UserError as error:
        raise UserError(f"{checkpoint.path}: damaged: {error}") from None
    except (MemoryError, ValueError, OverflowError) as error:  # of tables for an absurd context
        raise UserError(f"{checkpoint.path}: damaged: its configuration asks for absurd arrays ({error})") from None
    if ids != model.vocab_size:
        raise UserError(
            f"{checkpoint.path}: damaged: its tokenizer has {ids} ids, its model {model.vocab_size}; use another one"
        )
    return model


def from_tensors(tensors: Mapping[str, Array], config: ModelConfig, dtype: Float = np.float64) -> NormalForm:
    """The normal form of a model's named tensors (``blocks.0.attn.query_linear.weight``, ...).

    Raises:
        UserError: if a tensor is missing, has another shape than ``config`` says, or is not used by it.
    """
    width, length, head_dim = config.d_model, config.context_length, config.head_dim
    reader = _Reader(dict(tensors), config, dtype)
    vocab_size = len(tensors.get("token_embedding.weight", ()))
    embedding = reader.take("token_embedding.weight", vocab_size, width)
    position = reader.take("position_embedding.weight", length, width, present=config.position == "learned")
    if config.position == "sinusoidal":
        position = sinusoidal_positions(length, width).astype(dtype)
    cos, sin = rotary_angles(length, head_dim)
    if config.position != "rotary":
        cos, sin = np.ones_like(cos), np.zeros_like(sin)
    embedding_gain, embedding_shift = reader.norm("embedding_norm", present=config.embedding_norm)
    layers = [reader.layer(f"blocks.{i}") for i in range(config.n_layer)]
    final_gain, final_shift = reader.norm("final_norm")
    head = embedding.copy() if config.tie_embeddings else reader.take("lm_head.weight", vocab_size, width)
    if reader.left:
        raise UserError(f"tensor {min(reader.left)} is not part of the model that the configuration describes")
    return NormalForm(
        token_table=embedding * dtype(math.sqrt(width)) if config.embedding_scale else embedding,
        position_table=position,
        cos=cos.astype(dtype),
        sin=sin.astype(dtype),
        embedding_gain=embedding_gain,
        embedding_shift=embedding_shift,
        layers=Layer(*(np.stack(arrays) for arrays in zip(*layers, strict=True))),
        key_head=np.arange(config.n_head) // (config.n_head // (config.key_value_heads)),
        final_gain=final_gain,
        final_shift=final_shift,
        head=head,
        centred=config.norm == "layernorm",
        embedding_norm=config.embedding_norm,
        qk_norm=config.qk_norm,
        activation=config.mlp,
        softcap=config.logit_softcap,
    )


@dataclass(frozen=True)
class _Reader:
    """Takes named tensors one by one; what is never taken stays in ``left``."""

    left: dict[str, Array]
    config: ModelConfig
    dtype: Float

    def take(self, name: str, *shape: int, present: bool = True, fill: float = 0.0) -> Array:
        """One tensor, or an array full of ``fill`` where the layout has no such tensor."""
        if not present:
            return np.full(shape, fill, self.dtype)
        tensor = self.left.pop(name, None)
        if tensor is None or tensor.shape != shape:
            found = "is missing" if tensor is None else f"has shape {tensor.shape}"
            raise UserError(f"tensor {name} {found}, but the configuration asks for shape {shape}")
        return tensor.astype(self.dtype)

    def norm(self, name: str, present: bool = True) -> tuple[Array, Array]:
        """Gain and shift of a norm."""
        width, weighted = self.config.d_model, present and self.config.norm_weight
        gain = self.take(f"{name}.weight", width, present=weighted, fill=1.0)
        return gain, self.take(f"{name}.bias", width, present=weighted and self.config.norm == "layernorm")

    def linear(self, name: str, rows: int, columns: int, *, bias: bool, present: bool = True) -> tuple[Array, Array]:
        """Weight and bias of a linear layer."""
        weight = self.take(f"{name}.weight", rows, columns, present=present)
        return weight, self.take(f"{name}.bias", rows, present=present and bias)

    def layer(self, name: str) -> Layer:
        """One block."""
        config, width = self.config, self.config.d_model
        key_width = (config.key_value_heads) * config.head_dim
        hidden, gated = config.feed_forward_width, config.mlp == "swiglu"
        qkv_bias, bias = config.bias == "all", config.bias != "none"
        widths = {"query": width, "key": key_width, "value": key_width}
        qkv = [self.linear(f"{name}.attn.{part}_linear", rows, width, bias=qkv_bias) for part, rows in widths.items()]
        fused = np.concatenate([weight for weight, _ in qkv]), np.concatenate([bias for _, bias in qkv])
        return Layer(
            *self.norm(f"{name}.attn_norm"),
            *fused,
            *self.linear(f"{name}.attn.output_linear", width, width, bias=bias),
            *self.norm(f"{name}.mlp_norm"),
            *self.linear(f"{name}.mlp.up_linear", hidden, width, bias=bias),
            *self.linear(f"{name}.mlp.gate_linear", hidden if gated else 0, width, bias=bias, present=gated),
            *self.linear(f"{name}.mlp.down_linear", width, hidden, bias=bias),
        )


def sinusoidal_positions(length: int, width: int) -> Array:
    """(C, D): sin(p·10000^(−2i/D)) at index 2i, cos of the same angle at 2i + 1 (Vaswani 2017, section 3.5)."""
    angle = np.outer(np.arange(length), 10000.0 ** (-np.arange(0, width, 2) / width))
    return np.stack([np.sin(angle), np.cos(angle)], axis=-1).reshape(length, -1)[:, :width]


def rotary_angles(length: int, head_dim: int) -> tuple[Array, Array]:
    """cos and sin of p·10000^(−2i/K), each (C, K/2) (Su 2021, section 3.2.2)."""
    angle = np.outer(np.arange(length), 10000.0 ** (-2 * np.arange(head_dim // 2) / head_dim))
    return np.cos(angle), np.sin(angle)
