"""The decoder-only Transformer, leaf to root. Axis letters: see ``attention.py``."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minigpt.attention import CausalSelfAttention, KeyValueCache, sinusoidal_positions
from minigpt.config import ModelConfig
from minigpt.kernels import mlp, rms_norm, soft_cap

LAYER_NORM_EPSILON = 1e-5


class Norm(nn.Module):
    """Layer norm (Ba et al. 2016) or RMS norm (Zhang & Sennrich 2019) over the last axis, with or without a gain."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.centred = config.norm == "layernorm"
        self.weight = nn.Parameter(torch.ones(config.d_model)) if config.norm_weight else None
        self.bias = nn.Parameter(torch.zeros(config.d_model)) if config.norm_weight and self.centred else None

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) → (..., D)."""
        if self.centred:
            return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, LAYER_NORM_EPSILON)
        return rms_norm(x) if self.weight is None else rms_norm(x) * self.weight


class MLP(nn.Module):
    """The feed-forward of a block: D → d_ff → D, position by position."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, bias = config.feed_forward_width, config.bias != "none"
        self.activation = config.mlp
        self.up_linear = nn.Linear(config.d_model, width, bias=bias)
        if config.mlp == "swiglu":
            self.gate_linear = nn.Linear(config.d_model, width, bias=bias)
        self.down_linear = nn.Linear(width, config.d_model, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) → (B, T, D)."""
        if self.activation in ("relu2", "gelu") and self.up_linear.bias is None:
            return mlp(x, self.up_linear.weight, self.down_linear.weight, self.activation)
        hidden = self.up_linear(x)
        match self.activation:
            case "relu2":
                hidden = F.relu(hidden).square()
            case "relu":
                hidden = F.relu(hidden)
            case "gelu":
                hidden = F.gelu(hidden)
            case "gelu_tanh":
                hidden = F.gelu(hidden, approximate="tanh")
            case "swiglu":
                hidden = F.silu(self.gate_linear(x)) * hidden
        return self.down_linear(hidden)


class Block(nn.Module):
    """Pre-norm residual block: x + attention(norm(x)), then x + feed-forward(norm(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attn_norm, self.attn = Norm(config), CausalSelfAttention(config)
        self.mlp_norm, self.mlp = Norm(config), MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """(B, T, D) → (B, T, D)."""
        x = x + self.dropout(self.attn(self.attn_norm(x), cache))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class Memory:
    """What a Transformer keeps of the tokens it has seen: one key-value cache a block."""

    def __init__(self, caches: list[KeyValueCache]) -> None:
        self.caches = caches

    @property
    def length(self) -> int:
        """Tokens seen."""
        return self.caches[0].length

    @property
    def nbytes(self) -> int:
        """Bytes laid out, filled or not."""
        return sum(cache.keys.nbytes + cache.values.nbytes for cache in self.caches)

    def crop(self, length: int) -> None:
        """Forget all but the first ``length`` tokens."""
        for cache in self.caches:
            cache.length = min(cache.length, length)


class GPT(nn.Module):
    """Decoder-only Transformer: tokens (B, T) → logits (B, T, V)."""

    positions: Tensor

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.config, self.vocab_size, width = config, vocab_size, config.d_model
        self.longest = config.context_length  # tokens that a memory takes
        self.token_embedding = nn.Embedding(vocab_size, width)
        if config.position == "learned":
            self.position_embedding = nn.Embedding(config.context_length, width)
        elif config.position == "sinusoidal":
            self.register_buffer("positions", sinusoidal_positions(config.context_length, width), persistent=False)
        self.embedding_norm = Norm(config) if config.embedding_norm else nn.Identity()
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.final_norm = Norm(config)
        if not config.tie_embeddings:
            self.lm_head = nn.Linear(width, vocab_size, bias=False)
        self._initialise()

    def forward(self, tokens: Tensor, memory: Memory | None = None) -> Tensor:
        """(B, T) → (B, T, V). With a memory, the tokens follow those it holds, and are added to it."""
        start = memory.length if memory else 0
        if start + tokens.shape[-1] > self.config.context_length:
            raise ValueError(f"{start + tokens.shape[-1]} tokens exceed the context of {self.config.context_length}")
        x_BTD = self.dropout(self.embedding_norm(self._embed(tokens, start)))
        for i, block in enumerate(self.blocks):
            x_BTD = block(x_BTD, memory.caches[i] if memory else None)
        head = self.token_embedding if self.config.tie_embeddings else self.lm_head
        logits_BTV = F.linear(self.final_norm(x_BTD), head.weight)
        cap = self.config.logit_softcap
        return soft_cap(logits_BTV, cap) if cap else logits_BTV

    def new_memory(self, batch_size: int = 1) -> Memory:
        """An empty key-value cache for every block, room for the whole context."""
        weight, config = self.token_embedding.weight, self.config
        shape = (batch_size, config.key_value_heads, config.context_length, config.head_dim)
        return Memory([KeyValueCache(weight.new_zeros(shape), weight.new_zeros(shape)) for _ in self.blocks])

    @property
    def n_parameter(self) -> int:
        """Number of learned numbers."""
        return sum(parameter.numel() for parameter in self.parameters())

    def _embed(self, tokens: Tensor, start: int) -> Tensor:
        x_BTD = self.token_embedding(tokens)
        if self.config.embedding_scale:
            x_BTD = x_BTD * math.sqrt(self.config.d_model)
        stop = start + tokens.shape[-1]
        if self.config.position == "learned":
            return x_BTD + self.position_embedding.weight[start:stop]
        if self.config.position == "sinusoidal":
            return x_BTD + self.positions[start:stop]
        return x_BTD

    @torch.no_grad()
    def _initialise(self) -> None:
        """Matrices keep the size of what passes through them; what a block adds, and the untied head, start at zero.

        With ``attention_init = "copy"`` what attention adds starts as a copy instead, see ``start_by_copying``.
        """
        for name, parameter in self.named_parameters():
            if name.endswith(("bias", "output_linear.weight", "down_linear.weight", "lm_head.weight")):
                parameter.zero_()
            elif name == "token_embedding.weight" and self.config.embedding_norm:
                # Its size is normalised away on the way in. As the head too it gives first logits of about 0.5.
                parameter.normal_(std=0.5 * self.config.d_model**-0.5 if self.config.tie_embeddings else 1.0)
            elif name.endswith("embedding.weight"):
                parameter.normal_(std=self.config.d_model**-0.5 if self.config.embedding_scale else 0.02)
            elif name.endswith("linear.weight"):
                parameter.normal_(std=parameter.shape[1] ** -0.5)
        if self.config.attention_init == "copy":
            for block in self.blocks:
                assert isinstance(block, Block)
                block.attn.start_by_copying()
