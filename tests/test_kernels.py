"""Hand-written gradients against numerical ones, and values against the plain formulas."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from minigpt.attention import attention, causal_mask, merge_heads, rotary_tables, rotate
from minigpt.kernels import mlp, rms_norm, self_attention, soft_cap

LENGTH, HEADS, SIZE = 5, 2, 4


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def plain_rms_norm(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def check(kernel: Callable[..., Tensor], formula: Callable[..., Tensor], *inputs: Tensor) -> None:
    torch.testing.assert_close(kernel(*inputs), formula(*inputs))
    upstream = torch.randn_like(formula(*inputs))
    got = torch.autograd.grad(kernel(*inputs), inputs, upstream)
    want = torch.autograd.grad(formula(*inputs), inputs, upstream)
    torch.testing.assert_close(got, want)
    assert torch.autograd.gradcheck(kernel, inputs)


def test_rms_norm() -> None:
    torch.manual_seed(0)
    check(rms_norm, plain_rms_norm, random(2, 3, 6))
    assert torch.equal(rms_norm(torch.zeros(2, 4)), torch.zeros(2, 4))


def test_soft_cap() -> None:
    torch.manual_seed(1)
    check(lambda x: soft_cap(x, 3.0), lambda x: 3 * torch.tanh(x / 3), 4 * random(2, 3, 6))
    assert soft_cap(torch.tensor(1e6), 15.0) == 15


@pytest.mark.parametrize(("activation", "f"), [("relu2", lambda x: F.relu(x).square()), ("gelu", F.gelu)])
def test_mlp(activation: str, f: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(2)
    inputs = random(2, 3, 4), random(6, 4), random(4, 6)
    check(lambda x, up, down: mlp(x, up, down, activation), lambda x, up, down: f(x @ up.T) @ down.T, *inputs)


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("rotary", [False, True])
def test_self_attention_is_the_explicit_attention(rotary: bool, normalise: bool) -> None:
    torch.manual_seed(3)
    tables = tuple(table.double() for table in rotary_tables(LENGTH, SIZE))
    unseen = torch.full((LENGTH, LENGTH), -math.inf, dtype=torch.float64).triu(1)

    def kernel(packed: Tensor) -> Tensor:
        return self_attention(packed, unseen, (tables[0], tables[1]) if rotary else None, normalise=normalise)

    def formula(packed: Tensor) -> Tensor:
        query, key, value = packed.permute(2, 0, 3, 1, 4)
        if normalise:
            query, key = plain_rms_norm(query), plain_rms_norm(key)
        if rotary:
            query, key = rotate(query, *tables), rotate(key, *tables)
        return merge_heads(attention(query, key, value, causal_mask(LENGTH, LENGTH))[0])

    check(kernel, formula, random(3, LENGTH, 3, HEADS, SIZE))
