"""Classes with mistakes, as students write them: around a wrong function, or wrong by themselves."""

import math
from collections.abc import Callable, Iterator
from typing import Any

from student_classes import Course
from student_mistakes import FUNCTIONS, over_queries
from torch import nn
from torch.nn import functional as F


def of_a_layer(function: Callable[..., Any]) -> type:
    """A class that is right around a function that is not."""

    class MultiHeadAttention(Course):
        def forward(self, query, key, value, mask=None):
            q, k, v = map(self.split, (self.query_linear(query), self.key_linear(key), self.value_linear(value)))
            heads = function(q, k, v, mask)
            heads = heads[0] if isinstance(heads, tuple) else heads
            return self.output_linear(heads.transpose(1, 2).flatten(2))

    return MultiHeadAttention


def wired(use: Callable[..., Any], out: Callable[..., Any] | None = None) -> type:
    """A class with ``use(self, query, key, value) -> q, k, v`` and its own way out."""

    class MultiHeadAttention(Course):
        def forward(self, query, key, value, mask=None):
            q, k, v = map(self.split, use(self, query, key, value))
            heads = F.scaled_dot_product_attention(q, k, v, mask)
            merged = heads.transpose(1, 2).reshape(query.shape)
            return self.output_linear(merged) if out is None else out(self, merged)

    return MultiHeadAttention


def usual(self, query, key, value):
    return self.query_linear(query), self.key_linear(key), self.value_linear(value)


def with_weight(name: str) -> Callable[..., Any]:
    """x W in place of x W^T in one of the three projections."""

    def use(self, *inputs):
        linear = {"Q": self.query_linear, "K": self.key_linear, "V": self.value_linear}
        return [
            x @ layer.weight if letter == name else layer(x)
            for x, (letter, layer) in zip(inputs, linear.items(), strict=True)
        ]

    return use


class DModel(Course):
    def forward(self, query, key, value, mask=None):
        q, k, v = map(self.split, usual(self, query, key, value))
        s = q @ k.transpose(-2, -1) / math.sqrt(query.size(-1))
        s = s if mask is None else s.masked_fill(mask == 0, -1e9)
        return self.output_linear((s.softmax(-1) @ v).transpose(1, 2).flatten(2))


class MergedWrongly(Course):
    def forward(self, query, key, value, mask=None):
        q, k, v = map(self.split, usual(self, query, key, value))
        heads = F.scaled_dot_product_attention(q, k, v, mask)
        return self.output_linear(heads.reshape(query.shape))


class SplitWrongly(Course):
    def forward(self, query, key, value, mask=None):
        q, k, v = (
            x.view(x.shape[0], self.num_heads, -1, self.d_k)  # the second half of the transpose is forgotten
            for x in usual(self, query, key, value)
        )
        heads = F.scaled_dot_product_attention(q, k, v, mask)
        return self.output_linear(heads.transpose(1, 2).reshape(query.shape))


class NoMask(Course):
    def forward(self, query, key, value):  # type: ignore[override]
        return super().forward(query, key, value)


class NoBias(Course):
    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        self.output_linear = nn.Linear(d_model, d_model, bias=False)


def _classes() -> Iterator[tuple[str, type]]:
    inner = set(FUNCTIONS) - {
        "wrong group map", "sqrt(d_v) instead of sqrt(d_k)", "softmax over the queries",
        "weights returned instead of the output",
    }  # fmt: skip
    for name in sorted(inner):
        for function in FUNCTIONS[name]:
            if not function.__name__.endswith(("numpy", "einsum", "always", "no_mask")):
                yield name, of_a_layer(function)
    yield "softmax over the queries", of_a_layer(over_queries)
    yield "sqrt(d_model) instead of sqrt(d_head)", DModel
    yield "heads merged without the transpose", MergedWrongly
    yield "heads split without the transpose", SplitWrongly
    yield "mask missing", NoMask
    yield "output bias lost", NoBias
    yield "output bias lost", wired(usual, lambda self, x: F.linear(x, self.output_linear.weight))
    for letter in "QKV":
        yield f"W_{letter} transposed", wired(with_weight(letter))
    names = "query_linear", "key_linear", "value_linear"
    every = wired(lambda self, *x: [x_i @ getattr(self, name).weight for x_i, name in zip(x, names, strict=True)])
    yield "W_Q and W_K and W_V transposed", every
    yield "W_O transposed", wired(usual, lambda self, x: x @ self.output_linear.weight + self.output_linear.bias)
    q, k, v, o = "query_linear", "key_linear", "value_linear", "output_linear"
    swaps = {"W_Q and W_K": (k, q, v, o), "W_Q and W_V": (v, k, q, o), "W_K and W_V": (q, v, k, o)}
    swaps |= {"W_Q and W_O": (o, k, v, q), "W_K and W_O": (q, o, v, k), "W_V and W_O": (q, k, o, v)}
    for pair, order in swaps.items():
        yield f"{pair} swapped", _in_order(*order)
    yield "W_Q in place of W_K", wired(lambda s, q, k, v: (s.query_linear(q), s.query_linear(k), s.value_linear(v)))
    inputs = wired(lambda s, q, k, v: (s.query_linear(q), s.key_linear(q), s.value_linear(q)))
    yield "inputs taken for one another", inputs


def _in_order(query: str, key: str, value: str, output: str) -> type:
    """The four matrices in these places; the bias stays with the output."""

    def use(self, *inputs):
        return [x @ getattr(self, name).weight.T for x, name in zip(inputs, (query, key, value), strict=True)]

    return wired(use, lambda self, x: x @ getattr(self, output).weight.T + self.output_linear.bias)


CLASSES: tuple[tuple[str, type], ...] = tuple(_classes())
