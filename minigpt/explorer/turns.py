"""Texts for several who ask at once.

One thread writes, in turns of some milliseconds: every request that is taken in has one after each other's, so that
nobody waits for the end of another's text. (What can't be divided is one turn however long it takes: a model that is
loaded, a prompt's window that is read.) A request whose client does not read takes no turns and holds only its place.
Each has its own memory, uniforms and text: together they get what each would get alone.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from minigpt.explorer.guard import Refused

MOST_INSIDE = 32  # requests that are written in turns; another is refused
TURN_SECONDS = 0.03

Out = TypeVar("Out")


class Turns:
    """The one thread that writes, and the queue before it."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="minigpt-writing")
        self._ended = False
        self.inside = 0  # requests that are written

    async def work(self, pieces: Iterator[Out]) -> AsyncGenerator[list[Out], None]:
        """The pieces as they come, made in the thread. Whoever closes this early stops the work.

        Raises:
            Refused: if too many are inside, or the server ends.
        """
        if self.inside >= MOST_INSIDE:
            raise Refused(429, f"{self.inside} requests are being written: try again soon", code="queue_full")
        self.inside += 1
        try:
            loop = asyncio.get_running_loop()
            while taken := await loop.run_in_executor(self._thread, self._turn, pieces):  # after those who asked before
                yield taken
        finally:
            self.inside -= 1

    def end(self) -> None:
        """From now on each request is refused, when its next turn comes."""
        self._ended = True

    def _turn(self, pieces: Iterator[Out]) -> list[Out]:
        """What comes in a turn; nothing at the end."""
        if self._ended:
            raise Refused(503, "the server is ending", code="server_ending")
        end, taken = time.monotonic() + TURN_SECONDS, list[Out]()
        for piece in pieces:
            taken.append(piece)
            if time.monotonic() > end:
                break
        return taken
