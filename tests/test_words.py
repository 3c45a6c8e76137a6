"""Words as groups of tokens, and attention pooled by them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minigpt.inspection.words import Word, byte_place, byte_spans, pool, tokens_over, words_of
from minigpt.tokenizer import END, BpeTokenizer, Tokenizer, train_tokenizer

TEXT = "The bank isn't far, the river… 古 café.\n"
WORDS = ["The", "bank", "isn't", "far", ",", "the", "river", "…", "古", "café", "."]


@pytest.fixture(scope="module", params=["char", "byte", "bpe"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return train_tokenizer(request.param, [TEXT * 20], 300 if request.param == "bpe" else 0)


def test_the_same_words_whatever_the_tokens(tokenizer: Tokenizer) -> None:
    tokens = [END, *tokenizer.encode(TEXT), END]
    words = words_of(tokens, tokenizer)
    assert [word.text for word in words] == ["<|end|>", *WORDS, "<|end|>"]
    assert [word.start for word in words] == [0, *(word.end for word in words[:-1])] and words[-1].end == len(tokens)


@settings(deadline=None, max_examples=40)
@given(text=st.text(alphabet="ab' ,\n古é", max_size=12))
def test_words_cover_all_tokens_once_and_cut_no_text(text: str) -> None:
    byte = train_tokenizer("byte", [])
    tokens = byte.encode(text)
    words = words_of(tokens, byte)
    assert [place for word in words for place in range(word.start, word.end)] == list(range(len(tokens)))
    parts = [byte.decode(tokens[word.start : word.end]) for word in words]
    assert "".join(parts) == text
    assert all(not part.strip() or " " not in part.strip() for part in parts)


def test_a_token_over_two_words_joins_them() -> None:
    joined = BpeTokenizer("joined", [*(bytes([code]) for code in range(256)), b"e ", b"e b"], r"[\s\S]+")
    tokens = joined.encode("the bank of")
    assert len(tokens) == len("the bank of") - 2
    assert [word.text for word in words_of(tokens, joined)] == ["the bank", "of"]


def test_kana_and_chinese_characters_are_words_one_by_one() -> None:
    byte = train_tokenizer("byte", [])
    assert [word.text for word in words_of(byte.encode("古い café。"), byte)] == ["古", "い", "café", "。"]


def test_a_text_without_words_and_no_text(tokenizer: Tokenizer) -> None:
    assert words_of([], tokenizer) == []
    assert words_of(tokenizer.encode(" \n"), tokenizer) == [Word(" \n", 0, len(tokenizer.encode(" \n")))]


def test_tokens_are_found_by_the_bytes_of_a_word(tokenizer: Tokenizer) -> None:
    tokens = np.concatenate([[END], tokenizer.encode(TEXT)])
    spans = byte_spans(tokens, tokenizer)
    for word in ("bank", "river", "古", "café"):
        start = TEXT.index(word)
        places = tokens_over(spans, byte_place(TEXT, start), byte_place(TEXT, start + len(word)))
        assert tokenizer.decode(tokens[list(places)]).strip() == word


def test_pooling_by_hand() -> None:
    """Two tokens, then one: sums over columns, means over rows."""
    weights = np.array([[1, 0, 0], [0.25, 0.75, 0], [0.1, 0.3, 0.6]])
    assert np.allclose(pool(weights, [Word("a", 0, 2), Word("b", 2, 3)]), [[1, 0], [0.4, 0.6]])


@settings(deadline=None, max_examples=40)
@given(lengths=st.lists(st.integers(1, 4), min_size=1, max_size=6), seed=st.integers(0, 999))
def test_pooled_rows_sum_to_one_and_stay_causal(lengths: list[int], seed: int) -> None:
    ends = np.cumsum(lengths)
    words = [Word("w", int(end - length), int(end)) for length, end in zip(lengths, ends, strict=True)]
    weights = np.tril(np.random.default_rng(seed).random((2, 3, ends[-1], ends[-1])) + 0.01)
    weights /= weights.sum(axis=-1, keepdims=True)
    pooled = pool(weights, words)
    assert pooled.shape == (2, 3, len(words), len(words))
    assert np.allclose(pooled.sum(axis=-1), 1) and (np.triu(pooled, 1) == 0).all()
    first, last = words[0], words[-1]
    expected = weights[..., last.start : last.end, first.start : first.end].sum(axis=-1).mean(axis=-1)
    assert np.allclose(pooled[..., -1, 0], expected)


def test_pooling_refuses_words_that_leave_out_tokens() -> None:
    with pytest.raises(AssertionError, match="lose attention"):
        pool(np.eye(3), [Word("a", 0, 2)])
