"""The loops of ``minigpt.fast``, compiled by numba: tokens through the decoder, and the law of sampling.

The formulas are those of ``plain`` and ``sampling``. A token takes as long as it takes to read every weight once, so
each product goes over its matrix as a few streams, threads share it by outputs, and tokens read together share what was
read. All compiled code is in this one file, because numba keeps it on disk until its file changes.

Axes as in ``plain``: H query heads, G key/value heads, D model width, K head size, V vocabulary, C context length,
L layers, S keys, T tokens; outputs are rounded up, and the rest of them zeros. Weights are panels (out/64, in, 64): of
64 outputs the weights of the first input, then of the second. Keys lie in memory as the outputs of scores.
"""

import heapq
import math
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import numba
import numpy as np

from minigpt.normal_form import Array
from minigpt.packed import APART, GELU, GELU_TANH, PANEL, RELU2, SWIGLU, Crew, Desk, Flags, Law, Model, Outside
from minigpt.plain import GELU_CUBIC, GELU_SLOPE, LAYER_NORM_EPSILON, RMS_NORM_EPSILON
from minigpt.sampling import LARGEST
from minigpt.vectors import WIDTH, add, add_to, fma, load, tell, told, zeros

TOGETHER = 4  # tokens, for which a weight is read once
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


@_jit
def meet(crew: Crew) -> None:
    """Wait until all of the crew have come here.

    Raises:
        TimeoutError: if one does not come soon, as where other programs need the cores; it ends for all of them so.
    """
    mine = APART * crew.rank
    turn, patience = crew.arrived[mine] + 1, crew.patience[mine]
    tell(crew.arrived, mine, turn)
    for other in range(crew.size):
        there = told(crew.arrived, APART * other)
        while there < turn:
            patience -= 1
            if there < 0 or patience < 0:
                tell(crew.arrived, mine, -1)
                raise TimeoutError
            there = told(crew.arrived, APART * other)
    crew.patience[mine] = patience


@_jit
def _share(crew: Crew, n: int) -> tuple[int, int]:
    """The first of n things that are this thread's, and the first after them that is not."""
    return n * crew.rank // crew.size, n * (crew.rank + 1) // crew.size


# ── products and norms ─────────────────────────────────────────────────────────────────────────────────────────


@_jit
def _add_tile(x: Array, weight: Array, y: Array, token: int, panel: int) -> None:
    """y_t += W x_t of four tokens and one panel: (T, in), (out/64, in, 64), (T, out). Eight reads for 16 products."""
    a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = c0 = c1 = c2 = c3 = d0 = d1 = d2 = d3 = zeros()
    x0, x1, x2, x3 = x[token], x[token + 1], x[token + 2], x[token + 3]
    place = panel * weight.shape[1] * PANEL
    for i in range(weight.shape[1]):
        w0, w1 = load(weight, place), load(weight, place + WIDTH)
        w2, w3 = load(weight, place + 2 * WIDTH), load(weight, place + 3 * WIDTH)
        a0, a1, a2, a3 = fma(a0, x0[i], w0), fma(a1, x0[i], w1), fma(a2, x0[i], w2), fma(a3, x0[i], w3)
        b0, b1, b2, b3 = fma(b0, x1[i], w0), fma(b1, x1[i], w1), fma(b2, x1[i], w2), fma(b3, x1[i], w3)
        c0, c1, c2, c3 = fma(c0, x2[i], w0), fma(c1, x2[i], w1), fma(c2, x2[i], w2), fma(c3, x2[i], w3)
        d0, d1, d2, d3 = fma(d0, x3[i], w0), fma(d1, x3[i], w1), fma(d2, x3[i], w2), fma(d3, x3[i], w3)
        place += PANEL
    _add_panel(y[token], panel, a0, a1, a2, a3)
    _add_panel(y[token + 1], panel, b0, b1, b2, b3)
    _add_panel(y[token + 2], panel, c0, c1, c2, c3)
    _add_panel(y[token + 3], panel, d0, d1, d2, d3)


@_jit
def _add_panel(y: Array, panel: int, a: Any, b: Any, c: Any, d: Any) -> None:
    add_to(y, panel * PANEL, a)
    add_to(y, panel * PANEL + WIDTH, b)
    add_to(y, panel * PANEL + 2 * WIDTH, c)
    add_to(y, panel * PANEL + 3 * WIDTH, d)


@_jit
def _add_product(x: Array, inputs: Any, weight: Array, y: Array, first: int, last: int) -> None:
    """y += W x from panel ``first`` up to ``last``: (in,), (out/64, in, 64), (out,). ``inputs``: of them all, or some.

    The bits of a number are those that a tile gives it.
    """
    for panel in range(first, last):
        a = b = c = d = zeros()
        for i in inputs:
            place = (panel * weight.shape[1] + i) * PANEL
            a, b = fma(a, x[i], load(weight, place)), fma(b, x[i], load(weight, place + WIDTH))
            c, d = fma(c, x[i], load(weight, place + 2 * WIDTH)), fma(d, x[i], load(weight, place + 3 * WIDTH))
        _add_panel(y, panel, a, b, c, d)


@_jit
def _awake(x: Array) -> Array:
    """The places of what is not zero, as unsigned numbers, which need not be checked for a count from the end."""
    places, n = np.empty(len(x), np.uint32), 0
    for i in range(len(x)):
        places[n] = i
        n += x[i] != ZERO  # without a branch that would be guessed wrong
    return places[:n]


@_jit
def _add_linear(x: Array, weight: Array, bias: Array, y: Array, first: int, last: int, sparse: bool = False) -> None:
    """y_t += W x_t + b from panel ``first`` up to ``last``: (T, in), (out/64, in, 64), (out,), (T, out).

    Four tokens at a time; those left over one by one, and if x is ``sparse`` without the weights that meet a zero.
    """
    together = len(x) // TOGETHER * TOGETHER
    for t in range(len(x)):
        for place in range(first * PANEL, last * PANEL, WIDTH):
            add_to(y[t], place, load(bias, place))
    for panel in range(first, last):
        for t in range(0, together, TOGETHER):
            _add_tile(x, weight, y, t, panel)
    for t in range(together, len(x)):
        if sparse:
            _add_product(x[t], _awake(x[t]), weight, y[t], first, last)
        else:
            _add_product(x[t], range(weight.shape[1]), weight, y[t], first, last)


@_jit
def _linear(x: Array, weight: Array, bias: Array, y: Array, first: int, last: int) -> None:
    """y_t = W x_t + b, otherwise as ``_add_linear``."""
    y[: len(x), first * PANEL : last * PANEL] = ZERO
    _add_linear(x, weight, bias, y, first, last)


@_jit
def _add_weighted(weights: Array, rows: Array, y: Array) -> None:
    """y += Σ_s weights_s rows_s: (S,), (K/16, C, 16), (K,). Four sums for each vector, lest it wait for itself."""
    whole = len(weights) // 4 * 4
    for n in range(len(rows)):
        a = b = c = d = zeros()
        place = n * rows.shape[1] * WIDTH
        for s in range(0, whole, 4):
            a, b = fma(a, weights[s], load(rows, place)), fma(b, weights[s + 1], load(rows, place + WIDTH))
            c = fma(c, weights[s + 2], load(rows, place + 2 * WIDTH))
            d = fma(d, weights[s + 3], load(rows, place + 3 * WIDTH))
            place += 4 * WIDTH
        for s in range(whole, len(weights)):
            a = fma(a, weights[s], load(rows, place))
            place += WIDTH
        add_to(y, n * WIDTH, add(add(a, b), add(c, d)))


@_compiled
def _norm(x: Array, gain: Array, shift: Array, flags: Flags, y: Array) -> None:
    """y = layer_norm(x) or rms_norm(x), times gain plus shift; y may be x."""
    mean, epsilon, width = ZERO, F32(RMS_NORM_EPSILON), flags.d_model
    if flags.centred:
        epsilon = F32(LAYER_NORM_EPSILON)
        for i in range(width):
            mean += x[i]
        mean /= F32(width)
    squares = ZERO
    for i in range(width):
        squares += (x[i] - mean) * (x[i] - mean)
    scale = ONE / np.sqrt(squares / F32(width) + epsilon)
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

LOG2_E = F32(1 / math.log(2))
LN_2 = F32(0.693359375)  # its first bits, so that a whole number times it is exact
LN_2_REST = F32(math.log(2) - 0.693359375)
C2, C3, C4, C5, C6, C7 = (F32(1 / math.factorial(n)) for n in range(2, 8))
LOWEST = F32(-80)  # e⁻⁸⁰ is nothing beside 1, and no denormal number


@partial(_jit, fastmath={"contract"})  # in any order the two parts of ln 2 would be one again
def exponentiate(x: Array, scratch: Array) -> None:
    """x = eˣ for x ≤ 0, to 2e-7: 2ⁿ eʳ with |r| ≤ ln 2 / 2, by Taylor's series. The library's own runs in no vector."""
    powers = scratch.view(np.float32)
    for i in range(len(x)):
        value = LOWEST if x[i] < LOWEST else x[i]
        exponent = np.int32(value * LOG2_E + F32(127.5))  # n + 127: as a float holds it
        n = F32(exponent - np.int32(127))
        r = value - n * LN_2 - n * LN_2_REST
        x[i] = ONE + r * (ONE + r * (C2 + r * (C3 + r * (C4 + r * (C5 + r * (C6 + r * C7))))))
        scratch[i] = exponent << 23
    for i in range(len(x)):
        x[i] *= powers[i]


@_compiled
def _turn(head: Array, cos: Array, sin: Array, flags: Flags, scale: np.float32) -> None:
    """One query or key as it enters attention: normed if need be, times scale, its pairs of neighbours rotated."""
    if flags.qk_norm:
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
def _add_attention(query: Array, keys: Array, values: Array, n_key: int, y: Array) -> None:
    """y += attention of a query (K,) over the first keys (C/64, K, 64) and values (K/16, C, 16)."""
    n_panel = (n_key + PANEL - 1) // PANEL
    weights, scratch = np.zeros(n_panel * PANEL, np.float32), np.empty(n_panel * PANEL, np.int32)
    _add_product(query, range(len(query)), keys, weights, 0, n_panel)
    weights[n_key:] = weights[0]  # what the memory has there is no key; it must not be the largest
    largest = weights[0]
    for s in range(len(weights)):
        largest = max(largest, weights[s])
    for s in range(len(weights)):
        weights[s] -= largest
    exponentiate(weights, scratch)
    weights[n_key:] = ZERO
    total = ZERO
    for s in range(len(weights)):
        total += weights[s]
    share = ONE / total
    for s in range(len(weights)):
        weights[s] *= share
    _add_weighted(weights[:n_key], values, y)


@_compiled
def _remember(
    qkv: Array, keys: Array, values: Array, outside: Outside, flags: Flags, place: int, first: int, last: int
) -> None:
    """Put the key and value of the token at ``place`` into the memory (G, C/64, K, 64), (G, K/16, C, 16).

    Only of the key/value heads from ``first`` up to ``last``; ``qkv`` (G, H/G + 2, K) changes.
    """
    panel, column = place // PANEL, place % PANEL
    for g in range(first, last):
        key, value = qkv[g, -2], qkv[g, -1]
        _turn(key, outside.cos[place], outside.sin[place], flags, ONE)
        for i in range(len(key)):
            keys[g, panel, i, column] = key[i]
        for i in range(len(value)):
            values[g, i // WIDTH, place, i % WIDTH] = value[i]


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
    together, scale = qkv.shape[1] - 2, ONE / np.sqrt(F32(qkv.shape[2]))
    for g in range(first, last):
        for r in range(together):
            query, head = qkv[g, r], heads[g * together + r]
            _turn(query, outside.cos[place], outside.sin[place], flags, scale)
            head[:] = ZERO
            _add_attention(query, keys[g], values[g], place + 1, head)


# ── tokens ─────────────────────────────────────────────────────────────────────────────────────────────────────


@_compiled
def _normed(x: Array, gain: Array, shift: Array, flags: Flags) -> Array:
    """The norm of each row of (T, D)."""
    y = np.empty_like(x)
    for t in range(len(x)):
        _norm(x[t], gain, shift, flags, y[t])
    return y


@_compiled
def read(
    model: Model, keys: Array, values: Array, texts: Array, places: Array, tokens: Array, desk: Desk, crew: Crew
) -> None:
    """Put the logits after the last of T tokens on the desk, as many rows of them as it has.

    Each token comes with the number of its text and its place there; a text's tokens in order. The memory of all texts,
    (N, L, G, C/64, K, 64) and (N, L, G, K/16, C, 16), takes them in. All threads of the crew call this at once.
    """
    outside, layers, flags = model
    (n_layer, groups), head_dim, n_token, n_head = keys.shape[1:3], keys.shape[4], len(tokens), flags.n_head
    n_row = (n_head // groups + 2) * head_dim
    x, heads, up, gate = desk.x[:n_token], desk.heads[:n_token], desk.up[:n_token], desk.gate[:n_token]
    split_heads = heads.reshape(n_token, n_head, -1)
    g0, g1 = _share(crew, groups)
    q0, q1 = _share(crew, desk.qkv.shape[1] // PANEL)
    d0, d1 = _share(crew, x.shape[1] // PANEL)
    f0, f1 = _share(crew, up.shape[1] // PANEL)
    v0, v1 = _share(crew, len(outside.head))
    alone = True  # each reads no other rows of Q, K and V than it has computed
    for rank in range(crew.size):
        alone &= desk.qkv.shape[1] // PANEL * rank // crew.size * PANEL == groups * rank // crew.size * n_row
    if crew.rank == 0:
        for t in range(n_token):
            for i in range(x.shape[1]):
                x[t, i] = outside.token_table[tokens[t], i] + outside.position_table[places[t], i]
            if flags.embedding_norm:
                _norm(x[t], outside.embedding_gain, outside.embedding_shift, flags, x[t])
    meet(crew)  # x is whole, as at the end of each layer
    for i in range(n_layer):
        normed = _normed(x, layers.attn_gain[i], layers.attn_shift[i], flags)
        needed = max(0, n_token - len(desk.logits)) if i == n_layer - 1 else 0  # of the rest keys and values alone
        _linear(normed, layers.qkv_weight[i], layers.qkv_bias[i], desk.qkv, q0, q1)
        if not alone:
            meet(crew)
        for t in range(n_token):
            text, place = texts[t], places[t]
            qkv = desk.qkv[t, : groups * n_row].reshape(groups, -1, head_dim)
            _remember(qkv, keys[text, i], values[text, i], outside, flags, place, g0, g1)
            if t >= needed:
                _attend(qkv, keys[text, i], values[text, i], outside, flags, place, split_heads[t], g0, g1)
        x, heads, up, gate = x[needed:], heads[needed:], up[needed:], gate[needed:]
        meet(crew)  # all heads are there, and nobody reads x any more
        _add_linear(heads, layers.output_weight[i], layers.output_bias[i], x, d0, d1)
        meet(crew)
        normed = _normed(x, layers.mlp_gain[i], layers.mlp_shift[i], flags)
        _linear(normed, layers.up_weight[i], layers.up_bias[i], up, f0, f1)
        if flags.activation == SWIGLU:
            _linear(normed, layers.gate_weight[i], layers.gate_bias[i], gate, f0, f1)
        for t in range(len(up)):
            mine = slice(f0 * PANEL, f1 * PANEL)
            _activate(up[t, mine], gate[t, mine], flags.activation)
        meet(crew)  # all hidden numbers are there, and nobody reads x any more
        _add_linear(up, layers.down_weight[i], layers.down_bias[i], x, d0, d1, flags.sparse)
        meet(crew)
    last = _normed(x, outside.final_gain, outside.final_shift, flags)
    _linear(last, outside.head, np.zeros(desk.logits.shape[1], np.float32), desk.logits, v0, v1)
    if flags.softcap > 0:
        cap = F32(flags.softcap)
        for t in range(len(last)):
            for i in range(v0 * PANEL, v1 * PANEL):
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
        first, last = _share(crew, len(going))
        for t in range(first, last):
            text = going[t]
            logits = desk.logits[t, : len(law.banned)]
            desk.ids[text, n] = choose(logits, law, law.seen[text], uniforms[text, n])
        meet(crew)
        tokens, left = desk.ids[:, n].copy(), 0
        for text in going:
            if 0 <= tokens[text] != law.end:
                law.seen[text, tokens[text]] = True
                going[left] = text
                left += 1
        going = going[:left]
        if left == 0:
            break
