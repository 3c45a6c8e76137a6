"""From logits to text: one sampling law and one generation loop for every engine.

An engine turns tokens into logits (``Engine`` below). Everything random is one float64 uniform a token, so equal
logits give equal text whatever computed them.
"""

import codecs
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from minigpt.errors import UserError
from minigpt.tokenizer import Tokenizer

LARGEST = 1e300  # what a score is at most after an absurd penalty, so that differences stay finite

Array = np.ndarray[Any, np.dtype[Any]]


class Engine(Protocol):
    """What ``generate`` asks of a model. ``memory`` is the engine's own and is changed in place."""

    @property
    def context_length(self) -> int:
        """Most tokens one memory may take."""
        ...

    @property
    def vocab_size(self) -> int:
        """Length of the logits."""
        ...

    def new_memory(self) -> Any:
        """The memory of an empty sequence."""
        ...

    def logits(self, tokens: Array, memory: Any) -> Array:
        """Logits (V,) of the token after ``tokens`` (T ≥ 1), which follow those already in ``memory``."""
        ...


@runtime_checkable
class WritingEngine(Engine, Protocol):
    """An engine that also draws, by the same law: a call for several tokens costs less than one for each."""

    def write(self, token: int, memory: Any, rule: "Rule", *, uniforms: np.random.Generator, most: int) -> list[int]:
        """The next few ids after ``token``, which follows those in ``memory``: at most ``most``, ``rule.end`` the last.

        The memory has then read all of them but the last. No id at all: the logits are not finite.
        """
        ...


@dataclass(frozen=True)
class SamplingOptions:
    """How a token is chosen; the defaults beyond the temperature change nothing.

    Raises:
        UserError: naming the value that is out of range.
    """

    temperature: float = 0.8  # 0: always the likeliest
    top_k: int = 0  # keep so many of the likeliest; 0: all
    top_p: float = 1.0  # keep the smallest set with at least this probability
    min_p: float = 0.0  # keep what has at least this part of the likeliest's probability
    repetition_penalty: float = 1.0  # above 1: ids that were there before become less likely

    def __post_init__(self) -> None:
        for name, holds, rule in (
            ("temperature", 0 <= self.temperature < math.inf, "a number of at least 0"),
            ("top_k", self.top_k >= 0, "a whole number of at least 0"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p < 1, "at least 0 and below 1"),
            ("repetition_penalty", 0 < self.repetition_penalty < math.inf, "a number above 0"),
        ):
            if not holds:
                raise UserError(f"{name} = {getattr(self, name)}: must be {rule}")


@dataclass(frozen=True)
class Rule:
    """All that decides a text beside its logits and the uniforms."""

    options: SamplingOptions
    history: set[int]  # ids of prompt and text so far
    banned: Collection[int]  # ids never drawn
    end: int | None  # the id that ends the text


def distribution(
    logits: Array, history: Collection[int], options: SamplingOptions, banned: Collection[int] = ()
) -> Array:
    """Probabilities (V,) of the next token, in float64.

    In this order: repetition penalty over ``history`` (a positive logit is divided by it, a negative one
    multiplied: Keskar 2019); ban; temperature; top-k (ties: lowest ids); softmax; top-p (likeliest first, then by id);
    min-p against the likeliest left; renormalise. Temperature 0 puts everything on the largest logit's lowest id.

    Raises:
        UserError: if a logit is not finite.
    """
    scores = np.array(logits, dtype=np.float64)
    if not np.isfinite(scores).all():
        raise UserError(
            "the model's logits are not finite: the checkpoint is damaged or its training diverged; "
            "sample from an earlier step"
        )
    if history and options.repetition_penalty != 1:
        seen = list(history)
        penalty = options.repetition_penalty
        with np.errstate(over="ignore"):
            penalised = np.where(scores[seen] > 0, scores[seen] / penalty, scores[seen] * penalty)
        scores[seen] = np.clip(penalised, -LARGEST, LARGEST)
    if len(banned):
        scores[list(banned)] = -np.inf
    largest = scores.max()
    assert largest > -np.inf, "every id is banned"
    if options.temperature == 0:
        return np.eye(1, len(scores), int(scores.argmax()))[0]
    if 0 < options.top_k < len(scores):  # before the division, which keeps the order but could round into ties
        _keep_largest(scores, options.top_k)
    with np.errstate(over="ignore"):  # a tiny temperature: −inf is right
        probabilities = np.exp((scores - largest) / options.temperature)
    probabilities /= probabilities.sum()
    if options.top_p < 1:
        _keep_nucleus(probabilities, options.top_p)
    if options.min_p > 0:
        probabilities[probabilities < options.min_p * probabilities.max()] = 0
    return probabilities / probabilities.sum()


def _keep_largest(scores: Array, count: int) -> None:
    threshold = np.partition(scores, -count)[-count]
    ties = np.flatnonzero(scores == threshold)
    missing = count - np.count_nonzero(scores > threshold)
    scores[scores < threshold] = -np.inf
    scores[ties[missing:]] = -np.inf


def _keep_nucleus(probabilities: Array, mass: float) -> None:
    order = np.argsort(-probabilities, kind="stable")
    count = np.searchsorted(np.cumsum(probabilities[order]), mass) + 1
    probabilities[order[count:]] = 0


def draw(probabilities: Array, uniform: float) -> int:
    """The lowest id whose cumulated probability exceeds ``uniform`` in [0, 1): the inverse CDF in id order."""
    cumulated = np.cumsum(probabilities)
    last = int(np.flatnonzero(probabilities)[-1])  # if rounding carries uniform · total up to total itself
    return min(int(np.searchsorted(cumulated, uniform * cumulated[-1], side="right")), last)


def window_start(total: int, context_length: int) -> int:
    """Where the window of a sequence of ``total`` tokens begins, for a model that sees ``context_length`` of them.

    0 while all fit. A full window is cut to its last half, refilled from position 0, and grows to full again.
    """
    if total <= context_length:
        return 0
    kept = max(1, context_length // 2)
    period = context_length - kept + 1
    cuts = (total - context_length - 1) // period
    return context_length + 1 + cuts * period - kept


def generate(
    engine: Engine,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    options: SamplingOptions,
    seed: int = 0,
    end: int | None = 0,
    banned: Collection[int] = (),
) -> Iterator[int]:
    """The ids that follow a prompt, one by one as they are drawn; past the context length the window moves on.

    Args:
        engine: the model.
        prompt_ids: of any length; an empty prompt begins a document, with ``end``.
        max_new_tokens: how many ids at most.
        options: how each is chosen.
        seed: fixes the draws; several texts take seed, seed + 1, ...
        end: the id that ends a text and is not part of it, never drawn right at a document's beginning; None: only
            ``max_new_tokens`` ends a text.
        banned: ids never drawn, such as those of a vocabulary that was padded.

    Raises:
        UserError: if the logits are not finite, or the seed is negative.
    """
    if seed < 0:
        raise UserError(f"seed = {seed}: must be a whole number of at least 0")
    uniforms = np.random.Generator(np.random.PCG64(seed))
    tokens = list(prompt_ids)
    if not tokens:
        assert end is not None, "an empty prompt begins with the end id"
        tokens = [end]
    rule = Rule(options, set(tokens), banned, end)
    writer = engine if isinstance(engine, WritingEngine) else None
    memory, start, read, left = engine.new_memory(), 0, 0, max_new_tokens
    while left > 0:
        begin = window_start(len(tokens), engine.context_length)
        if begin != start:
            memory, start, read = engine.new_memory(), begin, begin
        ids: list[int] = []
        if writer and len(tokens) - read == 1 < len(tokens):
            ids = writer.write(tokens[-1], memory, rule, uniforms=uniforms, most=left)
        if not ids:
            logits = engine.logits(np.array(tokens[read:]), memory)
            barred = {*banned, end} if tokens == [end] else banned  # no document is empty
            ids = [draw(distribution(logits, rule.history, options, barred), uniforms.random())]
        for token in ids:
            if token == end:
                return
            yield token
            tokens.append(token)
            rule.history.add(token)
        read, left = len(tokens) - 1, left - len(ids)


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


def until_stop(pieces: Iterable[str], stops: Sequence[str]) -> Iterator[str]:
    """Text as it streams, up to the first stop string to be completed (of several at once: the longest).

    What may be the beginning of a stop string is held back until the next pieces tell. No piece that comes out is
    empty; where the pieces were cut does not change the text.

    Raises:
        UserError: if a stop string is empty.
    """
    if "" in stops:
        raise UserError("a stop string is empty; give at least one character")
    pending = ""
    for piece in pieces:
        pending += piece
        found = [(at + len(stop), at) for stop in stops if (at := pending.find(stop)) >= 0]
        if found:
            _, at = min(found)
            if at:
                yield pending[:at]
            return
        held = max((_overlap(pending, stop) for stop in stops), default=0)
        if ready := pending[: len(pending) - held]:
            yield ready
            pending = pending[len(ready) :]
    if pending:
        yield pending


def _overlap(text: str, stop: str) -> int:
    """Length of the longest beginning of ``stop``, not all of it, that ``text`` ends with."""
    return next(n for n in range(min(len(stop) - 1, len(text)), -1, -1) if text.endswith(stop[:n]))
