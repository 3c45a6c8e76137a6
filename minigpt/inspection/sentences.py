"""Sentences that differ in little, read by one model: attention between words, what changes, and who can see whom.

In a causal model a word's row holds nothing of what comes after the word. So a difference between two sentences can
only be in rows that come after it, and ``sight`` says which these are.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from importlib import resources
from typing import NamedTuple

import numpy as np
import torch

from minigpt.errors import UserError
from minigpt.inspection.capture import attention_maps
from minigpt.inspection.compare import Floats
from minigpt.inspection.subject import Subject
from minigpt.inspection.words import Word, pool, words_of
from minigpt.reading import normalise_newlines
from minigpt.tokenizer import END


@dataclass(frozen=True)
class Reading:
    """What a model did with a sentence. The first word is END, as at the start of every document."""

    words: tuple[Word, ...]
    maps: Floats  # (L, H, W, W), rows sum to 1

    @property
    def texts(self) -> list[str]:
        """The words."""
        return [word.text for word in self.words]


def read(subject: Subject, sentence: str) -> Reading:
    """Read a sentence with END in front.

    Raises:
        UserError: if it is empty, longer than the context, or has characters that the tokenizer does not know.
    """
    tokens = np.concatenate([[END], subject.tokenizer.encode(normalise_newlines(sentence))]).astype(np.int64)
    if not 2 <= len(tokens) <= subject.context_length:
        raise UserError(
            f"{sentence!r}: {len(tokens) - 1} tokens; must be at least 1, and at most {subject.context_length - 1}, "
            "the model's context without the <|end|> in front"
        )
    words = words_of(tokens, subject.tokenizer)
    return Reading(
        tuple(words), pool(attention_maps(subject.model, torch.from_numpy(tokens)).astype(np.float64), words)
    )


# ── two sentences ──────────────────────────────────────────────────────────────────────────────────────────────


def aligned(first: Sequence[str], second: Sequence[str]) -> list[tuple[int, int]]:
    """Places of the words that both have, in the order of both."""
    blocks = SequenceMatcher(a=first, b=second, autojunk=False).get_matching_blocks()
    return [(block.a + step, block.b + step) for block in blocks for step in range(block.size)]


def difference(first: Floats, second: Floats, pairs: Sequence[tuple[int, int]]) -> Floats:
    """Second map minus first, over P aligned words: (..., W, W), (..., W′, W′) → (..., P, P + 1).

    The last column is all words that are not aligned; each row sums to 0.
    """
    parts = []
    for weights, places in zip((first, second), zip(*pairs, strict=True), strict=True):
        rows = weights[..., list(places), :]
        shared = rows[..., list(places)]
        rest = rows.sum(axis=-1, keepdims=True) - shared.sum(axis=-1, keepdims=True)
        parts.append(np.concatenate([shared, rest], axis=-1))
    return parts[1] - parts[0]


def total_variation(differences: Floats) -> Floats:
    """Half the sum of the absolute differences of each row, the mean over rows: (..., P, N) → (...)."""
    return np.abs(differences).sum(axis=-1).mean(axis=-1) / 2


@dataclass(frozen=True)
class Sight:
    """What the row of one word can see, for a word that both sentences have. END, seen by all rows, is not listed.

    ``meets``: later words that the other sentence does not have, each with the words whose rows see both.
    """

    word: str
    place: int
    sees: tuple[str, ...]
    cannot_see: tuple[str, ...]
    meets: tuple[tuple[str, tuple[str, ...]], ...]

    @property
    def told(self) -> str:
        """The same in words."""
        seen = ", ".join(self.sees)
        if not self.cannot_see:
            return f'the row of "{self.word}" sees the whole sentence'
        told = f'the row of "{self.word}" sees only: {seen}; it cannot see: {", ".join(self.cannot_see)}'
        both = [f'"{other}" ({" to ".join(dict.fromkeys((rows[0], rows[-1])))})' for other, rows in self.meets]
        return f"{told}. Later rows see it together with {', '.join(both)}" if both else told


def sight(words: Sequence[str], others: Sequence[str]) -> list[Sight]:
    """For each word of a sentence (END first) that the other sentence has too: what its row sees."""
    return [
        Sight(
            word=word,
            place=place,
            sees=tuple(words[1 : place + 1]),
            cannot_see=tuple(words[place + 1 :]),
            meets=tuple(
                (words[later], tuple(words[later:]))
                for later in range(place + 1, len(words))
                if words[later] not in others
            ),
        )
        for place, word in enumerate(words)
        if place and word in others
    ]


def common_start(first: Sequence[str], second: Sequence[str]) -> int:
    """So many words, END included, are the same from the start; so are their rows."""
    pairs = zip(first, second, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


# ── a published row ────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class ReferenceRow:
    """One row of attention as published: what the query word receives from each of the words."""

    name: str
    words: tuple[str, ...]
    query: str
    weights: Floats  # (n,)


class Null(NamedTuple):
    """A row that prefers nothing: how near to the published one it is all the same."""

    weights: Floats  # (n,)
    distance: float
    order: float


@dataclass(frozen=True)
class RowComparison:
    """A model's rows beside a published one. ``order``: share of word pairs in its order, ties counting half.

    Of equal tokens, words of many receive more; so do those of a head that has learned nothing.
    """

    rows: Floats  # (L, H, n), each renormalised to sum to 1
    removed: Floats  # (L, H): mass on other places, removed before
    distance: Floats  # (L, H): total variation
    order: Floats  # (L, H)
    equal_words: Null
    equal_tokens: Null


def reference_rows() -> list[ReferenceRow]:
    """The published rows among the worked examples."""
    text = (resources.files("minigpt.inspection") / "examples.json").read_text(encoding="utf-8")
    return [
        ReferenceRow(row["name"], tuple(row["tokens"]), row["query"], np.array(row["weights"]))
        for row in json.loads(text)["reference_rows"]
    ]


def compare_row(subject: Subject, reference: ReferenceRow) -> RowComparison:
    """Give the words twice and take the query's row in the second copy, over the first copy alone.

    There it sees every word once, as in the published row; over its own copy it would see no word after itself.

    Raises:
        UserError: if the text has other words here, or they do not fit the context twice.
    """
    reading = read(subject, " ".join(reference.words * 2))
    count = len(reference.words)
    if reading.texts[1:] != [*reference.words, *reference.words]:
        raise UserError(
            f"{reference.name}: the text made of its words is parted into other words, so its row has no counterpart"
        )
    row = reading.maps[..., 1 + count + reference.words.index(reference.query), 1 : 1 + count]
    kept = row.sum(axis=-1)
    rows = row / kept[..., None]
    tokens = np.array([word.end - word.start for word in reading.words[1 : 1 + count]])

    def null(weights: Floats) -> Null:
        return Null(weights, float(_distance(weights, reference)), float(same_order(weights, reference.weights)))

    return RowComparison(
        rows=rows,
        removed=1 - kept,
        distance=_distance(rows, reference),
        order=same_order(rows, reference.weights),
        equal_words=null(np.full(count, 1 / count)),
        equal_tokens=null(tokens / tokens.sum()),
    )


def _distance(rows: Floats, reference: ReferenceRow) -> Floats:
    """Total variation: (..., n) → (...)."""
    return np.abs(rows - reference.weights).sum(axis=-1) / 2


def same_order(rows: Floats, weights: Floats) -> Floats:
    """Share of the pairs of places whose order is that of ``weights`` (n,), ties counting half: (..., n) → (...)."""
    first, second = np.triu_indices(len(weights), 1)
    ours, theirs = (np.sign(part[..., first] - part[..., second]) for part in (rows, weights))
    return (1 + (ours * theirs).mean(axis=-1)) / 2
