"""Advice comes once, at the moment it helps, and not at all where nothing is wrong."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from minigpt.advice import Adviser, before_training
from minigpt.config import Config, validate
from minigpt.corpus import Corpus
from minigpt.tokenizer import END, train_tokenizer


class Listener:
    """A reporter that remembers."""

    def __init__(self) -> None:
        self.sentences: list[str] = []
        self.rows: list[dict[str, float]] = []

    def advance(self, step: int) -> None: ...

    def log(self, step: int, **numbers: float) -> None:
        self.rows.append({"step": step, **numbers})

    def say(self, sentence: str) -> None:
        self.sentences.append(sentence)


@pytest.fixture
def listener() -> Listener:
    return Listener()


def config(**tables: dict[str, Any]) -> Config:
    return validate({"train": {"max_steps": 100, "batch_size": 8}, "model": {"context_length": 16}, **tables})


def corpus(*documents: int) -> Corpus:
    """Documents of so many tokens."""
    ids = np.concatenate([[END, *[1] * length] for length in documents] + ([[END]] if len(documents) > 1 else []))
    train = ids.astype(np.uint16)
    return Corpus(train_tokenizer("byte", []), train, train[:0], train[:0], (), "")


def test_a_text_that_would_be_read_very_often() -> None:
    """100 steps of 128 tokens: 20,000 tokens are read 0.64 times, 100 tokens 127 times."""
    assert list(before_training(config(), corpus(20_000))) == []
    (sentence,) = before_training(config(), corpus(100))
    assert "100 steps will read it 127 times" in sentence and "or --train.early-stop 3" in sentence
    (sentence,) = before_training(config(train={"max_steps": 1000, "batch_size": 8}), corpus(600))
    assert "steps will read it 213 times" in sentence and "or 118 steps, --train.early-stop 3" in sentence
    few = config(train={"max_steps": 20, "batch_size": 8})
    assert list(before_training(few, corpus(100))) == [], "what it says is enough"


def test_a_rate_made_for_another_optimizer() -> None:
    (sentence,) = before_training(config(optim={"name": "adamw", "lr": 0.02}), corpus(20_000))
    assert "optim.lr = 0.02 is high for adamw" in sentence
    assert list(before_training(config(optim={"name": "adamw", "lr": 0.003}), corpus(20_000))) == []


def test_a_context_that_no_document_fills() -> None:
    long = config(model={"context_length": 256}, train={"max_steps": 3, "batch_size": 8})
    (sentence,) = before_training(long, corpus(*[11] * 500))
    assert "12 tokens on average" in sentence and "--model.context-length 32" in sentence
    assert list(before_training(long, corpus(*[100] * 500))) == []
    assert list(before_training(long, corpus(6000))) == [], "one document"


def losses(adviser: Adviser, name: str, loss_at: Callable[[int], float], steps: int = 100) -> None:
    for step in range(1, steps + 1):
        adviser.log(step, **{name: loss_at(step)})


def test_a_rising_validation_loss_is_told_once(listener: Listener) -> None:
    losses(Adviser(listener, config()), "val_loss", lambda step: 2 + abs(step - 10) / 10, 40)
    (sentence,) = listener.sentences
    assert "rises since step 10 (2.000 -> 2.300)" in sentence and "--model.dropout 0.2" in sentence
    assert [row["step"] for row in listener.rows] == list(range(1, 41)), "all is passed on"


def test_a_noisy_validation_loss_is_not_told(listener: Listener) -> None:
    losses(Adviser(listener, config()), "val_loss", lambda step: 2 + 0.01 * (step % 7))
    assert listener.sentences == []


def test_a_training_loss_that_climbs_again_is_told_once(listener: Listener) -> None:
    losses(Adviser(listener, config(optim={"lr": 0.3})), "train_loss", lambda step: 4 - step / 20 if step < 40 else 5.0)
    (sentence,) = listener.sentences
    assert "has risen from" in sentence and "--optim.lr 0.1" in sentence


def test_a_falling_and_noisy_training_loss_is_not_told(listener: Listener) -> None:
    draw = np.random.default_rng(0)
    losses(Adviser(listener, config()), "train_loss", lambda step: 4 / step**0.2 * draw.uniform(0.7, 1.3), 400)
    assert listener.sentences == []


@pytest.mark.parametrize(
    ("val_losses", "words"),
    [
        ([3.0], ""),
        ([3.0, 2.5, 2.2, 2.0], "still falling at the end: --train.minutes 15 goes further"),
        ([3.0, 2.0, 2.1, 2.3], "overfitting since step 2, whose checkpoint is the best (2.000; 2.300 at the end)"),
        ([3.0, 2.0, 2.0, 1.9999], "had settled at the end"),
    ],
)
def test_the_last_word_follows_from_the_losses(listener: Listener, val_losses: list[float], words: str) -> None:
    adviser = Adviser(listener, config())
    for step, loss in enumerate(val_losses, start=1):
        adviser.log(step, val_loss=loss)
    sentence = adviser.last_word("--train.minutes 15")
    assert words in sentence and bool(words) == bool(sentence)
