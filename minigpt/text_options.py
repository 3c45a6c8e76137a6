"""The text that a command reads, by its options: ``--text``, ``--file`` or ``--source``."""

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from minigpt.checkpoint import Checkpoint
from minigpt.cli import unescape
from minigpt.config import nearest
from minigpt.console import say
from minigpt.corpora import corpus_of
from minigpt.corpus import Tokens, held_back, open_corpus
from minigpt.errors import UserError
from minigpt.reading import encoding_name, normalise_newlines, whole_text
from minigpt.sources import known_sources
from minigpt.tokenizer import Tokenizer
from minigpt.unseen import encoded

PARTS = {"val": "validation", "test": "test"}


def add_text_options(parser: argparse.ArgumentParser, *, text_help: str) -> argparse._MutuallyExclusiveGroup:
    """Add them; the group of those of which one alone can be given is returned, for more of the kind."""
    text = parser.add_mutually_exclusive_group()
    text.add_argument(
        "--source",
        default="val",
        metavar="PART",
        help="val or test part of the run's text (default: val); or all of tales, or of a name in data/sources.toml",
    )
    text.add_argument("--file", type=Path, metavar="PATH", help="read this file")
    text.add_argument("--text", metavar="TEXT", help=text_help)
    parser.add_argument("--encoding", metavar="NAME", help="encoding of --file (default: the run's)")
    add_unseen_option(parser)
    return text


def add_unseen_option(parser: argparse.ArgumentParser) -> None:
    """What becomes of characters without an id."""
    parser.add_argument(
        "--unseen",
        choices=["stop", "skip", "replace"],
        help="characters the tokenizer has never seen (default: as in the run)",
    )


@dataclass(frozen=True)
class AskedText:
    """A name for messages, and tokens (N,); of a task's examples also what is to be answered after each, or −1."""

    name: str
    tokens: Tokens | NDArray[np.int32]
    targets: NDArray[np.int64] | None = None


def asked_text(options: argparse.Namespace, checkpoint: Checkpoint, tokenizer: Tokenizer) -> AskedText:
    """What the options ask to read; what is to be said of it is told on stderr.

    Raises:
        UserError: for text that is not there, or can't be read.
    """
    data = checkpoint.config.data
    if options.encoding and not options.file:
        raise UserError(f"--encoding {options.encoding} is that of --file: give both")
    if options.text is not None:
        return AskedText("--text", encoded(tokenizer, normalise_newlines(unescape(options.text)), say))
    if options.file:
        if options.encoding:
            encoding_name(options.encoding, "--encoding")
            data = data.model_copy(update={"encoding": options.encoding})
        return AskedText(str(options.file), encoded(tokenizer, whole_text(options.file, data, say), say))
    if options.source in PARTS:
        return _part(options.source, checkpoint, tokenizer)
    return AskedText(options.source, _whole(options.source, checkpoint, tokenizer))


def _part(part: str, checkpoint: Checkpoint, tokenizer: Tokenizer) -> AskedText:
    """A part of the run's own text."""
    data = checkpoint.config.data
    corpus = corpus_of(checkpoint.config, tokenizer)
    tokens = held_back(corpus, data, part)
    for note in corpus.notes:
        say(note)
    own = tokenizer.to_dict() == checkpoint.tokenizer  # else, with --unseen, no fingerprint tells
    if own and corpus.fingerprint != checkpoint.metadata.get("corpus", corpus.fingerprint):
        say(f"{data.source}: the text has changed since the run began")
    return AskedText(f"{data.source} ({PARTS[part]})", tokens, corpus.targets.get(part))


def _whole(name: str, checkpoint: Checkpoint, tokenizer: Tokenizer) -> Tokens:
    """All of a known text, each document with END in front, as it would be trained on."""
    known = ["tales", *known_sources()]
    if name not in known:
        hint = nearest(name, [*PARTS, *known])
        raise UserError(f"--source {name}: no part of the run's text and no text of that name{hint}; or see --file")
    data = checkpoint.config.data.model_copy(update={"source": name, "val_fraction": 0.0, "test_fraction": 0.0})
    corpus = open_corpus(data, context_length=1, seed=checkpoint.config.run.seed, tokenizer=tokenizer)
    for note in corpus.notes:
        say(note)
    return corpus.train
