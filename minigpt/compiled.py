"""The loops of ``minigpt.fast``, compiled by numba: one token through the decoder, and the law of sampling.

The formulas are those of ``plain`` and ``sampling``, one number at a time. A token of a single text takes as long as it
takes to read every weight once, so each product goes over its matrix as one stream. All compiled code is in this one
file, because numba keeps it on disk until the file that it is in changes.

Axes as in ``plain``: H query heads, G key/value heads, D model width, K head size, V vocabulary, C context length,
L layers, S keys. Weights are (out, in).
"""

import heapq
import math
from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING, Any

import numba
import numpy as np

from minigpt.normal_form import Array
from minigpt.plain import LAYER_NORM_EPSILON, RMS_NORM_EPSILON
from minigpt.sampling import LARGEST

if TYPE_CHECKING:
    from minigpt.fast import Flags, Law, Model, Outside

RELU2, RELU, GELU, SWIGLU = range(4)
ACTIVATIONS = {"relu2": RELU2, "relu": RELU, "gelu": GELU, "swiglu": SWIGLU}
# Sums in any order, so that they run in vectors; what is not finite stays so (numba's True would allow to lose it).
ANY_ORDER = frozenset({"reassoc", "contract", "nsz"})
F32 = np.float32
ZERO, HALF, ONE = F32(0), F32(0.5), F32(1)


def _jit(function: Callable[..., Any], fastmath: Collection[str] = ()) -> Any:
    """Compiled when first called and kept on disk: beside this file, else in the user's cache folder, else nowhere."""
    compiled = partial(numba.njit, nogil=True, fastmath=set(fastmath), error_model="numpy")
    try:
        return compiled(function, cache=True)
    except RuntimeError:  # numba found no folder that it may write
        return compiled(function)


_compiled = partial(_jit, fastmath=ANY_ORDER)


# ── products and norms ─────────────────────────────────────────────────────────────────────────────────────────


@_compiled
def _add_product(x: Array, weight: Array, bias: Array, y: Array) -> None:
    """y += W x + b: row after row, so that the weights come from memory as one stream."""
    for j in range(len(weight)):
        total = ZERO
        for i in range(len(x)):
            total += weight[j, i] * x[i]
        y[j] += total + bias[j]


@_compiled
def _add_linear(x: Array, weight: Array, bias: Array, y: Array) -> None:
    """y_t += W x_t + b: (T, in) → (T, out), four tokens at a time while there are four, so each weight serves four."""
    whole = len(x) // 4 * 4
    for j in range(len(weight) if whole else 0):
        for t in range(0, whole, 4):
            a, b, c, d = ZERO, ZERO, ZERO, ZERO
            for i in range(x.shape[1]):
                w = weight[j, i]
                a += w * x[t, i]
                b += w * x[t + 1, i]
                c += w * x[t + 2, i]
                d += w * x[t + 3, i]
            y[t, j] += a + bias[j]
            y[t + 1, j] += b + bias[j]
            y[t + 2, j] += c + bias[j]
            y[t + 3, j] += d + bias[j]
    for t in range(whole, len(x)):
        _add_product(x[t], weight, bias, y[t])


@_compiled
def _add_weighted(weights: Array, rows: Array, y: Array) -> None:
    """y_i += Σ_s weights_s rows_si for as many i as y has: eight rows at a time, to load and store y less often."""
    whole = len(weights) // 8 * 8
    for s in range(0, whole, 8):
        a, b, c, d, e, f, g, h = weights[s : s + 8]
        for i in range(len(y)):
            first = a * rows[s, i] + b * rows[s + 1, i] + c * rows[s + 2, i] + d * rows[s + 3, i]
            last = e * rows[s + 4, i] + f * rows[s + 5, i] + g * rows[s + 6, i] + h * rows[s + 7, i]
            y[i] += first + last
    for s in range(whole, len(weights)):
        for i in range(len(y)):
            y[i] += weights[s] * rows[s, i]


@_compiled
def _norm(x: Array, gain: Array, shift: Array, centred: bool, y: Array) -> None:
    """y = layer_norm(x) or rms_norm(x), times gain plus shift; y may be x."""
    mean, epsilon, width = ZERO, F32(RMS_NORM_EPSILON), F32(len(x))
    if centred:
        epsilon = F32(LAYER_NORM_EPSILON)
        for i in range(len(x)):
            mean += x[i]
        mean /= width
    squares = ZERO
    for i in range(len(x)):
        squares += (x[i] - mean) * (x[i] - mean)
    scale = ONE / np.sqrt(squares / width + epsilon)
    for i in range(len(x)):
        y[i] = (x[i] - mean) * scale * gain[i] + shift[i]


@_compiled
def _activate(up: Array, gate: Array, activation: int) -> None:
    """up = activate(up, gate)."""
    for i in range(len(up)):
        u = up[i]
        if activation == GELU:
            up[i] = HALF * u * (ONE + math.erf(u * F32(math.sqrt(0.5))))
        elif activation == SWIGLU:
            up[i] = u * gate[i] * (HALF + HALF * math.tanh(HALF * gate[i]))
        else:
            positive = ZERO if u < ZERO else u  # NaN stays
            up[i] = positive * positive if activation == RELU2 else positive


# ── attention ──────────────────────────────────────────────────────────────────────────────────────────────────

LOG2_E, LN_2 = F32(1 / math.log(2)), F32(math.log(2))
C2, C3, C4, C5, C6, C7 = (F32(1 / math.factorial(n)) for n in range(2, 8))
LOWEST = F32(-80)  # e⁻⁸⁰ is nothing beside 1, and no denormal number


@_compiled
def exponentiate(x: Array, scratch: Array) -> None:
    """x = eˣ for x ≤ 0, to 2e-7: 2ⁿ eʳ with |r| ≤ ln 2 / 2, by Taylor's series. The library's own runs in no vector."""
    powers = scratch.view(np.float32)
    for i in range(len(x)):
        value = LOWEST if x[i] < LOWEST else x[i]
        exponent = np.int32(value * LOG2_E + F32(127.5))  # n + 127: as a float holds it
        r = value - F32(exponent - np.int32(127)) * LN_2
        x[i] = ONE + r * (ONE + r * (C2 + r * (C3 + r * (C4 + r * (C5 + r * (C6 + r * C7))))))
        scratch[i] = exponent << 23
    for i in range(len(x)):
        x[i] *= powers[i]


@_compiled
def _turn(head: Array, cos: Array, sin: Array, qk_norm: bool, scale: np.float32) -> None:
    """One query or key as it enters attention: normed if need be, times scale, its pairs of neighbours rotated."""
    if qk_norm:
        squares = ZERO
        for i in range(len(head)):
            squares += head[i] * head[i]
        scale /= np.sqrt(squares / F32(len(head)) + F32(RMS_NORM_EPSILON))
        for i in range(len(head)):
            head[i] *= scale
    for i in range(len(cos)):
        first, second = head[2 * i], head[2 * i + 1]
        head[2 * i] = first * cos[i] - second * sin[i]
        head[2 * i + 1] = first * sin[i] + second * cos[i]


@_compiled
def _add_attention(query: Array, keys: Array, values: Array, weights: Array, scratch: Array, y: Array) -> None:
    """y += attention of a query (K,) over the S = len(weights) first keys (K, C) and values (C, K)."""
    weights[:] = ZERO
    _add_weighted(query, keys, weights)
    largest = weights[0]
    for s in range(len(weights)):
        largest = max(largest, weights[s])
    for s in range(len(weights)):
        weights[s] -= largest
    exponentiate(weights, scratch)
    total = ZERO
    for s in range(len(weights)):
        total += weights[s]
    for s in range(len(weights)):
        weights[s] /= total
    _add_weighted(weights, values, y)


@_compiled
def _attend(
    qkv: Array, keys: Array, values: Array, outside: "Outside", flags: "Flags", place: int, heads: Array
) -> None:
    """heads (H, K) += attention of the token at ``place``, whose key and value enter the memory (G, K, C), (G, C, K).

    ``qkv`` (H + 2G, K) is changed.
    """
    n_head, groups, head_dim = flags.n_head, keys.shape[0], keys.shape[1]
    scale = ONE / np.sqrt(F32(head_dim))
    for h in range(n_head + groups):
        _turn(qkv[h], outside.cos[place], outside.sin[place], flags.qk_norm, scale if h < n_head else ONE)
    weights, scratch = np.empty(place + 1, np.float32), np.empty(place + 1, np.int32)
    for g in range(groups):
        for i in range(head_dim):
            keys[g, i, place] = qkv[n_head + g, i]
            values[g, place, i] = qkv[n_head + groups + g, i]
        for h in range(g * n_head // groups, (g + 1) * n_head // groups):
            _add_attention(qkv[h], keys[g], values[g], weights, scratch, heads[h])


# ── a token, and many ──────────────────────────────────────────────────────────────────────────────────────────


@_compiled
def _normed(x: Array, gain: Array, shift: Array, centred: bool) -> Array:
    """The norm of each row of (T, D)."""
    y = np.empty_like(x)
    for t in range(len(x)):
        _norm(x[t], gain, shift, centred, y[t])
    return y


@_compiled
def _linear(x: Array, weight: Array, bias: Array) -> Array:
    """(T, in) → (T, out)."""
    y = np.zeros((len(x), len(weight)), np.float32)
    _add_linear(x, weight, bias, y)
    return y


@_compiled
def read(model: "Model", keys: Array, values: Array, tokens: Array, place: int) -> Array:
    """Logits (V,) after the last of ``tokens`` (T,), the first at ``place``; memory (L, G, K, C) and (L, G, C, K)."""
    outside, layers, flags = model
    head_dim = keys.shape[2]
    x = outside.token_table[tokens] + outside.position_table[place : place + len(tokens)]
    if flags.embedding_norm:
        x = _normed(x, outside.embedding_gain, outside.embedding_shift, flags.centred)
    for i in range(len(keys)):
        normed = _normed(x, layers.attn_gain[i], layers.attn_shift[i], flags.centred)
        qkv, heads = _linear(normed, layers.qkv_weight[i], layers.qkv_bias[i]), np.zeros_like(x)
        for t in range(len(x)):
            rows = qkv[t].reshape(-1, head_dim), heads[t].reshape(-1, head_dim)
            _attend(rows[0], keys[i], values[i], outside, flags, place + t, rows[1])
        _add_linear(heads, layers.output_weight[i], layers.output_bias[i], x)
        normed = _normed(x, layers.mlp_gain[i], layers.mlp_shift[i], flags.centred)
        up = _linear(normed, layers.up_weight[i], layers.up_bias[i])
        gate = _linear(normed, layers.gate_weight[i], layers.gate_bias[i])
        for t in range(len(x)):
            _activate(up[t], gate[t], flags.activation)
        _add_linear(up, layers.down_weight[i], layers.down_bias[i], x)
    last = _normed(x[-1:], outside.final_gain, outside.final_shift, flags.centred)
    logits = _linear(last, outside.head, np.zeros(len(outside.head), np.float32))[0]
    if flags.softcap > 0:
        cap = F32(flags.softcap)
        for i in range(len(logits)):
            logits[i] = cap * math.tanh(logits[i] / cap)
    return logits


# ── the law of sampling, as minigpt.sampling specifies it ──────────────────────────────────────────────────────


@_jit
def _largest_first(values: Array) -> Any:
    """A heap of (−value, id): the largest first, of equals the lowest id."""
    heap = [(-values[i], i) for i in range(len(values))]
    heapq.heapify(heap)
    return heap


@_jit
def _adjust(scores: Array, law: "Law") -> None:
    """Penalty, ban and top-k, in place."""
    for i in range(len(scores)):
        if law.seen[i]:
            s = scores[i] / law.repetition_penalty if scores[i] > 0 else scores[i] * law.repetition_penalty
            scores[i] = min(max(s, -LARGEST), LARGEST)
        if law.banned[i]:
            scores[i] = -np.inf
    if 0 < law.top_k < len(scores):
        heap = _largest_first(scores)
        for i in range(len(scores)):
            scores[i] = -np.inf
        for _ in range(law.top_k):
            score, i = heapq.heappop(heap)
            scores[i] = -score


@_jit
def _keep_nucleus(probabilities: Array, mass: float) -> None:
    """Top-p, in place."""
    heap, total = _largest_first(probabilities), 0.0
    for i in range(len(probabilities)):
        probabilities[i] = 0.0
    while heap and total < mass:
        probability, i = heapq.heappop(heap)
        probabilities[i] = -probability
        total -= probability


@_jit
def _draw(probabilities: Array, uniform: float) -> int:
    """``sampling.draw``."""
    aim, cumulated, last = uniform * probabilities.sum(), 0.0, -1
    for i in range(len(probabilities)):
        if probabilities[i] > 0:
            cumulated, last = cumulated + probabilities[i], i
            if cumulated > aim:
                break
    return last


@_jit
def choose(logits: Array, law: "Law", uniform: float) -> int:
    """``draw(distribution(...), uniform)``; −1 if a logit is not finite."""
    scores = np.empty(len(logits))
    for i in range(len(logits)):
        if not math.isfinite(logits[i]):
            return -1
        scores[i] = logits[i]
    _adjust(scores, law)
    likeliest = int(scores.argmax())
    if law.temperature == 0:
        return likeliest
    largest, probabilities = scores[likeliest], scores
    for i in range(len(scores)):
        probabilities[i] = math.exp((scores[i] - largest) / law.temperature)
    probabilities /= probabilities.sum()
    if law.top_p < 1:
        _keep_nucleus(probabilities, law.top_p)
    floor = law.min_p * probabilities[likeliest]
    for i in range(len(probabilities)):
        if probabilities[i] < floor:
            probabilities[i] = 0.0
    probabilities /= probabilities.sum()
    return _draw(probabilities, uniform)


@_jit
def write(model: "Model", keys: Array, values: Array, token: int, place: int, law: "Law", uniforms: Array) -> Array:
    """Ids that follow ``token`` at ``place``: one a uniform, unless ``law.end`` comes or logits are not finite."""
    ids = np.empty(len(uniforms), np.int64)
    for n in range(len(uniforms)):
        token = choose(read(model, keys, values, np.array([token]), place + n), law, uniforms[n])
        if token < 0:
            return ids[:n]
        ids[n] = token
        law.seen[token] = law.repetition_penalty != 1
        if token == law.end:
            return ids[: n + 1]
    return ids
