"""Parts of a layer whose gradients are written by hand, because on a CPU it is worth a fifth of a training step.

There all but the large products waits for memory, and autograd visits every intermediate result again. Each function
equals the formula in its docstring, in value and gradient, and only re-orders the work: fewer passes, packed heads.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable
from torch.nn import functional as F

RMS_EPSILON = 1e-6
MANY = 128  # rows of a product, from which on oneDNN gains more than it takes to call it


def by_hand(x: Tensor) -> bool:
    """Whether these functions are the faster way: on a CPU, in one precision, where no compiler does their work."""
    return x.device.type == "cpu" and not torch.is_autocast_enabled("cpu") and not torch.compiler.is_compiling()


def rms_norm(x: Tensor) -> Tensor:
    """x / √(mean(x²) + 1e-6) over the last axis (Zhang & Sennrich 2019), without a gain."""
    return _RmsNorm.apply(x) if by_hand(x) else F.rms_norm(x, x.shape[-1:], eps=RMS_EPSILON)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """cap · tanh(x / cap): close to x near zero, never beyond ±cap (Gemma 2)."""
    return _SoftCap.apply(x, cap) if by_hand(x) else cap * torch.tanh(x / cap)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x Wᵀ: (B, T, D), (F, D) → (B, T, F)."""
    return _Linear.apply(x, weight) if by_hand(x) else F.linear(x, weight)


def mlp(x: Tensor, up: Tensor, down: Tensor, activation: str) -> Tensor:
    """f(x Upᵀ) Downᵀ: (B, T, D), (F, D), (D, F) → (B, T, D).

    f is max(0, ·)² for "relu2" (So et al. 2021), x Φ(x) for "gelu" (Hendrycks & Gimpel 2016).
    """
    if by_hand(x):
        return _Mlp.apply(x, up, down, activation)
    hidden = F.linear(x, up)
    return F.linear(F.gelu(hidden) if activation == "gelu" else F.relu(hidden).square(), down)


def self_attention(packed: Tensor, unseen: Tensor, tables: tuple[Tensor, Tensor] | None, *, normalise: bool) -> Tensor:
    """Causal attention from projected heads to merged heads; all weights at once, so for short contexts.

    Args:
        packed: (B, T, 3, H, K), queries, keys and values.
        unseen: (T, T), 0 where a query may look and -inf where not.
        tables: cosine and sine, (T, K/2) each, of rotary positions.
        normalise: whether ``rms_norm`` goes over queries and keys, before they are rotated.

    Returns:
        (B, T, H·K).
    """
    cos, sin = tables if tables else (None, None)
    return _SelfAttention.apply(packed, unseen, cos, sin, normalise)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """x Wᵀ: (N, D), (F, D) → (N, F), by oneDNN where it is measured to be the faster: 1.07 times at N = 768."""
    if len(x) >= MANY and x.dtype == torch.float32 and _has_wide_onednn():
        return torch.ops.mkldnn._linear_pointwise.default(x, weight, None, "none", [], "")
    return torch.mm(x, weight.mT)


@cache
def _has_wide_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512"


def _inverse_root_mean_square(x: Tensor) -> Tensor:
    mean_square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().mul_(1 / x.shape[-1])
    return mean_square.add_(RMS_EPSILON).rsqrt_()


def _norm_backward(gradient: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    """In place, from y = x · scale and its gradient to that of x: what lies along y cannot change it."""
    along_y = torch.linalg.vecdot(gradient, y).unsqueeze(-1)
    return gradient.addcmul_(y, along_y, value=-1 / y.shape[-1]).mul_(scale)


def _turn(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
    """Rotate the pairs (x_i, x_{i+K/2}) of the last axis into ``out``."""
    (x1, x2), (y1, y2) = x.chunk(2, dim=-1), out.chunk(2, dim=-1)
    torch.mul(x1, cos, out=y1).addcmul_(x2, sin, value=-1)
    torch.mul(x2, cos, out=y2).addcmul_(x1, sin)


class _RmsNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        scale = _inverse_root_mean_square(x)
        y = x * scale
        ctx.save_for_backward(y, scale)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (gradient,), (y, scale) = gradients, ctx.saved_tensors
        along_y = torch.linalg.vecdot(gradient, y).unsqueeze(-1)
        return torch.addcmul(gradient, y, along_y, value=-1 / y.shape[-1]).mul_(scale)


class _SoftCap(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cap: float) -> Tensor:
        tanh = (x / cap).tanh_()
        ctx.save_for_backward(tanh)
        return tanh * cap

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return torch.ops.aten.tanh_backward(gradients[0], *ctx.saved_tensors), None


class _SelfAttention(Function):
    @staticmethod
    def forward(
        ctx: Any, packed: Tensor, unseen: Tensor, cos: Tensor | None, sin: Tensor | None, normalise: bool
    ) -> Tensor:
        n_batch, length, _, n_head, size = packed.shape
        heads_3BHTK = packed.new_empty(3, n_batch, n_head, length, size)
        by_position = heads_3BHTK.permute(1, 3, 0, 2, 4)  # as packed
        if cos is None or sin is None:
            by_position.copy_(packed)
        else:
            cos, sin = cos[:, None, None], sin[:, None, None]
            _turn(packed[:, :, :2], cos, sin, out=by_position[:, :, :2])
            by_position[:, :, 2].copy_(packed[:, :, 2])
        scale = None
        if normalise:  # rotation has kept the size
            scale = _inverse_root_mean_square(heads_3BHTK[:2])
            heads_3BHTK[:2].mul_(scale)
        q_NTK, k_NTK, v_NTK = heads_3BHTK.flatten(1, 2).unbind()
        weights = torch.baddbmm(unseen, q_NTK, k_NTK.mT, alpha=size**-0.5)
        torch.softmax(weights, dim=-1, out=weights)
        ctx.save_for_backward(heads_3BHTK, weights, scale, cos, sin)
        merged = torch.bmm(weights, v_NTK).view(n_batch, n_head, length, size).transpose(1, 2)
        return merged.reshape(n_batch, length, n_head * size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        heads_3BHTK, weights, scale, cos, sin = ctx.saved_tensors
        _, n_batch, n_head, length, size = heads_3BHTK.shape
        q_NTK, k_NTK, v_NTK = heads_3BHTK.flatten(1, 2).unbind()
        of_output = gradients[0].view(n_batch, length, n_head, size).transpose(1, 2).flatten(0, 1)
        of_heads = torch.empty_like(heads_3BHTK)
        of_q, of_k, of_v = of_heads.flatten(1, 2).unbind()
        torch.bmm(weights.mT, of_output, out=of_v)
        of_scores = torch.bmm(of_output, v_NTK.mT)  # as yet of the weights
        torch.ops.aten._softmax_backward_data.out(of_scores, weights, -1, weights.dtype, grad_input=of_scores)
        torch.baddbmm(of_q, of_scores, k_NTK, beta=0, alpha=size**-0.5, out=of_q)
        torch.baddbmm(of_k, of_scores.mT, q_NTK, beta=0, alpha=size**-0.5, out=of_k)
        if scale is not None:
            _norm_backward(of_heads[:2], heads_3BHTK[:2], scale)
        of_packed = weights.new_empty(n_batch, length, 3, n_head, size)
        by_position = of_heads.permute(1, 3, 0, 2, 4)
        if cos is None or sin is None:
            of_packed.copy_(by_position)
        else:
            _turn(by_position[:, :, :2], cos, -sin, out=of_packed[:, :, :2])
            of_packed[:, :, 2].copy_(by_position[:, :, 2])
        return of_packed, None, None, None, None


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x_ND = x.reshape(-1, x.shape[-1])
        ctx.save_for_backward(x_ND, weight)
        return _product(x_ND, weight).view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (gradient,), (x_ND, weight) = gradients, ctx.saved_tensors
        gradient_NF = gradient.reshape(-1, gradient.shape[-1])
        of_x = _product(gradient_NF, weight.mT)
        return of_x.view(*gradient.shape[:-1], -1), torch.mm(gradient_NF.mT, x_ND)


class _Mlp(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, up: Tensor, down: Tensor, activation: str) -> Tensor:
        x_ND = x.reshape(-1, x.shape[-1])
        before = _product(x_ND, up)
        hidden = F.gelu(before) if activation == "gelu" else before.relu_().square()
        ctx.save_for_backward(x_ND, up, down, before, hidden)
        ctx.activation = activation
        return _product(hidden, down).view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_ND, up, down, before, hidden = ctx.saved_tensors
        gradient_ND = gradients[0].reshape(x_ND.shape)
        of_down = torch.mm(gradient_ND.mT, hidden)
        if ctx.activation == "gelu":
            of_before = _product(gradient_ND, down.mT)
            torch.ops.aten.gelu_backward.grad_input(of_before, before, grad_input=of_before)
        else:  # the factor 2 of the square goes over the smaller matrix
            of_before = _product(2 * gradient_ND, down.mT).mul_(before)
        of_up = torch.mm(of_before.mT, x_ND)
        return _product(of_before, up.mT).view(gradients[0].shape), of_up, of_down, None
