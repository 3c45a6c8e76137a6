"""One sentence of advice at the moment it helps: before training, from its numbers; in training, from its losses."""

import math
from collections.abc import Iterator

import numpy as np

from minigpt.config import Config
from minigpt.console import counted
from minigpt.corpus import Corpus
from minigpt.tokenizer import END
from minigpt.training import Reporter

MANY_EPOCHS = 100
FEWEST_STEPS = 100  # that are worth advising
HIGH_ADAMW_RATE = 0.01
RISING_VALIDATIONS = 3  # without a better one in between
RISEN = 1.05  # times the lowest validation loss: more than noise
OVERFITTED = 1.01  # at the end, times the lowest validation loss
FALLING = 0.999  # the last validation loss times this and less: from one to the next
MEMORY = 0.95  # of the smoothed training loss, which then spans about 20 rows
LEARNED = 0.01  # a loss below which nothing is left to be said
DIVERGED = 1.3  # times the lowest smoothed training loss


def before_training(config: Config, corpus: Corpus) -> Iterator[str]:
    """What is out of proportion in the training asked for."""
    tokens, context = len(corpus.train), config.model.context_length
    step_tokens = config.train.batch_size * context
    epochs = config.train.max_steps * step_tokens / max(1, tokens)
    if epochs > MANY_EPOCHS:
        fewer = math.ceil(MANY_EPOCHS / 4 * tokens / step_tokens)
        remedy = f"{fewer} steps, " if fewer >= FEWEST_STEPS else ""
        yield (
            f"the text is small: {counted(config.train.max_steps, 'step')} will read it {epochs:,.0f} times and learn "
            f"it by heart; more text helps, or {remedy}--train.early-stop 3, --model.dropout "
            f"{more_dropout(config):.1f}"
        )
    if config.optim.name == "adamw" and config.optim.lr > HIGH_ADAMW_RATE:
        yield f"optim.lr = {config.optim.lr:g} is high for adamw, which has one rate for all: 0.001 to 0.003 is usual"
    documents = int(np.count_nonzero(corpus.train == END)) - 1  # one more END closes a part of several
    if documents > 1 and context > 4 * tokens / documents:
        mean = tokens / documents
        shorter = 2 ** math.ceil(math.log2(2 * mean))
        yield (
            f"documents have {counted(round(mean), 'token')} on average, far fewer than "
            f"model.context_length = {context}: --model.context-length {max(8, shorter)} trains faster and loses little"
        )


class Adviser:
    """A reporter that passes all on to another, and has it say what the losses mean for the one who watches."""

    def __init__(self, reporter: Reporter, config: Config) -> None:
        self._reporter, self._config = reporter, config
        self._said: set[str] = set()
        self._best, self._best_step, self._since_best = math.inf, 0, 0
        self._validations: list[float] = []
        self._smooth = self._lowest = math.nan

    def advance(self, step: int) -> None:
        """So many steps are done."""
        self._reporter.advance(step)

    def say(self, sentence: str) -> None:
        """One line for the person who watches."""
        self._reporter.say(sentence)

    def log(self, step: int, **numbers: float) -> None:
        """One row of numbers, and what it means if that is new."""
        self._reporter.log(step, **numbers)
        if "val_loss" in numbers:
            self._validated(step, numbers["val_loss"])
        if math.isfinite(numbers.get("train_loss", math.nan)):
            self._trained(step, numbers["train_loss"])

    def last_word(self, longer: str) -> str:
        """What the losses of the whole training mean for the next one; ``longer`` is what to set for more of it."""
        if len(self._validations) < 2:
            return ""
        before, loss = self._validations[-3:][0], self._validations[-1]
        if loss < LEARNED:
            return ""
        if loss > OVERFITTED * self._best:
            return (
                f"overfitting since step {self._best_step}, whose checkpoint is the best ({self._best:.3f}; {loss:.3f} "
                f"at the end): more text or --model.dropout {more_dropout(self._config):.1f} goes further"
            )
        if loss < before * FALLING:
            return f"validation loss was still falling at the end: {longer} goes further"
        return "validation loss had settled at the end: more text or a larger network goes further than more steps"

    def _validated(self, step: int, loss: float) -> None:
        self._validations.append(loss)
        if loss < self._best:
            self._best, self._best_step, self._since_best = loss, step, 0
            return
        self._since_best += 1
        if self._since_best >= RISING_VALIDATIONS and loss > RISEN * self._best:
            self._once(
                "rising",
                f"validation loss rises since step {self._best_step} ({self._best:.3f} -> {loss:.3f}): what is learned "
                "from here on holds for this text alone. The best checkpoint is kept; more text or --model.dropout "
                f"{more_dropout(self._config):.1f} helps, --train.early-stop 3 would end here",
            )

    def _trained(self, step: int, loss: float) -> None:
        if math.isnan(self._smooth):
            self._smooth = self._lowest = loss
        self._smooth = MEMORY * self._smooth + (1 - MEMORY) * loss
        self._lowest = min(self._lowest, self._smooth)
        if self._smooth > DIVERGED * self._lowest:
            self._once(
                "diverging",
                f"training loss has risen from {self._lowest:.3f} to {self._smooth:.3f} at step {step}: the learning "
                f"rate may be too high; try --optim.lr {self._config.optim.lr / 3:.2g}",
            )

    def _once(self, kind: str, sentence: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            self._reporter.say(sentence)


def more_dropout(config: Config) -> float:
    """What to try where a text is learned by heart."""
    return max(0.2, min(0.5, config.model.dropout + 0.1))
