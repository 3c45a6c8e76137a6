"""From a run and what is asked of it to a page: which checkpoints, which texts, what fits."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from minigpt.checkpoint import Checkpoint, find_checkpoint
from minigpt.console import counted, say
from minigpt.errors import UserError
from minigpt.explorer.page import Page, as_script
from minigpt.explorer.payload import (
    PAGE_BYTES,
    PARAMETERS,
    TOKENS,
    Model,
    Opening,
    Payload,
    Shown,
    before_training,
    compared_model,
    film_entry,
    load_model,
    model_entry,
    payload_of,
)
from minigpt.files import check_writable, write_whole
from minigpt.normal_form import Array
from minigpt.text_options import asked_text
from minigpt.tokenizer import END, Tokenizer, tokenizer_from_dict


@dataclass(frozen=True)
class Wish:
    """What is asked of a page."""

    which: str = "best"
    texts: Sequence[str] = ()  # as typed; empty: the file, or the start of the validation text
    file: Path | None = None
    encoding: str | None = None
    unseen: str | None = None  # what becomes of characters that the tokenizer has never seen; None: as in the run
    half: bool = False
    compare: Path | None = None
    live: bool = False  # whether a server will compute what the page can't
    opening: Opening = field(default_factory=Opening)


@dataclass(frozen=True)
class Made:
    """A payload, and the models it is of, which share their tokenizer."""

    payload: Payload
    models: Sequence[Model]
    tokenizer: Tokenizer


def made(run: Path, wish: Wish) -> Made:
    """The page's payload of a run's folder or a checkpoint file; what is to be said is told on stderr.

    Raises:
        UserError: for what is not there, does not fit, or can't be read.
    """
    checkpoint = find_checkpoint(run, wish.which)
    tokenizer = tokenizer_from_dict(checkpoint.tokenizer, unseen=wish.unseen)
    chosen = load_model(checkpoint, half=wish.half)
    earlier = before_training(checkpoint)
    before = load_model(earlier, half=True) if earlier else None
    models = [chosen, compared_model(chosen, wish.compare)] if wish.compare else [chosen]
    shown = Shown(models, tokenizer, wish.opening, wish.live)
    if wish.half and not shown.fits:
        raise UserError(f"--f16: halves weights, and of {chosen.parameters:,} the page carries none; leave it out")
    ids = opening_ids(checkpoint, tokenizer, wish, captured=shown.captured)
    texts = [tokenizer.decode(some.tolist()).rstrip("\ufffd") for some in ids]
    shown = replace(shown, opening=replace(wish.opening, texts=texts))
    film = (
        film_entry(checkpoint.path.parent.parent, tokenizer, say)
        if checkpoint.path.parent.name == "checkpoints"
        else None
    )
    payload = payload_of(shown, ids, before=before, film=film)
    if before and shown.fits and not wish.compare:
        add_before(payload, before)
    if shown.captured:
        say(told_captured(chosen, ids, payload))
    return Made(payload, models, tokenizer)


def explore(run: str | Path, wish: Wish | None = None) -> Page:
    """The page of a run, for a notebook, which shows it. Raises as ``made`` does."""
    return Page(made(Path(run), wish or Wish()).payload)


def export(found: Made, option: str, path: Path) -> str:
    """Write the page to a file, named by an option; what was written, in words.

    Raises:
        UserError: if it can't be written.
    """
    check_writable(option, path)
    page = Page(found.payload).html().encode()
    write_whole(path, page)
    names = ", ".join(entry["name"] for entry in found.payload["models"])
    return f"{path}: {megabytes(len(page))}, {f'weights of {names}' if names else 'captured texts'}"


def add_before(payload: Payload, before: Model) -> None:
    """Add the model before training, in 16 bits, if the page stays small."""
    entry = model_entry(before)
    if len(Page(payload).html().encode()) + len(entry["blob"]) <= PAGE_BYTES:
        payload["models"].append(entry)
    else:
        say(f"the model before training is left out, so that the page stays below {megabytes(PAGE_BYTES)}; see --f16")


def told_captured(model: Model, ids: Sequence[Array], payload: Payload) -> str:
    """That the page carries no weights, with sizes."""
    size = len(as_script({"captured": payload["captured"]}))
    texts = f"{counted(len(ids), 'text')} of {counted(max(map(len, ids)), 'token')} at most"
    return (
        f"{model.parameters:,} parameters, of which a page carries at most {PARAMETERS:,}: this one shows {texts} "
        f"({megabytes(size)}) and takes no other; see --serve"
    )


def megabytes(size: int) -> str:
    """``4.2 MB``."""
    return f"{size / 1e6:.1f} MB"


# ── texts ──────────────────────────────────────────────────────────────────────────────────────────────────────


def opening_ids(checkpoint: Checkpoint, tokenizer: Tokenizer, wish: Wish, *, captured: bool) -> list[Array]:
    """The tokens of each text: those asked for, else the first document of the validation part.

    ``captured``: the page can't do without a text, and each is cut to what it can carry.

    Raises:
        UserError: for text that is not there or can't be read; only a page that can be typed in opens without one.
    """
    context, source = checkpoint.config.model.context_length, {"source": "val", "encoding": wish.encoding}

    def read(text: str | None) -> Array:
        options = argparse.Namespace(text=text, file=wish.file, **source)
        return np.asarray(asked_text(options, checkpoint, tokenizer).tokens[: context + 2])

    if not wish.texts and not wish.file:
        try:
            return [_first_document(read(None))[: min(context, TOKENS)]]
        except UserError as error:
            if captured:
                raise
            say(f"{error}; the page opens without a text")
            return []
    found, most = [read(text) for text in wish.texts or [None]], min(context, TOKENS) if captured else context
    if any(not len(tokens) for tokens in found):
        raise UserError("the text has no token: give at least one character")
    if any(len(tokens) > most for tokens in found):
        say(f"a text is cut to its first {counted(most, 'token')}")
    return [tokens[:most] for tokens in found]


def _first_document(tokens: Array) -> Array:
    """Up to the first END that is not the beginning."""
    begun = tokens[1:] if len(tokens) and tokens[0] == END else tokens
    ends = np.flatnonzero(begun == END)
    return begun[: ends[0]] if len(ends) and ends[0] else begun
