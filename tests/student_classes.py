"""Correct multi-head attention in the many ways courses write it: none may be accused of anything."""

import math
from collections.abc import Iterator
from itertools import product

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F


class Course(nn.Module):
    """As courses write it; the flags stand for what differs between them."""

    fill, softmax_dim, pair, fused, unsqueeze = -1e9, -1, True, False, False

    def __init__(self, d_model, num_heads):
        super().__init__()
        assert d_model % num_heads == 0
        self.num_heads, self.d_k = num_heads, d_model // num_heads
        self.query_linear = nn.Linear(d_model, d_model, bias=False)
        self.key_linear = nn.Linear(d_model, d_model, bias=False)
        self.value_linear = nn.Linear(d_model, d_model, bias=False)
        self.output_linear = nn.Linear(d_model, d_model)
        self.dropout = nn.Dropout(0.1)

    def split(self, x):
        return x.view(x.shape[0], -1, self.num_heads, self.d_k).transpose(1, 2)

    def forward(self, query, key, value, mask=None):
        q, k, v = map(self.split, (self.query_linear(query), self.key_linear(key), self.value_linear(value)))
        if mask is not None and self.unsqueeze:
            mask = mask.unsqueeze(1)
        if self.fused:
            heads, weights = F.scaled_dot_product_attention(q, k, v, mask), None
        else:
            scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(self.d_k)
            if mask is not None:
                scores = scores.masked_fill(mask == 0, self.fill)
            weights = self.dropout(torch.softmax(scores, dim=self.softmax_dim))
            heads = torch.matmul(weights, v)
        heads = heads.transpose(1, 2).contiguous().view(query.shape[0], -1, self.num_heads * self.d_k)
        output = self.output_linear(heads)
        return (output, weights) if self.pair else output


class Einsum(Course):
    def forward(self, query, key, value, mask=None):
        q, k, v = (
            layer(x).unflatten(-1, (self.num_heads, self.d_k))
            for layer, x in ((self.query_linear, query), (self.key_linear, key), (self.value_linear, value))
        )
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * self.d_k**-0.5
        if mask is not None:
            scores = scores + mask
        heads = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)
        return self.output_linear(heads.flatten(2))


class HeadByHead(Course):
    def forward(self, query, key, value, mask=None):
        done = []
        parts = [layer(x).split(self.d_k, -1) for layer, x in (
            (self.query_linear, query), (self.key_linear, key), (self.value_linear, value))]  # fmt: skip
        for q, k, v in zip(*parts, strict=True):
            scores = q @ k.mT / self.d_k**0.5
            if mask is not None:
                scores = scores.masked_fill(mask == 0, -math.inf)
            done.append(scores.softmax(-1) @ v)
        return self.output_linear(torch.cat(done, -1))


class WithoutBatch(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.h = num_heads
        self.query_linear, self.key_linear, self.value_linear = (nn.Linear(d_model, d_model) for _ in range(3))
        self.output_linear = nn.Linear(d_model, d_model)

    def forward(self, query, key, value, mask=None):
        t, d = query.shape
        q = self.query_linear(query).reshape(t, self.h, -1).permute(1, 0, 2)
        k = self.key_linear(key).reshape(len(key), self.h, -1).permute(1, 0, 2)
        v = self.value_linear(value).reshape(len(value), self.h, -1).permute(1, 0, 2)
        s = q @ k.mT / (d // self.h) ** 0.5
        if mask is not None:
            s = s.masked_fill(mask == 0, -1e9)
        return self.output_linear((s.softmax(-1) @ v).permute(1, 0, 2).reshape(t, d))


class Packed(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.h = num_heads
        self.c_attn, self.c_proj = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)

    def packed(self, x):
        return self.c_attn(x)

    def forward(self, x, mask=None):
        q, k, v = (part.unflatten(-1, (self.h, -1)).transpose(1, 2) for part in self.packed(x).chunk(3, dim=-1))
        s = q @ k.mT * q.shape[-1] ** -0.5
        s = s if mask is None else s.masked_fill(mask == 0, -math.inf)
        return self.c_proj((s.softmax(-1) @ v).transpose(1, 2).flatten(2))


class PackedOfThree(Packed):
    def forward(self, query, key, value, mask=None):  # type: ignore[override]
        return super().forward(query, mask)


class PackedCausal(Packed):
    def forward(self, x):  # type: ignore[override]
        return super().forward(x, torch.tril(torch.ones(x.shape[1], x.shape[1])))


class Bare(nn.Module):
    turned = False

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.h = num_heads
        self.W_q, self.W_k, self.W_v = (nn.Parameter(torch.randn(d_model, d_model)) for _ in range(3))
        self.proj = nn.ModuleList([nn.Linear(d_model, d_model)])

    def forward(self, query, key, value, mask=None):
        q, k, v = (
            (x @ (W.T if self.turned else W)).unflatten(-1, (self.h, -1)).transpose(1, 2)
            for x, W in ((query, self.W_q), (key, self.W_k), (value, self.W_v))
        )
        s = q @ k.mT / q.shape[-1] ** 0.5
        s = s if mask is None else s.masked_fill(mask == 0, -1e9)
        return self.proj[0]((s.softmax(-1) @ v).transpose(1, 2).flatten(2))


class PackedRows(Packed):
    """One bare matrix of 3 D rows, as torch keeps its own."""

    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        self.W_qkv = nn.Parameter(torch.randn(3 * d_model, d_model))

    def packed(self, x):
        return F.linear(x, self.W_qkv)


class PackedColumns(Packed):
    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        self.W_qkv = nn.Parameter(torch.randn(d_model, 3 * d_model))

    def packed(self, x):
        return x @ self.W_qkv


class OfTorch(nn.MultiheadAttention):
    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads, batch_first=True)

    def forward(self, query, key, value, mask=None):  # type: ignore[override]
        return super().forward(query, key, value, attn_mask=mask if mask is None else ~mask)


class Arrays:
    """NumPy alone, no module, and no call but ``forward``."""

    turned = False

    def __init__(self, d_model, num_heads):
        self.h = num_heads
        self.W_q, self.W_k, self.W_v, self.W_o = np.random.default_rng(0).normal(size=(4, d_model, d_model))
        self.b_o = np.ones((1, d_model))

    def times(self, x, W):
        return x @ (W.T if self.turned else W)

    def forward(self, query, key, value, mask=None):
        B, T, D = query.shape
        q, k, v = (
            self.times(x, W).reshape(B, -1, self.h, D // self.h).transpose(0, 2, 1, 3)
            for x, W in ((query, self.W_q), (key, self.W_k), (value, self.W_v))
        )
        s = q @ k.transpose(0, 1, 3, 2) / np.sqrt(D // self.h)
        s = s if mask is None else np.where(mask, s, -1e9)
        w = np.exp(s - s.max(-1, keepdims=True))
        w /= w.sum(-1, keepdims=True)
        return self.times((w @ v).transpose(0, 2, 1, 3).reshape(B, T, D), self.W_o) + self.b_o, w


class OwnLinear:
    def __init__(self, d_in, d_out):
        self.weight, self.bias = np.zeros((d_out, d_in)), np.zeros(d_out)


class OwnLayers(Arrays):
    """NumPy, with layers of its own that have a weight."""

    def __init__(self, d_model, num_heads):
        self.h = num_heads
        self.query_linear, self.key_linear, self.value_linear, self.output_linear = (
            OwnLinear(d_model, d_model) for _ in range(4)
        )

    def __call__(self, query, key, value, mask=None):
        self.W_q, self.W_k, self.W_v = (
            layer.weight.T for layer in (self.query_linear, self.key_linear, self.value_linear)
        )
        self.W_o, self.b_o = self.output_linear.weight.T, self.output_linear.bias
        return super().forward(query, key, value, mask)


class NoModule:
    """Layers of torch in a class that is no module."""

    def __init__(self, d_model, num_heads):
        self.inner = Course(d_model, num_heads).eval()

    def forward(self, query, key, value, mask=None):
        return self.inner(query, key, value, mask)


PACKED_NAMES = {"qkv": "c_attn", "output": "c_proj"}
ARRAY_NAMES = {"query": "W_q", "key": "W_k", "value": "W_v", "output": "W_o", "bias": "b_o"}
BARE_NAMES = {"query": "W_q", "key": "W_k", "value": "W_v", "output": "proj.0"}


def classes() -> Iterator[tuple[type, dict[str, str] | None]]:
    """Each with its own names of attributes, if they are not the usual ones."""
    for fill, dim, pair, fused, unsqueeze in product((-1e9, -math.inf), (-1, 3), (True, False), (False, True), (0, 1)):
        flags = {"fill": fill, "softmax_dim": dim, "pair": pair, "fused": fused, "unsqueeze": unsqueeze}
        yield type(f"Course, {flags}", (Course,), flags), None
    yield from ((kind, None) for kind in (Einsum, HeadByHead, WithoutBatch))
    yield from ((kind, PACKED_NAMES) for kind in (Packed, PackedOfThree, PackedCausal))
    rows = {"qkv": "W_qkv", "output": "c_proj"}
    yield from ((kind, rows) for kind in (PackedRows, PackedColumns))
    yield OfTorch, {"qkv": "in_proj_weight", "output": "out_proj"}
    yield from ((kind, ARRAY_NAMES) for kind in (Arrays, type("ArraysTurned", (Arrays,), {"turned": True})))
    yield OwnLayers, None
    yield NoModule, {role: f"inner.{role}_linear" for role in ("query", "key", "value", "output")}
    yield from ((kind, BARE_NAMES) for kind in (Bare, type("Turned", (Bare,), {"turned": True})))
