"""Worked examples of attention and its companions: small enough for a pencil, to ten places, as a file of JSON.

The file is one object with up to four lists, ``attention``, ``multi_head``, ``parts`` and ``reference_rows``; each of
their objects has a ``name``, usually an ``about``, what is given, and what must come out. ``examples.json`` beside
this module is the model for one's own. Axes: T queries, S keys, H heads, D model width, K head size.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from minigpt.config import nearest
from minigpt.console import counted
from minigpt.errors import UserError
from minigpt.inspection.worked.cases import AttentionCase, Case, MultiHeadCase, Part, ReferenceRow
from minigpt.inspection.worked.fields import Array, Fields


@dataclass(frozen=True, eq=False)
class Examples:
    """All that one file holds."""

    path: str
    attention: tuple[AttentionCase, ...]
    multi_head: tuple[MultiHeadCase, ...]
    parts: tuple[Part, ...]
    reference_rows: tuple[ReferenceRow, ...]

    def cases(self, names: Sequence[str] = ()) -> list[Case]:
        """What can be computed, all of it or the named ones, in the file's order.

        Raises:
            UserError: for a name that is not there.
        """
        cases: list[Case] = [*self.attention, *self.multi_head, *self.parts]
        known = [case.name for case in cases]
        for name in names:
            if name not in known:
                raise UserError(f"{name}: {self.path} has no such example{nearest(name, known)}")
        return [case for case in cases if not names or case.name in names]


# kind → fields that are given, fields that come out in order of computation; each with the letters of its axes
# ("*": any axes in front). F is the width of the feed-forward, P a number of positions or of pairs.
FEED_FORWARD = {"W1": "FD", "b1": "F", "W2": "DF", "b2": "D"}
PARTS: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "sinusoidal_positions": ({}, {"value": "TD"}),
    "rotary_table": ({"x": "TK"}, {"cos": "TP", "sin": "TP", "value": "TK"}),
    "rotary_relative": ({"query": "K", "key": "K", "positions": "P", "distance": ""}, {"product": "P"}),
    "layer_norm": ({"x": "*D"}, {"value": "*D"}),
    "rms_norm": ({"x": "*D"}, {"value": "*D"}),
    "feed_forward_relu": ({"x": "TD"} | FEED_FORWARD, {"hidden": "TF", "value": "TD"}),
    "masking": ({"scores": "TS", "mask": "TS"}, {"minus_infinity": "TS", "minus_1e9": "TS"}),
    "transformer_block": (
        {"x": "TD", "W_Q": "DD", "W_K": "DD", "W_V": "DD", "W_O": "DD", "b_O": "D"} | FEED_FORWARD,
        {"attn_norm": "TD", "query": "TD", "key": "TD", "value": "TD", "scaled_scores": "HTT", "weights": "HTT"}
        | {"heads": "TD", "after_attention": "TD", "mlp_norm": "TD", "hidden": "TF", "output": "TD"},
    ),
}
DEFAULTS = {"positions": [3, 5, 40], "distance": 3}  # of rotary_relative
LAST_POSITION = 100_000  # of a rotation; its table is made up to there


def load_examples(path: Path | None = None) -> Examples:
    """The examples of a file, or those that come with the project.

    Raises:
        UserError: one sentence with the file, the example and the field, if anything in it makes no sense.
    """
    name = str(path) if path else "examples.json"
    try:
        file = path or resources.files("minigpt.inspection") / "examples.json"
        content = json.loads(file.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise UserError(f"{name}: {error.strerror or error}; give the path of a JSON file of examples") from None
    except (ValueError, RecursionError) as error:  # no UTF-8, no JSON
        raise UserError(f"{name}: not a valid JSON file ({error})") from None
    lists = ("attention", "multi_head", "parts", "reference_rows")
    if not isinstance(content, dict) or not content:
        raise UserError(f"{name}: must be an object with one or more of the lists {', '.join(lists)}")
    for key in content:
        if key not in lists:
            raise UserError(f"{name}: there is no list {key}{nearest(key, lists)}")
    seen: set[str] = set()
    examples = Examples(
        name,
        attention=tuple(map(_attention, _each(content, "attention", name, seen))),
        multi_head=tuple(map(_multi_head, _each(content, "multi_head", name, seen))),
        parts=tuple(map(_part, _each(content, "parts", name, seen))),
        reference_rows=tuple(map(_reference_row, _each(content, "reference_rows", name, seen))),
    )
    if not seen:
        raise UserError(f"{name}: holds no example")
    return examples


# ── reading one example ────────────────────────────────────────────────────────────────────────────────────────


def _each(content: dict[str, Any], key: str, path: str, seen: set[str]) -> Iterator[Fields]:
    """The objects of one list, their names made sure to be new."""
    tables = content.get(key, [])
    if not isinstance(tables, list):
        raise UserError(f"{path}: {key} must be a list of objects")
    for number, table in enumerate(tables):
        name = table.get("name") if isinstance(table, dict) else None
        if not isinstance(name, str) or not name:
            raise UserError(f"{path}: {key} example number {number} must be an object with a name")
        if name in seen:
            raise UserError(f"{path}: two examples are named {name}; each needs a name of its own")
        seen.add(name)
        yield Fields(table, f"{path}: {key} example {name}")


def _optional(fields: Fields, field: str, axes: str) -> Array | None:
    return fields.numbers(field, axes) if field in fields else None


def _attention(fields: Fields) -> AttentionCase:
    query, key = fields.numbers("query", "*TK"), fields.numbers("key", "+SK")
    if query.ndim > 4:
        raise fields.problem("query", "may have two, three (heads) or four axes (sequences, heads)")
    if query.ndim != key.ndim or query.shape[:-3] != key.shape[:-3]:
        raise fields.problem("key", f"its shape {key.shape} does not fit that of query, {query.shape}")
    if query.ndim > 2 and query.shape[-3] % key.shape[-3]:
        raise fields.problem("key", f"its {key.shape[-3]} heads cannot be shared by the {query.shape[-3]} of query")
    shape = (*query.shape[:-1], key.shape[-2])
    case = AttentionCase(
        name=fields.text("name"),
        about=fields.text("about", ""),
        query=query,
        key=key,
        value=fields.numbers("value", "+SV"),
        mask=fields.mask("mask", shape) if "mask" in fields else None,
        scaled=fields.flag("scaled", True),
        raw_scores=_optional(fields, "raw_scores", "*TS"),
        scaled_scores=_optional(fields, "scaled_scores", "*TS"),
        weights=fields.numbers("weights", "*TS"),
        output=fields.numbers("output", "*TV"),
    )
    fields.end()
    return case


def _multi_head(fields: Fields) -> MultiHeadCase:
    x = fields.numbers("x", "TD")
    length, width = x.shape
    weights = fields.numbers("weights", "HTT")
    if width % len(weights):
        raise fields.problem("weights", f"{len(weights)} heads cannot share a width of {width}")
    identity = np.eye(width)
    case = MultiHeadCase(
        name=fields.text("name"),
        about=fields.text("about", ""),
        x=x,
        query_weight=fields.numbers("W_Q", "DD", identity),
        key_weight=fields.numbers("W_K", "DD", identity),
        value_weight=fields.numbers("W_V", "DD", identity),
        output_weight=fields.numbers("W_O", "DD", identity),
        output_bias=fields.numbers("b_O", "D", np.zeros(width)),
        mask=fields.mask("mask", (length, length), np.tri(length)),
        query=_optional(fields, "query", "TD"),
        key=_optional(fields, "key", "TD"),
        value=_optional(fields, "value", "TD"),
        weights=weights,
        output=fields.numbers("output", "TD"),
    )
    fields.end()
    return case


def _part(fields: Fields) -> Part:
    name = fields.text("name")
    kind = fields.text("kind", name)
    if kind not in PARTS:
        raise fields.problem("kind" if kind != name else "name", f"{kind} is no kind of part{nearest(kind, [*PARTS])}")
    given, results = (
        {field: fields.numbers(field, axes, DEFAULTS.get(field)) for field, axes in side.items()}
        for side in PARTS[kind]
    )
    about = fields.text("about", "")
    fields.end()
    _check_part(fields, kind, given)
    return Part(name, about, kind, given, results)


def _check_part(fields: Fields, kind: str, given: dict[str, Array]) -> None:
    """What the shapes alone do not tell."""
    match kind:
        case "sinusoidal_positions" if fields.size("D") % 2:
            raise fields.problem("value", f"its width must be even, not {fields.size('D')}")
        case "rotary_table" | "rotary_relative" if fields.size("K") % 2:
            raise fields.problem("x" if kind == "rotary_table" else "query", "rotation needs an even width")
        case "rotary_relative" if not _are_positions(given["positions"], given["distance"]):
            says = f"they and the distance must be whole numbers, none below the distance or above {LAST_POSITION}"
            raise fields.problem("positions", says)
        case "masking" if not np.isin(given["mask"], (0, 1)).all():
            raise fields.problem("mask", "must hold 1 where a query may look and 0 where it may not")
        case "transformer_block" if fields.size("D") % fields.size("H"):
            raise fields.problem("weights", f"{fields.size('H')} heads cannot share a width of {fields.size('D')}")


def _are_positions(positions: Array, distance: Array) -> bool:
    whole = (positions % 1 == 0).all() and distance % 1 == 0
    return bool(whole and 0 <= distance <= positions.min() and positions.max() <= LAST_POSITION)


def _reference_row(fields: Fields) -> ReferenceRow:
    row = ReferenceRow(
        name=fields.text("name"),
        about=fields.text("about", ""),
        tokens=fields.texts("tokens"),
        query=fields.text("query"),
        weights=fields.numbers("weights", "T"),
    )
    if len(row.weights) != len(row.tokens):
        raise fields.problem(
            "weights", f"{counted(len(row.weights), 'number')} for {counted(len(row.tokens), 'token')}"
        )
    if row.query not in row.tokens:
        raise fields.problem("query", f"{row.query} is none of the tokens")
    fields.end()
    return row
