"""Every worked example by each of the project's ways to compute attention::

numpy    the specification, ``minigpt.plain``, in float64 alone
torch    the explicit functions and modules, every step in the open
fused    PyTorch's fused kernel as the model calls it; shows the output alone, as do the next two
kernel   the layers with which a CPU trains, whose gradients are written by hand
cached   one token at a time behind a key-value cache, as text is generated
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional as F

from minigpt import kernels
from minigpt.attention import (
    CausalSelfAttention,
    KeyValueCache,
    MultiHeadAttention,
    attention,
    attention_weights,
    split_heads,
)
from minigpt.config import ModelConfig
from minigpt.inspection.worked.agreement import Steps
from minigpt.inspection.worked.cases import AttentionCase, Case, MultiHeadCase, Part
from minigpt.inspection.worked.fields import Array
from minigpt.inspection.worked.plain_steps import plain_steps, share_heads
from minigpt.inspection.worked.torch_parts import TORCH_PARTS, tensor, token_by_token

IMPLEMENTATIONS = ("numpy", "torch", "fused", "kernel", "cached")
NO_SUCH_FORM = "-"

Result = dict[str, Tensor] | str


@torch.inference_mode()
def computed(case: Case, implementation: str, dtype: str = "float64") -> Steps | str:
    """The steps that an implementation shows of an example, or in a word or two why it cannot compute it."""
    if implementation == "numpy":
        return plain_steps(case)
    with _default_dtype(getattr(torch, dtype)):
        match case:
            case AttentionCase():
                got = _ATTENTION[implementation](case)
            case MultiHeadCase():
                got = _multi_head(case, implementation)
            case Part():
                compute = TORCH_PARTS.get((case.kind, implementation))
                got = compute(case) if compute else NO_SUCH_FORM
    return got if isinstance(got, str) else {step: array.double().numpy() for step, array in got.items()}


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """While open, modules and tables are made in this type."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _other_mask(mask: Array | None) -> str:
    return "no mask" if mask is None else "other mask"


# ── attention alone ────────────────────────────────────────────────────────────────────────────────────────────


def _inputs(case: AttentionCase) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Query, key, value and mask, a key and value head for each query head."""
    key, value = share_heads(case)
    return tensor(case.query), tensor(key), tensor(value), None if case.mask is None else tensor(case.mask)


def _with_heads(x: Tensor) -> Tensor:
    """(T, K) or (H, T, K) → (1, H, T, K): with fewer than four axes the fused kernel would take another path."""
    while x.ndim < 4:
        x = x[None]
    return x


def _output(case: AttentionCase, heads: Tensor) -> Result:
    return {"output": heads.reshape(*case.query.shape[:-1], heads.shape[-1])}


def _explicit(case: AttentionCase) -> Result:
    query, key, value, mask = _inputs(case)
    raw = query @ key.mT
    if case.scaled:
        output, weights = attention(query, key, value, mask)
    else:
        weights = attention_weights(query, key, mask, scale=1.0)
        output = weights @ value
    scaled = raw * query.shape[-1] ** -0.5 if case.scaled else raw
    return {"raw_scores": raw, "scaled_scores": scaled, "weights": weights, "output": output}


def _fused(case: AttentionCase) -> Result:
    query, key, value, mask = _inputs(case)
    heads = F.scaled_dot_product_attention(
        *map(_with_heads, (query, key, value)),
        attn_mask=None if case.causal or mask is None else _with_heads(mask),
        is_causal=case.causal,
        scale=None if case.scaled else 1.0,
    )
    return _output(case, heads)


def _kernel(case: AttentionCase) -> Result:
    query, key, value, mask = _inputs(case)
    length, n_key = case.weights.shape[-2:]
    seen = torch.ones(1, length, n_key, dtype=torch.bool) if mask is None else mask.reshape(-1, length, n_key)
    for hindrance, word in (
        (not case.scaled, "unscaled"),
        (case.group > 1, "groups"),
        (length != n_key, "not self"),
        (key.shape[-1] != value.shape[-1], "wide V"),
        (bool((seen != seen[0]).any()), "many masks"),
        (not seen.any(dim=-1).all(), "empty row"),
    ):
        if hindrance:
            return word
    unseen = torch.zeros(length, length).masked_fill(~seen[0], -math.inf)
    packed = torch.stack([_with_heads(x) for x in (query, key, value)]).permute(1, 3, 0, 2, 4)  # (B, T, 3, H, K)
    merged = kernels.self_attention(packed, unseen, None, normalise=False)
    return _output(case, split_heads(merged, packed.shape[3]))


def _cached(case: AttentionCase) -> Result:
    if not case.causal:
        return _other_mask(case.mask)
    if not case.scaled:
        return "unscaled"
    query, key, value = (_with_heads(tensor(x)) for x in (case.query, case.key, case.value))
    n_head, length, size = query.shape[1:]
    config = ModelConfig(n_head=n_head, n_kv_head=key.shape[1], d_model=n_head * size, position="none")
    layer, cache = CausalSelfAttention(config), KeyValueCache(torch.zeros_like(key), torch.zeros_like(value))
    tokens = zip(*(x.split(1, dim=-2) for x in (query, key, value)), strict=True)
    rows = [layer.attend(q, *cache.append(k, v)) for q, k, v in tokens]
    assert cache.length == length
    return _output(case, torch.cat(rows, dim=-2))


_ATTENTION: dict[str, Callable[[AttentionCase], Result]] = {
    "torch": _explicit,
    "fused": _fused,
    "kernel": _kernel,
    "cached": _cached,
}

# ── between projections ────────────────────────────────────────────────────────────────────────────────────────


def _multi_head(case: MultiHeadCase, implementation: str) -> Result:
    width, x = case.x.shape[-1], tensor(case.x)[None]
    arrays = {
        "query_linear.weight": case.query_weight,
        "key_linear.weight": case.key_weight,
        "value_linear.weight": case.value_weight,
        "output_linear.weight": case.output_weight,
        "output_linear.bias": case.output_bias,
    }
    tensors = {name: tensor(array) for name, array in arrays.items()}
    if implementation == "torch":
        module = MultiHeadAttention(width, case.n_head)
        module.load_state_dict(tensors)
        output, weights = module(x, x, x, tensor(case.mask))
        query, key, value = module.query_linear(x), module.key_linear(x), module.value_linear(x)
        return {"query": query[0], "key": key[0], "value": value[0], "weights": weights[0], "output": output[0]}
    if not case.causal:
        return _other_mask(case.mask)
    config = ModelConfig(n_head=case.n_head, d_model=width, position="none", qk_norm=False, bias="no_qkv")
    layer = CausalSelfAttention(config)
    layer.load_state_dict(tensors)
    match implementation:
        case "fused":
            output = layer.combine(layer.attend(*layer.project(x)))
        case "kernel":
            output = layer(x)
        case _:
            output = token_by_token(layer, x, case.n_head)
    return {"output": output[0]}
