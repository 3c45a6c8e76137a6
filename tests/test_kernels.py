"""Hand-written gradients against numerical ones, and values against the plain formulas."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from minigpt.kernels import relu_squared, rms_norm


def plain_rms_norm(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


@pytest.mark.parametrize(
    ("kernel", "formula"), [(rms_norm, plain_rms_norm), (relu_squared, lambda x: F.relu(x).square())]
)
def test_value_and_gradient(kernel: Callable[[Tensor], Tensor], formula: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(2, 3, 6, dtype=torch.float64)
    torch.testing.assert_close(kernel(x), formula(x))
    (got,) = torch.autograd.grad(kernel(x), x, upstream)
    (want,) = torch.autograd.grad(formula(x), x, upstream)
    torch.testing.assert_close(got, want)
    assert torch.autograd.gradcheck(kernel, (x,))


def test_zeros_stay_zeros() -> None:
    assert torch.equal(rms_norm(torch.zeros(2, 4)), torch.zeros(2, 4))
