"""How well a model predicts a text: log-probabilities, ranks, and the mean loss in comparable units. No torch."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Evaluation:
    """Mean loss in nats a token over ``n_token`` predictions, which stand for ``n_byte`` bytes of text."""

    loss: float
    n_token: int
    n_byte: int
    accuracy: float = math.nan  # part of the predictions that is right; NaN: not looked at

    @property
    def perplexity(self) -> float:
        """e to the loss."""
        return math.exp(min(self.loss, 700.0))

    @property
    def bits_per_byte(self) -> float:
        """Loss in bits a byte of text: comparable between tokenizers."""
        return self.loss * self.n_token / math.log(2) / max(1, self.n_byte)


class Reader(Protocol):
    """An engine that tells the logits at every place of a window (``plain.PlainEngine``)."""

    @property
    def context_length(self) -> int:
        """Longest window."""
        ...

    def new_memory(self) -> Any:
        """The memory of an empty window."""
        ...

    def all_logits(self, tokens: Array, memory: Any) -> Array:
        """(T,) → (T, V)."""
        ...


@dataclass(frozen=True)
class TokenScores:
    """For each predicted token: ln p of it, its place among all by probability (1 = the likeliest), and whether it is
    what the model would say: of equally likely ones the first."""

    log_probability: Array
    rank: Array
    right: Array

    def evaluation(self, predicted: Array, byte_lengths: Array) -> Evaluation:
        """The mean, given the predicted ids (N,) and the bytes (V,) that each id stands for."""
        n_byte = int(byte_lengths[predicted].sum())
        loss = float(-self.log_probability.mean())
        return Evaluation(loss, len(self.log_probability), n_byte, float(self.right.mean()))


def score(reader: Reader, tokens: Array, targets: Array | None = None) -> TokenScores:
    """Score tokens 1 … N−1 of (N,), over windows of the context length that do not overlap, the short last included.

    The first token of a window after the first is predicted from the window before it, so that each is counted once.
    With ``targets`` (N,): not the next tokens but what is to be answered after each, where it is not −1.
    """
    answers = tokens[1:] if targets is None else targets[:-1]
    parts = [_score_window(logits, expected) for logits, expected in _windows(reader, tokens[:-1], answers)]
    return TokenScores(
        *(np.concatenate([getattr(part, name) for part in parts]) for name in ("log_probability", "rank", "right"))
    )


def _windows(reader: Reader, tokens: Array, answers: Array) -> Iterator[tuple[Array, Array]]:
    for start in range(0, len(tokens), reader.context_length):
        window = slice(start, start + reader.context_length)
        expected = answers[window].astype(np.int64)
        logits = reader.all_logits(tokens[window].astype(np.int64), reader.new_memory())
        yield logits[expected >= 0], expected[expected >= 0]


def _score_window(logits: Array, targets: Array) -> TokenScores:
    scores = logits.astype(np.float64)
    scores -= scores.max(axis=-1, keepdims=True)
    chosen = np.take_along_axis(scores, targets[:, None], axis=-1)
    log_sum = np.log(np.exp(scores).sum(axis=-1))
    return TokenScores(chosen[:, 0] - log_sum, (scores > chosen).sum(axis=-1) + 1, scores.argmax(axis=-1) == targets)
