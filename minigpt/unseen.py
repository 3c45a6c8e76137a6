"""Characters that a character tokenizer has never seen: what is said where they stop it, what is left without them."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from minigpt.errors import UserError

if TYPE_CHECKING:
    from minigpt.tokenizer import Tokenizer

SHOWN = 10  # characters named at most


class UnseenError(UserError):
    """A text holds such characters. ``can_replace``: whether the tokenizer knows one that could stand for them."""

    def __init__(self, text: str, *, can_replace: bool) -> None:
        unseen = sorted(set(text))
        names = ", ".join(f"{char!r} (U+{ord(char):04X})" for char in unseen[:SHOWN])
        more = f" and {len(unseen) - SHOWN} more" if len(unseen) > SHOWN else ""
        self._found = f"characters that the tokenizer has never seen: {names}{more}"
        self._choices = "skip or replace" if can_replace else "skip"
        super().__init__(self._sentence("--unseen", "in train.py --data.unseen"))

    def in_source(self, name: str) -> UserError:
        """The same of a text to train on."""
        return UserError(self._sentence("--data.unseen", "outside train.py --unseen", where=f", in {name}"))

    def _sentence(self, option: str, elsewhere: str, where: str = "") -> str:
        return (
            f"{self._found}{where}; {option} {self._choices} goes on without them ({elsewhere}); or train with "
            "data.vocab_size (rare characters then fall back to bytes), or with --data.tokenizer byte or bpe"
        )


def encoded(tokenizer: "Tokenizer", text: str, say: Callable[[str], None]) -> NDArray[np.int32]:
    """``tokenizer.encode(text)``; ``say`` is told how much of it was lost."""
    ids = tokenizer.encode(text)
    tell_lost(tokenizer, [text], say)
    return ids


def tell_lost(tokenizer: "Tokenizer", texts: Sequence[str], say: Callable[[str], None]) -> None:
    """Say how much of some texts the tokenizer leaves out or replaces, if anything."""
    if lost := sum(map(tokenizer.count_unseen, texts)):
        say(lost_note(tokenizer, lost, sum(map(len, texts))))


def as_read(tokenizer: "Tokenizer", text: str) -> str:
    """A text as the model gets it: without what the tokenizer leaves out, with what it puts for it."""
    return tokenizer.decode(tokenizer.encode(text).tolist()) if tokenizer.count_unseen(text) else text


def lost_note(tokenizer: "Tokenizer", lost: int, characters: int) -> str:
    """How much of a text the tokenizer left out or replaced."""
    how = "left out" if tokenizer.unseen == "skip" else "replaced"
    return f"{lost:,} of {characters:,} characters {how}: the tokenizer has never seen them"
