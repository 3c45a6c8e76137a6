"""The trained model that is looked at, and the sequences it is given: options shared by the parts that need a run."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from minigpt.checkpoint import Checkpoint, find_checkpoint
from minigpt.console import counted, say
from minigpt.errors import UserError
from minigpt.text_options import add_text_options, asked_text
from minigpt.tokenizer import END, Tokenizer, tokenizer_from_dict

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
    text = add_text_options(parser, text_help="one text to read, with <|end|> in front; of others, windows are read")
    text.add_argument(
        "--repeated", type=int, metavar="N", help="read N random tokens twice, <|end|> in front: for heads of induction"
    )
    parser.add_argument(
        "--sequences", type=int, default=sequences, metavar="N", help=f"windows to read (default: {sequences})"
    )
    parser.add_argument(
        "--length", type=int, default=0, metavar="T", help=f"tokens a window (default: the context, {LONGEST} at most)"
    )


def load_subject(
    run: Path, which: str = "best", *, unseen: str | None = None, say: Callable[[str], None] = say
) -> Subject:
    """The model of a run; ``unseen`` changes what becomes of characters that its tokenizer has never seen.

    ``say`` is told of damaged checkpoints that were passed over.

    Raises:
        UserError: if there is none.
    """
    from minigpt.assembly import load_model
    from minigpt.model import GPT

    checkpoint = find_checkpoint(run, which, say=say)
    kind = checkpoint.config.model.kind
    if kind != "gpt":
        raise UserError(f"{checkpoint.path}: a recurrent network (model.kind = {kind}) has no attention to look at")
    model = load_model(checkpoint, "cpu")
    assert isinstance(model, GPT)
    return Subject(checkpoint, tokenizer_from_dict(checkpoint.tokenizer, unseen=unseen), model)


@dataclass(frozen=True)
class Sequences:
    """Tokens (N, T), and of a task's examples what is to be answered after each, (N, T), −1: nothing."""

    tokens: NDArray[np.int64]
    targets: NDArray[np.int64] | None = None


def sequences(subject: Subject, options: argparse.Namespace) -> Sequences:
    """What the options ask to read: one text, or windows spread evenly over a file or part; whole examples of a task.

    A text is read with END in front, as every document begins.

    Raises:
        UserError: for numbers that make no sense, text that can't be read, and less than two tokens.
    """
    count, length = asked_size(subject, options)
    if options.repeated is not None:
        if options.encoding or options.unseen:
            raise UserError("--repeated: no text is read; leave out --encoding and --unseen")
        return Sequences(repeated(subject, options.repeated, count))
    asked = asked_text(options, subject.checkpoint, subject.tokenizer)
    name, tokens = asked.name, asked.tokens
    if options.text is not None:
        name, tokens = f"{name} with <|end|> in front", np.concatenate([[END], tokens])
    if len(tokens) < 2:
        raise UserError(f"{name}: {counted(len(tokens), 'token')}; at least 2 are needed")
    if options.text is not None:
        if len(tokens) > length:
            say(f"the text has {len(tokens)} tokens with its <|end|>: only the first {length} are read")
        return Sequences(tokens[None, :length].astype(np.int64))
    if asked.targets is not None:
        if length < subject.context_length and options.length:
            raise UserError(
                f"--length = {length}: a task's examples have {subject.context_length} tokens; leave it out"
            )
        tokens, targets = (ids[:-1].reshape(-1, subject.context_length) for ids in (tokens, asked.targets))
        return Sequences(tokens[:count].astype(np.int64), targets[:count].astype(np.int64))
    length = min(length, len(tokens))
    count = min(count, len(tokens) // length)
    starts = np.linspace(0, len(tokens) - length, count).astype(np.int64)
    return Sequences(tokens[starts[:, None] + np.arange(length)].astype(np.int64))


def repeated(subject: Subject, n_token: int, count: int) -> NDArray[np.int64]:
    """Sequences (count, 1 + 2N) of END and N random tokens twice: nothing but the first time tells what comes next
    (Olsson et al. 2022). No token comes again within the N, where the vocabulary is large enough.

    Raises:
        UserError: if they do not fit the context.
    """
    most = (subject.context_length - 1) // 2
    if not 2 <= n_token <= most:
        raise UserError(f"--repeated = {n_token}: must be at least 2 and at most {most}, half the context")
    random = np.random.default_rng(subject.checkpoint.config.run.seed)
    known = np.setdiff1d(np.arange(subject.tokenizer.vocab_size), [END, *subject.tokenizer.undefined_ids])
    drawn = [random.choice(known, n_token, replace=n_token > len(known)) for _ in range(count)]
    return np.array([[END, *tokens, *tokens] for tokens in drawn])


def asked_size(subject: Subject, options: argparse.Namespace) -> tuple[int, int]:
    """Most windows, and most tokens of each.

    Raises:
        UserError: for numbers that make no sense.
    """
    if options.sequences < 1:
        raise UserError(f"--sequences = {options.sequences}: must be at least 1")
    length = options.length or min(subject.context_length, LONGEST)
    if options.length and options.repeated is not None:
        raise UserError(f"--length = {length}: --repeated says how long the sequences are; leave one of them out")
    if not 2 <= length <= subject.context_length:
        raise UserError(f"--length = {length}: must be at least 2 and at most the context, {subject.context_length}")
    return options.sequences, length


def told(tokens: NDArray[np.int64], options: argparse.Namespace) -> str:
    """What was read, in words."""
    front = ", <|end|> in front" if options.text is not None or options.repeated is not None else ""
    if options.repeated is not None:
        front += f" of {options.repeated} random ones twice"
    return f"{counted(len(tokens), 'sequence')} of {tokens.shape[1]} tokens{front}"
