"""What is told about heads held against references: their names, and the tables, JSON and CSV of the numbers."""

import csv
import io
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minigpt.inspection.compare import Closeness, Description, Null
from minigpt.inspection.heads import Head
from minigpt.inspection.labels import shortened

NEAR, NEAR_UNIFORM = 0.5, 0.1  # largest total variation of a head that is named after a reference, and after uniform
NONE = "none"
DESCRIPTIONS = ("normalised_entropy", "effective_keys", "mean_distance", "first_token_mass", "positional_share")
MEASURES = ("total_variation", "jensen_shannon", "kl", "mass", "argmax", "lift", "coverage")
LEGEND = """
TV: share of the weight that is elsewhere than in the nearest reference. On the
same reference: lift of the mass over uniform attention (0 no preference, 1 the
pattern), mass on its keys, top: rows whose largest weight is on them, pct: of
100 heads before training, how many are as near. Without a reference: entr:
entropy (1 uniform), keys: effective number, dist: mean distance in tokens,
1st: weight on the first token, pos: how alike the maps of all texts are.
""".strip()
FULL_LEGEND = """
JS: Jensen-Shannon divergence, at most 1. KL(P|A): divergence of the head from
the reference in nats, infinite where it has no weight at all on a key of it.
""".strip()

Row = tuple[str, ...]


@dataclass(frozen=True)
class HeadReport:
    """Numbers on the heads of one model or file; arrays are (layers, H)."""

    references: Mapping[str, Closeness]
    nulls: Mapping[str, Null]  # those that there are
    description: Description
    about: Mapping[str, Any]  # what was read, for JSON
    heads: Sequence[Head]  # those that are told of
    title: str  # what was read, in words

    def nearest(self, head: Head) -> str:
        """The reference of the smallest total variation; empty if none is defined on the texts."""
        found = {name: float(close.total_variation[head]) for name, close in self.references.items()}
        known = {name: distance for name, distance in found.items() if not math.isnan(distance)}
        return min(known, key=known.__getitem__, default="")

    def name(self, head: Head) -> str:
        """The nearest reference, if it is near and nearer than chance; else ``none``."""
        nearest = self.nearest(head)
        if not nearest:
            return NONE
        distance = self.references[nearest].total_variation[head]
        if nearest == "uniform":
            return nearest if distance <= NEAR_UNIFORM else NONE
        beats_chance = nearest not in self.nulls or distance < self.nulls[nearest].first_percentile
        return nearest if distance <= NEAR and beats_chance else NONE

    def measures(self, reference: str, head: Head) -> dict[str, float]:
        """All numbers of a head on one reference; NaN where there is none."""
        close = self.references[reference]
        null = self.nulls.get(reference)
        values = {
            "total_variation": close.total_variation,
            "jensen_shannon": close.jensen_shannon,
            "kl": close.kl,
            "mass": close.mass,
            "argmax": close.argmax,
            "lift": close.lift,
            "percentile": null.percentile(close.total_variation) if null else np.full_like(close.mass, math.nan),
        }
        return {name: float(array[head]) for name, array in values.items()} | {"coverage": close.coverage}

    def descriptions(self, head: Head) -> dict[str, float]:
        """All numbers of a head without a reference."""
        return {name: float(getattr(self.description, name)[head]) for name in DESCRIPTIONS}


# ── for people ─────────────────────────────────────────────────────────────────────────────────────────────────


def as_text(told: HeadReport, *, full: bool) -> str:
    """What was read, and one table of all heads, at most 80 columns wide; with ``full`` one more a reference."""
    details = [_details(told, reference) for reference in told.references] if full else []
    legend = f"{LEGEND}\n{FULL_LEGEND}" if full else LEGEND
    return "\n\n".join([_heading(told), _overview(told), *details, legend])


def _heading(told: HeadReport) -> str:
    covered = [f"{shortened(name, 40, keep_end=True)} {close.coverage:.0%}" for name, close in told.references.items()]
    return "\n".join([told.title, *textwrap.wrap(f"coverage (rows where it is defined): {', '.join(covered)}", 80)])


def _overview(told: HeadReport) -> str:
    rows: list[Row] = [
        ("head", "name", "TV", "lift", "mass", "top", "pct", "entr", "keys", "dist", "1st", "pos"),
    ]
    for head in told.heads:
        nearest, name = told.nearest(head), told.name(head)
        values = told.measures(nearest, head) if nearest else dict.fromkeys((*MEASURES, "percentile"), math.nan)
        described = told.descriptions(head)
        shown = shortened(name, 18, keep_end=True)
        if name == NONE and nearest:
            shown = f"{NONE} ({shortened(nearest, 11, keep_end=True)})"
        rows.append(
            (
                str(head), shown,
                *(_number(values[key]) for key in ("total_variation", "lift", "mass", "argmax")),
                _number(values["percentile"], 0), _number(described["normalised_entropy"]),
                _number(described["effective_keys"], 1), _number(described["mean_distance"], 1),
                _number(described["first_token_mass"]), _number(described["positional_share"]),
            )
        )  # fmt: skip
    return "\n".join(_aligned(rows, left=2))


def _details(told: HeadReport, reference: str) -> str:
    close = told.references[reference]
    title = f"{shortened(reference, 40, keep_end=True)}: defined in {close.rows} of {close.all_rows} rows"
    if null := told.nulls.get(reference):
        middle = float(np.median(null.total_variation))
        title += f"; TV before training: median {middle:.3f}, 1st percentile {null.first_percentile:.3f}"
    keys = ("total_variation", "jensen_shannon", "kl", "mass", "argmax", "lift", "percentile")
    rows: list[Row] = [("head", "TV", "JS", "KL(P|A)", "mass", "top", "lift", "pct")]
    for head in told.heads:
        values = told.measures(reference, head)
        numbers = (_number(values[key], 1 if key == "percentile" else 3) for key in keys)
        rows.append((str(head), *numbers))
    return "\n".join([*_folded(title), *_aligned(rows, left=1)])


def _folded(title: str) -> list[str]:
    first, _, rest = title.partition("; ")
    return [title] if len(title) <= 80 else [first, "  " + rest]


def _aligned(rows: Sequence[Row], left: int) -> Iterator[str]:
    """Columns under each other, the first ``left`` of them flush left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.ljust(width) if number < left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join([" ".join(cells[:left]), " ".join(cells[left:])]).rstrip()


def _number(value: float, places: int = 2) -> str:
    return "-" if math.isnan(value) else f"{value:.{places}f}"


# ── for programs ───────────────────────────────────────────────────────────────────────────────────────────────


def as_json(told: HeadReport) -> dict[str, Any]:
    """All numbers; null where one is not defined or not finite."""
    return {
        **told.about,
        "references": {name: _about_reference(told, name) for name in told.references},
        "heads": [
            {
                "head": str(head),
                "name": told.name(head),
                "nearest": told.nearest(head),
                **_finite(told.descriptions(head)),
                "references": {name: _finite(told.measures(name, head)) for name in told.references},
            }
            for head in told.heads
        ],
    }


def _about_reference(told: HeadReport, reference: str) -> dict[str, Any]:
    close, null = told.references[reference], told.nulls.get(reference)
    chance: NDArray[Any] = null.total_variation if null else np.array([math.nan])
    return _finite(
        {
            "coverage": close.coverage,
            "uniform_mass": close.uniform_mass,
            "null_heads": len(chance) if null else 0,
            "null_median": float(np.median(chance)),
            "null_first_percentile": null.first_percentile if null else math.nan,
            "null_smallest": float(chance[0]),
        }
    )


def as_csv(told: HeadReport) -> str:
    """All numbers, a row for each head and reference; empty where one is not defined or not finite."""
    text = io.StringIO()
    columns = ("head", "name", "nearest", *DESCRIPTIONS, "reference", *MEASURES, "percentile")
    writer: csv.DictWriter[str] = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    for head in told.heads:
        common = {"head": str(head), "name": told.name(head), "nearest": told.nearest(head)}
        for reference in told.references:
            numbers = {**told.descriptions(head), **told.measures(reference, head)}
            writer.writerow({**common, "reference": reference, **_finite(numbers)})
    return text.getvalue()


def _finite(values: Mapping[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in values.items()}
