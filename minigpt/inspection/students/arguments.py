"""What a student's function is handed: arrays of its library, and masks in every customary kind and shape."""

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from minigpt.inspection.students.layer import Unusable
from minigpt.inspection.students.steps import Inputs, Mask

CONVENTIONS = ("bool", "0/1", "additive")  # a mask True = may look; its numbers; 0 and -inf to be added
ANY = "any"
MASKS = {ANY: CONVENTIONS, "bool": ("bool",), "additive": ("additive",)}  # what a teacher can settle
NO_MASK, OWN_CAUSAL, FLAG = "no mask", "own causal", "flag"  # functions that take no mask, or ``causal=True``
OTHER = re.compile("scal|drop|temp|return|need|head|dim|size|eps|train|d_?k|d_?v|d_?model|dev|type|verb")  # no masks


class MaskArgument(NamedTuple):
    """How a function takes its mask."""

    name: str | None = ""  # of the parameter; "": the next one by position; None: it takes none
    optional: bool = False
    flag: bool = False  # a truth value that asks for the causal mask
    kinds: tuple[str, ...] = CONVENTIONS

    @property
    def conventions(self) -> tuple[str, ...]:
        """The kinds of masks to try."""
        return (NO_MASK, OWN_CAUSAL) if self.name is None else (FLAG,) if self.flag else self.kinds

    def call(self, function: Callable[..., Any], arrays: Sequence[Any], mask: Any) -> Any:
        if self.name is None or (mask is None and self.optional):
            return function(*arrays)
        return function(*arrays, mask) if self.name == "" else function(*arrays, **{self.name: mask})


def mask_parameter(function: Callable[..., Any], n_input: int, wanted: str = ANY) -> MaskArgument:
    """What the signature says about a mask behind the inputs; ``wanted``: a key of MASKS.

    Raises:
        Unusable: if something else must be given too, or less can be.
    """
    kinds = MASKS[wanted]
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # built-in functions do not tell
        return MaskArgument(optional=True, kinds=kinds)
    if any(parameter.kind == parameter.VAR_POSITIONAL for parameter in parameters):
        return MaskArgument(optional=True, kinds=kinds)
    ordered = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(ordered) < n_input:
        raise Unusable(f"takes {len(ordered)} arguments; query, key and value must be its first {n_input}")
    rest = [p for p in parameters if p not in ordered[:n_input] and p.kind != p.VAR_KEYWORD]
    masks = [p for p in rest if "mask" in p.name.lower()]
    flags = [p for p in rest if "causal" in p.name.lower()] if not masks else []
    masks = masks or flags or [p for p in rest[:1] if p.default in (p.empty, None) and not OTHER.search(p.name)]
    needed = [p.name for p in rest if p.default is p.empty and p not in masks]
    if needed:
        raise Unusable(f"needs the argument {needed[0]!r}; only query, key, value and a mask are given")
    if not masks:
        return MaskArgument(None)
    mask = masks[0]
    name = "" if mask.kind == mask.POSITIONAL_ONLY else mask.name
    return MaskArgument(name, mask.default is not mask.empty, bool(flags), kinds)


def arrays_of(inputs: Inputs, library: str) -> list[Any]:
    return [converted(array, library) for array in (inputs.query, inputs.key, inputs.value)]


def converted(array: Any, library: str) -> Any:
    """A copy that the student's code may write to."""
    if library == "numpy":
        return array.copy()
    import torch

    kind = torch.bool if array.dtype == bool else torch.float32 if library.endswith("32") else torch.float64
    return torch.tensor(array, dtype=kind)


def lead_of(inputs: Inputs) -> tuple[int, ...]:
    """The axes of the scores in front of (T, S)."""
    lead = inputs.query.shape[:-2]
    return (*lead, inputs.projections.n_head) if inputs.projections else lead


def forms(lead: tuple[int, ...]) -> list[tuple[int, ...]]:
    """What may stand in front of a mask's (T, S): nothing, ones, the batch, or all that the scores have."""
    return [(), (1,)[: len(lead)], lead[:1], (1, 1)[: len(lead)], (*lead[:1], 1)[: len(lead)], lead]


def mask_of(mask: Mask, library: str, convention: str, lead: tuple[int, ...], form: int) -> Any:
    front = lead if mask.ndim > 2 else forms(lead)[form]
    shaped = np.broadcast_to(mask, (*front, *mask.shape[-2:]))
    if convention == "bool":
        return converted(shaped, library)
    return converted(shaped.astype(float) if convention == "0/1" else np.where(shaped, 0.0, -np.inf), library)
