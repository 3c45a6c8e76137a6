"""Tasks in which it is known what has to be read: seeded examples with their targets and links. NumPy alone.

An example has T tokens, END first. A target is what the token at its place has to answer; −1: it does not count. Where
one earlier token alone fixes the answer, its place is the cause. Training, validation and test never share an example:
a hash of its tokens says where it belongs, whatever the seed. (Of parity and brackets they do share beginnings, which
have answers of their own.) Sources of the tasks: copying, Jelassi et al. 2024;
induction, Olsson et al. 2022; recall, Arora et al. 2023 ("Zoology"); brackets of bounded depth, Yao et al. 2021;
parity, Hahn 2020.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from minigpt.config import TaskConfig, nearest
from minigpt.errors import UserError
from minigpt.tokenizer import END

PREFIX = "task:"  # of data.source
NONE = -1  # no target, no cause
FILLER, BAR, BITS, OPENERS, CLOSERS = ".", "|", "01", "([", ")]"
SYMBOLS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
PARTS = ("train", "val", "test")
HELD_OUT = {"val": 0, "test": 1}  # which of ten classes of examples; all others are for training
CLASSES, DRAWS = 10, 200  # times that examples are drawn before a part that stays empty is given up
DRAWN_TOKENS, MOST_TOKENS = 2_000_000, 50_000_000  # at a time; in all

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Examples:
    """N examples of T tokens each."""

    tokens: Ids  # (N, T), END first
    targets: Ids  # (N, T): the answer expected after the token at this place; −1: none
    causes: Ids  # (N, T): the place that this answer has to be read from; −1: not one alone


@dataclass(frozen=True)
class Task:
    """How examples are drawn, and the characters that their ids stand for: id i is ``alphabet[i − 1]``."""

    alphabet: Callable[[TaskConfig], str]
    draw: Callable[[np.random.Generator, int, int, TaskConfig], Examples]
    options: tuple[str, ...] = ()  # of [task], that change what is drawn

    def idle_options(self, options: TaskConfig) -> list[str]:
        """Those that are set and change nothing in this task."""
        used = {*self.options, "examples", "held_out"}
        usual = TaskConfig()
        return [key for key, value in options.model_dump().items() if key not in used and value != getattr(usual, key)]


def task_named(name: str) -> Task:
    """Raises UserError, with the nearest name, if there is no such task."""
    if name not in TASKS:
        raise UserError(f"data.source = {PREFIX}{name}: no such task{nearest(name, [*TASKS, 'tales'])}")
    return TASKS[name]


def examples(name: str, options: TaskConfig, *, length: int, count: int, seed: int, part: str) -> Examples:
    """The first ``count`` examples of a part: train, val or test.

    Args:
        name: of the task.
        options: what it looks like.
        length: tokens of an example, T.
        count: how many.
        seed: other seeds give others; no seed brings one of training into validation or test.
        part: which part.

    Raises:
        UserError: if there is no such task, its options don't go with the length, or a part has no example.
    """
    task = task_named(name)
    if count * length > MOST_TOKENS:
        raise UserError(
            f"{PREFIX}{name}: {count:,} examples of {length:,} tokens are too many; {MOST_TOKENS // length:,} of them "
            "can be held"
        )
    generator = np.random.default_rng([seed, PARTS.index(part)])
    found: list[Examples] = []
    for _ in range(DRAWS + 2 * CLASSES * count * length // DRAWN_TOKENS):
        drawn = task.draw(generator, min(count, max(1, DRAWN_TOKENS // length)), length, options)
        classes = class_of(drawn.tokens)
        chosen = classes == HELD_OUT[part] if part in HELD_OUT else classes >= len(HELD_OUT)
        found.append(Examples(drawn.tokens[chosen], drawn.targets[chosen], drawn.causes[chosen]))
        if sum(len(some.tokens) for some in found) >= count:
            return Examples(
                tokens=np.concatenate([some.tokens for some in found])[:count],
                targets=np.concatenate([some.targets for some in found])[:count],
                causes=np.concatenate([some.causes for some in found])[:count],
            )
    raise UserError(
        f"data.source = {PREFIX}{name}: there are too few different examples of {length} tokens, none for {part}; "
        "raise model.context_length"
    )


def class_of(tokens: Ids) -> Ids:
    """Which of ten classes each example (N, T) belongs to, by a hash of its tokens."""
    factors = np.random.default_rng(0).integers(1, 2**63, tokens.shape[1], dtype=np.uint64) * 2 + 1
    mixed = (tokens.astype(np.uint64) * factors).sum(axis=1, dtype=np.uint64)
    mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return ((mixed >> np.uint64(33)) % CLASSES).astype(np.int64)


# ── the tasks ──────────────────────────────────────────────────────────────────────────────────────────────────


def _copy(generator: np.random.Generator, count: int, length: int, options: TaskConfig) -> Examples:
    """END x₁ … xₙ (filler) | y₁ … yₙ: the same again, reversed or sorted."""
    n = options.length or max(1, (length - 2 - options.distance) // 2)
    used = 2 * n + 2 + options.distance
    _require("copy", f"{n} symbols and as many answers", used, length)
    unique = options.order == "sorted"
    if unique and n > options.symbols:
        raise UserError(
            f"task.symbols = {options.symbols}: sorting {n} different ones takes as many; "
            f"give task.length = {options.symbols} or less, or more symbols"
        )
    drawn = _distinct(generator, count, n, options.symbols) if unique else _any(generator, count, n, options.symbols)
    read = {
        "same": np.broadcast_to(np.arange(n), (count, n)),
        "reversed": np.broadcast_to(np.arange(n)[::-1], (count, n)),
        "sorted": np.argsort(drawn, axis=1),
    }[options.order]
    tokens, targets, causes = _blank(count, length, options)
    first = n + 1 + options.distance  # of the bar
    tokens[:, 1 : n + 1] = drawn
    tokens[:, first] = _id(BAR, options)
    answers = np.take_along_axis(drawn, read, axis=1)
    tokens[:, first + 1 : first + 1 + n] = answers
    targets[:, first : first + n] = answers
    causes[:, first : first + n] = 1 + read
    return Examples(tokens, targets, causes)


def _induction(generator: np.random.Generator, count: int, length: int, options: TaskConfig) -> Examples:
    """Different symbols, and somewhere a few of them again: from the second of these on each is known.

    Where they stand first and where again differs from example to example; with ``distance`` they come again just so
    many tokens later.
    """
    n, gap = options.length or max(2, length // 4), options.distance
    _require("induction", f"{n} symbols twice", 1 + max(2 * n, n + gap), length)
    if n < 2:
        raise UserError(f"task.length = {n}: the first symbol that comes again can't be known; give 2 or more")
    if gap and gap < n:
        raise UserError(f"task.distance = {gap}: must be at least task.length = {n}, or 0 to vary")
    if length - 1 - n > options.symbols:
        raise UserError(
            f"task.symbols = {options.symbols}: {length} tokens take {length - 1 - n} different ones; "
            f"give more, or model.context_length = {options.symbols + 1 + n} or less"
        )
    places, rows = np.arange(length - 1), np.arange(count)[:, None]
    again = generator.integers(max(n, gap), length - n, (count, 1))  # where they begin to stand again
    begin = again - gap if gap else (generator.random((count, 1)) * (again - n + 1)).astype(np.int64)
    # what stands at each place, by number among the different ones
    number = np.where(places < again, places, np.where(places < again + n, begin + places - again, places - n))
    tokens, targets, causes = _blank(count, length, options)
    tokens[:, 1:] = _distinct(generator, count, length - 1 - n, options.symbols)[rows, number]
    known = 1 + again + np.arange(1, n)  # places of the symbols that are known
    targets[rows, known - 1] = tokens[rows, known]
    causes[rows, known - 1] = known - again + begin
    return Examples(tokens, targets, causes)


def _recall(generator: np.random.Generator, count: int, length: int, options: TaskConfig) -> Examples:
    """END k₁ v₁ … kₙ vₙ (filler) | kᵢ vᵢ …: each key is asked once, in another order; its value is known."""
    n, half = options.length or max(1, (length - 2 - options.distance) // 4), options.symbols // 2
    used = 4 * n + 2 + options.distance
    _require("recall", f"{n} pairs, asked once each", used, length)
    if n > half:
        raise UserError(
            f"task.symbols = {options.symbols}: half of them are keys, which is too few for {n} pairs; "
            f"give more, or task.length = {max(1, half)} or less"
        )
    keys, values = _distinct(generator, count, n, half), half + _any(generator, count, n, half)
    order = np.argsort(generator.random((count, n)), axis=1)
    tokens, targets, causes = _blank(count, length, options)
    first = 2 * n + 1 + options.distance  # of the bar
    tokens[:, 1 : 2 * n : 2], tokens[:, 2 : 2 * n + 1 : 2] = keys, values
    tokens[:, first] = _id(BAR, options)
    asked = slice(first + 1, first + 2 * n, 2)
    tokens[:, asked] = np.take_along_axis(keys, order, axis=1)
    targets[:, asked] = tokens[:, first + 2 : first + 2 * n + 1 : 2] = np.take_along_axis(values, order, axis=1)
    causes[:, asked] = 2 * order + 2
    return Examples(tokens, targets, causes)


def _brackets(generator: np.random.Generator, count: int, length: int, options: TaskConfig) -> Examples:
    """Round and square brackets that close properly, ``depth`` open at most: which kind closes next is known."""
    used = (length - 1) // 2 * 2
    _require("brackets", "one pair", 3, length)
    alphabet, rows = _brackets_alphabet(options), np.arange(count)
    opener, closer = (np.array([1 + alphabet.index(c) for c in kinds]) for kinds in (OPENERS, CLOSERS))
    tokens, targets, causes = (np.full((count, length), value) for value in (END, NONE, NONE))
    tokens[:, 1:] = 1 + alphabet.index(FILLER)
    depth, opened, kinds = np.zeros(count, np.int64), np.zeros((count, length), np.int64), np.empty_like(tokens)
    for place in range(1, used + 1):
        left = used + 1 - place
        closes = (depth > 0) & ((depth == left) | (depth == options.depth) | (generator.random(count) < 0.5))
        kind = generator.integers(0, 2, count)
        last = opened[rows, np.maximum(depth - 1, 0)]  # where the innermost open one stands
        kind = np.where(closes, kinds[rows, last], kind)
        tokens[:, place] = np.where(closes, closer[kind], opener[kind])
        targets[:, place - 1] = np.where(closes, closer[kind], NONE)
        causes[:, place - 1] = np.where(closes, last, NONE)
        opened[rows, depth] = np.where(closes, opened[rows, depth], place)
        kinds[:, place] = kind
        depth += np.where(closes, -1, 1)
    return Examples(tokens, targets, causes)


def _parity(generator: np.random.Generator, count: int, length: int, options: TaskConfig) -> Examples:
    """Zeros and ones; after each of them, whether the ones so far are odd: 1, or even: 0. Every bit counts."""
    bits = generator.integers(0, 2, (count, length - 1))
    tokens, targets, causes = (np.full((count, length), value) for value in (END, NONE, NONE))
    tokens[:, 1:], targets[:, 1:] = 1 + bits, 1 + np.cumsum(bits, axis=1) % 2
    return Examples(tokens, targets, causes)


# ── parts of them ──────────────────────────────────────────────────────────────────────────────────────────────


def _symbols_alphabet(options: TaskConfig) -> str:
    return FILLER + SYMBOLS[: options.symbols] + BAR


def _brackets_alphabet(_options: TaskConfig) -> str:
    return "".join(sorted(OPENERS + CLOSERS + FILLER))


def _id(character: str, options: TaskConfig) -> int:
    return 1 + _symbols_alphabet(options).index(character)


def _blank(count: int, length: int, options: TaskConfig) -> tuple[Ids, Ids, Ids]:
    """Examples of END and filler, without targets or causes."""
    tokens, targets, causes = (np.full((count, length), value) for value in (END, NONE, NONE))
    tokens[:, 1:] = _id(FILLER, options)
    return tokens, targets, causes


def _any(generator: np.random.Generator, count: int, n: int, symbols: int) -> Ids:
    """(count, n) ids of the first so many symbols."""
    return 2 + generator.integers(0, symbols, (count, n))


def _distinct(generator: np.random.Generator, count: int, n: int, symbols: int) -> Ids:
    """The same, but none twice in an example."""
    return 2 + np.argsort(generator.random((count, symbols)), axis=1)[:, :n]


def _require(name: str, what: str, used: int, length: int) -> None:
    if used > length:
        raise UserError(
            f"model.context_length = {length}: the task {name} needs {used} tokens for {what}"
            "; give more of them, or a smaller task.length or task.distance"
        )


TASKS = {
    "copy": Task(_symbols_alphabet, _copy, ("order", "symbols", "length", "distance")),
    "induction": Task(_symbols_alphabet, _induction, ("symbols", "length", "distance")),
    "recall": Task(_symbols_alphabet, _recall, ("symbols", "length", "distance")),
    "brackets": Task(_brackets_alphabet, _brackets, ("depth",)),
    "parity": Task(lambda _options: BITS, _parity),
}
