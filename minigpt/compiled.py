"""The loops of ``minigpt.fast``, compiled by numba: tokens through the decoder, and the law of sampling.

The formulas are those of ``plain`` and ``sampling``, one number at a time. A token takes as long as it takes to read
every weight once, so each product goes over its matrix as one stream, threads share it by rows, and texts side by side
share what was read. All compiled code is in this one file, because numba keeps it on disk until its file changes.

Axes as in ``plain``: H query heads, G key/value heads, D model width, K head size, V vocabulary, C context length,
L layers, S keys, T tokens. Weights are (out, in).
"""

import heapq
import math
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import numba
import numpy as np
from numba.core import cgutils, types
from numba.extending import intrinsic

from minigpt.normal_form import Array
from minigpt.packed import APART, GELU, GELU_TANH, RELU2, SWIGLU, Crew, Desk, Flags, Law, Model, Outside
from minigpt.plain import GELU_CUBIC, GELU_SLOPE, LAYER_NORM_EPSILON, RMS_NORM_EPSILON
from minigpt.sampling import LARGEST

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


# ── threads that meet ──────────────────────────────────────────────────────────────────────────────────────────


@intrinsic
def _told(_typing: Any, array: Any, i: Any) -> Any:
    """``array[i]`` as another thread told it; what that thread wrote before is then there to read."""

    def load(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.load_atomic(_place(context, builder, signature, values), "acquire", 8)

    return types.int64(array, types.intp), load


@intrinsic
def _tell(_typing: Any, array: Any, i: Any, value: Any) -> Any:
    """``array[i] = value``, after all that this thread has written before."""

    def store(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        builder.store_atomic(values[2], _place(context, builder, signature, values), "release", 8)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.int64), store


def _place(context: Any, builder: Any, signature: Any, values: Any) -> Any:
    array = context.make_array(signature.args[0])(context, builder, values[0])
    return cgutils.get_item_pointer(context, builder, signature.args[0], array, [values[1]], wraparound=False)


@_jit
def meet(crew: Crew) -> None:
    """Wait until all of the crew have come here.

    Raises:
        TimeoutError: if one does not come soon, as where other programs need the cores; it ends for all of them so.
    """
    mine = APART * crew.rank
    turn, patience = crew.arrived[mine] + 1, crew.patience[mine]
    _tell(crew.arrived, mine, turn)  # pyright: ignore[reportCallIssue]
    for other in range(crew.size):
        there = _told(crew.arrived, APART * other)
        while there < turn:
            patience -= 1
            if there < 0 or patience < 0:
                _tell(crew.arrived, mine, -1)  # pyright: ignore[reportCallIssue]
                raise TimeoutError
            there = _told(crew.arrived, APART * other)
    crew.patience[mine] = patience


@_jit
def _share(crew: Crew, n: int, step: int) -> tuple[int, int]:
    """The first of n things that are this thread's, a multiple of ``step``, and the first after them that is not."""
    first, last = n // step * crew.rank // crew.size * step, n // step * (crew.rank + 1) // crew.size * step
    return first, last if crew.rank + 1 < crew.size else n


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
def _add_linear(x: Array, weight: Array, bias: Array, y: Array, first: int, last: int) -> None:
    """y_t += W x_t + b, from output ``first`` up to ``last``: (T, in) → (T, out).

    Four tokens and two outputs at a time, so that of six numbers read come eight products. If ``first`` is even it does
    not change which two go together: so every thread adds in the same order.
    """
    w, wb, out = weight[first:last], bias[first:last], y[:, first:last]
    whole, pairs = len(x) // 4 * 4, len(w) // 2 if len(x) >= 4 else 0
    for pair in range(pairs):
        j, k = 2 * pair, 2 * pair + 1
        for t in range(0, whole, 4):
            a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = ZERO
            for i in range(x.shape[1]):
                a, b = w[j, i], w[k, i]
                x0, x1, x2, x3 = x[t, i], x[t + 1, i], x[t + 2, i], x[t + 3, i]
                a0, a1, a2, a3 = a0 + a * x0, a1 + a * x1, a2 + a * x2, a3 + a * x3
                b0, b1, b2, b3 = b0 + b * x0, b1 + b * x1, b2 + b * x2, b3 + b * x3
            out[t, j] += a0 + wb[j]
            out[t + 1, j] += a1 + wb[j]
            out[t + 2, j] += a2 + wb[j]
            out[t + 3, j] += a3 + wb[j]
            out[t, k] += b0 + wb[k]
            out[t + 1, k] += b1 + wb[k]
            out[t + 2, k] += b2 + wb[k]
            out[t + 3, k] += b3 + wb[k]
    for t in range(len(x)):
        rest = 2 * pairs if t < whole else 0
        _add_product(x[t], w[rest:], wb[rest:], out[t, rest:])


@_compiled
def _linear(x: Array, weight: Array, bias: Array, y: Array, first: int, last: int) -> None:
    """y_t = W x_t + b, otherwise as ``_add_linear``."""
    y[: len(x), first:last] = ZERO
    _add_linear(x, weight, bias, y, first, last)


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
        elif activation == GELU_TANH:
            up[i] = HALF * u * (ONE + math.tanh(F32(GELU_SLOPE) * (u + F32(GELU_CUBIC) * u * u * u)))
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
def _remember(
    qkv: Array, keys: Array, values: Array, outside: Outside, flags: Flags, place: int, first: int, last: int
) -> None:
    """Put the key and value of the token at ``place`` into the memory (G, K, C), (G, C, K).

    Only of the key/value heads from ``first`` up to ``last``; ``qkv`` (H + 2G, K) changes.
    """
    groups, head_dim = keys.shape[:2]
    for g in range(first, last):
        key, value = qkv[flags.n_head + g], qkv[flags.n_head + groups + g]
        _turn(key, outside.cos[place], outside.sin[place], flags.qk_norm, ONE)
        for i in range(head_dim):
            keys[g, i, place] = key[i]
            values[g, place, i] = value[i]


@_compiled
def _attend(
    qkv: Array,
    keys: Array,
    values: Array,
    outside: Outside,
    flags: Flags,
    place: int,
    heads: Array,
    first: int,
    last: int,
) -> None:
    """heads (H, K) = attention of the token at ``place``, of the query heads of those key/value heads alone."""
    n_head, groups, scale = flags.n_head, keys.shape[0], ONE / np.sqrt(F32(keys.shape[1]))
    weights, scratch = np.empty(place + 1, np.float32), np.empty(place + 1, np.int32)
    for g in range(first, last):
        for h in range(g * n_head // groups, (g + 1) * n_head // groups):
            _turn(qkv[h], outside.cos[place], outside.sin[place], flags.qk_norm, scale)
            heads[h] = ZERO
            _add_attention(qkv[h], keys[g], values[g], weights, scratch, heads[h])


# ── tokens ──────────────────────────────────────────────────────────────────────────────────────────


@_compiled
def _normed(x: Array, gain: Array, shift: Array, centred: bool) -> Array:
    """The norm of each row of (T, D)."""
    y = np.empty_like(x)
    for t in range(len(x)):
        _norm(x[t], gain, shift, centred, y[t])
    return y


@_compiled
def read(
    model: Model, keys: Array, values: Array, texts: Array, places: Array, tokens: Array, desk: Desk, crew: Crew
) -> None:
    """Put the logits after the last of T tokens on the desk, as many rows of them as it has.

    Each token comes with the number of its text and its place there; a text's tokens in order. The memory of all texts,
    (N, L, G, K, C) and (N, L, G, C, K), takes them in. All threads of the crew call this at once.
    """
    outside, layers, flags = model
    n_layer, groups, head_dim, n_token, n_head = keys.shape[1], keys.shape[2], keys.shape[3], len(tokens), flags.n_head
    x, heads, up, gate = desk.x[:n_token], desk.heads[:n_token], desk.up[:n_token], desk.gate[:n_token]
    split_qkv, split_heads = desk.qkv[:n_token].reshape(n_token, -1, head_dim), heads.reshape(n_token, n_head, head_dim)
    g0, g1 = _share(crew, groups, 1)
    h0, h1 = g0 * n_head // groups, g1 * n_head // groups
    d0, d1 = _share(crew, x.shape[1], 2)
    f0, f1 = _share(crew, up.shape[1], 2)
    v0, v1 = _share(crew, len(outside.head), 2)
    if crew.rank == 0:
        x[:] = outside.token_table[tokens] + outside.position_table[places]
        if flags.embedding_norm:
            x[:] = _normed(x, outside.embedding_gain, outside.embedding_shift, flags.centred)
    meet(crew)
    for i in range(n_layer):
        normed = _normed(x, layers.attn_gain[i], layers.attn_shift[i], flags.centred)
        needed = max(0, n_token - len(desk.logits)) if i == n_layer - 1 else 0  # of the rest keys and values alone
        for r0, r1, t0 in (
            (h0, h1, needed), (n_head + g0, n_head + g1, 0), (n_head + groups + g0, n_head + groups + g1, 0)
        ):  # fmt: skip
            weight, bias = layers.qkv_weight[i], layers.qkv_bias[i]
            _linear(normed[t0:], weight, bias, desk.qkv[t0:], r0 * head_dim, r1 * head_dim)
        for t in range(n_token):
            text, place = texts[t], places[t]
            _remember(split_qkv[t], keys[text, i], values[text, i], outside, flags, place, g0, g1)
            if t >= needed:
                _attend(split_qkv[t], keys[text, i], values[text, i], outside, flags, place, split_heads[t], g0, g1)
        x, heads, up, gate = x[needed:], heads[needed:], up[needed:], gate[needed:]
        meet(crew)
        _add_linear(heads, layers.output_weight[i], layers.output_bias[i], x, d0, d1)
        meet(crew)
        normed = _normed(x, layers.mlp_gain[i], layers.mlp_shift[i], flags.centred)
        _linear(normed, layers.up_weight[i], layers.up_bias[i], up, f0, f1)
        if flags.activation == SWIGLU:
            _linear(normed, layers.gate_weight[i], layers.gate_bias[i], gate, f0, f1)
        for t in range(len(up)):
            _activate(up[t, f0:f1], gate[t, f0:f1], flags.activation)
        meet(crew)
        _add_linear(up, layers.down_weight[i], layers.down_bias[i], x, d0, d1)
        meet(crew)
    last = _normed(x, outside.final_gain, outside.final_shift, flags.centred)
    _linear(last, outside.head, np.zeros(len(outside.head), np.float32), desk.logits, v0, v1)
    if flags.softcap > 0:
        cap = F32(flags.softcap)
        for t in range(len(last)):
            for i in range(v0, v1):
                desk.logits[t, i] = cap * math.tanh(desk.logits[t, i] / cap)
    meet(crew)


# ── the law of sampling, as minigpt.sampling specifies it ──────────────────────────────────────────────────────


@_jit
def _largest_first(values: Array) -> Any:
    """A heap of (−value, id): the largest first, of equals the lowest id."""
    heap = [(-values[i], i) for i in range(len(values))]
    heapq.heapify(heap)
    return heap


@_jit
def _adjust(scores: Array, law: Law, seen: Array) -> None:
    """Penalty, ban and top-k, in place."""
    for i in range(len(scores)):
        if seen[i]:
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
def choose(logits: Array, law: Law, seen: Array, uniform: float) -> int:
    """``draw(distribution(...), uniform)``; −1 if a logit is not finite."""
    scores = np.empty(len(logits))
    for i in range(len(logits)):
        if not math.isfinite(logits[i]):
            return -1
        scores[i] = logits[i]
    _adjust(scores, law, seen)
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
def write(
    model: Model,
    keys: Array,
    values: Array,
    texts: Array,
    places: Array,
    tokens: Array,
    law: Law,
    uniforms: Array,
    desk: Desk,
    crew: Crew,
) -> None:
    """Put on the desk the ids that follow the token of each text: one a uniform (T, N), up to ``law.end`` at most.

    A text whose logits are not finite gets no more. The rest is as ``read`` has it.
    """
    going = np.arange(len(texts))
    for n in range(uniforms.shape[1]):
        read(model, keys, values, texts[going], places[going] + n, tokens[going], desk, crew)
        first, last = _share(crew, len(going), 1)
        for t in range(first, last):
            text = going[t]
            desk.ids[text, n] = choose(desk.logits[t], law, law.seen[text], uniforms[text, n])
        meet(crew)
        tokens = desk.ids[:, n].copy()
        going = going[(tokens[going] >= 0) & (tokens[going] != law.end)]
        if len(going) == 0:
            break
        if law.repetition_penalty != 1:
            for text in going:
                law.seen[text, tokens[text]] = True
