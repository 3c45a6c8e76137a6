"""What Ctrl-C and a request to end do: while a script loads, while it works, and while it trains."""

import contextlib
import os
import signal
import sys
from typing import Self


def quiet_interrupts() -> None:
    """From now on Ctrl-C ends the process at once, in one line. A script calls it before imports that take their time.

    Python itself would print where in them it was. Where Ctrl-C is ignored, as in the background, it stays so.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def raised_interrupts() -> None:
    """From now on Ctrl-C raises KeyboardInterrupt again, so that what works cleans up after itself."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, _frame: object) -> None:
    with contextlib.suppress(OSError):
        os.write(2, b"interrupted\n")
    os._exit(128 + number)


class StopSignal:
    """Ctrl-C or a request to end, caught while the context is open: the first is noted, the second ends at once.

    Before the training has asked for the first time there is nothing to save: one ends the program, which clears up.
    """

    def __init__(self) -> None:
        self.number, self._asked = 0, False
        # Ctrl-Break exists on Windows alone.
        self._caught = [signal.SIGINT, signal.SIGTERM, *([signal.SIGBREAK] if sys.platform == "win32" else [])]

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._note) for number in self._caught}
        return self

    def __exit__(self, *_error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __call__(self) -> bool:
        """Whether one has come."""
        self._asked = True
        return self.number > 0

    @property
    def exit_code(self) -> int:
        """128 + the signal's number, by custom; 0 where none has come."""
        return 128 + self.number if self.number else 0

    def _note(self, number: int, _frame: object) -> None:
        if self.number:
            os._exit(128 + number)
        self.number = number
        after = b"stopping after this step and saving; once more ends at once"
        with contextlib.suppress(OSError):
            os.write(2, b"\n%b\n" % (after if self._asked else b"ended before the training began"))
        if not self._asked:
            raise SystemExit(128 + number)
