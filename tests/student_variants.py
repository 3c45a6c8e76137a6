"""Correct attention in the many ways people write it: none of them may be accused of anything."""

import math
from collections.abc import Callable, Iterator
from itertools import cycle, islice, product
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

Function = Callable[..., Any]

TORCH_SCORES: dict[str, Function] = {
    "@": lambda q, k: q @ k.transpose(-2, -1) / math.sqrt(q.size(-1)),
    "matmul": lambda q, k: torch.matmul(q, k.mT) * q.shape[-1] ** -0.5,
    "einsum": lambda q, k: torch.einsum("...td,...sd->...ts", q, k) / np.sqrt(q.shape[-1]),
    "scaled q": lambda q, k: (q / q.shape[-1] ** 0.5) @ k.transpose(-1, -2),
    "tensor root": lambda q, k: q @ k.transpose(-2, -1) / torch.sqrt(torch.tensor(k.shape[-1], dtype=torch.float32)),
    "broadcast": lambda q, k: (q.unsqueeze(-2) * k.unsqueeze(-3)).sum(-1) / math.sqrt(k.shape[-1]),
}
TORCH_MASKS: dict[str, Function] = {
    "fill": lambda s, m: s.masked_fill(m == 0, float("-inf")),
    "fill -1e9": lambda s, m: s.masked_fill(m == 0, -1e9),
    "not": lambda s, m: s.masked_fill(~m, -1e9),
    "bool()": lambda s, m: s.masked_fill(~m.bool(), torch.finfo(s.dtype).min),
    "where": lambda s, m: torch.where(m != 0, s, torch.tensor(-torch.inf, dtype=s.dtype)),
    "added": lambda s, m: s + m,
    "1 - m": lambda s, m: s + (1.0 - m) * -1e9,
    "log": lambda s, m: s + torch.log(m.float()).to(s.dtype),
}
TORCH_SOFTMAXES: dict[str, Function] = {
    "softmax": lambda s: torch.softmax(s, dim=-1),
    "F": lambda s: F.softmax(s, dim=s.dim() - 1),
    "log_softmax": lambda s: F.log_softmax(s, -1).exp(),
    "by hand": lambda s: (e := torch.exp(s - s.max(dim=-1, keepdim=True).values)) / e.sum(dim=-1, keepdim=True),
}
NUMPY_SCORES: dict[str, Function] = {
    "@": lambda q, k: q @ np.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1]),
    "einsum": lambda q, k: np.einsum("...td,...sd->...ts", q, k) / math.sqrt(k.shape[-1]),
    "matmul": lambda q, k: np.matmul(q, np.moveaxis(k, -1, -2)) * k.shape[-1] ** -0.5,
}
NUMPY_MASKS: dict[str, Function] = {
    "where": lambda s, m: np.where(m == 0, -1e9, s),
    "where -inf": lambda s, m: np.where(m, s, -np.inf),
    "added": lambda s, m: s + m,
    "1 - m": lambda s, m: s + (1 - m) * -1e9,
    "astype": lambda s, m: np.where(m.astype(bool), s, np.finfo(s.dtype).min),
}


def _numpy_softmax(s: Any) -> Any:
    e = np.exp(s - np.max(s, axis=-1, keepdims=True))
    return e / np.sum(e, axis=-1, keepdims=True)


NUMPY_SOFTMAXES: dict[str, Function] = {
    "by hand": _numpy_softmax,
    "logsumexp": lambda s: np.exp((t := s - s.max(-1, keepdims=True)) - np.log(np.exp(t).sum(-1, keepdims=True))),
}
RETURNS: dict[str, Function] = {
    "output": lambda o, w: o,
    "pair": lambda o, w: (o, w),
    "double": lambda o, w: o.double() if isinstance(o, torch.Tensor) else o.astype(np.float32),
}
RANKS = {"any": (2, 3, 4), "2": (2,), "3": (3,), "4": (4,), "3 or 4": (3, 4)}


def functions() -> Iterator[tuple[str, Function]]:
    """Every pair of a way to mask and a way to get scores, with all else in turn; then those that fit no pattern."""
    for library, scores, masks, softmaxes in (
        ("torch", TORCH_SCORES, TORCH_MASKS, TORCH_SOFTMAXES),
        ("numpy", NUMPY_SCORES, NUMPY_MASKS, NUMPY_SOFTMAXES),
    ):
        rest = cycle(product(RANKS, softmaxes, RETURNS, ("optional", "required", "by keyword")))
        rest = islice(rest, 0, None, 7)  # 7 divides none of the lengths: all combinations come in turn
        repeats = 3 if library == "torch" else 2
        for score, masking, _ in product(scores, masks, range(repeats)):
            rank, softmax, returned, taking = next(rest)
            name = f"{library}: {score}, {masking}, {softmax}, {returned}, {rank} axes, mask {taking}"
            parts = scores[score], masks[masking], softmaxes[softmax], RETURNS[returned]
            yield name, _taking(taking, _function(*parts, RANKS[rank]))
    yield from ODD.items()


def _function(scores: Function, masked: Function, softmax: Function, returned: Function, ranks: Any) -> Function:
    def attention(q: Any, k: Any, v: Any, mask: Any) -> Any:
        if q.ndim not in ranks:
            raise ValueError(f"expected {ranks} axes")
        s = scores(q, k)
        if mask is not None:
            s = masked(s, mask)
        w = softmax(s)
        return returned(w @ v, w)

    return attention


def _taking(how: str, function: Function) -> Function:
    def optional(q: Any, k: Any, v: Any, mask: Any = None) -> Any:
        return function(q, k, v, mask)

    def required(q: Any, k: Any, v: Any, m: Any) -> Any:
        return function(q, k, v, m)

    def by_keyword(query: Any, key: Any, value: Any, dropout: float = 0.0, *, attn_mask: Any = None) -> Any:
        return function(query, key, value, attn_mask)

    return {"optional": optional, "required": required, "by keyword": by_keyword}[how]


# ── functions of their own kind ────────────────────────────────────────────────────────────────────────────────


def loops(q, k, v, mask=None):
    """Two axes, number by number."""
    out = np.zeros((len(q), v.shape[1]))
    for i in range(len(q)):
        powers = []
        scores = [sum(q[i][c] * k[j][c] for c in range(q.shape[1])) / math.sqrt(q.shape[1]) for j in range(len(k))]
        seen = [j for j in range(len(k)) if mask is None or mask[i][j]]
        powers = {j: math.exp(scores[j] - max(scores[j] for j in seen)) for j in seen}
        for j in seen:
            out[i] += powers[j] / sum(powers.values()) * v[j]
    return out


def numpy_two_axes(Q, K, V, mask=None):
    scores = Q @ K.T / np.sqrt(K.shape[1])
    if mask is not None:
        scores[mask == 0] = -1e9
    e = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights = e / e.sum(axis=1, keepdims=True)
    return weights @ V, weights


def torch_two_axes(q, k, v, mask=None):
    scores = torch.mm(q, k.t()) / math.sqrt(k.shape[1])
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -1e9)
    return torch.mm(F.softmax(scores, dim=1), v)


def bmm(q, k, v, mask=None):
    scores = torch.bmm(q, k.transpose(1, 2)).div_(q.size(2) ** 0.5)
    if mask is not None:
        scores.masked_fill_(mask == 0, float("-inf"))
    return torch.bmm(F.softmax(scores, dim=2), v), None


def heads_unsqueezed(q, k, v, mask=None):
    _, _, _, d = q.shape
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / d**0.5
    if mask is not None:
        scores = scores.masked_fill(mask.unsqueeze(1) == 0, -1e20)
    return torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), v)


def renormalised(q, k, v, mask=None):
    w = torch.softmax(q @ k.mT / k.shape[-1] ** 0.5, dim=-1)
    if mask is not None:
        w = w * mask
        w = w / w.sum(dim=-1, keepdim=True)
    return w @ v


def nan_to_zero(q, k, v, mask=None):
    s = q @ k.mT / k.shape[-1] ** 0.5
    if mask is not None:
        s = s.masked_fill(mask.logical_not(), -math.inf)
    return torch.nan_to_num(s.softmax(-1)) @ v


def grouped(q, k, v, mask=None):
    if q.ndim > 2 and k.shape[-3] != q.shape[-3]:
        k = k.repeat_interleave(q.shape[-3] // k.shape[-3], dim=-3)
        v = v.repeat_interleave(q.shape[-3] // v.shape[-3], dim=-3)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def mask_and_scale(q, k, v, mask=None, scale=None):
    s = q @ k.mT * (scale or k.shape[-1] ** -0.5)
    return (s if mask is None else s.masked_fill(mask == 0, -1e9)).softmax(-1) @ v


def always_causal(q, k, v):
    s = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    seen = torch.tril(torch.ones(s.shape[-2:]))
    return s.masked_fill(seen == 0, -math.inf).softmax(-1) @ v


def causal_flag(q, k, v, causal=False):
    s = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if causal:
        s = s + torch.triu(torch.full(s.shape[-2:], -math.inf), diagonal=1)
    return s.softmax(-1) @ v


def writes_to_its_inputs(q, k, v, mask=None):
    q /= math.sqrt(q.shape[-1])
    s = q @ k.mT
    if mask is not None:
        s[~mask.expand(s.shape)] = -1e9
    return s.softmax(-1) @ v


def naive_exp(q, k, v, mask=None):
    e = np.exp(q @ k.swapaxes(-1, -2) / np.sqrt(k.shape[-1]))
    e = e if mask is None else e * mask
    return e / e.sum(-1, keepdims=True) @ v


def mask_from_numpy(q, k, v, mask=None):
    s = q @ k.mT / k.shape[-1] ** 0.5
    if mask is not None:
        s = s + torch.from_numpy(np.where(mask.numpy(), 0.0, -1e9))
    return s.softmax(-1) @ v.to(s.dtype)


ODD: dict[str, Function] = {
    function.__name__: function
    for function in (
        loops, numpy_two_axes, torch_two_axes, bmm, heads_unsqueezed, renormalised, nan_to_zero, grouped,
        mask_and_scale,  always_causal, causal_flag, writes_to_its_inputs, naive_exp, mask_from_numpy,
    )
} | {"F.scaled_dot_product_attention": F.scaled_dot_product_attention}  # fmt: skip
