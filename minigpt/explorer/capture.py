"""What a model did with one text, in NumPy, and the same as plain values for the page.

The formulas are those of ``minigpt.plain``; here what lies between them is kept. Blobs are base64 of deflated
little-endian numbers.

Axes: L layers, H query heads, G key/value heads, T tokens, K head size, D model width, V vocabulary.
"""

import base64
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from minigpt.errors import UserError
from minigpt.normal_form import Array, Layer, NormalForm
from minigpt.plain import (
    attention_weights,
    causal_mask,
    feed_forward,
    layer_norm,
    merge_heads,
    rms_norm,
    rotate,
    softmax,
    split_heads,
)

GUESSES = 5  # next tokens kept for each depth and place
LARGEST_LOGITS = 256  # kept of each place's, where all of them would be too many
ALL_LOGITS = 1 << 17  # V·T up to which all are kept: 512 kB


@dataclass(frozen=True)
class Captured:
    """One pass over T tokens, in the float type of the model."""

    ids: Array  # (T,)
    query: Array  # (L, H, T, K), as they enter attention: normed, rotated, not yet divided by √K
    key: Array  # (L, G, T, K)
    value: Array  # (L, G, T, K)
    weights: Array  # (L, H, T, T)
    stream: Array  # (L + 1, T, D): after the embedding, then after each block
    logits: Array  # (T, V)


def capture(model: NormalForm, ids: Sequence[int] | Array) -> Captured:
    """The model's numbers on at most C tokens, as ``plain.forward`` gives them in float64.

    Raises:
        UserError: if they overflow.
    """
    tokens = np.asarray(ids)
    with np.errstate(all="ignore"):  # what overflows is refused below
        x = model.token_table[tokens] + model.position_table[: len(tokens)]
        if model.embedding_norm:
            x = _norm(x, model) * model.embedding_gain + model.embedding_shift
        stream, heads = [x], []
        for layer in model.per_layer():
            normed = _norm(x, model) * layer.attn_gain + layer.attn_shift
            query, key, value = projected(normed, layer, model)
            weights = attention_weights(query, key[model.key_head], causal_mask(len(tokens)))
            merged = merge_heads(weights @ value[model.key_head])
            x = x + (merged @ layer.output_weight.T + layer.output_bias)
            x = x + feed_forward(_norm(x, model) * layer.mlp_gain + layer.mlp_shift, layer, model.activation)
            stream.append(x)
            heads.append((query, key, value, weights))
        logits = read_out(x, model)
    if not np.isfinite(logits).all():
        raise UserError("the model's numbers overflow: training diverged; take an earlier step")
    queries, keys, values, maps = (np.stack(part) for part in zip(*heads, strict=True))
    return Captured(tokens, queries, keys, values, maps, np.stack(stream), logits)


def projected(x: Array, layer: Layer, model: NormalForm) -> tuple[Array, Array, Array]:
    """Queries (H, T, K), keys and values (G, T, K) of normed tokens (T, D)."""
    heads = split_heads(x @ layer.qkv_weight.T + layer.qkv_bias, model.head_dim)
    query, key, value = np.split(heads, [model.n_head, model.n_head + model.n_kv_head])
    if model.qk_norm:
        query, key = rms_norm(query), rms_norm(key)
    query, key = (rotate(part, model.cos[: len(x)], model.sin[: len(x)]) for part in (query, key))
    return query, key, value


def read_out(x: Array, model: NormalForm) -> Array:
    """Logits (T, V) of the stream (T, D) after any block, as if the model ended there."""
    logits = (_norm(x, model) * model.final_gain + model.final_shift) @ model.head.T
    return model.softcap * np.tanh(logits / model.softcap) if model.softcap else logits


def _norm(x: Array, model: NormalForm) -> Array:
    return layer_norm(x) if model.centred else rms_norm(x)


# ── for the page ───────────────────────────────────────────────────────────────────────────────────────────────


def blob(array: Array, dtype: str, level: int = 9) -> str:
    """Base64 of the deflated numbers, in C order and little-endian."""
    return base64.b64encode(zlib.compress(np.ascontiguousarray(array, dtype=dtype).data, level)).decode("ascii")


def lower_triangle(maps: Array) -> Array:
    """(..., T, T) → (..., T·(T + 1)/2): row after row, each up to the diagonal."""
    return maps[..., *np.tril_indices(maps.shape[-1])]


def captured_entry(model: NormalForm, ids: Sequence[int] | Array, *, live: bool = False) -> dict[str, Any]:
    """What ``captured.js`` reads of one text; ``live``: in haste and whole, not for a file that is to stay small."""
    level = 1 if live else 9
    found = capture(model, ids)
    return {
        "ids": [int(token) for token in found.ids],
        "query": blob(found.query, "<f4", level),
        "key": blob(found.key, "<f4", level),
        "value": blob(found.value, "<f4", level),
        "weights": blob(lower_triangle(found.weights), "<f2", level),
        "logits": _logits(found.logits, level, whole=live),
        "losses": blob(_losses(found), "<f4", level),
        "guesses": _guesses(found, model, level),
    }


def _logits(logits: Array, level: int, *, whole: bool) -> dict[str, Any]:
    """All, or the largest of each place with their ids and the logarithm of Σ exp over all."""
    if whole or logits.size <= ALL_LOGITS or logits.shape[1] <= LARGEST_LOGITS:
        return {"values": blob(logits, "<f4", level)}
    ids = _largest(logits, LARGEST_LOGITS)
    values = np.take_along_axis(logits, ids, axis=1)
    total = values[:, 0] + np.log(np.exp(logits - values[:, :1]).sum(axis=1))
    return {
        "ids": blob(ids, "<u4", level),
        "values": blob(values, "<f4", level),
        "log_sum": blob(total, "<f4", level),
    }


def _losses(found: Captured) -> Array:
    """(T − 1,): −ln p of each token but the first, in nats."""
    logits, next_ids = found.logits[:-1], found.ids[1:, None]
    largest = logits.max(axis=1, initial=-np.inf)
    total = largest + np.log(np.exp(logits - largest[:, None]).sum(axis=1))
    return total - np.take_along_axis(logits, next_ids, axis=1)[:, 0]


def _guesses(found: Captured, model: NormalForm, level: int) -> dict[str, Any]:
    """The likeliest tokens (L + 1, T, count) after each depth, and their probabilities."""
    ids, shares = [], []
    for x in found.stream:
        logits = read_out(x, model)
        ids.append(_largest(logits, min(GUESSES, logits.shape[1])))
        shares.append(np.take_along_axis(softmax(logits), ids[-1], axis=1))
    return {
        "count": ids[0].shape[1],
        "ids": blob(np.stack(ids), "<u4", level),
        "p": blob(np.stack(shares), "<f4", level),
    }


def _largest(logits: Array, count: int) -> Array:
    """Ids (T, count) of the largest logits of each place, largest first."""
    ids = np.argpartition(-logits, count - 1, axis=1)[:, :count]
    order = np.argsort(-np.take_along_axis(logits, ids, axis=1), axis=1, kind="stable")
    return np.take_along_axis(ids, order, axis=1)
