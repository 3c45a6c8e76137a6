"""A model, a sampling rule and a crew of threads as ``compiled`` takes them: arrays and numbers of types that stay.

Axes as in ``normal_form``; T tokens that are read together. What a product puts out is rounded up to whole panels of 64
numbers, a head's K to whole vectors of 16; what is added are zeros, which stay zeros all the way.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from minigpt.normal_form import Array, Layer, NormalForm
from minigpt.plain import rearranged
from minigpt.sampling import Rule
from minigpt.vectors import WIDTH

RELU2, RELU, GELU, GELU_TANH, SWIGLU = range(5)
ACTIVATIONS = {"relu2": RELU2, "relu": RELU, "gelu": GELU, "gelu_tanh": GELU_TANH, "swiglu": SWIGLU}
PANEL = 4 * WIDTH  # outputs of a product that are computed together
APART = 8  # numbers from one thread's to the next's: no two lie in one piece of a core's memory (64 bytes)


class Outside(NamedTuple):
    """The arrays of the normal form that belong to no block."""

    token_table: Array  # (V, D)
    position_table: Array  # (C, D)
    cos: Array  # (C, K/2)
    sin: Array  # (C, K/2)
    embedding_gain: Array  # (D,)
    embedding_shift: Array  # (D,)
    final_gain: Array  # (D,)
    final_shift: Array  # (D,)
    head: Array  # (V/64, D, 64)


class Flags(NamedTuple):
    """What the arrays' shapes do not tell."""

    d_model: int
    n_head: int
    centred: bool
    embedding_norm: bool
    qk_norm: bool
    activation: int
    sparse: bool  # after a ReLU; not if a weight is infinite, for zero times that is no zero
    softcap: float


class Model(NamedTuple):
    """A whole model."""

    outside: Outside
    layers: Layer  # every array with a leading axis L; weights as panels (L, out/64, in, 64)
    flags: Flags

    @classmethod
    def of(cls, model: NormalForm) -> "Model":
        """A float32 normal form: rotary pairs side by side, rows of Q, K and V by key/value head, (G, H/G + 2, K)."""
        rows = np.arange(len(model.layers.qkv_bias[0])).reshape(-1, model.head_dim)
        of_queries, of_keys, of_values = np.split(rows, [model.n_head, model.n_head + model.n_kv_head])
        of_queries = of_queries.reshape(model.n_kv_head, -1, model.head_dim)
        order = np.concatenate([of_queries, of_keys[:, None], of_values[:, None]], axis=1).ravel()

        def packed(layer: Layer) -> Layer:
            columns = layer.output_weight.reshape(-1, model.n_head, model.head_dim)
            layer = layer._replace(
                qkv_weight=layer.qkv_weight[order],
                qkv_bias=layer.qkv_bias[order],
                output_weight=rounded(columns, WIDTH).reshape(len(columns), -1),
            )
            return Layer(*(panels(array) if array.ndim == 2 else rounded(array) for array in layer))

        layers = [packed(rearranged(layer, model)) for layer in model.per_layer()]
        outside = {name: getattr(model, name) for name in Outside._fields}
        outside |= {name: rounded(array) for name, array in outside.items() if name not in ("cos", "sin")}
        sparse = model.activation in ("relu", "relu2") and bool(np.isfinite(model.layers.down_weight).all())
        flags = (model.centred, model.embedding_norm, model.qk_norm, ACTIVATIONS[model.activation], sparse)
        return cls(
            Outside(**outside | {"head": panels(model.head)}),
            Layer(*(np.stack(arrays) for arrays in zip(*layers, strict=True))),
            Flags(model.token_table.shape[1], model.n_head, *flags, float(model.softcap)),
        )


def panels(weight: Array) -> Array:
    """(out, in) → (out/64, in, 64)."""
    padded = rounded(weight.T)
    return np.ascontiguousarray(padded.reshape(len(padded), -1, PANEL).swapaxes(0, 1))


def rounded(array: Array, multiple: int = PANEL) -> Array:
    """With zeros at the end of each row, up to the next multiple of so many numbers."""
    missing = -array.shape[-1] % multiple
    return np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, missing)])


class Law(NamedTuple):
    """``sampling.Rule`` of N texts, which may differ in what they have had and in nothing else."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    seen: Array  # (N, V), True: the repetition penalty applies
    banned: Array  # (V,), True: never drawn
    end: int  # −1: none

    @classmethod
    def of(cls, rules: Sequence[Rule], vocab_size: int) -> "Law":
        """For a model of so many ids."""
        rule, seen, banned = rules[0], np.zeros((len(rules), vocab_size), np.bool_), np.zeros(vocab_size, np.bool_)
        options = rule.options
        assert all((other.options, other.banned, other.end) == (options, rule.banned, rule.end) for other in rules)
        banned[list(rule.banned)] = True
        if options.repetition_penalty != 1:
            for row, other in zip(seen, rules, strict=True):
                row[list(other.history)] = True
        return cls(
            float(options.temperature),
            min(options.top_k, vocab_size),
            float(options.top_p),
            float(options.min_p),
            float(options.repetition_penalty),
            seen,
            banned,
            -1 if rule.end is None else rule.end,
        )


class Desk(NamedTuple):
    """The arrays that a crew works on together, each thread at its own columns."""

    x: Array  # (T, D)
    qkv: Array  # (T, (H + 2G)·K)
    heads: Array  # (T, H·K)
    up: Array  # (T, F)
    gate: Array  # (T, F) or (T, 0)
    logits: Array  # of the last tokens, as many as it has rows: (1, V) or (T, V)
    ids: Array  # (T, N), −1 where none was written

    @classmethod
    def of(cls, model: Model, *, n_token: int, n_id: int = 0) -> "Desk":
        """For reading so many tokens of one text, or for writing so many ids after each token."""
        layers = model.layers

        def rows(biases: Array) -> Array:
            return np.empty((n_token, biases.shape[1]), np.float32)

        return cls(
            x=rows(layers.output_bias),
            qkv=rows(layers.qkv_bias),
            heads=np.empty((n_token, layers.output_weight.shape[2]), np.float32),
            up=rows(layers.up_bias),
            gate=rows(layers.gate_bias),
            logits=np.empty((n_token if n_id else 1, len(model.outside.head) * PANEL), np.float32),
            ids=np.full((n_token, n_id), -1, np.int64),
        )


class Crew(NamedTuple):
    """Threads that read tokens together, as one of them sees it: each has its share of every product's outputs."""

    rank: int
    size: int
    arrived: Array  # (8·size,), every eighth: how often that thread has met the others; −1: it has given up
    patience: Array  # (8·size,), every eighth: how often that thread may still look whether others come

    @classmethod
    def of(cls, size: int, patience: int) -> "list[Crew]":
        """What each of so many threads gets."""
        arrived, patiences = np.zeros(APART * size, np.int64), np.full(APART * size, patience, np.int64)
        return [cls(rank, size, arrived, patiences) for rank in range(size)]
