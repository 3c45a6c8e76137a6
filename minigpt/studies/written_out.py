"""Networks step by step, so that what depends on what can be counted: torch's recurrent modules hide it in one call."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from minigpt.attention import attention, causal_mask
from minigpt.model import GPT
from minigpt.recurrent import RecurrentLM

PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "linear", "_linear_pointwise", "matmul"}


def recurrent_logits(model: RecurrentLM, tokens: Tensor) -> Tensor:
    """What the model gives for tokens (B, T), by a loop over time and layers: (B, T, V)."""
    parts = 2 if isinstance(model.recurrent, nn.LSTM) else 1
    zeros = model.token_embedding.weight.new_zeros(len(tokens), model.config.d_model)
    states = [(zeros,) * parts for _ in range(model.config.n_layer)]
    outputs = []
    for t in range(tokens.shape[1]):
        x = model.token_embedding(tokens[:, t])
        for layer, state in enumerate(states):
            states[layer] = cell(model, layer, x, state)
            x = states[layer][0]
        outputs.append(x)
    head = model.token_embedding if model.config.tie_embeddings else model.lm_head
    return F.linear(torch.stack(outputs, dim=1), head.weight)


def cell(model: RecurrentLM, layer: int, x: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """One step of one layer, as the papers write it: x (B, D) and the state before → h, and c of an LSTM."""
    weights = dict(model.recurrent.named_parameters())
    w_x, w_h, b_x, b_h = (weights[f"{name}_l{layer}"] for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
    given, kept = F.linear(x, w_x, b_x), F.linear(state[0], w_h, b_h)
    if isinstance(model.recurrent, nn.LSTM):
        i, f, g, o = (given + kept).chunk(4, dim=-1)
        c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c
    if isinstance(model.recurrent, nn.GRU):
        (r, z, n), (r_kept, z_kept, n_kept) = given.chunk(3, dim=-1), kept.chunk(3, dim=-1)
        z = (z + z_kept).sigmoid()
        return ((1 - z) * (n + (r + r_kept).sigmoid() * n_kept).tanh() + z * state[0],)
    return ((given + kept).tanh(),)


def logits(model: GPT | RecurrentLM, tokens: Tensor) -> Tensor:
    """(B, T) → (B, T, V) by operations that can be counted."""
    if isinstance(model, RecurrentLM):
        return recurrent_logits(model, tokens)
    with explicit_attention(model):
        return model(tokens)


@contextmanager
def explicit_attention(model: GPT, *, masked: bool = True) -> Iterator[None]:
    """Within it every layer uses the explicit function; ``masked=False`` lets it look at what comes later too."""
    layers: list[Any] = [block.attn for block in model.blocks]

    def read(layer: Any, x: Tensor, _cache: object = None) -> Tensor:
        query, key, value = layer.project(x)
        mask = causal_mask(x.shape[-2], x.shape[-2], x.device) if masked else None
        heads, _ = attention(query, layer.share_heads(key), layer.share_heads(value), mask)
        return layer.combine(heads)

    for layer in layers:
        layer.forward = lambda x, cache=None, layer=layer: read(layer, x, cache)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


@dataclass
class Count:
    """The longest chain of matrix products of which each needs the one before, and all their operations."""

    longest: int = 0
    operations: int = 0  # multiplications and additions
    depths: dict[int, int] = field(default_factory=dict)  # by the address of a tensor's memory
    alive: list[Tensor] = field(default_factory=list)  # so that no address is given away twice


class _Counting(TorchDispatchMode):
    def __init__(self, count: Count) -> None:
        super().__init__()
        self.count = count

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = [item for item in _flat(args) if isinstance(item, Tensor)]
        count = self.count
        depth = max((count.depths.get(item.untyped_storage().data_ptr(), 0) for item in given), default=0)
        if func.overloadpacket.__name__ in PRODUCTS:
            depth += 1
            left, _right = [item for item in given if item.ndim >= 2][-2:]
            count.operations += 2 * out.numel() * left.shape[-1]
        for item in _flat((out,)):
            if isinstance(item, Tensor):
                address = item.untyped_storage().data_ptr()
                count.depths[address] = max(depth, count.depths.get(address, 0))
                count.alive.append(item)
        count.longest = max(count.longest, depth)
        return out


@torch.no_grad()
def counted(model: GPT | RecurrentLM, tokens: Tensor) -> Count:
    """Count one pass over tokens (B, T)."""
    count = Count()
    with _Counting(count):
        logits(model, tokens)
    return count


def _flat(items: Any) -> Iterator[Any]:
    for item in items:
        if isinstance(item, list | tuple):
            yield from _flat(item)
        else:
            yield item
