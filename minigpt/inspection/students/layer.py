"""A student's multi-head class, made and filled with given weights. Runs in the student's process."""

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np

from minigpt.inspection.students.steps import Array, Projections

NAMES = {"query": "query_linear", "key": "key_linear", "value": "value_linear", "output": "output_linear"}
SIZES = (12, 3)  # d_model and heads of the object that is made to look at


class Unusable(Exception):
    """A student's code can't be asked at all; ``absent`` if what was named is not there."""

    def __init__(self, message: str, *, absent: bool = False) -> None:
        super().__init__(message)
        self.absent = absent


class Layer:
    """A class made as ``(d_model, num_heads)``, with its projections under the given names.

    Args:
        made_by: the class.
        names: attributes for ``query``, ``key``, ``value`` and ``output``; ``qkv`` in place of the first three for
            one packed layer of 3 D rows: all of W_Q, then W_K, then W_V. Dots lead to attributes of attributes.

    Raises:
        Unusable: if it can't be made, or has no such attributes.
    """

    def __init__(self, made_by: type, names: Mapping[str, str]) -> None:
        self._class, self._names = made_by, names
        self._ready: dict[tuple[int, str, bool], Any] = {}
        sample = self._new(*SIZES)
        self.forward = getattr(sample, "forward", sample)
        self.bare = any(not hasattr(self._find(sample, name), "weight") for name in names.values())
        inputs = [
            parameter
            for parameter in inspect.signature(self.forward).parameters.values()
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
            and not any(word in parameter.name.lower() for word in ("mask", "causal"))
        ]
        self.n_input = 1 if len(inputs) < 3 else 3
        self.takes_other_inputs = self.n_input == 3 and "qkv" not in names

    def made(self, learned: Projections, library: str, turned: bool) -> Any:
        """An object with these weights, in evaluation mode; made once for each kind of numbers.

        Args:
            turned: bare tensors hold W, not Wᵀ.
        """
        key = (id(learned), library, turned)
        if key not in self._ready:
            module = self._new(len(learned.bias), learned.n_head)
            module = module.double() if library.endswith("64") else module.float()
            self._fill(module.eval(), learned, turned)
            self._ready[key] = module
        return self._ready[key]

    def _new(self, d_model: int, n_head: int) -> Any:
        try:
            return self._class(d_model, n_head)
        except Exception as error:
            raise Unusable(f"can't be made by ({d_model}, {n_head}): {type(error).__name__}: {error}") from None

    def _find(self, module: Any, name: str) -> Any:
        found = module
        for part in name.split("."):
            found = getattr(found, part, None)
            if found is None:
                linear = [path for path, inner in module.named_modules() if path and hasattr(inner, "weight")]
                bare = [path for path, _ in module.named_parameters(recurse=False)]
                has = ", ".join([*linear, *bare]) or "nothing with weights"
                raise Unusable(f"has no {name}, but {has}; say --names query=...,key=...", absent=True)
        return found

    def _fill(self, module: Any, learned: Projections, turned: bool) -> None:
        for role, name in self._names.items():
            matrix = (
                np.concatenate([learned.query, learned.key, learned.value])
                if role == "qkv"
                else {"query": learned.query, "key": learned.key, "value": learned.value, "output": learned.output}[
                    role
                ]
            )
            target = self._find(module, name)
            if not hasattr(target, "weight"):
                _copy(target, matrix if turned else matrix.T, name)
                continue
            _copy(target.weight, matrix, f"{name}.weight")
            if getattr(target, "bias", None) is not None:
                bias = learned.bias if role == "output" else np.zeros(len(matrix))
                _copy(target.bias, bias, f"{name}.bias")


def _copy(target: Any, array: Array, name: str) -> None:
    import torch

    if tuple(target.shape) != array.shape:
        raise Unusable(f"{name} has the shape {tuple(target.shape)}; it must be {array.shape}")
    with torch.no_grad():
        target.copy_(torch.tensor(array))
