"""Attention weights of a model at work, recomputed by the explicit function and checked against what ran."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor, nn

from minigpt.attention import CausalSelfAttention, attention, causal_mask

TOLERANCE = 1e-5  # of the largest number in the layer's output
LONGEST = 256  # tokens of a text that are looked at

# From "moves nothing" to "moves all", one hue, light to dark.
LIGHT, DARK = np.array([247, 251, 255]), np.array([8, 48, 107])


@contextmanager
def captured_weights(model: nn.Module) -> Iterator[list[Tensor]]:
    """While open, each full pass of ``model`` leaves one (B, H, T, T) tensor a layer in the list, first layer first.

    A forward hook recomputes each layer by ``attention`` and refuses weights that do not give the layer's output.
    """
    weights: list[Tensor] = []

    def look(layer: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
        assert isinstance(layer, CausalSelfAttention)
        query, key, value = layer.project(arguments[0])
        mask = causal_mask(query.shape[-2], query.shape[-2], query.device)
        heads, weights_BHTT = attention(query, layer.share_heads(key), layer.share_heads(value), mask)
        deviation = (layer.combine(heads) - output).abs().max()
        if deviation > TOLERANCE * output.abs().max() + 1e-12:
            raise ArithmeticError(f"the attention weights give the layer's output only to {deviation:g}")
        weights.append(weights_BHTT)

    layers = [module for module in model.modules() if isinstance(module, CausalSelfAttention)]
    hooks = [layer.register_forward_hook(look) for layer in layers]
    try:
        yield weights
    finally:
        for hook in hooks:
            hook.remove()


@torch.inference_mode()
def attention_maps(model: nn.Module, tokens: Tensor) -> np.ndarray:
    """Weights of every head on one text: tokens (T,) → (layers, H, T, T), float32, rows summing to 1."""
    was_training = model.training
    model.eval()
    try:
        with captured_weights(model) as weights:
            model(tokens[None])
    finally:
        model.train(was_training)
    return torch.cat(weights).float().cpu().numpy()


def attention_grid(maps: np.ndarray, *, least: int = 96) -> np.ndarray:
    """All heads as one picture: (layers, H, T, T) in [0, 1] → (height, width, 3) uint8, layers down, heads across."""
    n_layer, n_head, n_token, _ = maps.shape
    cell = n_token * -(-least // n_token)  # whole pixels a weight
    margin, gap = 14, 4
    picture = Image.new("RGB", (n_head * (cell + gap) + gap, n_layer * (cell + margin + gap)), "white")
    draw = ImageDraw.Draw(picture)
    for layer in range(n_layer):
        for head in range(n_head):
            left, top = gap + head * (cell + gap), margin + layer * (cell + margin + gap)
            shade = np.sqrt(maps[layer, head])[..., None]  # small weights stay visible
            colours = (LIGHT + (DARK - LIGHT) * shade).round().astype(np.uint8)
            picture.paste(Image.fromarray(colours).resize((cell, cell), Image.Resampling.NEAREST), (left, top))
            draw.text((left, top - margin + 1), f"L{layer}H{head}", fill="black")
    return np.asarray(picture)
