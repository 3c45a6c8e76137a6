"""Attention from the formula to the layer, leaf to root.

Axis letters, everywhere in the project::

    B batch   T queries   S keys   H heads   D model width   K head size   V vocabulary

Masks are boolean, True = may look. A query with nothing to look at has weights 0 and output 0.
Source of the formulas: Vaswani et al. 2017, "Attention Is All You Need"; rotary positions: Su et al. 2021, "RoFormer".
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minigpt.config import ModelConfig
from minigpt.kernels import by_hand, linear, rms_norm, self_attention

ROTARY_BASE = 10_000.0
SHORT = 128  # up to here, on a CPU, all weights at once are faster than torch's blockwise kernel, at 64 twice as fast

# ── masks, weights, attention ──────────────────────────────────────────────────────────────────────────────────


def causal_mask(n_query: int, n_key: int, device: torch.device | str | None = None) -> Tensor:
    """(T, S), True where a query may look: the queries are the last T of the S positions, and none sees its future."""
    ones = torch.ones(n_query, n_key, dtype=torch.bool, device=device)
    return ones.tril(n_key - n_query)


def attention_weights(query: Tensor, key: Tensor, mask: Tensor | None = None, *, scale: float | None = None) -> Tensor:
    """softmax(Q Kᵀ · scale) over the keys (equation 1 of the paper, without V).

    Args:
        query: (..., T, K).
        key: (..., S, K).
        mask: broadcastable to (..., T, S); True = may look.
        scale: 1/√K unless given; 1 shows what scaling is for.

    Returns:
        (..., T, S), rows summing to 1, or to 0 where nothing may be looked at.
    """
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if mask is None:
        return scores.softmax(dim=-1)
    weights = scores.masked_fill(~mask, -math.inf).softmax(dim=-1)
    return weights.masked_fill(~mask, 0.0)  # a row of -inf alone gave NaN


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """softmax(Q Kᵀ / √K) V: (..., T, K), (..., S, K), (..., S, K′) → output (..., T, K′) and weights (..., T, S)."""
    weights = attention_weights(query, key, mask)
    return weights @ value, weights


def split_heads(x: Tensor, n_head: int) -> Tensor:
    """(B, T, H·K) → (B, H, T, K)."""
    return x.unflatten(-1, (n_head, -1)).transpose(-3, -2)


def merge_heads(heads: Tensor) -> Tensor:
    """(B, H, T, K) → (B, T, H·K)."""
    return heads.transpose(-3, -2).flatten(-2)


class MultiHeadAttention(nn.Module):
    """Multi-head attention as courses write it, for self- and cross-attention.

    Bias-free query, key and value projections, an output projection with a bias; every step in the open.
    """

    def __init__(self, d_model: int, n_head: int) -> None:
        super().__init__()
        if d_model % n_head:
            raise ValueError(f"d_model = {d_model} must be a multiple of n_head = {n_head}")
        self.n_head = n_head
        self.query_linear = nn.Linear(d_model, d_model, bias=False)
        self.key_linear = nn.Linear(d_model, d_model, bias=False)
        self.value_linear = nn.Linear(d_model, d_model, bias=False)
        self.output_linear = nn.Linear(d_model, d_model)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(B, T, D), (B, S, D), (B, S, D), mask that fits (B, H, T, S) → output (B, T, D), weights (B, H, T, S)."""
        q_BHTK = split_heads(self.query_linear(query), self.n_head)
        k_BHSK = split_heads(self.key_linear(key), self.n_head)
        v_BHSK = split_heads(self.value_linear(value), self.n_head)
        heads_BHTK, weights_BHTS = attention(q_BHTK, k_BHSK, v_BHSK, mask)
        return self.output_linear(merge_heads(heads_BHTK)), weights_BHTS


# ── positions ──────────────────────────────────────────────────────────────────────────────────────────────────


def sinusoidal_positions(n_position: int, d_model: int) -> Tensor:
    """(T, D): sin(p / 10000^(2i/D)) on even, cos of the same on odd indices (section 3.5 of the paper)."""
    angle = _angles(n_position, d_model)
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(-2).to(torch.get_default_dtype())


def rotary_tables(n_position: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine, each (T, K/2), of the angle p · 10000^(-2i/K) by which pair i is turned at position p."""
    angle = _angles(n_position, head_dim)
    return angle.cos().to(torch.get_default_dtype()), angle.sin().to(torch.get_default_dtype())


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x_i, x_{i+K/2}) by its position's angle, so that q·k tells distance alone.

    (x₁, x₂) → (x₁ cos − x₂ sin, x₂ cos + x₁ sin), for the halves of the last axis: (..., T, K), tables (T, K/2).
    """
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1)


def _angles(n_position: int, size: int) -> Tensor:
    frequency = ROTARY_BASE ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    return torch.arange(n_position, dtype=torch.float64)[:, None] * frequency


# ── the model's attention ──────────────────────────────────────────────────────────────────────────────────────


class KeyValueCache:
    """Keys and values of the tokens one layer has seen, (B, H, length, K) each, in memory laid out beforehand."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values, self.length = keys, values, 0

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store the next (B, H, T, K) and return all so far, (B, H, S, K)."""
        end = self.length + key.shape[-2]
        if end > self.keys.shape[-2]:
            raise ValueError(f"{end} tokens do not fit in a cache of {self.keys.shape[-2]}")
        self.keys[:, :, self.length : end] = key
        self.values[:, :, self.length : end] = value
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]


class CausalSelfAttention(nn.Module):
    """Self-attention of a decoder block: project → attend → combine.

    ``combine(attention(*project(x), causal_mask))`` is the same function written out, for looking at the weights.
    """

    cos: Tensor
    sin: Tensor
    unseen: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.n_head, self.n_kv_head, self.qk_norm = config.n_head, config.key_value_heads, config.qk_norm
        width, kv_width = config.d_model, self.n_kv_head * config.head_dim
        qkv_bias, output_bias = config.bias == "all", config.bias != "none"
        self.query_linear = nn.Linear(width, width, bias=qkv_bias)
        self.key_linear = nn.Linear(width, kv_width, bias=qkv_bias)
        self.value_linear = nn.Linear(width, kv_width, bias=qkv_bias)
        self.output_linear = nn.Linear(width, width, bias=output_bias)
        self.rotary = config.position == "rotary"
        if self.rotary:
            cos, sin = rotary_tables(config.context_length, config.head_dim)
            self.register_buffer("cos", cos, persistent=False)
            self.register_buffer("sin", sin, persistent=False)
        length = min(config.context_length, SHORT)
        unseen = torch.full((length, length), -math.inf).triu(1)
        self.register_buffer("unseen", unseen, persistent=False)

    @torch.no_grad()
    def start_by_copying(self) -> None:
        """W_O = W_Vᵀ: each head begins by adding what it attends to, so that copying need not be learned first."""
        value_HKD = self.value_linear.weight.unflatten(0, (self.n_kv_head, -1))
        value_HKD = value_HKD.repeat_interleave(self.n_head // self.n_kv_head, dim=0)
        self.output_linear.weight.copy_(value_HKD.flatten(0, 1).T)

    def project(self, x: Tensor, start: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T, D) at positions start … start+T-1 → queries (B, H, T, K), keys and values (B, H_kv, T, K)."""
        q_BTHK, k_BTHK, v_BTHK = self._heads(x).split([self.n_head, self.n_kv_head, self.n_kv_head], dim=2)
        if self.qk_norm:
            q_BTHK, k_BTHK = rms_norm(q_BTHK), rms_norm(k_BTHK)
        q_BHTK, k_BHTK, v_BHTK = q_BTHK.transpose(1, 2), k_BTHK.transpose(1, 2), v_BTHK.transpose(1, 2)
        if self.rotary:
            cos, sin = self._tables(start, x.shape[-2])
            q_BHTK, k_BHTK = rotate(q_BHTK, cos, sin), rotate(k_BHTK, cos, sin)
        return q_BHTK, k_BHTK, v_BHTK

    def _heads(self, x: Tensor) -> Tensor:
        """(B, T, D) → queries, keys and values by one product, (B, T, H + 2 H_kv, K)."""
        layers = self.query_linear, self.key_linear, self.value_linear
        weight = torch.cat(tuple(layer.weight for layer in layers))
        if self.query_linear.bias is None:
            heads = linear(x, weight)
        else:
            heads = F.linear(x, weight, torch.cat(tuple(layer.bias for layer in layers)))
        return heads.unflatten(-1, (self.n_head + 2 * self.n_kv_head, -1))

    def _tables(self, start: int, length: int) -> tuple[Tensor, Tensor]:
        return self.cos[start : start + length], self.sin[start : start + length]

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Causal attention by the fused kernel: (B, H, T, K), (B, H_kv, S, K), (B, H_kv, S, K) → (B, H, T, K)."""
        n_query, n_key = query.shape[-2], key.shape[-2]
        key, value = self.share_heads(key), self.share_heads(value)
        if n_query == n_key:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)
        # The kernel's own causal mask is aligned to the first key; a chunk behind a filled cache needs the last.
        mask = None if n_query == 1 else causal_mask(n_query, n_key, query.device)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    def share_heads(self, heads: Tensor) -> Tensor:
        """Give each query head its key or value head, number h // (H / H_kv): (B, H_kv, S, K) → (B, H, S, K)."""
        group = self.n_head // self.n_kv_head
        return heads if group == 1 else heads.repeat_interleave(group, dim=1)

    def combine(self, heads: Tensor) -> Tensor:
        """(B, H, T, K) → (B, T, D)."""
        return self.output_linear(merge_heads(heads))

    def forward(self, x: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """(B, T, D) → (B, T, D); with a cache, x follows the tokens the cache holds and is added to it."""
        length = x.shape[-2]
        if cache is None and length <= SHORT and self.n_kv_head == self.n_head and by_hand(x):
            packed = self._heads(x).unflatten(2, (3, -1))
            tables = self._tables(0, length) if self.rotary else None
            unseen = self.unseen[:length, :length]
            return self.output_linear(self_attention(packed, unseen, tables, normalise=self.qk_norm))
        q_BHTK, k_BHSK, v_BHSK = self.project(x, cache.length if cache else 0)
        if cache:
            k_BHSK, v_BHSK = cache.append(k_BHSK, v_BHSK)
        return self.combine(self.attend(q_BHTK, k_BHSK, v_BHSK))
