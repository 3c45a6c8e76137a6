"""Ids to text as it comes: whole characters alone, and nothing past a stop string."""

import codecs
from collections.abc import Sequence

from minigpt.errors import UserError
from minigpt.tokenizer import Tokenizer


class StreamDecoder:
    """Ids one by one → text as it comes: only whole characters, so that no half of one is ever shown.

    All that ``push`` and ``flush`` return, joined, is ``tokenizer.decode`` of the same ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The characters that this id completes; often one word, sometimes nothing."""
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def flush(self) -> str:
        """What is left at the end: U+FFFD if a character stayed incomplete."""
        return self._decoder.decode(b"", final=True)


class StopFilter:
    """Text as it streams, up to the first stop string to be completed (of several at once: the longest).

    What may be the beginning of a stop string is held back until the next pieces tell; where the pieces were cut does
    not change the text.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises UserError if a stop string is empty."""
        if "" in stops:
            raise UserError("a stop string is empty; give at least one character")
        self.met = False  # whether a stop string has come: nothing follows
        self._stops, self._pending = stops, ""

    def push(self, piece: str) -> str:
        """What is certain with this piece, often nothing."""
        pending = self._pending + piece
        found = [(at + len(stop), at) for stop in self._stops if (at := pending.find(stop)) >= 0]
        held = max((_overlap(pending, stop) for stop in self._stops), default=0)
        certain = min(found)[1] if found else len(pending) - held
        self.met, self._pending = bool(found), "" if found else pending[certain:]
        return pending[:certain]

    def flush(self) -> str:
        """What was held back, when no more comes."""
        rest, self._pending = self._pending, ""
        return rest


def _overlap(text: str, stop: str) -> int:
    """Length of the longest beginning of ``stop``, not all of it, that ``text`` ends with."""
    return next(n for n in range(min(len(stop) - 1, len(text)), -1, -1) if text.endswith(stop[:n]))
