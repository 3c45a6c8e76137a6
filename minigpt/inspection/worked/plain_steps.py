"""Every worked example step by step in plain NumPy, float64, with the functions of ``minigpt.plain``."""

import math
from collections.abc import Callable

import numpy as np

from minigpt import plain
from minigpt.config import ModelConfig
from minigpt.inspection.worked.agreement import Steps
from minigpt.inspection.worked.cases import AttentionCase, Case, MultiHeadCase, Part
from minigpt.inspection.worked.fields import Array
from minigpt.normal_form import from_tensors, rotary_angles, sinusoidal_positions


def plain_steps(case: Case) -> Steps:
    """All steps in order of computation, those that the example does not list among them."""
    match case:
        case AttentionCase():
            return _attention_steps(case)
        case MultiHeadCase():
            return _multi_head_steps(case)
        case Part():
            return _PARTS[case.kind](case)


def share_heads(case: AttentionCase) -> tuple[Array, Array]:
    """Keys and values, one head of each for every query head."""
    if case.group == 1:
        return case.key, case.value
    return np.repeat(case.key, case.group, axis=-3), np.repeat(case.value, case.group, axis=-3)


def block_config(part: Part) -> ModelConfig:
    """The layout of a ``transformer_block``: pre-norm with layer norm, ReLU, no positions, no bias on Q, K, V."""
    length, width = part.given["x"].shape
    return ModelConfig(
        n_layer=1, n_head=len(part.results["weights"]), d_model=width, d_ff=len(part.given["W1"]),
        context_length=max(length, 2), position="none", norm="layernorm", mlp="relu", qk_norm=False, bias="no_qkv",
        embedding_norm=False,
    )  # fmt: skip


def block_tensors(part: Part) -> Steps:
    """The weights of a ``transformer_block`` under the names they have in a model's block."""
    given = part.given
    return {
        "attn.query_linear.weight": given["W_Q"],
        "attn.key_linear.weight": given["W_K"],
        "attn.value_linear.weight": given["W_V"],
        "attn.output_linear.weight": given["W_O"],
        "attn.output_linear.bias": given["b_O"],
        "mlp.up_linear.weight": given["W1"],
        "mlp.up_linear.bias": given["b1"],
        "mlp.down_linear.weight": given["W2"],
        "mlp.down_linear.bias": given["b2"],
    }


def _attention_steps(case: AttentionCase) -> Steps:
    key, value = share_heads(case)
    steps = _scores(case.query, key, case.mask, case.scaled)
    steps["weights"] = plain.attention_weights(case.query, key, case.mask, scaled=case.scaled)
    steps["output"] = plain.attention(case.query, key, value, case.mask, scaled=case.scaled)
    return steps


def _scores(query: Array, key: Array, mask: Array | None, scaled: bool = True) -> Steps:
    raw = query @ np.swapaxes(key, -1, -2)
    steps = {"raw_scores": raw, "scaled_scores": raw / math.sqrt(query.shape[-1]) if scaled else raw}
    return steps if mask is None else steps | {"masked_scores": np.where(mask, steps["scaled_scores"], -np.inf)}


def _multi_head_steps(case: MultiHeadCase) -> Steps:
    weights = case.query_weight, case.key_weight, case.value_weight
    steps = _projected_heads(case.x, weights, case.mask, case.n_head)
    return steps | {"output": steps["heads"] @ case.output_weight.T + case.output_bias}


def _projected_heads(x: Array, weights: tuple[Array, ...], mask: Array, n_head: int) -> Steps:
    projected = [x @ weight.T for weight in weights]
    query, key, value = (plain.split_heads(y, x.shape[-1] // n_head) for y in projected)
    return {
        **dict(zip(("query", "key", "value"), projected, strict=True)),
        **_scores(query, key, mask),
        "weights": plain.attention_weights(query, key, mask),
        "heads": plain.merge_heads(plain.attention(query, key, value, mask)),
    }


def _sinusoidal(part: Part) -> Steps:
    return {"value": sinusoidal_positions(*part.results["value"].shape)}


def _rotary_table(part: Part) -> Steps:
    x = part.given["x"]
    cos, sin = rotary_angles(*x.shape)
    return {"cos": cos, "sin": sin, "value": plain.rotate(x, cos, sin)}


def _rotary_relative(part: Part) -> Steps:
    places, distance = part.given["positions"].astype(int), int(part.given["distance"])
    query, key = (np.tile(part.given[name], (len(places), 1)) for name in ("query", "key"))
    cos, sin = rotary_angles(int(places.max()) + 1, query.shape[-1])
    turned_query = plain.rotate(query, cos[places], sin[places])
    turned_key = plain.rotate(key, cos[places - distance], sin[places - distance])
    return {
        "turned_query": turned_query,
        "turned_key": turned_key,
        "product": (turned_query * turned_key).sum(axis=-1),
    }


def _feed_forward(part: Part) -> Steps:
    given = part.given
    hidden = plain.activate("relu", given["x"] @ given["W1"].T + given["b1"], np.zeros(0))
    return {"hidden": hidden, "value": hidden @ given["W2"].T + given["b2"]}


def _masking(part: Part) -> Steps:
    scores, mask = part.given["scores"], part.given["mask"] == 1
    one_to_one = np.eye(scores.shape[-1])  # as keys, these make the queries their own scores
    with np.errstate(invalid="ignore"):  # 0/0 is the point
        exponentials = np.exp(np.where(mask, scores, -np.inf))
        bare = exponentials / exponentials.sum(axis=-1, keepdims=True)
    return {
        "bare_softmax": bare,
        "minus_infinity": plain.attention_weights(scores, one_to_one, mask, scaled=False),
        "minus_1e9": plain.softmax(np.where(mask, scores, -1e9)),
    }


def _block(part: Part) -> Steps:
    x, given = part.given["x"], part.given
    config = block_config(part)
    tensors = {f"blocks.0.{name}": tensor for name, tensor in block_tensors(part).items()}
    model = from_tensors({"token_embedding.weight": x, **tensors}, config)
    (layer,) = model.per_layer()
    normed = plain.layer_norm(x)
    matrices = given["W_Q"], given["W_K"], given["W_V"]
    steps = _projected_heads(normed, matrices, plain.causal_mask(len(x)), config.n_head)
    middle = x + plain.self_attention(normed, layer, model)
    mlp_norm = plain.layer_norm(middle)
    return {
        "attn_norm": normed,
        **steps,
        "after_attention": middle,
        "mlp_norm": mlp_norm,
        "hidden": plain.activate("relu", mlp_norm @ layer.up_weight.T + layer.up_bias, np.zeros(0)),
        "output": plain.block(x, layer, model),
    }


_PARTS: dict[str, Callable[[Part], Steps]] = {
    "sinusoidal_positions": _sinusoidal,
    "rotary_table": _rotary_table,
    "rotary_relative": _rotary_relative,
    "layer_norm": lambda part: {"value": plain.layer_norm(part.given["x"])},
    "rms_norm": lambda part: {"value": plain.rms_norm(part.given["x"])},
    "feed_forward_relu": _feed_forward,
    "masking": _masking,
    "transformer_block": _block,
}
