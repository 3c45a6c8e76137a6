"""Fixed attention patterns that heads are held against: pure functions of the tokens.

A pattern says, for each row (the query), how the weight is shared among the keys up to it. Rows it has nothing to say
about are left out, never counted against a head. Row 0 is left out by every pattern: it has one key, so that all
heads agree there with everything.
"""

import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from minigpt.config import nearest
from minigpt.errors import UserError

BRACKETS = {")": "(", "]": "[", "}": "{", "）": "（", "］": "［", "」": "「", "』": "『", "】": "【", "》": "《"}
NAMES = (
    "uniform", "previous", "first", "self", "window:W", "duplicate", "induction", "punctuation", "brackets",
)  # fmt: skip

HEAVIEST = 1e100  # weight in a file: the sum of a row of them is still a number
LONGEST = 10**9  # tokens: wider windows and later rows are mistakes

LINKS = "links"

Tokens = NDArray[np.integer[Any]]
Link = tuple[int, Sequence[int]]
"""A query row and the keys it should move information from."""


@dataclass(frozen=True)
class Pattern:
    """Where a head should move information from."""

    weights: NDArray[np.float32]  # (T, T), causal; defined rows sum to 1, the others are 0
    defined: NDArray[np.bool_]  # (T,)


@dataclass(frozen=True)
class Reference:
    """A named pattern, to be drawn for any text."""

    name: str
    pattern: Callable[[Tokens], Pattern]
    """Tokens (T,) → the pattern on them."""
    reads_tokens: bool = False
    """Whether it depends on which tokens there are, and not only on how many."""


class Vocabulary(Protocol):
    """What is asked of a tokenizer here."""

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one id."""
        ...


def parse_reference(text: str, tokenizer: Vocabulary | None) -> Reference:
    """A reference from how it is written on the command line: one of ``NAMES``, or the path of a JSON file.

    Args:
        text: for example ``previous``, ``window:4`` (the four tokens up to the row's own), ``my.json``.
        tokenizer: tells the tokens' text, which punctuation and brackets ask for.

    Raises:
        UserError: for an unknown name, a wrong width, a file that holds no pattern, or a text that isn't known.
    """
    if text.lower().endswith(".json"):
        return read_reference(Path(text))
    if text in _BY_POSITION:
        return Reference(text, _BY_POSITION[text])
    name, colon, width = text.partition(":")
    if name == "window" and colon:
        if not re.fullmatch("0*[1-9][0-9]{0,8}", width):
            raise UserError(f"{text}: the width of a window is a whole number from 1 to {LONGEST - 1}, as in window:4")
        return Reference(f"window:{int(width)}", lambda tokens: window(tokens, int(width)))
    if text in _BY_IDENTITY:
        return Reference(text, _BY_IDENTITY[text], reads_tokens=True)
    if text in _BY_TEXT:
        if tokenizer is None:
            raise UserError(f"{text}: needs the tokens' text; give it by --tokens FILE")
        draw = _BY_TEXT[text]
        return Reference(text, lambda tokens: draw(tokens, tokenizer), reads_tokens=True)
    if text == LINKS:
        raise UserError(f"{LINKS}: known of the tales alone; use heads RUN --ref {LINKS}, without --maps")
    raise UserError(f"{text}: no such reference{nearest(text, [*NAMES, 'FILE.json'])}")


# ── by position ────────────────────────────────────────────────────────────────────────────────────────────────


def uniform(tokens: Tokens) -> Pattern:
    """The same weight for all keys up to the row's own."""
    return _shared(np.tri(len(tokens), dtype=bool))


def previous(tokens: Tokens) -> Pattern:
    """The token before."""
    return _shared(np.eye(len(tokens), k=-1, dtype=bool))


def first(tokens: Tokens) -> Pattern:
    """The first token."""
    support = np.zeros((len(tokens), len(tokens)), dtype=bool)
    support[:, :1] = True
    return _shared(support)


def itself(tokens: Tokens) -> Pattern:
    """The row's own token."""
    return _shared(np.eye(len(tokens), dtype=bool))


def window(tokens: Tokens, width: int) -> Pattern:
    """The last ``width`` tokens, the row's own among them, alike; fewer where the text begins."""
    inside = np.tri(len(tokens), dtype=bool)
    return _shared(inside & ~np.tri(len(tokens), k=-width, dtype=bool))


# ── by content ─────────────────────────────────────────────────────────────────────────────────────────────────


def duplicate(tokens: Tokens) -> Pattern:
    """All earlier places of the row's own token alike; rows whose token is new are not defined."""
    return _shared(np.tril(tokens[:, None] == tokens, k=-1))


def induction(tokens: Tokens) -> Pattern:
    """All tokens that followed an earlier place of the row's own token, alike (Olsson et al. 2022, prefix matching).

    Rows whose token is new are not defined. After a token said twice in a row the follower is the row itself.
    """
    support = np.zeros((len(tokens), len(tokens)), dtype=bool)
    support[:, 1:] = np.tril(tokens[:, None] == tokens, k=-1)[:, :-1]
    return _shared(support)


def punctuation(tokens: Tokens, tokenizer: Vocabulary) -> Pattern:
    """All tokens so far that are nothing but punctuation (and space), alike; rows before the first are not defined."""
    marks = np.array([_is_punctuation(text) for text in _texts(tokens, tokenizer)], dtype=bool)
    return _shared(np.tri(len(tokens), dtype=bool) & marks)


def brackets(tokens: Tokens, tokenizer: Vocabulary) -> Pattern:
    """The innermost bracket still open once the row's token is read: the one that the next closing one must match.

    Rows where none is open are not defined; closing brackets that match nothing are passed over.
    """
    support = np.zeros((len(tokens), len(tokens)), dtype=bool)
    still_open: list[tuple[str, int]] = []
    for i, text in enumerate(_texts(tokens, tokenizer)):
        for character in text:
            if character in _OPENING:
                still_open.append((character, i))
            elif still_open and BRACKETS.get(character) == still_open[-1][0]:
                still_open.pop()
        if still_open:
            support[i, still_open[-1][1]] = True
    return _shared(support)


_OPENING = frozenset(BRACKETS.values())
_BY_POSITION = {"uniform": uniform, "previous": previous, "first": first, "self": itself}
_BY_IDENTITY = {"duplicate": duplicate, "induction": induction}
_BY_TEXT = {"punctuation": punctuation, "brackets": brackets}


# ── by hand ────────────────────────────────────────────────────────────────────────────────────────────────────


def links_reference(links: Iterable[Link], name: str = LINKS) -> Reference:
    """Rows with known links: each moves information from its keys alike; keys of links that share a row add up."""
    return _pairs_reference(name, [(query, key, 1.0) for query, keys in links for key in keys])


def read_reference(path: Path) -> Reference:
    """A pattern written by hand: a T × T matrix, or a list of pairs ``[query, key]`` or ``[query, key, weight]``.

    Either may be named, ``{"matrix": ...}`` or ``{"pairs": ...}``. Weights tell the shares within a row, which need
    not sum to 1; a row without any is not defined.

    Raises:
        UserError: if the file can't be read, or holds neither or something that could be both; and, when drawn, for a
            text of another length than the matrix's or without the rows of the pairs.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not a valid JSON file ({error})") from None
    kinds = {"matrix": _is_matrix, "pairs": _is_pairs}
    if isinstance(content, dict) and len(content) == 1 and next(iter(content)) in kinds:
        found = [kind for kind, value in content.items() if kinds[kind](value)]
        content = next(iter(content.values()))
    else:
        found = [kind for kind, fits in kinds.items() if fits(content)]
    if len(found) > 1:
        raise UserError(f'{path}: could be a matrix or pairs; name it, {{"matrix": ...}} or {{"pairs": ...}}')
    if not found:
        raise UserError(
            f"{path}: must be a T x T matrix of weights, 0 above the diagonal, or a list of pairs [query, key] or "
            f"[query, key, weight] with whole numbers, key <= query < {LONGEST:g}, and 0 < weight <= {HEAVIEST:g}"
        )
    if found == ["pairs"]:
        return _pairs_reference(str(path), [(pair[0], pair[1], (*pair, 1.0)[2]) for pair in content])
    matrix = np.array(content, dtype=np.float64)

    def draw(tokens: Tokens) -> Pattern:
        if len(tokens) != len(matrix):
            size = f"{len(matrix)} x {len(matrix)}"
            raise UserError(f"{path}: is {size}, but {len(tokens)} tokens are read; see --length")
        return _shared(matrix)

    return Reference(str(path), draw)


def _pairs_reference(name: str, pairs: Sequence[tuple[int, int, float]]) -> Reference:
    def draw(tokens: Tokens) -> Pattern:
        weights = np.zeros((len(tokens), len(tokens)))
        for query, key, weight in pairs:
            if query >= len(tokens):
                raise UserError(f"{name}: row {query} is beyond the {len(tokens)} tokens that are read")
            assert 0 <= key <= query, (name, query, key)
            weights[query, key] += weight
        return _shared(weights)

    return Reference(name, draw)


def _is_matrix(content: Any) -> bool:
    if not isinstance(content, list) or not content:
        return False
    if not all(isinstance(row, list) and len(row) == len(content) and all(map(_is_share, row)) for row in content):
        return False
    return not np.triu(np.array(content, dtype=np.float64), 1).any()


def _is_pairs(content: Any) -> bool:
    return isinstance(content, list) and bool(content) and all(map(_is_pair, content))


def _is_pair(pair: Any) -> bool:
    if not isinstance(pair, list) or len(pair) not in (2, 3) or not all(type(place) is int for place in pair[:2]):
        return False
    return 0 <= pair[1] <= pair[0] < LONGEST and all(_is_share(weight) and weight > 0 for weight in pair[2:])


def _is_share(weight: Any) -> bool:
    return type(weight) in (int, float) and 0 <= weight <= HEAVIEST


# ── small parts ────────────────────────────────────────────────────────────────────────────────────────────────


def _shared(weights: NDArray[Any]) -> Pattern:
    """Rows of shares → rows that sum to 1; row 0 and rows without a share are not defined."""
    shares = weights.astype(np.float64)
    shares[:1] = 0
    totals = shares.sum(axis=-1, keepdims=True)
    return Pattern((shares / np.where(totals, totals, 1)).astype(np.float32), totals[:, 0] > 0)


def _texts(tokens: Tokens, tokenizer: Vocabulary) -> list[str]:
    """Each token's text; pieces of a character longer than a byte become U+FFFD, which is no punctuation."""
    return [tokenizer.token_bytes(int(token)).decode("utf-8", errors="replace") for token in tokens]


def _is_punctuation(text: str) -> bool:
    marks = text.strip()
    return bool(marks) and all(unicodedata.category(character).startswith("P") for character in marks)
