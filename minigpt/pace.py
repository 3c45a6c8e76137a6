"""What a training costs on this machine, measured on its own steps: seconds, memory, and when it will end."""

import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from minigpt.assembly import build_model, build_optimizers
from minigpt.config import Config
from minigpt.corpus import Corpus
from minigpt.machine import machine_choices, prepare_machine
from minigpt.training import Run, train_step, validation_row
from minigpt.watching import sample_text

BEGINNING_AND_END = 2.5  # seconds: the folder, the logs, the first checkpoint and look; the last ones, and leaving
LOOK_AND_SAVE = 0.25  # seconds that come with a validation, for a small network
FEWEST_UPDATES = 5


@dataclass(frozen=True)
class Pace:
    """Seconds of an update, and of a validation with the sample and checkpoint that go with it; most bytes held."""

    update: float
    validation: float
    memory: int  # 0: the system doesn't tell

    def seconds(self, config: Config) -> float:
        """Of the whole training, its text and network made ready."""
        steps, interval = config.train.max_steps, config.train.eval_interval
        validations = math.ceil(steps / interval) if interval else 1
        return steps * self.update + validations * self.validation + BEGINNING_AND_END

    def told(self, config: Config) -> str:
        """What the training will cost, in a sentence."""
        seconds = self.seconds(config)
        form = "%H:%M" if seconds < 43_200 else "%d %b %H:%M"
        end = time.strftime(form, time.localtime(time.time() + seconds))
        update = f"{1000 * self.update:.3g} ms" if self.update < 1 else f"{self.update:.2f} s"
        memory = f"; {self.memory / 1e9:.2g} GB of memory so far" if self.memory else ""
        return f"{update} an update, measured: {duration(seconds)}, until about {end}{memory}"

    def steps(self, config: Config, seconds: float) -> int:
        """Updates that so many seconds leave room for."""
        interval = config.train.eval_interval
        once, each = (0.0, self.validation / interval) if interval else (self.validation, 0.0)
        return max(1, int((seconds - BEGINNING_AND_END - once) / (self.update + each)))


def duration(seconds: float) -> str:
    """``45 s``, ``4 min 50 s``, ``3 h 5 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def update_seconds(config: Config, corpus: Corpus) -> float:
    """Of one update, the quickest of three."""
    run = rehearsal(config, corpus)
    return min(timed(lambda: train_step(run)) for _ in range(3))


def rehearsal(config: Config, corpus: Corpus) -> Run:
    """A training that is thrown away, after its first two updates, which are slow."""
    config = config.with_values(run=machine_choices(config))
    prepare_machine(config)
    model = build_model(config, corpus.tokenizer.vocab_size)
    run = Run(config=config, corpus=corpus, model=model, optimizers=build_optimizers(model, config))
    for _ in range(2):
        train_step(run)
    return run


def timed(action: Callable[[], object]) -> float:
    """Seconds that it takes."""
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


def measured_pace(config: Config, corpus: Corpus, *, seconds: float) -> Pace:
    """What this training costs, from so many seconds of it and one validation and sample."""
    run = rehearsal(config, corpus)
    updates = []
    while sum(updates) < seconds or len(updates) < FEWEST_UPDATES:
        updates.append(timed(lambda: train_step(run)))
    run.model.eval()
    validation = timed(lambda: validation_row(run)) + timed(lambda: sample_text(run.model, corpus.tokenizer, config))
    return Pace(statistics.median(updates), validation + LOOK_AND_SAVE, peak_memory(run.config.run.device))


def peak_memory(device: str) -> int:
    """Most bytes that this process has held so far, on a GPU there; 0 where the system doesn't tell."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
