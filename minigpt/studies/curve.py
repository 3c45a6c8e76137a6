"""Validation loss against seconds, ours and nanoGPT's, as numbers and as a picture."""

import itertools
import json
import math
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image, ImageDraw, ImageFont

from minigpt.studies.measure import Report, table
from minigpt.studies.whole_runs import SPEEDRUN, train_process

if TYPE_CHECKING:  # loading torch here would slow what is timed
    from minigpt.config import Config

Curve = Sequence[tuple[float, float]]  # (seconds, loss)

OUR_INTERVAL, THEIR_INTERVAL = 25, 100  # steps between validations
ESTIMATE = re.compile(r"step (\d+): train loss [\d.]+, val loss ([\d.]+)")  # what nanoGPT prints
COLOURS = ("#08519c", "#d95f02", "#636363", "#1b9e77", "#7570b3", "#e7298a", "#a6761d")
SIZE, MARGIN, FONT_SIZE = (900, 540), (70, 30, 30, 60), 16  # left, top, right, bottom


def curve(*, nanogpt: Path | None, threads: int, flags: Sequence[str], picture: Path | None) -> Report:
    """``configs/speedrun_cpu.toml`` and nanoGPT's recipe for a CPU, validated on the way; seconds of whole processes.

    nanoGPT's losses are its own estimates, on 20 batches.

    Args:
        nanogpt: its checkout.
        threads: its CPU threads.
        flags: options handed on to ``train.py``.
        picture: file to draw into.
    """
    with tempfile.TemporaryDirectory() as scratch:
        often = ["--train.eval-interval", str(OUR_INTERVAL)]
        run = train_process([str(SPEEDRUN), *flags, *often], Path(scratch) / "run")
        rows = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        start = run.seconds - rows[-1]["seconds"]  # and end: what the run itself does not count
        curves: dict[str, Curve] = {
            "minigpt": [(start + row["seconds"], row["val_loss"]) for row in rows if "val_loss" in row]
        }
        if nanogpt:
            from minigpt.checkpoint import find_checkpoint

            curves["nanoGPT"] = nanogpt_curve(nanogpt, find_checkpoint(run.path, "last").config, threads)
    if picture:
        draw_curves(curves, x_label="seconds", y_label="validation loss").save(picture)
    lines = table([["", "seconds", "loss"], *([n, f"{s:.1f}", f"{v:.3f}"] for n, c in curves.items() for s, v in c)])
    return Report(lines, {"curves": curves})


def nanogpt_curve(folder: Path, config: "Config", threads: int) -> Curve:
    """nanoGPT's recipe on the text of a run of ours."""
    from minigpt.corpus import open_corpus
    from minigpt.studies.peers import RECIPE_STEPS, nanogpt_lines, write_nanogpt_data

    corpus = open_corpus(config.data, context_length=config.model.context_length, seed=config.run.seed)
    with tempfile.TemporaryDirectory() as scratch:
        write_nanogpt_data(corpus, Path(scratch) / "data")
        begun, points = time.perf_counter(), []
        for line in nanogpt_lines(
            folder, Path(scratch), threads=threads, steps=RECIPE_STEPS, eval_interval=THEIR_INTERVAL
        ):
            if match := ESTIMATE.search(line):
                points.append((time.perf_counter() - begun, float(match[2])))
    return points


# ── the picture ────────────────────────────────────────────────────────────────────────────────────────────────


def draw_curves(curves: Mapping[str, Curve], *, x_label: str, y_label: str) -> Image.Image:
    """Lines over a logarithmic x axis, the name of each at its end; every x is above 0."""
    xs, ys = zip(*(point for curve in curves.values() for point in curve), strict=True)
    picture = Image.new("RGB", SIZE, "white")
    draw, font = ImageDraw.Draw(picture), ImageFont.load_default(FONT_SIZE)
    (left, top, right, bottom), (width, height) = MARGIN, SIZE
    x_ticks, y_ticks = ticks_1_2_5(min(xs), max(xs)), even_ticks(min(ys), max(ys))
    x_ends, y_ends = (min(*xs, x_ticks[0]), max(*xs, x_ticks[-1])), (y_ticks[0], y_ticks[-1])

    def place(x: float, y: float) -> tuple[float, float]:
        """Pixels of a point."""
        across = math.log(x / x_ends[0]) / max(math.log(x_ends[1] / x_ends[0]), 1e-9)
        up = (y - y_ends[0]) / (y_ends[1] - y_ends[0])
        return left + across * (width - left - right), height - bottom - up * (height - top - bottom)

    for x in x_ticks:
        draw.line([place(x, y_ends[0]), place(x, y_ends[1])], fill="#dddddd")
        draw.text((place(x, y_ends[0])[0], height - bottom + 8), f"{x:g}", fill="black", font=font, anchor="mt")
    for y in y_ticks:
        draw.line([place(x_ends[0], y), place(x_ends[1], y)], fill="#dddddd")
        draw.text((left - 8, place(x_ends[0], y)[1]), f"{y:.3g}", fill="black", font=font, anchor="rm")
    draw.text((left + (width - left - right) / 2, height - 12), x_label, fill="black", font=font, anchor="mb")
    draw.text((left, top - 8), y_label, fill="black", font=font, anchor="lb")
    for (name, curve), colour in zip(curves.items(), itertools.cycle(COLOURS), strict=False):
        points = [place(x, y) for x, y in curve]
        draw.line(points, fill=colour, width=3)
        x, y = points[-1]
        draw.text((min(x, width - 8), y - 10), name, fill=colour, font=font, anchor="rb")
    return picture


def ticks_1_2_5(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten from low to high, the nearest one if there are none between."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    marks = [digit * 10.0**decade for decade in decades for digit in (1, 2, 5)]
    return [mark for mark in marks if low <= mark <= high] or [min(marks, key=lambda mark: abs(math.log(mark / low)))]


def even_ticks(low: float, high: float) -> list[float]:
    """About five round numbers that take in low and high."""
    rough = max(high - low, 1e-6) / 5
    size = 10.0 ** math.floor(math.log10(rough))
    step = min((digit * size for digit in (1, 2, 5, 10)), key=lambda step: abs(step - rough))
    first, last = math.floor(low / step), math.ceil(high / step)
    return [step * n for n in range(first, max(last, first + 1) + 1)]
