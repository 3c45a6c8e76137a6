"""The parts around attention as PyTorch computes them: the model's own functions and modules, in the default type."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from minigpt.attention import (
    CausalSelfAttention,
    KeyValueCache,
    attention,
    attention_weights,
    causal_mask,
    merge_heads,
    rotary_tables,
    rotate,
    sinusoidal_positions,
)
from minigpt.config import ModelConfig
from minigpt.inspection.worked.cases import Part
from minigpt.inspection.worked.fields import Array
from minigpt.inspection.worked.plain_steps import block_config, block_tensors
from minigpt.kernels import RMS_EPSILON, rms_norm
from minigpt.model import MLP, Block, Norm

Result = dict[str, Tensor]


def tensor(array: Array) -> Tensor:
    """A copy; numbers in the default type."""
    return torch.tensor(array, dtype=torch.bool if array.dtype == bool else torch.get_default_dtype())


def token_by_token(layer: Callable[[Tensor, KeyValueCache], Tensor], x: Tensor, n_head: int) -> Tensor:
    """Output (1, T, D) of an attention layer or a block, each token fed behind the cache of those before."""
    room = torch.zeros(1, n_head, x.shape[1], x.shape[2] // n_head)
    cache = KeyValueCache(room, room.clone())
    return torch.cat([layer(token, cache) for token in x.split(1, dim=1)], dim=1)


def _sinusoidal(part: Part) -> Result:
    return {"value": sinusoidal_positions(*part.results["value"].shape)}


def _rotary_table(part: Part) -> Result:
    x = tensor(part.given["x"])
    cos, sin = rotary_tables(*x.shape)
    return {"cos": cos, "sin": sin, "value": rotate(x, cos, sin)}


def _rotary_relative(part: Part) -> Result:
    query, key = tensor(part.given["query"]), tensor(part.given["key"])
    places = torch.tensor(part.given["positions"]).long()
    before = places - int(part.given["distance"])
    cos, sin = rotary_tables(int(places.max()) + 1, len(query))
    return {"product": (rotate(query, cos[places], sin[places]) * rotate(key, cos[before], sin[before])).sum(-1)}


def _layer_norm(part: Part) -> Result:
    x = tensor(part.given["x"])
    norm = Norm(ModelConfig(norm="layernorm", d_model=x.shape[-1], n_head=1))
    return {"value": norm(x)}


def _feed_forward(part: Part) -> Result:
    x, up, down = (tensor(part.given[name]) for name in ("x", "W1", "W2"))
    mlp = MLP(ModelConfig(n_head=1, d_model=x.shape[-1], d_ff=len(up), mlp="relu", bias="no_qkv"))
    biases = {f"{name}_linear.bias": tensor(part.given[b]) for name, b in (("up", "b1"), ("down", "b2"))}
    mlp.load_state_dict({"up_linear.weight": up, "down_linear.weight": down, **biases})
    return {"hidden": mlp.up_linear(x).relu(), "value": mlp(x)}


def _masking(part: Part) -> Result:
    scores, mask = tensor(part.given["scores"]), tensor(part.given["mask"]).bool()
    one_to_one = torch.eye(scores.shape[-1])  # as keys, these make the queries their own scores
    return {
        "minus_infinity": attention_weights(scores, one_to_one, mask, scale=1.0),
        "minus_1e9": scores.masked_fill(~mask, -1e9).softmax(dim=-1),
    }


def _block(part: Part) -> Block:
    block = Block(block_config(part)).eval()
    block.load_state_dict({name: tensor(array) for name, array in block_tensors(part).items()})
    return block


def _block_in_the_open(part: Part) -> Result:
    block, x = _block(part), tensor(part.given["x"])[None]
    assert isinstance(block.attn, CausalSelfAttention)
    normed = block.attn_norm(x)
    query, key, value = block.attn.project(normed)
    heads, weights = attention(query, key, value, causal_mask(x.shape[1], x.shape[1]))
    middle = x + block.attn.combine(heads)
    mlp_norm = block.mlp_norm(middle)
    steps = {
        "attn_norm": normed,
        "query": merge_heads(query),
        "key": merge_heads(key),
        "value": merge_heads(value),
        "scaled_scores": query @ key.mT * query.shape[-1] ** -0.5,
        "weights": weights,
        "heads": merge_heads(heads),
        "after_attention": middle,
        "mlp_norm": mlp_norm,
        "hidden": block.mlp.up_linear(mlp_norm).relu(),
        "output": middle + block.mlp(mlp_norm),
    }
    return {step: array[0] for step, array in steps.items()}


def _block_fused(part: Part) -> Result:
    block, x = _block(part), tensor(part.given["x"])[None]
    middle = x + block.attn.combine(block.attn.attend(*block.attn.project(block.attn_norm(x))))
    return {"output": (middle + block.mlp(block.mlp_norm(middle)))[0]}


def _block_as_trained(part: Part) -> Result:
    return {"output": _block(part)(tensor(part.given["x"])[None])[0]}


def _block_cached(part: Part) -> Result:
    block = _block(part)
    return {"output": token_by_token(block, tensor(part.given["x"])[None], block.attn.n_head)[0]}


def _rms_norm(part: Part) -> Result:
    x = tensor(part.given["x"])
    return {"value": F.rms_norm(x, x.shape[-1:], eps=RMS_EPSILON)}


TORCH_PARTS: dict[tuple[str, str], Callable[[Part], Result]] = {
    ("sinusoidal_positions", "torch"): _sinusoidal,
    ("rotary_table", "torch"): _rotary_table,
    ("rotary_relative", "torch"): _rotary_relative,
    ("layer_norm", "torch"): _layer_norm,
    ("rms_norm", "torch"): _rms_norm,
    ("rms_norm", "kernel"): lambda part: {"value": rms_norm(tensor(part.given["x"]))},
    ("feed_forward_relu", "torch"): _feed_forward,
    ("masking", "torch"): _masking,
    ("transformer_block", "torch"): _block_in_the_open,
    ("transformer_block", "fused"): _block_fused,
    ("transformer_block", "kernel"): _block_as_trained,
    ("transformer_block", "cached"): _block_cached,
}
"""(kind of part, implementation) → how it is computed; what is not here has no such form."""
