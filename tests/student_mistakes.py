"""Attention with mistakes, as students write them: function by function, knowing nothing of how they are recognised."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from student_group_mistakes import GROUPS
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


def no_mask(q, k, v):
    return torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]), -1) @ v


def no_mask_numpy(q, k, v, dropout=0.0):
    e = np.exp(q @ np.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1]))
    return e / e.sum(-1, keepdims=True) @ v


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
    "mask missing": (mask_forgotten, mask_not_kept, no_mask, no_mask_numpy),
    "mask transposed": (mask_turned, mask_turned_added),
    "mask strict": (own_place_hidden, own_strict_mask, strict_mask_always),
    "mask inverted": (mask_inverted, mask_inverted_bool, mask_inverted_times, mask_inverted_numpy),
    "mask after the softmax": (mask_afterwards, mask_filled_afterwards),
    "mask multiplied before the softmax": (mask_multiplied, mask_multiplied_early_numpy),
    "-1 instead of -inf": (minus_one, minus_one_before_scaling),
    "wrong group map": GROUPS,
    "weights returned instead of the output": (only_weights,),
}
