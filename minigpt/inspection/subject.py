"""The trained model that is looked at, and the sequences it is given: options shared by the parts that need a run."""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from minigpt.checkpoint import Checkpoint, find_checkpoint
from minigpt.cli import unescape
from minigpt.console import counted
from minigpt.corpus import held_back, open_corpus
from minigpt.errors import UserError
from minigpt.reading import normalise_newlines, whole_text
from minigpt.tokenizer import END, Tokenizer, tokenizer_from_dict
from minigpt.unseen import encoded

if TYPE_CHECKING:
    from minigpt.model import GPT  # torch: a second that --help need not wait

SEQUENCES, LONGEST = 8, 256  # how many windows of the validation part are read, and how long they are at most


@dataclass(frozen=True)
class Subject:
    """A saved model, made ready for looking: in evaluation mode, on the CPU, in float32."""

    checkpoint: Checkpoint
    tokenizer: Tokenizer
    model: "GPT"

    @property
    def context_length(self) -> int:
        """Most tokens the model sees at once."""
        return self.model.config.context_length


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """The run and its checkpoint."""
    parser.add_argument("run", type=Path, help="a run's folder or one checkpoint file")
    parser.add_argument("--which", default="best", metavar="best|last|STEP", help="checkpoint (default: best)")


def add_text_arguments(parser: argparse.ArgumentParser, *, sequences: int = SEQUENCES) -> None:
    """What the model reads; ``sequences`` is how many windows unless asked otherwise."""
    text = parser.add_mutually_exclusive_group()
    text.add_argument("--text", metavar="TEXT", help="one text to read, with <|end|> in front")
    text.add_argument("--file", type=Path, metavar="FILE", help="read windows of this file")
    text.add_argument(
        "--source",
        default="val",
        choices=["val", "test"],
        metavar="PART",
        help="val or test part of the run's text (default: val)",
    )
    parser.add_argument(
        "--sequences", type=int, default=sequences, metavar="N", help=f"windows to read (default: {sequences})"
    )
    parser.add_argument(
        "--length", type=int, default=0, metavar="T", help=f"tokens a window (default: the context, {LONGEST} at most)"
    )
    parser.add_argument(
        "--unseen",
        choices=["stop", "skip", "replace"],
        help="characters the tokenizer has never seen (default: as in the run)",
    )


def load_subject(run: Path, which: str = "best", *, unseen: str | None = None) -> Subject:
    """The model of a run; ``unseen`` changes what becomes of characters that its tokenizer has never seen.

    Raises:
        UserError: if there is none.
    """
    from minigpt.assembly import load_model

    checkpoint = find_checkpoint(run, which)
    return Subject(checkpoint, tokenizer_from_dict(checkpoint.tokenizer, unseen=unseen), load_model(checkpoint, "cpu"))


def sequences(subject: Subject, options: argparse.Namespace) -> NDArray[np.int64]:
    """What the options ask to read, as tokens (N, T): one text, or windows spread evenly over a file or part.

    A text is read with END in front, as every document begins.

    Raises:
        UserError: for numbers that make no sense, text that can't be read, and less than two tokens.
    """
    count, length = asked_size(subject, options)
    tokens, name = _tokens(subject, options)
    if len(tokens) < 2:
        raise UserError(f"{name}: {len(tokens)} tokens; at least 2 are needed")
    if options.text is not None:
        if len(tokens) > length:
            say(f"the text has {len(tokens)} tokens with its <|end|>: only the first {length} are read")
        return tokens[None, :length].astype(np.int64)
    length = min(length, len(tokens))
    count = min(count, len(tokens) // length)
    starts = np.linspace(0, len(tokens) - length, count).astype(np.int64)
    return tokens[starts[:, None] + np.arange(length)].astype(np.int64)


def asked_size(subject: Subject, options: argparse.Namespace) -> tuple[int, int]:
    """Most windows, and most tokens of each.

    Raises:
        UserError: for numbers that make no sense.
    """
    if options.sequences < 1:
        raise UserError(f"--sequences = {options.sequences}: must be at least 1")
    length = options.length or min(subject.context_length, LONGEST)
    if not 2 <= length <= subject.context_length:
        raise UserError(f"--length = {length}: must be at least 2 and at most the context, {subject.context_length}")
    return options.sequences, length


def told(tokens: NDArray[np.int64], options: argparse.Namespace) -> str:
    """What was read, in words."""
    front = ", <|end|> in front" if options.text is not None else ""
    return f"{counted(len(tokens), 'sequence')} of {tokens.shape[1]} tokens{front}"


def say(sentence: str) -> None:
    """Tell on stderr."""
    print(sentence, file=sys.stderr)


def _tokens(subject: Subject, options: argparse.Namespace) -> tuple[NDArray[Any], str]:
    data = subject.checkpoint.config.data
    if options.text is not None:
        text = encoded(subject.tokenizer, normalise_newlines(unescape(options.text)), say)
        return np.concatenate([[END], text]), "--text with <|end|> in front"
    if options.file:
        return encoded(subject.tokenizer, whole_text(options.file, data, say), say), str(options.file)
    corpus = open_corpus(
        data,
        context_length=subject.context_length,
        seed=subject.checkpoint.config.run.seed,
        tokenizer=subject.tokenizer,
    )
    part = held_back(corpus, data, options.source)
    for note in corpus.notes:
        say(note)
    return part, f"{data.source} ({options.source})"
