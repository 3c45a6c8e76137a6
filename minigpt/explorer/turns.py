"""Texts for several who ask at once.

One thread writes, in turns of some milliseconds, so that nobody waits for the end of another's text. Each request has
its own memory, uniforms and text: together they get what each would get alone.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from minigpt.explorer.guard import Refused

AT_ONCE = 4  # requests whose texts grow in turns; each may hold the memories of as many texts as the engine likes
MOST_WAITING = 28  # requests beside them; another is refused
TURN_SECONDS = 0.03

Out = TypeVar("Out")


class Turns:
    """The one thread that writes, and the queue before it."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="minigpt-writing")
        self._at_once = asyncio.Semaphore(AT_ONCE)
        self.inside = 0  # requests that are written or wait

    async def work(self, pieces: Iterator[Out]) -> AsyncGenerator[list[Out], None]:
        """The pieces as they come, made in the thread. Whoever closes this early stops the work.

        Raises:
            Refused: if too many wait.
        """
        if self.inside >= AT_ONCE + MOST_WAITING:
            raise Refused(429, f"{self.inside} requests are being written or wait: try again soon", code="queue_full")
        self.inside += 1
        try:
            async with self._at_once:
                loop = asyncio.get_running_loop()
                while taken := await loop.run_in_executor(self._thread, _turn, pieces):  # after those who asked before
                    yield taken
        finally:
            self.inside -= 1


def _turn(pieces: Iterator[Out]) -> list[Out]:
    """What comes in a turn; nothing at the end."""
    end, taken = time.monotonic() + TURN_SECONDS, list[Out]()
    for piece in pieces:
        taken.append(piece)
        if time.monotonic() > end:
            break
    return taken
