"""Which text is for training, which for validation, which for the test.

One document is cut by characters: its tail is validated, and the end of that tail kept for the test. Several
documents go whole into one part each, drawn at random from a seed, and stay in their order within the part.
"""

import random
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from math import ceil, floor
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from minigpt.config import DataConfig
from minigpt.errors import UserError
from minigpt.sources import Document, Source
from minigpt.tokenizer import pieces

TRAIN, VAL, TEST = range(3)
NOTHING = -1

Tokens = NDArray[np.uint16] | NDArray[np.uint32]


@dataclass(frozen=True)
class Split:
    """``part_of[i]`` is the part of document i, or NOTHING if it is blank.

    With ``cuts``, there is one document, and validation and test begin at these characters of it.
    """

    source: Source
    part_of: NDArray[np.int8]
    cuts: tuple[int, int] | None

    def texts(self) -> Iterator[tuple[int, Document]]:
        """(part, text) in the order of the source; read each text before asking for the next."""
        for part, document in zip(self.part_of.tolist(), self.source.documents(), strict=True):
            if part == NOTHING:
                continue
            if self.cuts is None:
                yield part, document
            else:
                for piece_part, group in groupby(_cut(document, self.cuts), key=itemgetter(0)):
                    yield piece_part, map(itemgetter(1), group)

    def learning_texts(self, *, most: int | None) -> Iterator[str]:
        """What a tokenizer learns from: at most ``most`` bytes, spread over the training part; None: all text."""
        if most is None:
            yield from self._pieces(TRAIN, VAL, TEST)
        else:
            length = sum(len(text.encode("utf-8", "surrogatepass")) for text in self._pieces(TRAIN))
            yield from thinned(self._pieces(TRAIN), ceil(length / most))

    def _pieces(self, *parts: int) -> Iterator[str]:
        return (text for part, document in self.texts() if part in parts for text in pieces(document))


def split_source(source: Source, data: DataConfig, *, seed: int, least: int) -> Split:
    """Read the source once and decide the parts.

    Raises:
        UserError: if there is nothing but blanks in it; the sentence names ``least``, the characters needed.
    """
    lengths = array("q")
    for document in source.documents():
        length, blank = 0, True
        for chunk in document:
            length += len(chunk)
            blank = blank and chunk.isspace()
        lengths.append(0 if blank else length)
    counts = np.array(lengths, dtype=np.int64)
    with_text = np.flatnonzero(counts)
    if not len(with_text):
        raise UserError(f"{source.name}: there is no text in it; training needs at least {least} characters")
    total = int(counts.sum())
    if len(with_text) > 1:
        return Split(source, assign(counts, data, seed), cuts=None)
    part_of = np.where(counts, TRAIN, NOTHING).astype(np.int8)
    held_back = data.val_fraction + data.test_fraction
    # the tiny addition makes (1 − 0.9)·10 one, as it should be
    return Split(
        source,
        part_of,
        cuts=(floor((1 - held_back) * total + 1e-6), floor((1 - data.test_fraction) * total + 1e-6)),
    )


def assign(lengths: NDArray[np.int64], data: DataConfig, seed: int) -> NDArray[np.int8]:
    """Fill validation and test with random documents that fit into their share; the smallest one if none does.

    So a part that is asked for gets a document if there are enough, and never swallows a book that is most of the text.
    """
    part_of = np.where(lengths, TRAIN, NOTHING).astype(np.int8)
    order = np.random.default_rng(seed).permutation(np.flatnonzero(lengths))
    for part, fraction in ((VAL, data.val_fraction), (TEST, data.test_fraction)):
        free = order[part_of[order] == TRAIN].tolist()
        if not fraction or len(free) < 2:
            continue
        room = fraction * float(lengths.sum())
        chosen: list[int] = []
        for document in free:
            if lengths[document] <= room and len(chosen) < len(free) - 1:
                chosen.append(document)
                room -= float(lengths[document])
        part_of[chosen or [min(free, key=lengths.__getitem__)]] = part
    return part_of


def thinned(texts: Iterable[str], spacing: int) -> Iterator[str]:
    """One of each ``spacing`` texts in a row, drawn by lot: texts that take turns are all heard."""
    lots, chosen = random.Random(0), 0
    for number, text in enumerate(texts):
        if number % spacing == 0:
            chosen = number + int(spacing * lots.random())
        if number == chosen:
            yield text


def _cut(document: Document, cuts: tuple[int, int]) -> Iterator[tuple[int, str]]:
    position = 0
    for chunk in document:
        bounds = [0, *(min(max(cut - position, 0), len(chunk)) for cut in cuts), len(chunk)]
        for part in (TRAIN, VAL, TEST):
            if text := chunk[bounds[part] : bounds[part + 1]]:
                yield part, text
        position += len(chunk)


# ── lengths ────────────────────────────────────────────────────────────────────────────────────────────────────


def check_training_part(length: int, name: str, context_length: int, least: int) -> None:
    """Refuse a training part of fewer tokens than a window and its last target.

    Raises:
        UserError: naming the largest context that works or, where none does, the ``least`` characters of a text.
    """
    if length > context_length:
        return
    has = f"{name}: its training part has {length} tokens, but model.context_length = {context_length} needs "
    largest = length - 1
    if largest >= 2:
        remedy = f"the largest context that works is {largest} (--model.context-length {largest})"
    else:
        remedy = f"take a text of at least {least} characters"
    raise UserError(f"{has}{context_length + 1}; {remedy}")


def usable(tokens: Tokens, part: str, fraction: float, context_length: int, notes: list[str]) -> Tokens:
    """The part, or nothing if it has no token to predict; adds a note if it is asked for and short."""
    if not fraction or len(tokens) > context_length:
        return tokens
    if len(tokens) < 2:
        notes.append(f"{part} is off: its part of the text has no two tokens")
        return tokens[:0]
    notes.append(
        f"{part} reads one window of {len(tokens) - 1} tokens, shorter than model.context_length = {context_length}: "
        "its part of the text has no more"
    )
    return tokens
