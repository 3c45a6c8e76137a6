"""How well a model predicts a text: log-probabilities, ranks, and the mean loss in comparable units. No torch."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np

from minigpt.errors import UserError
from minigpt.tokenizer import Tokenizer, shown

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
class TokenScore:
    """One predicted token: its text, its id, ln p of it, its place among all by probability (1 = the likeliest)."""

    token: str
    id: int
    log_probability: float
    rank: int


@dataclass(frozen=True)
class TokenScores:
    """For each predicted token: its id, ln p of it, its place among all by probability (1 = the likeliest), and whether
    it is what the model would say: of equally likely ones the first."""

    token: Array
    log_probability: Array
    rank: Array
    right: Array

    def evaluation(self, byte_lengths: Array) -> Evaluation:
        """The mean, given the bytes (V,) that each id stands for."""
        n_byte = int(byte_lengths[self.token].sum())
        loss = float(-self.log_probability.mean())
        return Evaluation(loss, len(self.log_probability), n_byte, float(self.right.mean()))

    def listed(self, tokenizer: Tokenizer) -> list[TokenScore]:
        """One by one, with their text."""
        return [
            TokenScore(shown(tokenizer, int(token)), int(token), float(p), int(rank))
            for token, p, rank in zip(self.token, self.log_probability, self.rank, strict=True)
        ]


def score(reader: Reader, tokens: Array, targets: Array | None = None) -> TokenScores:
    """Score tokens 1 … N−1 of (N,), over windows of the context length that do not overlap, the short last included.

    The first token of a window after the first is predicted from the window before it, so that each is counted once.
    With ``targets`` (N,): not the next tokens but what is to be answered after each, where it is not −1.
    """
    answers = tokens[1:] if targets is None else targets[:-1]
    return _joined(_score_window(logits, expected) for logits, expected in _windows(reader, tokens[:-1], answers))


def score_sliding(reader: Reader, tokens: Array, stride: int) -> TokenScores:
    """Score the tokens (N,) as Hugging Face's guide "Perplexity of fixed-length models" does.

    Windows of C tokens, the context length, begin at 0, S, 2S, ... until one reaches the end. In each, the tokens that
    no window before it held are predicted, from all those before them in the window: at least C − S, but for the first
    window's. The perplexity is e to −Σ ln p ÷ the number of tokens predicted, which are all but the first; with S = C
    the first of each window has nothing before it and is left out, so that they are fewer than ``score``'s.

    (The code of the guide weighs windows otherwise: see ``guide_perplexity``.)

    Raises:
        UserError: for a stride that would leave tokens out.
    """
    context = reader.context_length
    if not 1 <= stride <= context:
        raise UserError(f"--stride = {stride}: must be at least 1 and at most the context, {context}")
    parts, done = [], 0
    for begin in range(0, len(tokens), stride):
        window = tokens[begin : begin + context].astype(np.int64)
        new = max(done - begin, 1)  # place in the window of the first that is predicted
        if len(window) > 1:
            logits = reader.all_logits(window[:-1], reader.new_memory())
            parts.append(_score_window(logits[new - 1 :], window[new:]))
        done = begin + len(window)
        if done == len(tokens):
            break
    return _joined(parts)


def guide_perplexity(scores: TokenScores, context: int, stride: int) -> float:
    """The perplexity of ``score_sliding``'s tokens to the digits of the guide's code.

    It takes the mean of each window after the first for one of a token less than it is of; with a stride of 1 the first
    window alone counts.
    """
    losses, first = -scores.log_probability, min(context - 1, len(scores.token))
    windows = [losses[:first], *(losses[at : at + stride] for at in range(first, len(losses), stride))]
    weights = [first, *(len(window) - 1 for window in windows[1:])]
    if stride == context:  # the first of each window is not predicted
        return math.exp(min(float(losses.mean()), 700.0))
    loss = sum(float(window.mean()) * weight for window, weight in zip(windows, weights, strict=True)) / sum(weights)
    return math.exp(min(loss, 700.0))


def _joined(parts: Iterable[TokenScores]) -> TokenScores:
    names = [field.name for field in fields(TokenScores)]
    arrays = zip(*([getattr(part, name) for name in names] for part in parts), strict=True)
    return TokenScores(*map(np.concatenate, arrays))


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
    rank = (scores > chosen).sum(axis=-1) + 1
    return TokenScores(targets, chosen[:, 0] - log_sum, rank, scores.argmax(axis=-1) == targets)
