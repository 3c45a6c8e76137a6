"""Words of a tokenized text, and attention between words: sums and means over their tokens. No torch.

Pooling is that of Clark et al. 2019 (arXiv:1906.04341, section 4.1): what is moved *from* a word is the sum over its
tokens, what goes *to* a word is the mean over its tokens' rows. Rows that sum to 1 still do.
"""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from minigpt.tokenizer import END, Tokenizer

END_WORD = "<|end|>"

# Letters and digits, held together by an apostrophe; else a run of other signs. Chinese characters and kana, written
# without spaces, are words one by one.
_UNSPACED = r"\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+(?:['’]\w+)*|[^\w\s]+")


class Word(NamedTuple):
    """Tokens ``start`` to ``end`` (excluded), and their text without the space around it."""

    text: str
    start: int
    end: int


def words_of(tokens: Sequence[int] | NDArray[Any], tokenizer: Tokenizer) -> list[Word]:
    """The tokens (T,) in groups, each of them whole words: the space before a word belongs to it, END stands alone.

    A token that reaches over the border of two words joins them into one group.
    """
    spans = byte_spans(tokens, tokenizer)
    text = b"".join(tokenizer.token_bytes(int(token)) for token in tokens).decode("utf-8", "surrogateescape")
    starts = {0, *(end for _, end in word_bytes(text)[:-1])}  # where a word or the space before it starts
    beginnings = [
        place
        for place, (token, (start, end)) in enumerate(zip(tokens, spans.tolist(), strict=True))
        if place == 0 or token == END or tokens[place - 1] == END or (start in starts and start < end)
    ]
    groups = zip(beginnings, [*beginnings[1:], len(tokens)], strict=True) if len(tokens) else ()
    return [Word(_text_of(tokens[start:end], tokenizer), start, end) for start, end in groups]


def word_bytes(text: str) -> list[tuple[int, int]]:
    """First byte and the byte after the last, in UTF-8, of each word of a text."""
    return [(byte_place(text, match.start()), byte_place(text, match.end())) for match in _WORD.finditer(text)]


def byte_place(text: str, character: int) -> int:
    """The byte, in UTF-8, at which a character of the text starts."""
    return len(text[:character].encode("utf-8", "surrogateescape"))


def byte_spans(tokens: Sequence[int] | NDArray[Any], tokenizer: Tokenizer) -> NDArray[np.int64]:
    """First byte and the byte after the last of each token's text: (T,) → (T, 2). END has none: both are equal."""
    lengths = tokenizer.byte_lengths[np.asarray(tokens, dtype=np.int64)]
    ends = np.cumsum(lengths)
    return np.stack([ends - lengths, ends], axis=-1)


def tokens_over(spans: NDArray[np.int64], first: int, last: int) -> tuple[int, ...]:
    """Positions of the tokens that hold some of the bytes ``first`` to ``last`` (excluded)."""
    return tuple(np.flatnonzero((spans[:, 1] > first) & (spans[:, 0] < last)).tolist())


def pool(weights: NDArray[Any], words: Sequence[Word]) -> NDArray[Any]:
    """Attention between tokens → between words: (..., T, T) → (..., W, W). The words must cover the tokens in order."""
    starts = np.array([word.start for word in words])
    counts = np.array([word.end - word.start for word in words])
    assert starts[0] == 0 and counts.sum() == weights.shape[-1], "words that leave out tokens would lose attention"
    to_words = np.add.reduceat(weights, starts, axis=-1)
    return np.add.reduceat(to_words, starts, axis=-2) / counts[:, None]


def _text_of(tokens: Sequence[int] | NDArray[Any], tokenizer: Tokenizer) -> str:
    if len(tokens) == 1 and tokens[0] == END:
        return END_WORD
    text = tokenizer.decode(map(int, tokens))
    return text.strip() or text
