"""Functions with two mistakes at once, and with one that has no name."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

INF = float("inf")

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


def same_weights(q, k, v, mask=None):
    w = q.new_ones(q.shape[-2], k.shape[-2]) if mask is None else mask.to(q.dtype)
    return w / w.sum(-1, keepdim=True) @ v


def root_of_queries(q, k, v, mask=None):
    s = q @ k.mT / q.shape[-2] ** 0.5
    return (s if mask is None else s.masked_fill(mask == 0, -INF)).softmax(-1) @ v


def ten_percent_less(q, k, v, mask=None):
    return F.scaled_dot_product_attention(0.9 * q, k, v, mask)


def groups_backwards(q, k, v, mask=None):
    if q.ndim == 4 and k.shape[1] != q.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1).flip(1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, mask)


UNKNOWN = {cube_root: "scaling", softplus: "softmax", values_squared: "weighted sum", minus_three: "mask",
           shifted_keys: "raw scores", groups_backwards: None, same_weights: "raw scores"}  # fmt: skip
