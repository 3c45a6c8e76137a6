"""Names of heads: layer and head, from 0, as ``L1H2``."""

import re
from typing import NamedTuple

from minigpt.errors import UserError


class Head(NamedTuple):
    """One head, counted from 0 and written ``L1H2``."""

    layer: int
    head: int

    def __str__(self) -> str:
        return f"L{self.layer}H{self.head}"


def parse_head(name: str, n_layer: int, n_head: int) -> Head:
    """``L1H2`` → a head of a network that has it.

    Raises:
        UserError: for any other text, and for a head that is not there.
    """
    match = re.fullmatch(r"[Ll](\d+)[Hh](\d+)", name)
    head = Head(int(match[1]), int(match[2])) if match else None
    if head is None or head.layer >= n_layer or head.head >= n_head:
        raise UserError(f"{name}: no such head; this model has L0H0 to {Head(n_layer - 1, n_head - 1)}")
    return head
