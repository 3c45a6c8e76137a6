"""The film of a run's attention: every head on one fixed text, a frame each time training lets it be looked at.

In the run's folder, ``attention/`` holds::

    probe.json          what is looked at: the tokens, their texts, and a note where a longer text was cut
    step-00000150.npy   a frame: the weights of every head, uint8 (layers, H, T, T); weight = byte / 255
    rows.jsonl          an object a frame and head: step, head, total_variation, normalised_entropy, ...

``total_variation`` is that to each reference; the other numbers are described in ``compare``. Null where there is none,
as of a reference that says nothing about the text.
"""

import contextlib
import io
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minigpt.config import Config
from minigpt.corpus import Corpus
from minigpt.errors import UserError
from minigpt.files import move_aside, write_whole
from minigpt.inspection.compare import closeness, describe
from minigpt.inspection.patterns import Pattern, parse_reference
from minigpt.tokenizer import Tokenizer

LONGEST = 256  # tokens of a text whose maps are kept
NUMBERS = ("normalised_entropy", "effective_keys", "mean_distance", "first_token_mass")

_FRAME = re.compile(r"step-(\d{8}|[1-9]\d{8,})\.npy")
Row = dict[str, Any]


# ── what is looked at, and what is said of it ──────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Probe:
    """The text of every frame, and what its heads are held against."""

    tokens: NDArray[np.int64]  # (T,)
    patterns: Mapping[str, Pattern]
    note: str = ""  # what of the text is left out, in a sentence

    def to_dict(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """The content of ``probe.json``."""
        tokens = self.tokens.tolist()
        texts = [tokenizer.token_bytes(token).decode("utf-8", errors="replace") for token in tokens]
        return {"tokens": tokens, "texts": texts, "note": self.note}


def probe_of(config: Config, corpus: Corpus) -> Probe:
    """``inspect.text``, or the start of the validation text, and the references of ``inspect.scores``.

    Raises:
        UserError: for a reference that is unknown or does not fit the text.
    """
    context, tokenizer = config.model.context_length, corpus.tokenizer
    longest = min(context, LONGEST)
    text, note = tokenizer.encode(config.inspect.text), ""
    if len(text) > longest:
        note = f"inspect.text has {len(text)} tokens: attention is drawn for the first {longest}"
    elif not len(text):
        text = corpus.val if len(corpus.val) else corpus.train
        if context > longest:
            note = f"the context has {context} tokens: attention is drawn for texts of {longest}"
    tokens = np.array(text[:longest], dtype=np.int64)
    names = [name.strip() for name in config.inspect.scores.split(",")]
    try:
        references = [parse_reference(name, tokenizer) for name in names if name]
        return Probe(tokens, {reference.name: reference.pattern(tokens) for reference in references}, note)
    except UserError as error:
        raise UserError(f"inspect.scores: {error}") from None


def frame_rows(step: int, maps: NDArray[np.float32], probe: Probe) -> list[Row]:
    """One row a head of the maps (layers, H, T, T) on the probe."""
    n_layer, n_head, n_token, _ = maps.shape
    near = {name: closeness(maps, pattern).total_variation for name, pattern in probe.patterns.items()}
    description = describe(maps[None]) if n_token > 1 else None  # one token has no choice
    numbers = {name: getattr(description, name) for name in NUMBERS} if description else {}
    return [
        {
            "step": step,
            "head": f"L{layer}H{head}",
            "total_variation": {name: _number(values[layer, head]) for name, values in near.items()},
            **{name: _number(values[layer, head]) for name, values in numbers.items()},
        }
        for layer in range(n_layer)
        for head in range(n_head)
    ]


def strongest(rows: Iterable[Row], count: int = 3) -> str:
    """The heads nearest to a reference, as a small table; one that is merely near to uniform is not strong."""
    near: dict[str, tuple[float, str]] = {}  # head → its nearest reference
    for row in rows:
        distances = [(tv, name) for name, tv in row["total_variation"].items() if tv is not None and name != "uniform"]
        if distances:
            near[row["head"]] = min(distances)
    chosen = sorted(near, key=lambda head: near[head])[:count]
    lines = [f"{head:<8}{near[head][0]:>9.2f}  {near[head][1]}" for head in chosen]
    return "\n".join([f"{'head':<8}elsewhere  than in", *lines]) if lines else ""


def _number(value: float) -> float | None:
    return round(float(value), 6) if math.isfinite(value) else None


# ── writing ────────────────────────────────────────────────────────────────────────────────────────────────────


def begin_film(folder: Path, probe: Mapping[str, Any], step: int) -> None:
    """Make the folder ready for frames past ``step``: what is there of them is cut, and at step 0 all of it.

    A film of other tokens is moved aside, to ``attention.old-1`` and so on.

    Args:
        folder: ``attention/`` of a run.
        probe: the content of ``probe.json``.
        step: where training goes on; one that begins at 0 looks at step 0 first.

    Raises:
        OSError, UserError: if it can't be written.
    """
    if step and folder.is_dir() and _read_probe(folder).get("tokens", probe["tokens"]) != probe["tokens"]:
        move_aside(folder)
    folder.mkdir(exist_ok=True)
    for frame in _steps(folder):
        if frame > step or not step:
            _frame_path(folder, frame).unlink()
    kept = [row for row in _read_rows(folder) if step and row["step"] <= step]
    write_whole(folder / "rows.jsonl", _lines(kept))
    write_whole(folder / "probe.json", json.dumps(probe).encode())


def add_frame(folder: Path, step: int, maps: NDArray[np.float32], rows: Iterable[Row]) -> None:
    """Keep the maps (layers, H, T, T) and the rows of one step.

    Raises:
        OSError, UserError: if they can't be written.
    """
    content = io.BytesIO()
    np.save(content, np.rint(maps * 255).astype(np.uint8), allow_pickle=False)
    write_whole(_frame_path(folder, step), content.getvalue())
    with (folder / "rows.jsonl").open("ab") as file:
        file.write(_lines(rows))


def _lines(rows: Iterable[Row]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


# ── reading ────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Film:
    """A film on disk: small things are read at once, each frame when it is asked for."""

    folder: Path
    tokens: list[int]
    texts: list[str]  # one a token; bytes that are no character alone are U+FFFD
    note: str
    steps: list[int]  # of the frames, ascending
    rows: list[Row]

    def maps(self, step: int) -> NDArray[np.uint8]:
        """The frame of one of the steps: (layers, H, T, T), weight = byte / 255.

        Raises:
            UserError: if the file is gone or damaged.
        """
        path = _frame_path(self.folder, step)
        try:
            maps = np.load(path, allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise UserError(f"{path}: cannot be read ({error}); the other frames may be good") from None
        size = len(self.tokens)
        if maps.dtype != np.uint8 or maps.ndim != 4 or maps.shape[2:] != (size, size):
            raise UserError(f"{path}: holds no maps of {size} tokens; the other frames may be good")
        return maps


def read_film(run: Path) -> Film:
    """The film in a run's folder, also of a run that is being trained.

    Raises:
        UserError: if there is none.
    """
    folder = run / "attention"
    probe, steps = _read_probe(folder), _steps(folder)
    if not probe or not steps:
        raise UserError(f"{run}: holds no film of attention; a run that is trained now makes one (see inspect.*)")
    return Film(folder, probe["tokens"], probe["texts"], probe["note"], steps, _read_rows(folder))


def _frame_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}.npy"


def _steps(folder: Path) -> list[int]:
    """Steps of the frames in a folder, ascending."""
    names = [match for path in folder.glob("step-*.npy") if (match := _FRAME.fullmatch(path.name))]
    return sorted(int(match[1]) for match in names)


def _read_probe(folder: Path) -> dict[str, Any]:
    """The content of ``probe.json``; empty where there is none that can be read."""
    with contextlib.suppress(OSError, ValueError):
        probe = json.loads((folder / "probe.json").read_bytes())
        if isinstance(probe, dict) and {"tokens", "texts", "note"} <= probe.keys():
            return probe
    return {}


def _read_rows(folder: Path) -> list[Row]:
    """The rows that can be read; a process may have been killed, or be at work, in the middle of the last."""
    try:
        lines = (folder / "rows.jsonl").read_bytes().splitlines()
    except FileNotFoundError:
        return []
    rows: list[Row] = []
    for line in lines:
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                rows.append(row)
    return rows
