"""The fields of one object in a user's JSON file, taken one by one, each mistake told in a sentence that says where."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from minigpt.config import nearest
from minigpt.errors import UserError

Array = np.ndarray[Any, np.dtype[Any]]


class Fields:
    """An object's fields; whoever reads takes all it knows and then calls ``end``.

    Shapes are written in letters, an axis each, with "*" or "+" in front for any number of axes more. What a letter
    stands for is learned from the first array that has it, and holds for the others. Every method raises a
    ``UserError``.
    """

    def __init__(self, table: dict[str, Any], where: str) -> None:
        """``where`` begins every message: the file and the object."""
        self.where = where
        self._left = {field: value for field, value in table.items() if value is not None}
        self._known: list[str] = []
        self._sizes: dict[str, tuple[int, ...]] = {}

    def __contains__(self, field: str) -> bool:
        """Whether it is there to be taken; null is as good as absent."""
        self._known.append(field)
        return field in self._left

    def problem(self, field: str, says: str) -> UserError:
        """To be raised."""
        return UserError(f"{self.where}, field {field}: {says}")

    def text(self, field: str, default: str | None = None) -> str:
        """A string."""
        value = self._take(field, default)
        if not isinstance(value, str) or not (value or default == ""):
            raise self.problem(field, f"must be text, not {_short(value)}")
        return value

    def texts(self, field: str) -> tuple[str, ...]:
        """A list of strings."""
        value = self._take(field)
        if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            raise self.problem(field, f"must be a list of texts, not {_short(value)}")
        return tuple(value)

    def flag(self, field: str, default: bool) -> bool:
        """True or false."""
        value = self._take(field, default)
        if not isinstance(value, bool):
            raise self.problem(field, f"must be true or false, not {_short(value)}")
        return value

    def numbers(self, field: str, axes: str, default: Any = None) -> Array:
        """Finite numbers of this shape, float64."""
        array = self._array(field, default)
        self._check_shape(field, array.shape, axes)
        return array

    def mask(self, field: str, shape: Sequence[int], default: Any = None) -> Array:
        """Ones and zeros, or true and false, stretched to this shape as NumPy does; bool."""
        array = self._array(field, default)
        if not np.isin(array, (0, 1)).all():
            raise self.problem(field, "must hold 1 where a query may look and 0 where it may not")
        try:
            return np.broadcast_to(array.astype(bool), shape).copy()
        except ValueError:
            raise self.problem(field, f"its shape {array.shape} does not fit {tuple(shape)}") from None

    def size(self, letter: str) -> int:
        """What a letter stands for by now."""
        return self._sizes[letter][0]

    def end(self) -> None:
        """Refuse what was not taken."""
        for field in self._left:
            raise UserError(f"{self.where}: there is no field {field}{nearest(field, self._known)}")

    def _take(self, field: str, default: Any = None) -> Any:
        self._known.append(field)
        if field not in self._left and default is None:
            raise UserError(f"{self.where}: the field {field} is missing")
        return self._left.pop(field, default)

    def _array(self, field: str, default: Any) -> Array:
        value = self._take(field, default)
        try:
            array = np.array(value)
        except ValueError:  # rows of different lengths
            array = np.array("")
        if array.dtype.kind not in "biuf" or not array.size or not np.isfinite(array).all():
            raise self.problem(field, f"must be finite numbers in rows of one length, not {_short(value)}")
        return array.astype(np.float64)

    def _check_shape(self, field: str, shape: tuple[int, ...], axes: str) -> None:
        front, letters = (axes[0], axes[1:]) if axes[:1] in ("*", "+") else ("", axes)
        split = len(shape) - len(letters)
        fits = split >= 0 if front else split == 0
        if fits:
            sizes = [(letter, (size,)) for letter, size in zip(letters, shape[split:], strict=True)]
            sizes += [(front, shape[:split])] if front else []
            fits = all(self._sizes.setdefault(name, size) == size for name, size in sizes)
        if not fits:
            wanted = [str(self._sizes[letter][0]) if letter in self._sizes else letter for letter in letters]
            some = "".join(f"{size}, " for size in self._sizes.get(front, ())) if front else ""
            raise self.problem(field, f"has the shape {shape}, where ({some}{', '.join(wanted)}) is needed")


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
