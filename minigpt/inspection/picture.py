"""Attention maps as a picture, for TensorBoard."""

import numpy as np
from PIL import Image, ImageDraw

# From "moves nothing" to "moves all", one hue, light to dark.
LIGHT, DARK = np.array([247, 251, 255]), np.array([8, 48, 107])


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
