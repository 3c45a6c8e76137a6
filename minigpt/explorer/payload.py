"""What the page is given of a run: weights or captured texts, the tokenizer, and what is known beside them, as JSON.

Needs no torch: a page is made in a second.
"""

import base64
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from minigpt.checkpoint import Checkpoint, checkpoint_path, find_checkpoint, read_checkpoint
from minigpt.errors import UserError
from minigpt.explorer.capture import blob, capture, captured_entry, lower_triangle
from minigpt.inspection.compare import Null, closeness
from minigpt.inspection.film import read_film
from minigpt.inspection.patterns import parse_reference
from minigpt.normal_form import Array, NormalForm, from_checkpoint
from minigpt.tokenizer import END, BpeTokenizer, CharTokenizer, Tokenizer

FORMAT = 1
VIEWS = ("look", "worked", "compare", "film")
PARAMETERS = 1_000_000  # of a model that a page carries whole; of a larger one it carries texts
PAGE_BYTES = 5_000_000  # of a page that also carries the model before training
FILM_BYTES = 2_000_000  # of a film; of a longer one frames are left out
TOKENS = 128  # of a captured text, at most
NULL_REFERENCES = ("previous", "first", "self", "duplicate", "induction", "punctuation", "brackets")

Payload = dict[str, Any]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Model:
    """A checkpoint and its normal form, in the precision that the page has it in."""

    checkpoint: Checkpoint
    form: NormalForm
    name: str
    parameters: int
    precision: str = "f32"

    @property
    def about(self) -> dict[str, Any]:
        """What the page knows of any model, whether it has its weights or not."""
        form = self.form
        sizes = {
            "n_layer": len(form.layers.up_weight),
            "n_head": form.n_head,
            "n_kv_head": form.n_kv_head,
            "d_model": form.token_table.shape[1],
            "head_dim": form.head_dim,
            "d_ff": form.layers.up_weight.shape[1],
            "context_length": form.context_length,
            "vocab_size": form.vocab_size,
        }
        names = ("centred", "embedding_norm", "qk_norm", "activation", "softcap")
        flags = {name: getattr(form, name) for name in names}
        step = self.checkpoint.step
        return {"name": self.name, "step": step, "precision": self.precision, "sizes": sizes, "flags": flags}


@dataclass(frozen=True)
class Opening:
    """How the page opens."""

    texts: Sequence[str] = ()
    view: str = ""  # one of VIEWS; empty: the first there is
    lang: str = "en"


@dataclass(frozen=True)
class Shown:
    """The models of a page, and how it opens."""

    models: list[Model]  # the chosen one first
    tokenizer: Tokenizer
    opening: Opening
    live: bool = False  # whether a server computes what the page can't

    @property
    def fits(self) -> bool:
        """Whether the page carries the weights."""
        return all(model.parameters <= PARAMETERS for model in self.models)

    @property
    def captured(self) -> bool:
        """Whether the page has nothing but some texts."""
        return not self.fits and not self.live


# ── models ─────────────────────────────────────────────────────────────────────────────────────────────────────


def load_model(checkpoint: Checkpoint, *, half: bool = False, name: str = "") -> Model:
    """A saved Transformer; with ``half`` its numbers are rounded to 16 bits, and all that follows is of those.

    Raises:
        UserError: for a recurrent network, a damaged file, and weights that are not finite or not in 16 bits.
    """
    form = from_checkpoint(checkpoint)
    if half:
        with np.errstate(over="ignore"):
            form = form.astype(np.float16).astype(np.float32)
    if not all(np.isfinite(array).all() for _, array in _arrays(form)):
        hint = "beyond 16 bits: leave out --f16" if half else "not finite: training diverged; take an earlier step"
        raise UserError(f"{checkpoint.path}: has weights that are {hint}")
    parameters = sum(array.size for array in checkpoint.tensors("model").values())
    return Model(checkpoint, form, name or f"step {checkpoint.step}", parameters, "f16" if half else "f32")


def before_training(checkpoint: Checkpoint) -> Checkpoint | None:
    """Step 0 of the same run, where it is kept and not this one."""
    path = checkpoint_path(checkpoint.path.parent, 0)
    return read_checkpoint(path) if checkpoint.step and path.is_file() else None


def compared_model(chosen: Model, path: Path) -> Model:
    """The one to hold beside it: best of a run, or a file.

    Raises:
        UserError: if its ids are not those of the chosen one.
    """
    other = find_checkpoint(path, "best")
    if _ids_of(other.tokenizer) != _ids_of(chosen.checkpoint.tokenizer):
        raise UserError(f"--compare {path}: has another tokenizer, so the two read no text alike; train it on this one")
    name = f"step {other.step}" if other.path.parent == chosen.checkpoint.path.parent else f"{path}, step {other.step}"
    return load_model(other, half=chosen.precision == "f16", name=name)


def _ids_of(tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in tokenizer.items() if key != "unseen"}


def model_entry(model: Model) -> dict[str, Any]:
    """The weights; arrays that change nothing, and a head that is the token table, are left out."""
    form = model.form
    arrays = [(name, array) for name, array in _arrays(form) if not _neutral(name, array, form)]
    flat = np.concatenate([array.ravel() for _, array in arrays])
    return {
        **model.about,
        "key_head": [int(head) for head in form.key_head],
        "arrays": [{"name": name, "shape": list(array.shape)} for name, array in arrays],
        "blob": blob(flat, "<f4" if model.precision == "f32" else "<f2"),
    }


def _arrays(form: NormalForm) -> list[tuple[str, Array]]:
    """All arrays of floats, those of the layers as ``layers.qkv_weight`` with the leading axis L."""
    names = (
        "token_table", "position_table", "cos", "sin", "embedding_gain", "embedding_shift",
        "final_gain", "final_shift", "head",
    )  # fmt: skip
    layers = [(f"layers.{name}", array) for name, array in form.layers._asdict().items()]
    return [(name, getattr(form, name)) for name in names] + layers


def _neutral(name: str, array: Array, form: NormalForm) -> bool:
    """Whether the page can fill it in: gains and cos 1, shifts, biases, positions and sin 0, a tied head, no gate."""
    if name == "head":
        return np.array_equal(array, form.token_table)
    if name.endswith(("gain", "cos")):
        return bool((array == 1).all())
    return name.endswith(("shift", "bias", "position_table", "sin", "gate_weight")) and not array.any()


# ── what stands beside them ────────────────────────────────────────────────────────────────────────────────────


def tokenizer_entry(tokenizer: Tokenizer) -> dict[str, Any]:
    """The tokenizer, for ``tokenizer.js``."""
    assert isinstance(tokenizer, CharTokenizer | BpeTokenizer)
    tokens = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
    bpe = isinstance(tokenizer, BpeTokenizer)
    return {
        "kind": "bpe" if bpe else "char",
        "end": END,
        "tokens": [base64.b64encode(token).decode("ascii") for token in tokens],
        "pattern": tokenizer.pattern if bpe else "",
        "byte_fallback": not bpe and tokenizer.byte_fallback,
        "unseen": tokenizer.unseen,
    }


def run_entry(model: Model) -> dict[str, Any]:
    """What the page's head says of the run."""
    checkpoint = model.checkpoint
    return {
        "name": checkpoint.config.run.name,
        "step": checkpoint.step,
        "steps": checkpoint.config.train.max_steps,
        "val_loss": checkpoint.val_loss if math.isfinite(checkpoint.val_loss) else None,
        "parameters": model.parameters,
    }


def film_entry(run: Path, tokenizer: Tokenizer, say: Say) -> dict[str, Any] | None:
    """The film of a run, where there is one; of a long one so many frames, evenly spread, as take 2 MB."""
    try:
        film = read_film(run)
    except UserError:
        return None
    first = film.maps(film.steps[0])
    count, steps = len(film.steps), film.steps
    while (
        len(maps := blob(np.stack([lower_triangle(film.maps(step)) for step in steps]), "u1")) > FILM_BYTES
        and count > 1
    ):
        count = max(1, min(count - 1, count * FILM_BYTES // len(maps)))
        steps = spread(film.steps, count)
    if left_out := len(film.steps) - count:
        say(f"the film has {len(film.steps)} frames: {left_out} are left out, so that the page stays small")
    return {
        "steps": steps,
        "left_out": left_out,
        "n_layer": first.shape[0],
        "n_head": first.shape[1],
        "length": first.shape[2],
        "ids": film.tokens,
        "text": tokenizer.decode(film.tokens),
        "maps": maps,
        "heads": [[row for row in film.rows if row["step"] == step] for step in steps],
    }


def spread(steps: Sequence[int], count: int) -> list[int]:
    """So many of the steps, evenly spread: both ends, or the last alone."""
    if count == 1:
        return list(steps[-1:])
    return [steps[round(i * (len(steps) - 1) / (count - 1))] for i in range(count)]


def nulls_entry(before: Model | None, tokenizer: Tokenizer, ids: Array) -> dict[str, Any] | None:
    """For each reference that the text defines, how near the heads of the network are before training.

    Median and largest lift, and the first percentile of the total variation.
    """
    if before is None or len(ids) < 2:
        return None
    maps = capture(before.form, ids).weights
    found: dict[str, Any] = {}
    for name in NULL_REFERENCES:
        near = closeness(maps, parse_reference(name, tokenizer).pattern(ids))
        if np.isfinite(near.lift).all():
            found[name] = {
                "heads": near.lift.size,
                "median": float(np.median(near.lift)),
                "maximum": float(near.lift.max()),
                "first_percentile": Null(near.total_variation.ravel()).first_percentile,
            }
    return found


def examples() -> dict[str, Any]:
    """The worked examples."""
    return json.loads((resources.files("minigpt.inspection") / "examples.json").read_text(encoding="utf-8"))


# ── all of it ──────────────────────────────────────────────────────────────────────────────────────────────────


def payload_of(shown: Shown, ids: Sequence[Array], *, before: Model | None, film: dict[str, Any] | None) -> Payload:
    """The whole payload.

    Args:
        shown: the models, the tokenizer, and how the page opens.
        ids: the tokens of each of its texts.
        before: the model before training, for what chance gives.
        film: see ``film_entry``.
    """
    chosen, opening = shown.models[0], shown.opening
    return {
        "format": FORMAT,
        "lang": opening.lang,
        "title": chosen.checkpoint.config.run.name,
        "view": opening.view,
        "text": opening.texts[0] if opening.texts else "",
        "texts": list(opening.texts),
        "models": [model_entry(model) for model in shown.models] if shown.fits else [],
        "tokenizer": tokenizer_entry(shown.tokenizer),
        "captured": [entry for model in shown.models * shown.captured for entry in text_entries(model, shown, ids)],
        "server": None,
        "nulls": nulls_entry(before, shown.tokenizer, ids[0]) if ids else None,
        "examples": examples(),
        "film": film,
        "run": run_entry(chosen),
    }


def text_entries(model: Model, shown: Shown, ids: Sequence[Array]) -> list[dict[str, Any]]:
    """What a model did with each of the texts, computed in float64."""
    form = model.form.astype(np.float64)
    return [
        {**model.about, "text": text, **captured_entry(form, some)}
        for text, some in zip(shown.opening.texts, ids, strict=True)
    ]
