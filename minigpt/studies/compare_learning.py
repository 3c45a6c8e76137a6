"""Rows of the table of recurrent networks against the Transformer that are learned: tasks and texts, equal parameters.

Each network is a cell of a sweep, a run of its own: an interrupted comparison goes on where it was. Each kind trains as
the program trains it, a Transformer with Muon and a recurrent network with AdamW, which is the only one that it has;
its rate is the best of a few on ``recall``, and is used in every row.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from minigpt.assembly import restored
from minigpt.checkpoint import find_checkpoint
from minigpt.config import merge, validate
from minigpt.corpora import corpus_of
from minigpt.corpus import evaluation_batches
from minigpt.errors import TrainingStopped, UserError
from minigpt.files import safe_name
from minigpt.studies.compare_structure import Extent, Row, shape
from minigpt.studies.measure import table
from minigpt.studies.sweep import Cell, Mean, Result, run_cells

RATES = {"gpt": (0.01, 0.03), "recurrent": (0.003, 0.01, 0.03)}
PAIRS = 4  # of recall
SYMBOLS = 8  # of copy
ADAMW = {"name": "adamw", "beta2": 0.98, "warmup_steps": 20, "weight_decay": 0.0, "schedule": "linear"}
MUON = {"name": "muon", "adam_lr": 0.01, "schedule": "linear"}  # for a Transformer's matrices, AdamW for the rest
PLACES = ((0, 8), (8, 32), (32, 128))  # of a window, over which losses are averaged


class Interrupted(Exception):
    """A signal came; what was trained is kept."""


@dataclass(frozen=True)
class Lesson:
    """What is learned: tables of its text or task and the amount of it, and the name of the folder of its runs."""

    name: str
    tables: Mapping[str, Any]
    context_length: int
    batch_size: int
    steps: int


def task(name: str, context_length: int, steps: int, **options: Any) -> Lesson:
    """A task whose examples have so many tokens."""
    tables = {
        "data": {"source": f"task:{name}", "tokenizer": "char"},
        "task": {"examples": 20_000, **options},
        "train": {"eval_tokens": 0},
    }
    return Lesson(f"{name}-{context_length}", tables, context_length, 64, steps)


def text(source: str, steps: int) -> Lesson:
    """A text in windows of 128 characters, validated on 100,000 tokens at most."""
    tables = {"data": {"source": source, "tokenizer": "char", "vocab_size": 0}, "train": {"eval_tokens": 100_000}}
    return Lesson(safe_name(Path(source).stem), tables, 128, 16, steps)


def learned(extent: Extent, lesson: Lesson, cell: Cell) -> Result:
    """What a network has come to, trained now unless a run of these settings is there.

    Raises:
        Interrupted: if a signal came before it was done.
        TrainingStopped: if its loss was not finite.
    """
    kind = cell.settings["model.kind"]
    shaped = shape(kind, context_length=lesson.context_length)
    common = {
        "run": {"device": "cpu", "dtype": "float32", "threads": extent.threads},
        "data": {"cache_dir": extent.cache_dir},
        "model": shaped.model_dump(),
        "optim": MUON if kind == "gpt" else ADAMW,
        "train": {"batch_size": lesson.batch_size, "eval_interval": 0},
    }
    folder = extent.folder / lesson.name
    found = run_cells(
        [cell], merge(lesson.tables, common), folder, config_path=None, stop=extent.stop, say=lambda _line: None
    )
    if not found:
        raise Interrupted
    extent.advance(f"{kind}, {lesson.name}")
    [(_, result)] = found
    if result.failed:
        raise TrainingStopped(f"{result.run}: {result.failed}")
    return result


def cell_of(lesson: Lesson, kind: str, rate: float, seed: int = 1, steps: int = 0) -> Cell:
    """A training of so many steps (0: the lesson's own number)."""
    settings = {"model.kind": kind, "optim.lr": f"{rate:g}", "train.max_steps": str(steps or lesson.steps)}
    return Cell(settings, seed)


def accuracies(extent: Extent, lesson: Lesson, kind: str, rate: float) -> list[float]:
    """On examples for validation, of each seed."""
    todo = [cell_of(lesson, kind, rate, seed) for seed in range(1, extent.seeds + 1)]
    return [learned(extent, lesson, cell).accuracy for cell in todo]


def best_rates(extent: Extent) -> dict[str, float]:
    """For each kind the rate that learns ``recall`` best: by accuracy, then by loss."""
    lesson, found = recall(extent, 8), {}
    for kind in extent.kinds:
        tried = {rate: learned(extent, lesson, cell_of(lesson, kind, rate)) for rate in rates(kind, extent)}
        found[kind] = min(tried, key=lambda rate: (-tried[rate].accuracy, tried[rate].loss))
    return found


def rates(kind: str, extent: Extent) -> tuple[float, ...]:
    """What is tried."""
    tried = RATES.get(kind, RATES["recurrent"])
    return tried[1:] if extent.quick else tried


def recall(extent: Extent, distance: int) -> Lesson:
    """Four pairs, and their keys asked so many tokens later."""
    context_length = 4 * PAIRS + 2 + distance
    return task("recall", context_length, 200 if extent.quick else 400, length=PAIRS, distance=distance, symbols=16)


def copy(extent: Extent, distance: int) -> Lesson:
    """Eight symbols, and the same again so many tokens later."""
    context_length = 2 * SYMBOLS + 2 + distance
    return task("copy", context_length, 200 if extent.quick else 400, length=SYMBOLS, distance=distance, symbols=16)


def distances(extent: Extent) -> tuple[int, ...]:
    """Tokens between what is to be read and where it is asked."""
    return (8, 32) if extent.quick else (8, 64, 200)


# ── rows ───────────────────────────────────────────────────────────────────────────────────────────────────────


def long_range(extent: Extent, chosen: Mapping[str, float]) -> Row:
    """Accuracy on recall and copy against the distance."""
    found: dict[str, dict[str, list[float]]] = {}
    for name, lesson_at in (("recall", recall), ("copy", copy)):
        for kind in extent.kinds:
            found[f"{name}, {kind}"] = {
                str(d): accuracies(extent, lesson_at(extent, d), kind, chosen[kind]) for d in distances(extent)
            }
    rows = [["right, at a distance of", *map(str, distances(extent))]]
    rows += [[name, *(percent(values) for values in by.values())] for name, by in found.items()]
    return Row(
        "long range",
        table(rows),
        {"accuracy": found, "rates": dict(chosen)},
        f"After {recall(extent, 8).steps} steps of 64 examples; more may close a gap. Chance: 1 in 8 and 1 in 16.",
    )


def parity(extent: Extent, chosen: Mapping[str, float]) -> Row:
    """The task that recurrence wins: every bit counts."""
    length = 17 if extent.quick else 33
    lesson = task("parity", length, 500 if extent.quick else 1000)
    found = {kind: accuracies(extent, lesson, kind, chosen[kind]) for kind in extent.kinds}
    rows = [["", f"right, of {length - 1} bits"], *([kind, percent(values)] for kind, values in found.items())]
    return Row(
        "where recurrence wins: parity",
        table(rows),
        {"accuracy": found},
        "One bit of state is all it takes; that an RNN can hold it does not say that training finds it each time.",
    )


def language(extent: Extent, chosen: Mapping[str, float]) -> Row:
    """Validation loss on texts after equal tokens, and after equal seconds; and by place in the window."""
    steps = 60 if extent.quick else 400
    lines, numbers = [], {}
    for source in texts(extent):
        lesson = text(source, steps)
        try:
            equal = {k: learned(extent, lesson, cell_of(lesson, k, chosen[k])) for k in extent.kinds}
        except UserError as error:
            lines += [f"{source}: left out ({error})"]
            continue
        quickest = min(result.seconds for result in equal.values())
        slower = {k: max(1, round(steps * quickest / result.seconds)) for k, result in equal.items()}
        timed = {k: learned(extent, lesson, cell_of(lesson, k, chosen[k], steps=slower[k])) for k in extent.kinds}
        places = [f"{first}-{end}" for first, end in PLACES]
        rows = [[source, f"{steps * 2048:,} tokens", f"{quickest:.0f} s", *places]]
        for kind, result in equal.items():
            losses = [result.loss, timed[kind].loss, *loss_by_place(Path(result.run))]
            rows.append([kind, *(f"{loss:.3f}" for loss in losses)])
            names = ("equal_tokens", "equal_seconds", *places)
            numbers[f"{source}, {kind}"] = dict(zip(names, losses, strict=True))
        lines += table(rows)
    return Row(
        "language: validation loss after equal tokens, after equal seconds, by place",
        lines,
        numbers,
        "Small networks, one seed, short trainings by characters: which is ahead here need not be so at another size.",
    )


def check_text(source: str, cache_dir: str) -> None:
    """Better told now than after the trainings before. Raises UserError if the text can't be read."""
    try:
        corpus_of(validate(merge(text(source, 1).tables, {"data": {"cache_dir": cache_dir}})))
    except UserError as error:
        raise UserError(f"--text {source}: {error}") from None


def texts(extent: Extent) -> list[str]:
    """The tales and the other text, each once."""
    return list(dict.fromkeys(["tales", extent.text]))


@torch.inference_mode()
def loss_by_place(path: Path) -> list[float]:
    """Mean loss of a run over the places of PLACES, in windows of the validation part."""
    checkpoint = find_checkpoint(path, "best")
    run = restored(checkpoint, checkpoint.config)
    run.model.eval()
    losses = []
    for inputs, targets in evaluation_batches(run.corpus.val[:50_001], 128, 64):
        if inputs.shape[1] == 128:
            logits_BTV = run.model(torch.from_numpy(inputs))
            losses.append(
                F.cross_entropy(logits_BTV.transpose(1, 2), torch.from_numpy(targets), reduction="none").numpy()
            )
    by_place = np.concatenate(losses).mean(axis=0)
    return [float(by_place[a:b].mean()) for a, b in PLACES]


def percent(values: Sequence[float]) -> str:
    """``97.2 % ± 0.4``."""
    mean = Mean.of(values)
    return f"{100 * mean.mean:.1f} %" + ("" if math.isnan(mean.error) else f" ± {100 * mean.error:.1f}")


def trainings(extent: Extent, rows: Sequence[str]) -> int:
    """How many networks the rows train."""
    kinds = len(extent.kinds)
    counts = {
        "long-range": 2 * kinds * len(distances(extent)) * extent.seeds,
        "parity": kinds * extent.seeds,
        "language": 2 * kinds * len(texts(extent)),
    }
    learning = [counts[row] for row in rows if row in counts]
    return sum(learning) + (sum(len(rates(kind, extent)) for kind in extent.kinds) if learning else 0)
