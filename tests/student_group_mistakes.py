"""Attention with fewer key heads than query heads, where query heads use the wrong ones."""

import torch
from torch.nn import functional as F

INF = float("inf")


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


def groups_tiled_of_keys(q, k, v, mask=None):
    h = q.shape[-3] if q.ndim == 4 else 1
    if q.ndim == 4 and k.shape[1] != h:
        k, v = k.repeat(1, h // k.shape[1], 1, 1), v.repeat_interleave(h // v.shape[1], 1)
    return F.scaled_dot_product_attention(q, k, v, mask)


def groups_tiled_of_values(q, k, v, mask=None):
    h = q.shape[-3] if q.ndim == 4 else 1
    if q.ndim == 4 and k.shape[1] != h:
        k, v = k.repeat_interleave(h // k.shape[1], 1), v.repeat(1, h // v.shape[1], 1, 1)
    return F.scaled_dot_product_attention(q, k, v, mask)


def first_group_alone(q, k, v, mask=None):
    if q.ndim == 4 and k.shape[1] != q.shape[1]:
        k, v = k[:, :1], v[:, :1]
    return F.scaled_dot_product_attention(q, k.expand(q.shape[:-2] + k.shape[-2:]), v, mask)


GROUPS = (groups_by_remainder, groups_tiled, groups_tiled_of_keys, groups_tiled_of_values, first_group_alone)
