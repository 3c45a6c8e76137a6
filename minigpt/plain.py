"""The whole decoder in NumPy, twice: float64 to read and to check against, float32 with a cache to run.

``forward`` and the small functions above it are the specification, each with its formula; the tests hold them
against worked examples, and every other engine against them. ``PlainEngine`` computes the same numbers fast.

Axes: T tokens or queries, S keys, H query heads, G key/value heads, R query heads a key head, D model width,
K head size, V vocabulary, C context length, L layers. Weights are (out, in): y = x Wᵀ + b.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from minigpt.normal_form import Array, Layer, NormalForm

LAYER_NORM_EPSILON = 1e-5
RMS_NORM_EPSILON = 1e-6
GELU_SLOPE, GELU_CUBIC = math.sqrt(2 / math.pi), 0.044715  # of gelu_tanh

_erf = np.frompyfunc(math.erf, 1, 1)  # NumPy has none of its own

# ── the specification, in float64 ──────────────────────────────────────────────────────────────────────────────


def softmax(scores: Array) -> Array:
    """exp(s_j) / Σ_k exp(s_k) over the last axis; −inf gets 0, also where the whole row is −inf."""
    largest = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    exponentials = np.exp(scores - np.where(largest == -np.inf, 0, largest))  # the same quotient, never overflowing
    total = exponentials.sum(axis=-1, keepdims=True)
    return exponentials / np.where(total == 0, 1, total)


def attention_weights(query: Array, key: Array, mask: Array | None = None, *, scaled: bool = True) -> Array:
    """softmax(Q Kᵀ / √K): (..., T, K), (..., S, K) → (..., T, S). ``mask``: True = may look (Vaswani 2017, eq. 1)."""
    scores = query @ np.swapaxes(key, -1, -2)
    if scaled:
        scores = scores / math.sqrt(query.shape[-1])
    return softmax(scores if mask is None else np.where(mask, scores, -np.inf))


def attention(query: Array, key: Array, value: Array, mask: Array | None = None, *, scaled: bool = True) -> Array:
    """Σ_j weight_ij v_j: (..., T, width of v). A query that may look at nothing gets zeros."""
    return attention_weights(query, key, mask, scaled=scaled) @ value


def causal_mask(length: int) -> Array:
    """(T, T): token i may look at the tokens j ≤ i."""
    return np.tri(length, dtype=bool)


def split_heads(x: Array, head_dim: int) -> Array:
    """(T, H·K) → (H, T, K)."""
    return x.reshape(len(x), -1, head_dim).swapaxes(0, 1)


def merge_heads(x: Array) -> Array:
    """(H, T, K) → (T, H·K)."""
    return x.swapaxes(0, 1).reshape(x.shape[1], -1)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Turns the pairs (x_i, x_{i+K/2}) by their angle: (x₁ cos − x₂ sin, x₁ sin + x₂ cos)."""
    half = cos.shape[-1]
    first, second, odd_one = np.split(x, [half, 2 * half], axis=-1)  # an odd K (never rotary) leaves one over
    return np.concatenate([first * cos - second * sin, first * sin + second * cos, odd_one], axis=-1)


def layer_norm(x: Array) -> Array:
    """(x − mean) / √(variance + 1e-5) over the last axis (Ba 2016)."""
    centred = x - x.mean(axis=-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + LAYER_NORM_EPSILON)


def rms_norm(x: Array) -> Array:
    """x / √(mean(x²) + 1e-6) over the last axis (Zhang & Sennrich 2019)."""
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + RMS_NORM_EPSILON)


def activate(name: str, up: Array, gate: Array) -> Array:
    """relu2 max(0, u)², relu max(0, u), gelu u·Φ(u) (Hendrycks 2016), swiglu u·g·σ(g) (Shazeer 2020).

    gelu_tanh is what the former's paper puts for Φ, and GPT-2 has: (1 + tanh(√(2/π) (u + 0.044715 u³))) / 2.
    """
    if name == "gelu":
        return 0.5 * up * (1 + np.asarray(_erf(up * math.sqrt(0.5)), dtype=up.dtype))
    if name == "gelu_tanh":
        return 0.5 * up * (1 + np.tanh(GELU_SLOPE * (up + GELU_CUBIC * up * up * up)))
    if name == "swiglu":
        return up * gate * (0.5 + 0.5 * np.tanh(0.5 * gate))  # σ(g) = (1 + tanh(g/2)) / 2, which can't overflow
    positive = np.maximum(up, 0)
    return positive * positive if name == "relu2" else positive


def feed_forward(x: Array, layer: Layer, activation: str) -> Array:
    """activate(x W_upᵀ + b_up, x W_gateᵀ + b_gate) W_downᵀ + b_down: (T, D) → (T, D)."""
    up = x @ layer.up_weight.T + layer.up_bias
    gate = x @ layer.gate_weight.T + layer.gate_bias
    return activate(activation, up, gate) @ layer.down_weight.T + layer.down_bias


def self_attention(x: Array, layer: Layer, model: NormalForm) -> Array:
    """merge(attention(heads of q, k, v)) W_outputᵀ + b, each token seeing itself and those before: (T, D) → (T, D)."""
    length, n_head = len(x), model.n_head
    heads = split_heads(x @ layer.qkv_weight.T + layer.qkv_bias, model.head_dim)
    query, key, value = np.split(heads, [n_head, n_head + model.n_kv_head])
    if model.qk_norm:
        query, key = rms_norm(query), rms_norm(key)
    query, key = (rotate(part, model.cos[:length], model.sin[:length]) for part in (query, key))
    heads = attention(query, key[model.key_head], value[model.key_head], causal_mask(length))
    return merge_heads(heads) @ layer.output_weight.T + layer.output_bias


def block(x: Array, layer: Layer, model: NormalForm) -> Array:
    """x + attention(norm(x)), then x + feed_forward(norm(x)): (T, D) → (T, D)."""
    norm = layer_norm if model.centred else rms_norm
    x = x + self_attention(norm(x) * layer.attn_gain + layer.attn_shift, layer, model)
    return x + feed_forward(norm(x) * layer.mlp_gain + layer.mlp_shift, layer, model.activation)


def forward(model: NormalForm, tokens: Sequence[int] | Array) -> Array:
    """Next-token logits after each of at most C tokens: (T,) → (T, V), in float64."""
    model = model.astype(np.float64)
    norm = layer_norm if model.centred else rms_norm
    x = model.token_table[np.asarray(tokens)] + model.position_table[: len(tokens)]
    if model.embedding_norm:
        x = norm(x) * model.embedding_gain + model.embedding_shift
    for layer in model.per_layer():
        x = block(x, layer, model)
    logits = (norm(x) * model.final_gain + model.final_shift) @ model.head.T
    return model.softcap * np.tanh(logits / model.softcap) if model.softcap else logits


# ── the engine, in float32 ─────────────────────────────────────────────────────────────────────────────────────


@dataclass
class PlainMemory:
    """Keys and values of the tokens seen so far, with room for a whole context."""

    keys: Array  # (L, G, K, C)
    values: Array  # (L, G, C, K)
    length: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes held, used or not."""
        return self.keys.nbytes + self.values.nbytes

    def crop(self, length: int) -> None:
        """Forget all but the first ``length`` tokens."""
        assert 0 <= length <= self.length
        self.length = length


class PlainEngine:
    """Next-token logits of one growing sequence, in float32 (the protocol of ``minigpt.sampling``).

    With small matrices the number of NumPy calls is the cost, so three rearrangements save calls and change nothing
    else: gains of one and biases of zero are skipped (held as empty arrays); the two halves of a rotary pair lie
    side by side, which makes the rotation one complex product; 1/√K is part of the query's weights, or of its norm.
    """

    def __init__(self, model: NormalForm) -> None:
        """``model`` in any float type; a float32 one is shared where no rearrangement is needed."""
        model = model.astype(np.float32)
        self._model = replace(
            model,
            position_table=_unless_all(0, model.position_table),
            embedding_gain=_unless_all(1, model.embedding_gain),
            embedding_shift=_unless_all(0, model.embedding_shift),
            final_gain=_unless_all(1, model.final_gain),
            final_shift=_unless_all(0, model.final_shift),
        )
        self._n_head, self._n_kv_head, self._head_dim = model.n_head, model.n_kv_head, model.head_dim
        self._head_weight = np.ascontiguousarray(model.head.T)
        self._layers = [_packed(rearranged(layer, model)) for layer in model.per_layer()]
        self._rotation = _unless_all(1, (model.cos + 1j * model.sin)[:, None].astype(np.complex64))
        # rms_norm(q)/√K = q/√(Σq² + K·ε) and rms_norm(k) = k/√(Σk²/K + ε): one slope and offset a head
        slope = np.repeat(np.array([1, 1 / model.head_dim], np.float32), [model.n_head, model.n_kv_head])[:, None]
        self._norm_slope, self._norm_offset = slope, slope * np.float32(model.head_dim * RMS_NORM_EPSILON)

    @property
    def context_length(self) -> int:
        """Most tokens a memory holds."""
        return len(self._model.cos)

    @property
    def vocab_size(self) -> int:
        """Length of the logits."""
        return self._model.vocab_size

    def new_memory(self) -> PlainMemory:
        """An empty memory."""
        outer = len(self._layers), self._model.n_kv_head
        length, head_dim = self.context_length, self._model.head_dim
        return PlainMemory(
            keys=np.empty((*outer, head_dim, length), np.float32),
            values=np.empty((*outer, length, head_dim), np.float32),
        )

    def logits(self, tokens: Sequence[int] | Array, memory: PlainMemory) -> Array:
        """Logits (V,) of what follows ``tokens``, which follow those in ``memory`` and are added to it."""
        with np.errstate(all="ignore"):  # whoever reads the logits asks whether they are finite
            return self._head(self._read(tokens, memory, n_needed=1))[0]

    def all_logits(self, tokens: Sequence[int] | Array, memory: PlainMemory) -> Array:
        """Logits (T, V) of what follows each of ``tokens``; otherwise as ``logits``."""
        with np.errstate(all="ignore"):
            return self._head(self._read(tokens, memory, n_needed=len(tokens)))

    def _read(self, tokens: Sequence[int] | Array, memory: PlainMemory, n_needed: int) -> Array:
        """The last block's output (N, D) at the last N tokens; of the others it computes keys and values alone."""
        model, start, end = self._model, memory.length, memory.length + len(tokens)
        assert start < end <= self.context_length, f"{len(tokens)} tokens do not fit a memory of {start}"
        x = model.token_table[np.asarray(tokens)]
        if model.position_table.size:
            x += model.position_table[start:end]
        if model.embedding_norm:
            x = self._norm(x, model.embedding_gain, model.embedding_shift)
        for i, layer in enumerate(self._layers):
            normed = self._norm(x, layer.attn_gain, layer.attn_shift)
            if i == len(self._layers) - 1:
                x = x[-n_needed:]
            heads = self._attend(normed, i, memory, n_query=len(x))
            x += _linear(heads, layer.output_weight, layer.output_bias)
            normed = self._norm(x, layer.mlp_gain, layer.mlp_shift)
            up = _linear(normed, layer.up_weight, layer.up_bias)
            gate = _linear(normed, layer.gate_weight, layer.gate_bias) if layer.gate_weight.size else up
            x += _linear(activate(model.activation, up, gate), layer.down_weight, layer.down_bias)
        memory.length = end
        return x

    def _attend(self, x: Array, i: int, memory: PlainMemory, n_query: int) -> Array:
        """Merged heads (N, D) of the last N tokens in block ``i``; the keys and values of all enter the memory."""
        start, end = memory.length, memory.length + len(x)
        n_head, groups, head_dim = self._n_head, self._n_kv_head, self._head_dim
        rows = self._project(x, self._layers[i], start)
        keys, values = memory.keys[i, :, :, :end], memory.values[i, :, :end]
        keys[:, :, start:] = rows[:, n_head : n_head + groups].transpose(1, 2, 0)
        values[:, start:] = rows[:, n_head + groups :].swapaxes(0, 1)
        query = rows[-n_query:, :n_head].reshape(n_query, groups, -1, head_dim).transpose(1, 2, 0, 3)  # (G, R, N, K)
        scores = query.reshape(groups, -1, head_dim) @ keys  # (G, R·N, S)
        if n_query > 1:
            future = np.triu(np.full((n_query, end), -np.inf, np.float32), end - n_query + 1)
            scores += np.tile(future, (n_head // groups, 1))
        scores -= np.maximum.reduce(scores, axis=-1, keepdims=True)
        weights = np.exp(scores, out=scores)
        heads = (weights @ values) / np.add.reduce(weights, axis=-1, keepdims=True)
        return heads.reshape(query.shape).transpose(2, 0, 1, 3).reshape(n_query, -1)

    def _project(self, x: Array, layer: Layer, start: int) -> Array:
        """Queries, keys and values (T, H + 2G, K) as they enter attention: normed, scaled and rotated."""
        rows = _linear(x, layer.qkv_weight, layer.qkv_bias).reshape(len(x), -1, self._head_dim)
        turning = rows[:, : self._n_head + self._n_kv_head]
        if self._model.qk_norm:
            squares = np.add.reduce(turning * turning, axis=-1, keepdims=True)
            turning /= np.sqrt(squares * self._norm_slope + self._norm_offset)
        if self._rotation.size:
            pairs = turning.view(np.complex64)
            pairs *= self._rotation[start : start + len(x)]
        return rows

    def _norm(self, x: Array, gain: Array, shift: Array) -> Array:
        width, epsilon = x.shape[-1], RMS_NORM_EPSILON
        if self._model.centred:
            x, epsilon = x - np.add.reduce(x, axis=-1, keepdims=True) / width, LAYER_NORM_EPSILON
        if len(x) == 1:  # the usual case: one call and Python's own arithmetic
            x = x * (1 / math.sqrt(float(np.vdot(x, x)) / width + epsilon))
        else:
            x = x / np.sqrt(np.add.reduce(x * x, axis=-1, keepdims=True) / width + epsilon)
        if gain.size:
            x *= gain
        if shift.size:
            x += shift
        return x

    def _head(self, x: Array) -> Array:
        model = self._model
        logits = self._norm(x, model.final_gain, model.final_shift) @ self._head_weight
        return model.softcap * np.tanh(logits / model.softcap) if model.softcap else logits


def rearranged(layer: Layer, model: NormalForm) -> Layer:
    """Rotary pairs side by side, and 1/√K in the query's rows unless a norm follows that has it."""
    rows = np.arange(len(layer.qkv_bias)).reshape(-1, model.head_dim)
    if model.sin.any():
        turning = rows[: model.n_head + model.n_kv_head]
        turning[:] = turning.reshape(len(turning), 2, -1).swapaxes(1, 2).reshape(turning.shape)
    scale = np.ones((len(layer.qkv_bias), 1), np.float32)
    if not model.qk_norm:
        scale[: model.n_head * model.head_dim] /= math.sqrt(model.head_dim)
    order = rows.ravel()
    return layer._replace(qkv_weight=layer.qkv_weight[order] * scale, qkv_bias=layer.qkv_bias[order] * scale[:, 0])


def _packed(layer: Layer) -> Layer:
    """Weights as (in, out), neutral vectors empty."""
    return Layer(
        *(
            np.ascontiguousarray(array.T) if array.ndim == 2 else _unless_all(name.endswith("gain"), array)
            for name, array in layer._asdict().items()
        )
    )


def _unless_all(neutral: int, array: Array) -> Array:
    """The array, or an empty one when all of it is the number that changes nothing."""
    return array[:0] if (array == neutral).all() else array


def _linear(x: Array, weight: Array, bias: Array) -> Array:
    y = x @ weight
    if bias.size:
        y += bias
    return y
