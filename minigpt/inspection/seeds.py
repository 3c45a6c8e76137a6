"""The same task, several networks: as often right, yet not by looking at the same place."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from minigpt.inspection.capture import looking
from minigpt.inspection.compare import Floats
from minigpt.inspection.heads import Head
from minigpt.inspection.links import LinkedText, batches, padded
from minigpt.model import GPT

REACH = 4  # tokens before and after the cause that are told apart


@dataclass(frozen=True)
class Looks:
    """How often a network is right, and where its heads look in the rows that have to know.

    ``best`` moves most from the cause; ``aside`` moves most from one place beside it, ``offset`` tokens later.
    """

    right: float
    best: str
    mass: float
    aside: str
    offset: int
    aside_mass: float


@torch.inference_mode()
def looks(model: GPT, texts: Sequence[LinkedText]) -> Looks:
    """Read texts whose links have one token on each side."""
    right: list[bool] = []
    sums = np.zeros((model.config.n_layer, model.config.n_head, 2 * REACH + 1))
    counts = np.zeros(2 * REACH + 1)
    for batch in batches([len(text.tokens) for text in texts]):
        tokens_BT = padded([texts[index].tokens for index in batch])
        with looking(model) as seen:
            likeliest_BT = model(tokens_BT).argmax(dim=-1)
        weights_BLHTS = torch.stack([look.weights for look in seen], dim=1).double().numpy()
        for place, index in enumerate(batch):
            for link in texts[index].links:
                row, cause = link.rows[0], link.cause[0]
                right.append(bool(likeliest_BT[place, row] == tokens_BT[place, link.word[0]]))
                offsets = np.arange(max(-REACH, -cause), min(REACH, row - cause) + 1)
                sums[..., offsets + REACH] += weights_BLHTS[place, :, :, row, cause + offsets].transpose(1, 2, 0)
                counts[offsets + REACH] += 1
    mean = sums / np.maximum(1, counts)
    beside = mean.copy()
    beside[..., REACH] = 0
    best, aside = _largest(mean[..., REACH]), _largest(beside)
    return Looks(
        right=float(np.mean(right)),
        best=str(Head(*best)),
        mass=float(mean[..., REACH][best]),
        aside=str(Head(*aside[:2])),
        offset=aside[2] - REACH,
        aside_mass=float(beside[aside]),
    )


def _largest(numbers: Floats) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(numbers.argmax(), numbers.shape))


def seeds_table(found: dict[str, Looks]) -> list[str]:
    """One line a network, by name."""
    width = max(map(len, found)) + 2
    lines = [f"{'':<{width}}{'right':>7}   on the cause    most on a place beside it"]
    for name, look in found.items():
        lines.append(
            f"{name:<{width}}{look.right:>7.1%}   {look.best:<6}{look.mass:>6.3f}    "
            f"{look.aside:<6}{look.aside_mass:>6.3f}  {look.offset:+d}"
        )
    return lines
