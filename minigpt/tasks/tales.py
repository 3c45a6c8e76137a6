"""Tales: short stories from a seeded grammar, in which many words are fixed by words 5 to 40 words earlier.

The default corpus. Every story tells its links: which word is determined, by which earlier word, of which kind.
A tenth of the word combinations behind determined words never occurs in the corpus, so that a model can be judged on
combinations it has not seen (`held_out_stories`, `guesses`). Grammar and words are data: ``tales_english.toml``.
"""

import hashlib
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from minigpt.tasks.grammar import (
    WORD,
    Entry,
    Fact,
    Grammar,
    Key,
    Slot,
    Template,
    Text,
    capitalized,
    owned,
    read_grammar,
    sentences,
)

__all__ = [
    "KINDS", "Determined", "Link", "Span", "Story",
    "corpus", "guesses", "held_out_stories", "is_held_out", "recognise", "sentences", "stories",
]  # fmt: skip

KINDS = ("name", "pronoun", "colour", "object", "number", "quote", "time", "sense")

CORPUS_SHA256 = "eda5d25c05114cc50a94946df72887e8dd19bad4ce26894ea388a78755e9191c"
"""Of the stories that ``corpus()`` tells, joined by newlines: the tests compare it, and token files are kept by it."""

NEAREST, FARTHEST = 5, 40  # words between a determined word and its cause
HELD_OUT_SHARE = 10  # one combination in so many is held out
_TRIES = 50  # draws before a held-out combination is given up


@dataclass(frozen=True, slots=True)
class Span:
    """Characters ``start`` to ``end`` (excluded) of a story's text."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Link:
    """``source`` is determined by ``target``, an earlier word of the same story."""

    source: Span
    target: Span
    kind: str


@dataclass(frozen=True, slots=True)
class Determined:
    """A word that a perfect reader of the text before it knows.

    ``candidates`` are the words of its class; ``combination`` the words a learner must have seen apart but, when
    ``held_out``, has never seen together.
    """

    span: Span
    kind: str
    candidates: frozenset[str]
    combination: tuple[str, ...]
    held_out: bool


@dataclass(frozen=True, slots=True)
class Story:
    """One document. ``links[i]`` is the link of ``determined[i]``; ``held_out``: some combination is."""

    text: str
    links: tuple[Link, ...]
    determined: tuple[Determined, ...]
    combinations: tuple[tuple[str, ...], ...]
    held_out: bool


def is_held_out(combination: Sequence[str]) -> bool:
    """Is this combination of words kept from training? A hash decides, so nothing need be stored."""
    digest = hashlib.sha256(" ".join(combination).encode("ascii")).digest()
    return int.from_bytes(digest[:4], "big") % HELD_OUT_SHARE == 0


def stories(seed: int = 0, *, held_out: bool | None = False, language: str = "english") -> Iterator[Story]:
    """Endless stories; the same seed tells the same ones on every Python.

    held_out: False draws no held-out combination, True as many as possible (nearly all), None whatever comes.
    """
    grammar, uniform = _grammar(language), random.Random(seed).random
    while True:
        teller = _Teller(grammar, uniform, held_out)
        story = teller.tell()
        if teller.words <= grammar.longest:
            yield story


def corpus(seed: int = 0, size: int = 2_000_000, *, language: str = "english") -> list[str]:
    """The fewest stories without held-out combinations that have ``size`` bytes together."""
    texts: list[str] = []
    for story in stories(seed, language=language):
        if size <= 0:
            break
        texts.append(story.text)
        size -= len(story.text.encode("utf-8"))
    return texts


def held_out_stories(seed: int, count: int, *, language: str = "english") -> list[Story]:
    """``count`` stories to judge by: judge the determined words that are ``held_out``."""
    drawn = stories(seed, held_out=True, language=language)
    return list(itertools.islice((story for story in drawn if story.held_out), count))


def recognise(sentence: str, *, language: str = "english") -> bool:
    """Can the grammar make this single sentence, agreement inside it included?"""
    return _grammar(language).accepts(sentence)


@dataclass(frozen=True, slots=True)
class Guess:
    """Accuracy of two guesses that read nothing, and the number of words they were tried on."""

    commonest: float  # always the commonest word of the kind
    last: float  # the last word of the same class before
    count: int


def guesses(judged: Sequence[Story]) -> dict[str, Guess]:
    """Both guesses on the held-out determined words, for each kind and "overall".

    The commonest word is taken from the judged words themselves, which favours the guess.
    """
    words: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    hits: Counter[str] = Counter()
    for story in judged:
        for item in story.determined:
            if item.held_out:
                word = story.text[item.span.start : item.span.end]
                words[item.kind][word] += 1
                before = (match[0] for match in WORD.finditer(story.text[: item.span.start]))
                hits[item.kind] += [seen for seen in before if seen in item.candidates][-1:] == [word]
    common = {kind: max(counted.values(), default=0) for kind, counted in words.items()}
    count = {kind: counted.total() for kind, counted in words.items()}
    table = {
        kind: Guess(common[kind] / count[kind], hits[kind] / count[kind], count[kind]) for kind in KINDS if count[kind]
    }
    total = sum(count.values())
    return table | {"overall": Guess(sum(common.values()) / total, hits.total() / total, total)} if total else {}


# ── telling ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _grammar(language: str) -> Grammar:
    return read_grammar(Path(__file__).with_name(f"tales_{language}.toml"))


@dataclass(frozen=True, slots=True)
class _Mention:
    span: Span
    word_index: int
    anchor: bool


class _Teller:
    """Writes one story: draws words when they are first needed and remembers where they were mentioned."""

    def __init__(self, grammar: Grammar, uniform: Callable[[], float], held_out: bool | None) -> None:
        self.grammar, self.uniform, self.held_out = grammar, uniform, held_out
        self.pieces: list[str] = []
        self.length = self.words = 0
        self.owner: dict[str, str] = {}  # letter in a sentence → owner in this scene
        self.variant: dict[str, int] = {}
        self.values: dict[Key, Entry] = {}  # (owner, field) → what was drawn
        self.mentions: dict[Key, list[_Mention]] = {}
        self.combinations: dict[Fact, tuple[str, ...]] = {}
        self.links: list[Link] = []
        self.determined: list[Determined] = []
        for pair in grammar.pairs:
            first, second = pair.owners
            self.variant[first] = self._below(2)
            self.variant[second] = 1 - self.variant[first] if pair.opposite else self._below(2)
            self.owner |= {first: first, second: second}

    def tell(self) -> Story:
        """The story, whole."""
        for part, count in self.grammar.plot.items():
            scenes = self.grammar.scenes[part]
            chosen: set[int] = set()
            while len(chosen) < count:
                chosen.add(self._below(len(scenes)))
            for index in sorted(chosen):
                self._swap_asked()
                for step in scenes[index]:
                    if self.length:
                        self._put(" ", 0)
                    self._write(step[self._below(len(step))])
        combinations = tuple(self.combinations.values())
        held_out = any(is_held_out(words) for words in combinations)
        return Story("".join(self.pieces), tuple(self.links), tuple(self.determined), combinations, held_out)

    def _below(self, count: int) -> int:
        return int(self.uniform() * count)

    def _swap_asked(self) -> None:
        """Draw anew, for each pair, which of the two is asked first."""
        for pair in self.grammar.pairs:
            first, second = pair.owners if self.uniform() < pair.first else reversed(pair.owners)
            self.owner |= dict(zip(pair.asked, (first, second), strict=False))

    def _put(self, text: str, words: int) -> Span:
        self.pieces.append(text)
        start = self.length
        self.length += len(text)
        self.words += words
        return Span(start, self.length)

    def _write(self, template: Template) -> None:
        for part in template:
            if isinstance(part, Text):
                self._put(part.text, part.words)
            else:
                self._fill(part)

    def _fill(self, slot: Slot) -> None:
        owner = self.owner.get(slot.owner, "")
        table = self.grammar.tables[slot.field]
        entry = self._value(owner, slot.field) if owner else self._draw(table.entries, squarings=2)
        form = entry[self.variant.get(owner, 0)]
        if not isinstance(form, str):
            self._write(owned(form, slot))
            return
        if slot.article:
            article = self.grammar.article(form)
            self._put(capitalized(article) if slot.capital else article, 1)
        elif slot.capital:
            form = capitalized(form)
        word_index = self.words
        span = self._put(form, 1)
        if owner:
            if slot.kind:
                self._determine(slot, owner, span, word_index)
            self.mentions.setdefault((owner, slot.field), []).append(_Mention(span, word_index, slot.anchor))

    def _determine(self, slot: Slot, owner: str, span: Span, word_index: int) -> None:
        """Note a determined word, if its cause is neither too near nor too far."""
        causes = [
            mention
            for mention in self.mentions.get((owner, slot.cause), ())
            if mention.anchor or slot.cause != slot.field
        ]
        if not causes or not NEAREST <= word_index - causes[-1].word_index <= FARTHEST:
            return
        words = self.combinations[self.grammar.facts[owner, slot.field]]
        candidates = self.grammar.tables[slot.field].words
        self.links.append(Link(span, causes[-1].span, slot.kind))
        self.determined.append(Determined(span, slot.kind, candidates, words, is_held_out(words)))

    # ── drawing ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _draw(self, entries: tuple[Entry, ...], *, squarings: int) -> Entry:
        """An entry: each squaring of the random number makes the first ones likelier, the last ones rarer.

        Products of floats are the same everywhere; ``**`` is left to each system's C library.
        """
        number = self.uniform()
        for _ in range(squarings):
            number *= number
        return entries[int(number * len(entries))]

    def _value(self, owner: str, field: str) -> Entry:
        """The owner's word for a field: drawn when first asked for."""
        if (owner, field) not in self.values:
            self._settle((owner, field))
        return self.values[owner, field]

    def _settle(self, key: Key) -> None:
        """Draw until the word differs from the partner's and stands in allowed combinations only."""
        owner, field = key
        table = self.grammar.tables[field]
        chooser = (owner, table.by)
        implied = bool(table.by) and chooser not in self.values
        partner = (self.grammar.partner[owner], field)
        for tries in itertools.count(1):
            if table.by:
                if implied:  # nobody has read it yet, so it may still change
                    self.values.pop(chooser, None)
                entries = table.parts[str(self._value(*chooser)[0])].entries
            else:
                entries = table.entries
            entry = self._draw(entries, squarings=0 if table.by else 1)
            if self.grammar.clash(owner, entries, entry, self.values.get(partner)):
                continue
            self.values[key] = entry
            facts = {
                fact: tuple(str(self.values[part][self.variant[part[0]]]) for part in fact)
                for fact in self.grammar.facts_with.get(key, ())
                if all(part in self.values for part in fact)
            }
            if (
                self.held_out is None
                or (self.held_out and tries >= _TRIES)
                or all(is_held_out(words) == self.held_out for words in facts.values())
            ):
                self.combinations |= facts
                return
            del self.values[key]
