"""Attention with mistakes, as students write them: function by function, knowing nothing of how they are recognised."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from student_variants import Course
from torch import nn
from torch.nn import functional as F

INF = float("inf")


def no_root(q, k, v, mask=None):
    s = q @ k.transpose(-2, -1)
    if mask is not None:
        s = s.masked_fill(mask == 0, -1e9)
    return torch.softmax(s, -1) @ v


def no_root_numpy(q, k, v, mask=None):
    s = q @ np.swapaxes(k, -1, -2)
    if mask is not None:
        s = np.where(mask, s, -1e9)
    e = np.exp(s - s.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True) @ v


def no_root_added(q, k, v, mask=None):
    s = torch.matmul(q, k.mT)
    return F.softmax(s if mask is None else s + mask, dim=-1) @ v


def by_d(q, k, v, mask=None):
    s = q @ k.transpose(-2, -1) / q.size(-1)
    if mask is not None:
        s.masked_fill_(mask == 0, -INF)
    w = s.softmax(-1)
    return w @ v, w


def root_twice(q, k, v, mask=None):
    root = math.sqrt(q.size(-1))
    s = (q / root) @ (k / root).mT
    return (s if mask is None else s.masked_fill(mask == 0, -INF)).softmax(-1) @ v


def times_root(q, k, v, mask=None):
    s = q @ k.transpose(-2, -1) * math.sqrt(q.size(-1))
    if mask is not None:
        s = s.masked_fill(mask == 0, -1e9)
    return s.softmax(-1) @ v


def root_of_values(q, k, v, mask=None):
    s = q @ k.transpose(-2, -1) / v.shape[-1] ** 0.5
    if mask is not None:
        s = s.masked_fill(mask == 0, -1e9)
    return s.softmax(-1) @ v


def over_queries(q, k, v, mask=None):
    s = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    if mask is not None:
        s = s.masked_fill(mask == 0, -1e9)
    return F.softmax(s, dim=-2) @ v


def over_axis_0(q, k, v, mask=None):
    s = q @ k.T / math.sqrt(q.size(-1))
    if mask is not None:
        s = s.masked_fill(mask == 0, -1e9)
    return F.softmax(s, dim=0) @ v


def over_queries_numpy(q, k, v, mask=None):
    s = q @ k.T / np.sqrt(k.shape[-1])
    if mask is not None:
        s = s + (1 - mask) * -1e9
    e = np.exp(s - s.max(axis=0))
    return (e / e.sum(axis=0)) @ v


def over_axis_1_of_three(q, k, v, mask=None):
    s = torch.bmm(q, k.transpose(1, 2)) / math.sqrt(q.size(-1))
    if mask is not None:
        s = s.masked_fill(mask == 0, -1e9)
    return torch.bmm(F.softmax(s, dim=1), v)


def over_all_numpy(q, k, v, mask=None):
    s = q @ k.swapaxes(-1, -2) / np.sqrt(k.shape[-1])
    if mask is not None:
        s = np.where(mask == 0, -1e9, s)
    e = np.exp(s - s.max())
    return e / e.sum() @ v


def over_matrix(q, k, v, mask=None):
    s = q @ k.mT / k.shape[-1] ** 0.5
    if mask is not None:
        s = s.masked_fill(mask == 0, -INF)
    w = F.softmax(s.flatten(-2), dim=-1).view(s.shape)
    return w @ v


def without_softmax(q, k, v, mask=None):
    s = q @ k.mT / k.shape[-1] ** 0.5
    if mask is not None:
        s = s.masked_fill(mask == 0, -INF)
    return s @ v


def without_softmax_large(q, k, v, mask=None):
    s = q @ k.mT / k.shape[-1] ** 0.5
    if mask is not None:
        s = s.masked_fill(mask == 0, -1e9)
    return s @ v


def keys_by_queries(q, k, v, mask=None):
    s = k @ q.transpose(-2, -1) / math.sqrt(k.size(-1))
    if mask is not None:
        s = s.masked_fill(mask == 0, -1e9)
    return s.softmax(-1) @ v


def keys_by_queries_numpy(q, k, v, mask=None):
    s = k @ q.T / np.sqrt(k.shape[1])
    if mask is not None:
        s[mask == 0] = -np.inf
    e = np.exp(s - s.max(1)[:, None])
    return e / e.sum(1)[:, None] @ v


def weights_turned(q, k, v, mask=None):
    s = q @ k.transpose(-2, -1) / math.sqrt(k.size(-1))
    if mask is not None:
        s = s.masked_fill(mask == 0, -1e9)
    w = s.softmax(-1)
    return w.transpose(-2, -1) @ v, w


def weights_turned_einsum(q, k, v, mask=None):
    s = torch.einsum("bqd,bkd->bqk", q, k) / math.sqrt(k.size(-1))
    if mask is not None:
        s = s.masked_fill(mask == 0, -1e9)
    return torch.einsum("bij,bid->bjd", s.softmax(-1), v)


def mask_forgotten(q, k, v, mask=None):
    return torch.softmax(q @ k.mT / math.sqrt(k.size(-1)), -1) @ v


def mask_not_kept(q, k, v, mask=None):
    s = q @ k.mT / math.sqrt(k.size(-1))
    if mask is not None:
        s.masked_fill(mask == 0, -1e9)
    return s.softmax(-1) @ v


def mask_turned(q, k, v, mask=None):
    s = q @ k.mT / math.sqrt(k.size(-1))
    if mask is not None:
        s = s.masked_fill(mask.transpose(-2, -1) == 0, -1e9)
    return s.softmax(-1) @ v


def mask_turned_added(q, k, v, mask=None):
    s = q @ k.mT / math.sqrt(k.size(-1))
    return (s if mask is None else s + mask.mT).softmax(-1) @ v


def own_place_hidden(q, k, v, mask=None):
    s = q @ k.mT / math.sqrt(k.size(-1))
    if mask is not None:
        same = torch.eye(*s.shape[-2:], dtype=torch.bool)
        s = s.masked_fill((mask == 0) | same, -1e9)
    return s.softmax(-1) @ v


def own_strict_mask(q, k, v, mask=None):
    s = q @ k.mT / math.sqrt(k.size(-1))
    if mask is not None:
        s = s.masked_fill(torch.tril(torch.ones(s.shape[-2:]), diagonal=-1) == 0, -INF)
    return s.softmax(-1) @ v


def strict_mask_always(q, k, v):
    s = q @ k.mT / math.sqrt(k.size(-1))
    hidden = torch.triu(torch.ones(s.shape[-2:]), diagonal=0).bool()
    return s.masked_fill(hidden, -1e9).softmax(-1) @ v


def mask_inverted(q, k, v, mask=None):
    s = q @ k.mT / math.sqrt(k.size(-1))
    if mask is not None:
        s = s.masked_fill(mask == 1, -1e9)
    return s.softmax(-1) @ v


def mask_inverted_bool(q, k, v, mask=None):
    s = q @ k.mT / math.sqrt(k.size(-1))
    if mask is not None:
        s = s.masked_fill(mask.bool(), -INF)
    return s.softmax(-1) @ v


def mask_inverted_times(q, k, v, mask=None):
    s = q @ k.mT / math.sqrt(k.size(-1))
    if mask is not None:
        s = s + mask * -1e9
    return s.softmax(-1) @ v


def mask_inverted_numpy(q, k, v, mask=None):
    s = q @ k.swapaxes(-1, -2) / math.sqrt(k.shape[-1])
    if mask is not None:
        s = np.where(mask, -1e9, s)
    e = np.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True) @ v


def mask_afterwards(q, k, v, mask=None):
    w = torch.softmax(q @ k.mT / math.sqrt(k.size(-1)), -1)
    if mask is not None:
        w = w * mask
    return w @ v, w


def mask_filled_afterwards(q, k, v, mask=None):
    w = torch.softmax(q @ k.mT / math.sqrt(k.size(-1)), -1)
    return (w if mask is None else w.masked_fill(mask == 0, 0.0)) @ v


def mask_multiplied(q, k, v, mask=None):
    s = q @ k.mT / math.sqrt(k.size(-1))
    if mask is not None:
        s = s * mask
    return s.softmax(-1) @ v


def mask_multiplied_early_numpy(q, k, v, mask=None):
    s = q @ k.swapaxes(-1, -2)
    if mask is not None:
        s = s * mask
    s = s / np.sqrt(k.shape[-1])
    e = np.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True) @ v


def minus_one(q, k, v, mask=None):
    s = q @ k.mT / math.sqrt(k.size(-1))
    if mask is not None:
        s = s.masked_fill(mask == 0, -1)
    return s.softmax(-1) @ v


def minus_one_before_scaling(q, k, v, mask=None):
    s = q @ k.mT
    if mask is not None:
        s = torch.where(mask.bool(), s, -1.0)
    return (s / math.sqrt(k.size(-1))).softmax(-1) @ v


def groups_by_remainder(q, k, v, mask=None):
    n_kv = k.shape[-3]
    heads = []
    for h in range(q.shape[-3]):
        q_h, k_h, v_h = q[..., h, :, :], k[..., h % n_kv, :, :], v[..., h % n_kv, :, :]
        heads.append(F.scaled_dot_product_attention(q_h, k_h, v_h, mask))
    return torch.stack(heads, dim=-3)


def groups_tiled(q, k, v, mask=None):
    if q.ndim == 4:
        k = k.repeat(1, q.shape[1] // k.shape[1], 1, 1)
        v = v.repeat(1, q.shape[1] // v.shape[1], 1, 1)
    s = q @ k.mT / k.shape[-1] ** 0.5
    if mask is not None:
        s = s.masked_fill(mask == 0, -INF)
    return s.softmax(-1) @ v


def naive_exp(q, k, v, mask=None):
    s = q @ k.swapaxes(-1, -2) / np.sqrt(k.shape[-1])
    if mask is not None:
        s = np.where(mask, s, -1e9)
    return np.exp(s) / np.exp(s).sum(-1, keepdims=True) @ v


def only_weights(q, k, v, mask=None):
    s = q @ k.mT / k.shape[-1] ** 0.5
    return (s if mask is None else s.masked_fill(mask == 0, -INF)).softmax(-1)


FUNCTIONS: dict[str, tuple[Callable[..., Any], ...]] = {
    "no sqrt(d)": (no_root, no_root_numpy, no_root_added),
    "d instead of sqrt(d)": (by_d, root_twice),
    "times sqrt(d)": (times_root,),
    "sqrt(d_v) instead of sqrt(d_k)": (root_of_values,),
    "softmax over the queries": (over_queries, over_axis_0, over_queries_numpy, over_axis_1_of_three),
    "softmax over the whole matrix": (over_all_numpy, over_matrix),
    "softmax missing": (without_softmax, without_softmax_large),
    "Q and K swapped": (keys_by_queries, keys_by_queries_numpy),
    "weights transposed": (weights_turned, weights_turned_einsum),
    "mask missing": (mask_forgotten, mask_not_kept),
    "mask transposed": (mask_turned, mask_turned_added),
    "mask strict": (own_place_hidden, own_strict_mask, strict_mask_always),
    "mask inverted": (mask_inverted, mask_inverted_bool, mask_inverted_times, mask_inverted_numpy),
    "mask after the softmax": (mask_afterwards, mask_filled_afterwards),
    "mask multiplied before the softmax": (mask_multiplied, mask_multiplied_early_numpy),
    "-1 instead of -inf": (minus_one, minus_one_before_scaling),
    "wrong group map": (groups_by_remainder, groups_tiled),
    "softmax overflows": (naive_exp,),
    "weights returned instead of the output": (only_weights,),
}


# ── classes ────────────────────────────────────────────────────────────────────────────────────────────────────


def of_a_layer(function: Callable[..., Any]) -> type:
    """A class that is right around a function that is not."""

    class MultiHeadAttention(Course):
        def forward(self, query, key, value, mask=None):
            q, k, v = map(self.split, (self.query_linear(query), self.key_linear(key), self.value_linear(value)))
            heads = function(q, k, v, mask)
            heads = heads[0] if isinstance(heads, tuple) else heads
            return self.output_linear(heads.transpose(1, 2).flatten(2))

    return MultiHeadAttention


def wired(use: Callable[..., Any], out: Callable[..., Any] | None = None) -> type:
    """A class with ``use(self, query, key, value) -> q, k, v`` and its own way out."""

    class MultiHeadAttention(Course):
        def forward(self, query, key, value, mask=None):
            q, k, v = map(self.split, use(self, query, key, value))
            heads = F.scaled_dot_product_attention(q, k, v, mask)
            merged = heads.transpose(1, 2).reshape(query.shape)
            return self.output_linear(merged) if out is None else out(self, merged)

    return MultiHeadAttention


def usual(self, query, key, value):
    return self.query_linear(query), self.key_linear(key), self.value_linear(value)


def with_weight(name: str) -> Callable[..., Any]:
    """x W in place of x W^T in one of the three projections."""

    def use(self, *inputs):
        linear = {"Q": self.query_linear, "K": self.key_linear, "V": self.value_linear}
        return [
            x @ layer.weight if letter == name else layer(x)
            for x, (letter, layer) in zip(inputs, linear.items(), strict=True)
        ]

    return use


class DModel(Course):
    def forward(self, query, key, value, mask=None):
        q, k, v = map(self.split, usual(self, query, key, value))
        s = q @ k.transpose(-2, -1) / math.sqrt(query.size(-1))
        s = s if mask is None else s.masked_fill(mask == 0, -1e9)
        return self.output_linear((s.softmax(-1) @ v).transpose(1, 2).flatten(2))


class MergedWrongly(Course):
    def forward(self, query, key, value, mask=None):
        q, k, v = map(self.split, usual(self, query, key, value))
        heads = F.scaled_dot_product_attention(q, k, v, mask)
        return self.output_linear(heads.reshape(query.shape))


class SplitWrongly(Course):
    def forward(self, query, key, value, mask=None):
        q, k, v = (
            x.view(x.shape[0], self.num_heads, -1, self.d_k)  # the second half of the transpose is forgotten
            for x in usual(self, query, key, value)
        )
        heads = F.scaled_dot_product_attention(q, k, v, mask)
        return self.output_linear(heads.transpose(1, 2).reshape(query.shape))


class NoBias(Course):
    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        self.output_linear = nn.Linear(d_model, d_model, bias=False)


def _classes() -> Iterator[tuple[str, type]]:
    inner = set(FUNCTIONS) - {
        "wrong group map", "sqrt(d_v) instead of sqrt(d_k)", "softmax overflows", "softmax over the queries",
        "weights returned instead of the output",
    }  # fmt: skip
    for name in sorted(inner):
        for function in FUNCTIONS[name]:
            if not function.__name__.endswith(("numpy", "einsum", "always")):
                yield name, of_a_layer(function)
    yield "softmax over the queries", of_a_layer(over_queries)
    yield "sqrt(d_model) instead of sqrt(d_head)", DModel
    yield "heads merged without the transpose", MergedWrongly
    yield "heads split without the transpose", SplitWrongly
    yield "output bias lost", NoBias
    yield "output bias lost", wired(usual, lambda self, x: F.linear(x, self.output_linear.weight))
    for letter in "QKV":
        yield f"W_{letter} transposed", wired(with_weight(letter))
    yield "W_O transposed", wired(usual, lambda self, x: x @ self.output_linear.weight + self.output_linear.bias)
    q, k, v, o = "query_linear", "key_linear", "value_linear", "output_linear"
    swaps = {"W_Q and W_K": (k, q, v, o), "W_Q and W_V": (v, k, q, o), "W_K and W_V": (q, v, k, o)}
    swaps |= {"W_Q and W_O": (o, k, v, q), "W_K and W_O": (q, o, v, k), "W_V and W_O": (q, k, o, v)}
    for names, order in swaps.items():
        yield f"{names} swapped", _in_order(*order)
    yield "W_Q in place of W_K", wired(lambda s, q, k, v: (s.query_linear(q), s.query_linear(k), s.value_linear(v)))
    inputs = wired(lambda s, q, k, v: (s.query_linear(q), s.key_linear(q), s.value_linear(q)))
    yield "inputs taken for one another", inputs


def _in_order(query: str, key: str, value: str, output: str) -> type:
    """The four matrices in these places; the bias stays with the output."""

    def use(self, *inputs):
        return [x @ getattr(self, name).weight.T for x, name in zip(inputs, (query, key, value), strict=True)]

    return wired(use, lambda self, x: x @ getattr(self, output).weight.T + self.output_linear.bias)


CLASSES: tuple[tuple[str, type], ...] = tuple(_classes())


# ── two at once ────────────────────────────────────────────────────────────────────────────────────────────────


def no_root_no_mask(q, k, v, mask=None):
    return torch.softmax(q @ k.mT, -1) @ v


def no_root_over_queries(q, k, v, mask=None):
    s = q @ k.mT
    if mask is not None:
        s = s.masked_fill(mask == 0, -1e9)
    return s.softmax(-2) @ v


def inverted_and_by_d(q, k, v, mask=None):
    s = q @ k.mT / k.shape[-1]
    if mask is not None:
        s = s.masked_fill(mask, -INF)
    return s.softmax(-1) @ v


PAIRS: dict[tuple[str, str], Callable[..., Any]] = {
    ("no sqrt(d)", "mask missing"): no_root_no_mask,
    ("no sqrt(d)", "softmax over the queries"): no_root_over_queries,
    ("d instead of sqrt(d)", "mask inverted"): inverted_and_by_d,
}


# ── none that is known ─────────────────────────────────────────────────────────────────────────────────────────


def cube_root(q, k, v, mask=None):
    s = q @ k.mT / 4.5
    return (s if mask is None else s.masked_fill(mask == 0, -INF)).softmax(-1) @ v


def softplus(q, k, v, mask=None):
    w = F.softplus(q @ k.mT / k.shape[-1] ** 0.5)
    return (w if mask is None else w * mask) @ v


def values_squared(q, k, v, mask=None):
    s = q @ k.mT / k.shape[-1] ** 0.5
    return (s if mask is None else s.masked_fill(mask == 0, -INF)).softmax(-1) @ v**2


def minus_three(q, k, v, mask=None):
    s = q @ k.mT / k.shape[-1] ** 0.5
    return (s if mask is None else s.masked_fill(mask == 0, -3.0)).softmax(-1) @ v


def shifted_keys(q, k, v, mask=None):
    s = q @ k.roll(1, -2).mT / k.shape[-1] ** 0.5
    return (s if mask is None else s.masked_fill(mask == 0, -INF)).softmax(-1) @ v


UNKNOWN = {cube_root: "scaling", softplus: "softmax", values_squared: "weighted sum", minus_three: "mask",
           shifted_keys: "raw scores"}  # fmt: skip
