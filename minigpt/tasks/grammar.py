"""A grammar read from a TOML file: word tables, sentences with slots, and who shares which words.

The notation is explained at the top of ``tales_english.toml``. This module knows no language: it parses the file
(`Grammar`) and tells which sentences it can make (`Grammar.accepts`) and how a started one may go on
(`Grammar.expected`). Telling stories from it is the work of ``tales.py``.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

WORD = re.compile(r"[A-Za-z]+")
_SENTENCE = re.compile(r'\S.*?[.!?]"?(?=\s+["A-Z]|\s*$)', re.DOTALL)
_SLOT = re.compile(
    r"\{(?:(?P<owner>\w?)(?P<dot>\.))?(?P<field>\w+)(?P<anchor>\^)?(?:!(?P<kind>\w+))?(?:<(?P<cause>\w+))?\}"
)


@dataclass(frozen=True, slots=True)
class Text:
    """Letters that always stand there."""

    text: str
    words: int  # number of words in them


@dataclass(frozen=True, slots=True)
class Slot:
    """A place for a word or phrase of the table ``field``."""

    owner: str  # "" draws a free word; "." is the owner of the phrase around the slot
    field: str
    kind: str = ""  # of a determined word
    cause: str = ""  # the owner's field whose mention fixes the word
    anchor: bool = False  # later words point to this mention
    capital: bool = False
    article: bool = False


Key = tuple[str, str]  # owner, field
Fact = tuple[Key, ...]
Template = tuple[Text | Slot, ...]
Form = str | Template  # a single word, or a phrase
Entry = tuple[Form, Form]  # the forms of the two variants


@dataclass(frozen=True, slots=True)
class Table:
    """Words and phrases a slot chooses from; with ``by``, one table for each word of that other field."""

    entries: tuple[Entry, ...] = ()
    words: frozenset[str] = frozenset()  # all forms that are single words
    places: Mapping[str, tuple[tuple[Entry, int], ...]] = field(default_factory=dict)  # word → (entry, variant)s
    by: str = ""
    parts: Mapping[str, "Table"] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Pair:
    """Two owners that share no word and, if ``opposite``, no variant; ``asked`` names them in the order asked."""

    owners: str
    opposite: bool
    asked: str
    first: float  # probability that the first owner is asked first


class Grammar:
    """The content of one grammar file, parsed."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self._mark: str = data["article"]["mark"]
        self.articles: list[str] = data["article"]["forms"]
        self._second_before = re.compile(data["article"]["second_before"])
        self.pairs = [Pair(**pair) for pair in data["pairs"]]
        self.partner = {
            one: other
            for pair in self.pairs
            for letters in (pair.owners, pair.asked)
            for one, other in zip(letters, reversed(letters), strict=True)
        }
        self.opposite = {owner for pair in self.pairs if pair.opposite for owner in pair.owners + pair.asked}
        self.facts: dict[Key, Fact] = {}  # determined (owner, field) → what it is judged by
        self.facts_with: dict[Key, list[Fact]] = {}
        for owner in "".join(pair.owners for pair in self.pairs):
            for determined, names in data["facts"].items():
                fact = tuple((who or owner, name) for who, _, name in (name.rpartition(".") for name in names))
                self.facts[owner, determined] = fact
                for key in fact:
                    facts = self.facts_with.setdefault(key, [])
                    facts += [fact] * (fact not in facts)
        self.longest: int = data["longest"]
        self.plot: dict[str, int] = data["plot"]
        self.tables = {name: self._table(source) for name, source in data["tables"].items()}
        self.scenes = {
            part: [
                [[self.parse(line, sentence=True) for line in step] for step in scene["steps"]]
                for scene in data["scenes"]
                if scene["part"] == part
            ]
            for part in self.plot
        }

    def article(self, word: str) -> str:
        """The indefinite article that ``word`` takes, with its space."""
        return self.articles[bool(self._second_before.match(word))]

    def clash(self, owner: str, entries: Sequence[Entry], entry: Entry, partners: Entry | None) -> bool:
        """Would the two owners of a pair use the same word, where there are others?"""
        same_form = entry[0] == entry[1] or owner not in self.opposite
        return entry == partners and same_form and len(entries) > 1

    def accepts(self, sentence: str) -> bool:
        """Can the grammar make this sentence? Agreement and repeated words inside it included."""
        reader = _Reader(self, sentence)
        return any(end == len(sentence) for template in self.sentence_templates() for end in reader.read(template))

    def expected(self, start: str) -> set[Text | Slot]:
        """What may follow the start of a sentence: slots, and what is left of fixed texts."""
        reader = _Reader(self, start)
        for template in self.sentence_templates():
            for _ in reader.read(template):
                pass
        return reader.follow

    def sentence_templates(self) -> Iterator[Template]:
        """Every sentence of the grammar."""
        return (line for scenes in self.scenes.values() for scene in scenes for step in scene for line in step)

    def parse(self, line: str, *, sentence: bool = False) -> Template:
        """The texts and slots of a sentence or phrase; slots that open a sentence or a quotation get a capital."""
        parts: list[Text | Slot] = []
        end = 0
        for match in _SLOT.finditer(line):
            before = line[end : match.start()]
            opens = (sentence and end == 0 and before.lower() in ("", self._mark)) or before.endswith('"')
            article = before.lower().endswith(self._mark)
            if article:
                before = before[: -len(self._mark)]
            if before:
                parts.append(Text(before, len(WORD.findall(before))))
            name, kind, cause = match["field"], match["kind"] or "", match["cause"]
            anchor = bool(match["anchor"] or (kind and not cause))
            owner = match["owner"] or match["dot"] or ""
            parts.append(Slot(owner, name, kind, cause or name, anchor, opens, article))
            end = match.end()
        if line[end:]:
            parts.append(Text(line[end:], len(WORD.findall(line[end:]))))
        return tuple(parts)

    def _table(self, source: str | list[str] | Mapping[str, Any]) -> Table:
        if isinstance(source, Mapping):
            parts = {word: self._table(entries) for word, entries in source.items() if word != "by"}
            words = frozenset(word for part in parts.values() for word in part.words)
            return Table(words=words, by=source["by"], parts=parts)
        entries: list[Entry] = []
        places: dict[str, list[tuple[Entry, int]]] = {}
        for line in source.split() if isinstance(source, str) else source:
            one, _, two = line.partition("/")
            if " " in line:
                entries.append((self.parse(one), self.parse(two or one)))
                continue
            entries.append((one, two or one))
            for variant, word in enumerate((one, two or one)):
                places.setdefault(word, []).append((entries[-1], variant))
        return Table(tuple(entries), frozenset(places), {word: tuple(found) for word, found in places.items()})


@cache
def owned(phrase: Template, slot: Slot) -> Template:
    """A phrase standing in a slot: its "." fields belong to the slot's owner and share its marks."""
    return tuple(
        replace(part, owner=slot.owner, kind=slot.kind, anchor=slot.anchor)
        if isinstance(part, Slot) and part.owner == "."
        else part
        for part in phrase
    )


def capitalized(word: str) -> str:
    """The word with a capital first letter, the rest as it is."""
    return word[:1].upper() + word[1:]


# What a sentence read so far has fixed: the variant of an owner, the entry of an owner's field.
_Bound = Mapping[str | tuple[str, str], Any]


class _Reader:
    """Reads one text by templates, trying all ways; ``follow`` gathers what may stand where the text ends."""

    def __init__(self, grammar: Grammar, text: str) -> None:
        self.grammar, self.text = grammar, text
        self.follow: set[Text | Slot] = set()

    def read(self, template: Template) -> Iterator[int]:
        """Ends of all readings of a sentence template."""
        return (end for end, _ in self._rest(template, 0, {}))

    def _rest(self, template: Template, position: int, bound: _Bound) -> Iterator[tuple[int, _Bound]]:
        if not template:
            yield position, bound
            return
        head, rest = template[0], template[1:]
        if isinstance(head, Slot):
            if self.text[position:] in ("", *(self.grammar.articles if head.article else ())):
                self.follow.add(head)
            for end, now_bound in self._slot(head, position, bound):
                yield from self._rest(rest, end, now_bound)
        elif self.text.startswith(head.text, position):
            yield from self._rest(rest, position + len(head.text), bound)
        elif head.text.startswith(self.text[position:]):
            self.follow.add(Text(head.text[len(self.text) - position :], 0))

    def _slot(self, slot: Slot, position: int, bound: _Bound) -> Iterator[tuple[int, _Bound]]:
        table = self.grammar.tables[slot.field]
        if not table.by:
            yield from self._entries(slot, table, position, bound)
            return
        chooser = (slot.owner, table.by)
        for entry in [bound[chooser]] if chooser in bound else self.grammar.tables[table.by].entries:
            yield from self._entries(slot, table.parts[str(entry[0])], position, {**bound, chooser: entry})

    def _entries(self, slot: Slot, table: Table, position: int, bound: _Bound) -> Iterator[tuple[int, _Bound]]:
        for entry in table.entries:
            for variant, phrase in enumerate(entry[: 1 if entry[0] == entry[1] else 2]):
                if not isinstance(phrase, tuple):
                    continue
                if (now_bound := self._bind(slot, table, entry, bound, variant)) is not None:
                    yield from self._rest(owned(phrase, slot), position, now_bound)
        for spelled, end in self._words(slot, position):
            for entry, variant in table.places.get(spelled, ()):
                if (now_bound := self._bind(slot, table, entry, bound, variant)) is not None:
                    yield end, now_bound

    def _words(self, slot: Slot, position: int) -> Iterator[tuple[str, int]]:
        """The word that stands at ``position``, as the table may spell it, and its end."""
        for article in self.grammar.articles if slot.article else [""]:
            start = capitalized(article) if slot.capital else article
            match = WORD.match(self.text, position + len(start))
            if match is None or not self.text.startswith(start, position):
                continue
            word = match[0]
            if article and self.grammar.article(word) == article:
                yield word, match.end()
            elif not article and (word == capitalized(word) or not slot.capital):
                yield word, match.end()
                if slot.capital:
                    yield word[0].lower() + word[1:], match.end()

    def _bind(self, slot: Slot, table: Table, entry: Entry, bound: _Bound, variant: int = 0) -> _Bound | None:
        """The bindings with this entry in the slot, or None if they contradict it."""
        if not slot.owner:
            return bound
        owner, key = slot.owner, (slot.owner, slot.field)
        partner = self.grammar.partner[owner]
        if bound.get(key, entry) != entry or self.grammar.clash(
            owner, table.entries, entry, bound.get((partner, slot.field))
        ):
            return None
        if entry[0] == entry[1]:
            return {**bound, key: entry}
        if bound.get(owner, variant) != variant:
            return None
        partners = {partner: 1 - variant} if owner in self.grammar.opposite else {}
        return {**bound, key: entry, owner: variant, **partners}


def sentences(text: str) -> list[str]:
    """The sentences of a text, quotations kept with theirs; an unfinished last one is left out."""
    return _SENTENCE.findall(text)


@cache
def read_grammar(path: Path) -> Grammar:
    """The grammar of one file, parsed once."""
    return Grammar(tomllib.loads(path.read_text(encoding="utf-8")))
