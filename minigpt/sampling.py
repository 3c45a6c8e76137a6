"""From logits to ids: one sampling law and one generation loop for every engine.

An engine turns tokens into logits (``Engine`` below). Everything random is one float64 uniform a token, so equal
logits give equal text whatever computed them.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np

from minigpt.errors import UserError

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
class WritingEngine(Protocol):
    """An engine that also draws, by the same law, and for several texts at once: that costs less than one by one.

    Numbers of a text alone and beside others may differ in their last digit.
    """

    @property
    def context_length(self) -> int:
        """Most tokens the memory may take of one text."""
        ...

    @property
    def vocab_size(self) -> int:
        """Length of the logits."""
        ...

    @property
    def texts_at_once(self) -> int:
        """How many texts, at most, it is good to write side by side."""
        ...

    def new_memory(self, n_text: int = 1) -> Any:
        """The memory of so many empty texts; ``lengths[n]`` is what it has of text n, and may be set to less."""
        ...

    def logits(self, tokens: Array, memory: Any, text: int = 0) -> Array:
        """Logits (V,) of the token after ``tokens`` (T ≥ 1), which follow those of that text in ``memory``."""
        ...

    def write(self, texts: Mapping[int, "Text"], memory: Any) -> dict[int, list[int]]:
        """The next few ids of each text, by its number in ``memory``, which takes in what it has not read.

        The memory then has all of the new ones but the last of each. The texts' rules differ in what they have had
        alone. A text gets at most as many as are left to it, and none after its end; no id at all: its logits are not
        finite.
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
        certain = np.zeros(len(scores))
        certain[scores.argmax()] = 1
        return certain
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
    cumulated = probabilities.cumsum()
    drawn = int(cumulated.searchsorted(uniform * cumulated[-1], side="right"))
    if drawn == len(probabilities):  # rounding carried uniform · total up to total itself
        return int(np.flatnonzero(probabilities)[-1])
    return drawn


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


@dataclass
class Text:
    """A text as it grows, and all that decides its next id but the logits."""

    tokens: list[int]  # the prompt's first
    rule: Rule
    uniforms: np.random.Generator
    left: int  # ids that may still come; whoever reads them may set it to 0
    start: int = 0  # where the window begins that the model sees
    read: int = 0  # how many of the tokens its memory has taken in, or left behind

    @classmethod
    def begin(
        cls,
        prompt_ids: Sequence[int],
        *,
        max_new_tokens: int,
        options: SamplingOptions,
        seed: int = 0,
        end: int | None = 0,
        banned: Collection[int] = (),
    ) -> Self:
        """A text that begins with a prompt; arguments and errors as ``generate``'s."""
        for name, number in (("seed", seed), ("max_new_tokens", max_new_tokens)):
            if not isinstance(number, int | np.integer) or number < 0:
                raise UserError(f"{name} = {number}: must be a whole number of at least 0")
        tokens = list(prompt_ids)
        if not tokens:
            assert end is not None, "an empty prompt begins with the end id"
            tokens = [end]
        uniforms = np.random.Generator(np.random.PCG64(seed))
        return cls(tokens, Rule(options, set(tokens), banned, end), uniforms, max_new_tokens)

    def window_moved(self, context_length: int) -> bool:
        """Whether the model needs an empty memory now, to read a later window."""
        start = window_start(len(self.tokens), context_length)
        if start == self.start:
            return False
        self.start = self.read = start
        return True

    @property
    def unread(self) -> Array:
        """The tokens that the memory has still to take in."""
        return np.array(self.tokens[self.read :])

    @property
    def begins_a_document(self) -> bool:
        """Whether its end may not come now: no document is empty."""
        return self.tokens == [self.rule.end]

    def next_id(self, logits: Array) -> int:
        """Draw the id after the last."""
        rule = self.rule
        banned = {*rule.banned, rule.end} if self.begins_a_document else rule.banned
        return draw(distribution(logits, rule.history, rule.options, banned), self.uniforms.random())

    def grow(self, ids: Sequence[int]) -> Iterator[int]:
        """Append ids, one by one as they are asked for, up to the end of the text, which then has none left."""
        self.read = len(self.tokens) + len(ids) - 1
        for token in ids:
            if token == self.rule.end:
                self.left = 0
            if self.left == 0:
                return
            self.tokens.append(token)
            self.rule.history.add(token)
            self.left -= 1
            yield token


def generate(
    engine: Engine | WritingEngine,
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
    text = Text.begin(
        prompt_ids, max_new_tokens=max_new_tokens, options=options, seed=seed, end=end, banned=banned
    )  # fmt: skip
    yield from continued(engine, text)


def continued(engine: Engine | WritingEngine, text: Text) -> Iterator[int]:
    """The ids by which a text grows, as ``generate``."""
    if isinstance(engine, WritingEngine):
        for _, token in generate_together(engine, [text]):
            yield token
        return
    memory = engine.new_memory()
    while text.left:
        if text.window_moved(engine.context_length):
            memory = engine.new_memory()
        yield from text.grow([text.next_id(engine.logits(text.unread, memory))])


def generate_together(engine: WritingEngine, texts: Sequence[Text]) -> Iterator[tuple[int, int]]:
    """The ids of several texts that grow side by side, with each its text's number; raises as ``generate``.

    A text of which its reader has seen enough ends when ``left`` is set to 0.
    """
    memory = engine.new_memory(len(texts))
    while going := {number: text for number, text in enumerate(texts) if text.left}:
        for number, text in going.items():
            text.window_moved(engine.context_length)
            memory.lengths[number] = text.read - text.start
        ready = {number: text for number, text in going.items() if not text.begins_a_document}
        written = engine.write(ready, memory) if ready else {}
        for number, text in going.items():
            if not (ids := written.get(number)):
                memory.lengths[number] = text.read - text.start
                ids = [text.next_id(engine.logits(text.unread, memory, number))]
            for token in text.grow(ids):
                yield number, token
