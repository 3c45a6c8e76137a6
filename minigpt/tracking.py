"""What is told while a run trains: a progress bar, rows in ``metrics.jsonl``, and TensorBoard.

Telling must never end a run: a place that can't be written (a full disk, a closed console) is named once and then
left alone.
"""

import contextlib
import json
import math
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, BinaryIO, Self, TextIO

import numpy as np
from tqdm import tqdm

from minigpt.errors import UserError
from minigpt.run import RunFolder

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter

METRICS = {
    "train_loss": "train/loss",
    "val_loss": "val/loss",
    "val_perplexity": "val/perplexity",
    "val_bits_per_byte": "val/bits_per_byte",
    "val_accuracy": "val/accuracy",
    "lr": "train/lr",
    "grad_norm": "train/grad_norm",
    "tokens_seen": "train/tokens_seen",
    "tokens_per_second": "speed/tokens_per_second",
    "seconds": "speed/seconds",
}
"""Names of the known numbers in ``metrics.jsonl``, in their order there, and in TensorBoard."""


class Tracker:
    """Tells of one run's training; a context manager.

    On a terminal there is a bar; elsewhere each row of numbers is a line of its own, at once visible.

    Args:
        run: its folder; rows past ``start_step`` must have been cut already (``RunFolder.cut_metrics``).
        total_steps: where the run ends.
        start_step: the checkpoint's step when resuming; TensorBoard forgets what it had after it.
        config_text: the configuration, shown in TensorBoard.
        stream: the console; stderr unless given.
    """

    def __init__(
        self,
        run: RunFolder,
        *,
        total_steps: int,
        start_step: int = 0,
        config_text: str = "",
        stream: TextIO | None = None,
    ) -> None:
        self._run = run
        self._total_steps = total_steps
        self._start_step = start_step
        self._config_text = config_text
        self._stream = stream or sys.stderr
        self._started = 0.0
        self._latest: dict[str, float] = {}
        self._silenced: set[str] = set()
        self._metrics: BinaryIO | None = None
        self._board: SummaryWriter | None = None
        self._bar: tqdm | None = None
        self._show_error_of_thread = threading.excepthook

    def __enter__(self) -> Self:
        threading.excepthook = self._hear_thread
        self.attempt("metrics.jsonl", self._open_metrics)
        self.attempt("tensorboard", self._open_board)
        self.attempt("console", self._open_bar)
        self._started = time.monotonic()
        if self._config_text:
            self.note("config", self._config_text, self._start_step)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for sink in (self._bar, self._board, self._metrics):
            if sink is not None:
                with contextlib.suppress(OSError, ValueError):
                    sink.close()
        threading.excepthook = self._show_error_of_thread

    def advance(self, step: int) -> None:
        """Move the bar to ``step`` steps done."""
        bar = self._bar
        if bar is not None:
            self.attempt("console", lambda: bar.update(step - bar.n))

    def log(self, step: int, **numbers: float | np.number | None) -> None:
        """Record one row of numbers after ``step`` steps: call it once a step, with all there is to say.

        Names are those of METRICS; others are recorded after them, in TensorBoard under their own name. None is
        skipped; what is not finite becomes null in ``metrics.jsonl``.
        """
        known = {key: _number(value) for key, value in numbers.items() if value is not None}
        ordered = {key: known[key] for key in (*METRICS, *known) if key in known}
        self._latest |= ordered
        self.attempt("metrics.jsonl", lambda: self._append(step, ordered))
        self.attempt("tensorboard", lambda: self._scalars(step, ordered))
        if self._bar is not None:
            self._bar.set_description_str(self._summary(), refresh=False)
            self.advance(step)
        else:
            self.say(f"step {step}/{self._total_steps}  {self._summary()}  {self._time_left(step)}")

    def text(self, tag: str, text: str, step: int) -> None:
        """Keep a sample, as it is in ``samples/step-00000500.txt`` and as a block of code in TensorBoard."""

        def write_sample() -> None:
            self._run.samples.mkdir(exist_ok=True)
            path = self._run.samples / f"step-{step:08d}.txt"
            path.write_text(text, encoding="utf-8", errors="backslashreplace", newline="\n")

        self.attempt("samples", write_sample)
        self.note(tag, text, step)

    def note(self, tag: str, text: str, step: int) -> None:
        """Show a text, as a block of code, in TensorBoard alone."""
        board = self._board
        if board is not None:
            # TensorBoard shows Markdown: an indented block keeps every character as it is
            valid = text.encode("utf-8", "backslashreplace").decode()
            block = "\n".join("    " + line for line in valid.split("\n"))
            self.attempt("tensorboard", lambda: board.add_text(tag, block, step))

    def image(self, tag: str, image: np.ndarray, step: int) -> None:
        """Show a picture, uint8 of shape (height, width, 3), in TensorBoard."""
        board = self._board
        if board is not None:
            self.attempt("tensorboard", lambda: board.add_image(tag, image, step, dataformats="HWC"))

    def say(self, sentence: str) -> None:
        """Print a line on the console, above the bar."""
        self.attempt("console", lambda: self._print(sentence))

    def attempt(self, sink: str, action: Callable[[], object]) -> None:
        """Do something that writes to ``sink``; if it can't be written, say so once and leave it alone from then on."""
        if sink in self._silenced:
            return
        try:
            action()
        except (OSError, UserError) as error:
            self._silenced.add(sink)
            if isinstance(error, OSError):
                self.say(f"could not write {sink} ({error.strerror or error}); training goes on without it")
            else:
                self.say(f"{error} (training goes on without it)")

    # ── the places ─────────────────────────────────────────────────────────────────────────────────────────────

    def _open_metrics(self) -> None:
        self._metrics = self._run.metrics.open("ab")

    def _open_board(self) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter  # loads torch, in seconds

        self._board = SummaryWriter(str(self._run.tensorboard), purge_step=self._start_step + 1)

    def _hear_thread(self, told: threading.ExceptHookArgs) -> None:
        """TensorBoard's own thread ends with the error that it hands to the next call, where it is told in one line."""
        if not (isinstance(told.exc_value, OSError) and type(told.thread).__module__.startswith("tensorboard.")):
            self._show_error_of_thread(told)

    def _open_bar(self) -> None:
        if self._stream.isatty():
            self._bar = tqdm(
                total=self._total_steps,
                initial=self._start_step,
                file=self._stream,
                dynamic_ncols=True,
                smoothing=0.1,
                bar_format="{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}  {desc}  {remaining} left",
            )

    def _append(self, step: int, numbers: dict[str, float]) -> None:
        assert self._metrics is not None, "enter the tracker first"
        finite = {key: value if math.isfinite(value) else None for key, value in numbers.items()}
        self._metrics.write(json.dumps({"step": step, **finite}).encode() + b"\n")
        self._metrics.flush()

    def _scalars(self, step: int, numbers: dict[str, float]) -> None:
        assert self._board is not None, "enter the tracker first"
        for key, value in numbers.items():
            self._board.add_scalar(METRICS.get(key, key), value, step)
        self._board.flush()  # a killed run keeps its curves, and a full disk is noticed here

    def _print(self, line: str) -> None:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        shown = line.encode(encoding, "backslashreplace").decode(encoding)
        if self._bar is not None:
            self._bar.write(shown, file=self._stream)
        else:
            print(shown, file=self._stream, flush=True)

    # ── words ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _summary(self) -> str:
        formats = {
            "train_loss": "train {:.4f}",
            "val_loss": "val {:.4f}",
            "val_accuracy": "right {:.1%}",
            "tokens_per_second": "{:,.0f} tok/s",
        }
        return "  ".join(text.format(self._latest[key]) for key, text in formats.items() if key in self._latest)

    def _time_left(self, step: int) -> str:
        if step <= self._start_step:
            return "? left"
        seconds = (time.monotonic() - self._started) / (step - self._start_step) * (self._total_steps - step)
        return f"{tqdm.format_interval(max(0, round(seconds)))} left"


def _number(value: float | np.number) -> float:
    """NumPy's single numbers as Python's, whole ones staying whole."""
    return int(value) if isinstance(value, int | np.integer) else float(value)
