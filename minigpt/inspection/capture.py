"""What each attention layer of a model did, recomputed by the explicit function; and what happens if it does else.

One hook from outside is the only way to look and to intervene: the network has no switch for either.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from minigpt.attention import CausalSelfAttention, attention, causal_mask
from minigpt.errors import CheckFailed, UserError

TOLERANCE = 1e-5  # of the largest number in the layer's output


class Looked(NamedTuple):
    """What one layer did with a text: its queries, keys, values, weights, and each head's result.

    Keys and values are those that each query head uses, after norm and rotation.
    """

    query: Tensor  # (B, H, T, K)
    key: Tensor  # (B, H, T, K)
    value: Tensor  # (B, H, T, K)
    weights: Tensor  # (B, H, T, T)
    heads: Tensor  # (B, H, T, K), weights @ value


Change = Callable[[int, Tensor], Tensor]
"""(layer, tensor) → the tensor to go on with: the same one, or another of its shape. The argument is not written to."""


@contextmanager
def looking(
    model: nn.Module, *, change_weights: Change | None = None, change_heads: Change | None = None
) -> Iterator[list[Looked]]:
    """While open, each full pass of ``model`` leaves one ``Looked`` a layer in the list, first layer first.

    Args:
        model: in evaluation mode; a pass with a memory is neither looked at nor changed.
        change_weights: other weights (B, H, T, T) for a layer; its heads and its output follow from them.
        change_heads: other results (B, H, T, K) of a layer's heads, after any change of weights.

    Raises:
        UserError: in a pass, if a layer's numbers overflow.
        CheckFailed: in a pass, if the recomputed weights and values do not give the layer's own output.
    """
    if model.training:
        raise ValueError("what is looked at must be in evaluation mode: dropout would make the weights others")
    looks: list[Looked] = []
    layers = [module for module in model.modules() if isinstance(module, CausalSelfAttention)]
    numbers = {layer: number for number, layer in enumerate(layers)}

    def look(layer: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> Tensor | None:
        assert isinstance(layer, CausalSelfAttention)
        if arguments[1:] not in ((), (None,)):  # a cache, whose keys are no longer what they were before this pass
            return None
        query, key, value = layer.project(arguments[0])
        key, value = layer.share_heads(key), layer.share_heads(value)
        heads, weights = attention(query, key, value, causal_mask(query.shape[-2], query.shape[-2], query.device))
        number, new_weights, new_heads = numbers[layer], weights, heads
        deviation = (layer.combine(heads) - output).abs().max()
        if not deviation.isfinite():
            refuse_overflow(arguments[0], f"what layer {number} reads")
            refuse_overflow(deviation, f"the attention of layer {number}")
        if deviation > TOLERANCE * output.abs().max() + 1e-12:
            raise CheckFailed(f"layer {number}: the attention weights give its output only to {deviation:g}")
        if change_weights:
            new_weights = change_weights(number, weights)
            if new_weights is not weights:
                new_heads = new_weights @ value
        if change_heads:
            new_heads = change_heads(number, new_heads)
        looks.append(Looked(query, key, value, new_weights, new_heads))
        return None if new_heads is heads else layer.combine(new_heads)

    hooks = [layer.register_forward_hook(look) for layer in layers]
    try:
        yield looks
    finally:
        for hook in hooks:
            hook.remove()


def refuse_overflow(numbers: Tensor, what: str) -> None:
    """Finite weights can be so large that what they give is not.

    Raises:
        UserError: if one of the numbers is not finite, saying of what.
    """
    if not numbers.isfinite().all():
        raise UserError(f"{what} overflows: training diverged; take an earlier step")


@torch.inference_mode()
def attention_maps(model: nn.Module, tokens: Tensor) -> np.ndarray:
    """Weights of every head on one text: tokens (T,) → (layers, H, T, T), float32, rows summing to 1."""
    was_training = model.training
    model.eval()
    try:
        with looking(model) as looks:
            model(tokens[None])
    finally:
        model.train(was_training)
    return torch.cat([look.weights for look in looks]).float().cpu().numpy()
