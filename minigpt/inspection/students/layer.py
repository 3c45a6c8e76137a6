"""A student's multi-head class, made and filled with given weights. Runs in the student's process."""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from minigpt.inspection.students.steps import Array, Projections

NAMES = {"query": "query_linear", "key": "key_linear", "value": "value_linear", "output": "output_linear"}
SIZES = (12, 3)  # d_model and heads of the object that is made to look at


class Unusable(Exception):
    """A student's code can't be asked at all; ``absent`` if what was named is not there."""

    def __init__(self, message: str, *, absent: bool = False) -> None:
        super().__init__(message)
        self.absent = absent


class Place(NamedTuple):
    """Where an array of weights is kept."""

    owner: Any
    attribute: str
    path: str  # as the user writes it
    bare: bool  # not of a layer of torch, so that nobody can tell W from Wᵀ if it is square

    @property
    def held(self) -> Any:
        """What is there now, of torch or NumPy."""
        return getattr(self.owner, self.attribute)

    def put(self, array: Array) -> None:
        if tuple(self.held.shape) != array.shape:
            raise Unusable(f"{self.path} has the shape {tuple(self.held.shape)}; it must be {array.shape}")
        if isinstance(self.held, np.ndarray):
            setattr(self.owner, self.attribute, array.copy())
        else:
            import torch

            with torch.no_grad():
                self.held.copy_(torch.tensor(array))

    def put_bias(self, array: Array) -> None:
        """(D,), where it may be kept as a row (1, D)."""
        self.put(array[None] if tuple(self.held.shape) == (1, len(array)) else array)


class Layer:
    """A class made as ``(d_model, num_heads)``, with its projections under the given names.

    A projection is a layer with a ``weight``, or a bare array of torch or NumPy; the class need not be a module.

    Args:
        made_by: the class.
        names: attributes for ``query``, ``key``, ``value`` and ``output``; ``qkv`` in place of the first three for
            one packed layer of 3 D rows: all of W_Q, then W_K, then W_V; ``bias`` for the output's, if it is no
            attribute of ``output``. Dots lead to attributes of attributes.

    Raises:
        Unusable: if it can't be made, or has no such attributes.
    """

    def __init__(self, made_by: type, names: Mapping[str, str]) -> None:
        self._class, self._names = made_by, names
        self._ready: dict[tuple[int, str, bool], Callable[..., Any]] = {}
        sample = self._new(*SIZES)
        self.forward = getattr(sample, "forward", sample)
        if not callable(self.forward):
            raise Unusable("has no method forward(query, key, value, mask=None)", absent=True)
        places = [_place(sample, name) for role, name in names.items() if role != "bias"]
        self.ambiguous = any(place.bare and _is_square(place.held) for place in places)
        with_numpy = any(isinstance(place.held, np.ndarray) for place in places)
        self.libraries = ("numpy",) if with_numpy else ("torch float32", "torch float64")
        inputs = [
            parameter
            for parameter in inspect.signature(self.forward).parameters.values()
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
            and not any(word in parameter.name.lower() for word in ("mask", "causal"))
        ]
        self.n_input = 1 if len(inputs) < 3 else 3
        self.takes_other_inputs = self.n_input == 3 and "qkv" not in names

    def made(self, learned: Projections, library: str, turned: bool) -> Callable[..., Any]:
        """An object with these weights, in evaluation mode; made once for each kind of numbers.

        Args:
            turned: bare square arrays hold W, not Wᵀ.
        """
        key = (id(learned), library, turned)
        if key not in self._ready:
            made = self._new(len(learned.bias), learned.n_head)
            if _is_module(made):
                made = (made.double() if library.endswith("64") else made.float()).eval()
            self._fill(made, learned, turned)
            self._ready[key] = made if callable(made) else made.forward
        return self._ready[key]

    def _new(self, d_model: int, n_head: int) -> Any:
        try:
            return self._class(d_model, n_head)
        except Exception as error:
            raise Unusable(f"can't be made by ({d_model}, {n_head}): {type(error).__name__}: {error}") from None

    def _fill(self, made: Any, learned: Projections, turned: bool) -> None:
        packed = np.concatenate([learned.query, learned.key, learned.value])
        arrays = learned._asdict() | {"qkv": packed}
        for role, name in self._names.items():
            place, array = _place(made, name), arrays[role]
            if role == "bias":
                place.put_bias(array)
                continue
            other_way = not turned if _is_square(place.held) else tuple(place.held.shape) == array.T.shape
            place.put(array.T if place.bare and other_way else array)
            if place.attribute == "weight" and getattr(place.owner, "bias", None) is not None:
                bias = learned.bias if role == "output" else np.zeros(len(array))
                place._replace(attribute="bias", path=f"{name}.bias").put_bias(bias)


def _place(made: Any, name: str) -> Place:
    """Where a projection's matrix is kept: in what is named, or in its ``weight``."""
    owner, found, attribute = None, made, ""
    for attribute in name.split("."):
        owner, found = found, getattr(found, attribute, None)
        if found is None:
            has = ", ".join(_with_weights(made)) or "nothing with weights"
            raise Unusable(f"has no {name}, but {has}; say --names query=..,key=..,value=..,output=..", absent=True)
    if hasattr(found, "weight"):
        owner, attribute, name = found, "weight", f"{name}.weight"
    if not hasattr(getattr(owner, attribute), "shape"):
        raise Unusable(f"{name} is of type {type(found).__name__}, no array or layer with a weight", absent=True)
    return Place(owner, attribute, name, bare=owner is not found or not _is_module(found))


def _with_weights(made: Any) -> Iterator[str]:
    """The names of all that could be a projection."""
    if _is_module(made):
        yield from (path for path, inner in made.named_modules() if path and hasattr(inner, "weight"))
        yield from (path for path, _ in made.named_parameters(recurse=False))
    else:
        kept = getattr(made, "__dict__", {})
        yield from (name for name, value in kept.items() if hasattr(value, "shape") or hasattr(value, "weight"))


def _is_module(made: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(made, torch.nn.Module)


def _is_square(array: Any) -> bool:
    return len(set(array.shape)) == 1
