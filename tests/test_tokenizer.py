"""Tokenizers: lossless, restorable, the same as the libraries they stand on, and clear about what they cannot do."""

import json
from itertools import pairwise

import numpy as np
import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st

from minigpt.bpe import BYTES, SPLIT_PATTERN
from minigpt.errors import UserError
from minigpt.streaming import StreamDecoder
from minigpt.tokenizer import (
    END,
    BpeTokenizer,
    Tokenizer,
    bpe_vocab_size,
    pieces,
    tokenizer_from_dict,
    train_tokenizer,
)

ENGLISH = "The river rose in spring, and the old bridge didn't hold; 12 boats went under.\n" * 40
JAPANESE = "春の朝、小さな駅で猫が電車を待っていた。「次は何時ですか」と駅長にきいた。\n夏には子猫が三匹ふえた。\n" * 20
HARD_TEXTS = [
    "  a  b ",
    "\n\n",
    "\t",
    "a\r\nb",
    "e\u0301 and é",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466",
    "مرحبا بالعالم",
    "a\0b",
    "\ufeffx",
    "<|end|><|endoftext|><|im_start|>",
    JAPANESE[:50],
    "",
]


def lossless_tokenizers() -> list[Tokenizer]:
    return [
        train_tokenizer("byte", []),
        train_tokenizer("bpe", [ENGLISH, JAPANESE], 400),
        train_tokenizer("char", [ENGLISH, JAPANESE], 280),
    ]


LOSSLESS = lossless_tokenizers()


# ── lossless ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("tokenizer", LOSSLESS, ids=lambda tokenizer: tokenizer.name)
@pytest.mark.parametrize("text", HARD_TEXTS)
def test_hard_texts_come_back_exactly(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32 and ids.ndim == 1
    assert tokenizer.decode(ids) == text
    assert END not in ids
    assert tokenizer.byte_lengths[ids].sum() == len(text.encode("utf-8"))
    assert (len(ids) == 0) == (text == "")


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=60), which=st.integers(0, len(LOSSLESS) - 1))
def test_any_text_comes_back_exactly_and_streams_equal(text: str, which: int) -> None:
    tokenizer = LOSSLESS[which]
    ids = tokenizer.encode(text).tolist()
    assert tokenizer.decode(ids) == text
    stream = StreamDecoder(tokenizer)
    assert "".join(map(stream.push, ids)) == text  # whole characters: nothing is left for flush
    assert stream.flush() == ""


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(0, 399), max_size=30))
def test_streaming_any_ids_equals_decoding_them(ids: list[int]) -> None:
    stream = StreamDecoder(LOSSLESS[1])
    assert "".join([*map(stream.push, ids), stream.flush()]) == LOSSLESS[1].decode(ids)


def test_streaming_holds_back_half_a_character() -> None:
    tokenizer = train_tokenizer("byte", [])
    stream = StreamDecoder(tokenizer)
    assert [stream.push(token) for token in tokenizer.encode("é中").tolist()] == ["", "é", "", "", "中"]
    assert stream.push(1 + 0xE4) == "" and stream.flush() == "\ufffd"


@pytest.mark.parametrize("tokenizer", LOSSLESS, ids=lambda tokenizer: tokenizer.name)
def test_control_strings_are_plain_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one<|endoftext|>two<|end|>")
    assert len(ids) > 10 and ids.min() > END
    assert tokenizer.decode([END, *ids.tolist(), END]) == "one<|endoftext|>two<|end|>"


@pytest.mark.parametrize("name", ["char", "byte", "bpe"])
def test_half_a_surrogate_pair_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=r"U\+D800"):
        train_tokenizer(name, ["abc"]).encode("ab\ud800")
    with pytest.raises(UserError, match=r"U\+DCFF, .* for the byte 0xff that is no text in the console's encoding"):
        train_tokenizer("char", ["abc"]).encode("ab\udcff")
    if name != "byte":
        with pytest.raises(UserError, match=r"U\+DC00, half of a surrogate pair and no character: remove it"):
            train_tokenizer(name, ["ab\udc00"])


@pytest.mark.parametrize("tokenizer", LOSSLESS, ids=lambda tokenizer: tokenizer.name)
def test_ids_outside_the_vocabulary_are_refused(tokenizer: Tokenizer) -> None:
    for token in (-1, tokenizer.vocab_size):
        with pytest.raises(ValueError, match="below"):
            tokenizer.decode([token])


# ── char ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_char_numbers_characters_by_code_point() -> None:
    tokenizer = train_tokenizer("char", ["ba\n", "中a"])
    assert tokenizer.vocab_size == 5
    assert tokenizer.encode("\nab中").tolist() == [1, 2, 3, 4]
    assert tokenizer.byte_lengths.tolist() == [0, 1, 1, 1, 3]


def test_char_names_what_it_has_never_seen_and_the_ways_on() -> None:
    tokenizer = train_tokenizer("char", ["abc \n"])
    with pytest.raises(UserError) as failure:
        tokenizer.encode("Zü?")
    for part in ("'?' (U+003F)", "'Z' (U+005A)", "'ü' (U+00FC)", "--unseen skip", "data.vocab_size", "byte or bpe"):
        assert part in str(failure.value)
    with pytest.raises(UserError, match="and 90 more"):
        tokenizer.encode("".join(map(chr, range(0x4E00, 0x4E64))))


@pytest.mark.parametrize(("unseen", "lost"), [("stop", 0), ("skip", 3), ("replace", 3)])
def test_char_counts_what_it_loses(unseen: str, lost: int) -> None:
    own = train_tokenizer("char", ["abc \n"]).to_dict()
    assert tokenizer_from_dict(own, unseen=unseen).count_unseen("aZü" + "a" * 200_000 + "Z") == lost
    assert tokenizer_from_dict({**own, "byte_fallback": True}, unseen=unseen).count_unseen("aZü") == 0
    assert train_tokenizer("byte", []).count_unseen("aZü") == 0


def test_char_with_a_size_keeps_frequent_characters_and_falls_back_to_bytes() -> None:
    tokenizer = train_tokenizer("char", ["猫猫猫犬犬鳥 abc"], 259)
    assert tokenizer.vocab_size == 259
    assert tokenizer.encode("a猫犬").tolist() == [1 + ord("a"), 258, 257]  # 犬 U+72AC is before 猫 U+732B
    assert tokenizer.encode("鳥").tolist() == [1 + byte for byte in "鳥".encode()]
    assert train_tokenizer("char", ["abc"], 300).vocab_size == 257, "no more than the text gives"


def test_char_size_that_was_derived_gives_the_same_tokenizer_again() -> None:
    derived = train_tokenizer("char", [ENGLISH])
    assert train_tokenizer("char", [ENGLISH], derived.vocab_size).to_dict() == derived.to_dict()


# ── bpe ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_bpe_makes_frequent_words_one_token_with_their_space() -> None:
    tokenizer = train_tokenizer("bpe", [ENGLISH], 2048)
    for word in (" river", " bridge", " spring", " boats"):
        assert len(tokenizer.encode(word)) == 1


def test_bpe_stops_early_and_tells_its_true_size() -> None:
    tokenizer = train_tokenizer("bpe", ["aaaa"], 1000)
    assert tokenizer.vocab_size == 259  # END, 256 bytes, aa, aaaa
    assert tokenizer.encode("aaaa").tolist() == [258]
    assert train_tokenizer("bpe", ["a"], 1000).vocab_size == 257


def test_bpe_chooses_a_size_by_the_length_of_the_text() -> None:
    assert [bpe_vocab_size(n) for n in (0, 10_000, 179_100, 10**9)] == [257, 357, 2048, 2048]
    assert train_tokenizer("bpe", [ENGLISH]).vocab_size == bpe_vocab_size(len(ENGLISH))


def test_byte_is_bpe_without_merges() -> None:
    text = ENGLISH[:100] + JAPANESE[:100]
    byte = train_tokenizer("byte", [])
    assert byte.vocab_size == 257 == train_tokenizer("bpe", [text], 257).vocab_size
    assert byte.encode(text).tolist() == [1 + value for value in text.encode("utf-8")]
    encoding = tiktoken.Encoding(
        "bytes", pat_str=SPLIT_PATTERN, mergeable_ranks={b: i for i, b in enumerate(BYTES)}, special_tokens={}
    )
    assert byte.encode(text).tolist() == [1 + rank for rank in encoding.encode_ordinary(text)]


@pytest.mark.parametrize("name", ["bpe", "byte", "char"])
def test_a_million_spaces_or_letters_without_a_line_end(name: str) -> None:
    tokenizer = train_tokenizer(name, [" x" * 100])
    for text in (" " * 1_000_000, "x" * 250_000):
        assert tokenizer.decode(tokenizer.encode(text).tolist()) == text


def test_bpe_in_threads_gives_the_ids_of_one() -> None:
    tokenizer = train_tokenizer("bpe", [ENGLISH, JAPANESE], 400)
    rows = [f"{number} {JAPANESE[: number % 40]} boats\n" for number in range(6000)]
    documents = ["", *rows, "".join(rows), "x" * 90_000]
    expected = [tokenizer._encode_piece(document).tolist() for document in documents]
    assert [ids.tolist() for ids in tokenizer.encode_each(documents)] == expected
    text = "".join(rows) * 4
    assert len(list(pieces([text]))) > 5
    apart = [tokenizer._encode_piece(piece) for piece in pieces([text])]
    assert np.array_equal(tokenizer.encode(text), np.concatenate(apart))


def test_sizes_that_cannot_be() -> None:
    for name in ("char", "bpe"):
        with pytest.raises(UserError, match="at least 257"):
            train_tokenizer(name, [ENGLISH], 100)
    with pytest.raises(UserError, match="always has 257"):
        train_tokenizer("byte", [], 1000)


# ── pieces ─────────────────────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=30, deadline=None)
@given(lines=st.lists(st.integers(0, 150_000), max_size=6), cuts=st.lists(st.integers(0, 500_000), max_size=5))
def test_pieces_depend_on_the_text_alone(lines: list[int], cuts: list[int]) -> None:
    text = "\n".join("x" * length for length in lines)
    bounds = [0, *sorted(cuts), len(text)]
    chunks = [text[start:end] for start, end in pairwise(bounds)]
    got = list(pieces(chunks))
    assert got == list(pieces([text])) and "".join(got) == text
    assert all(0 < len(piece) <= 100_000 for piece in got)
    assert all(piece.endswith("\n") for piece in got[:-1] if "\n" in piece)


# ── to a dictionary and back ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("tokenizer", [*LOSSLESS, train_tokenizer("char", [JAPANESE])], ids=range(4))
def test_restored_from_json(tokenizer: Tokenizer) -> None:
    restored = tokenizer_from_dict(json.loads(json.dumps(tokenizer.to_dict())))
    assert (restored.name, restored.vocab_size) == (tokenizer.name, tokenizer.vocab_size)
    assert restored.encode(JAPANESE).tolist() == tokenizer.encode(JAPANESE).tolist()
    assert restored.to_dict() == tokenizer.to_dict()


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": "AA== !!"},
        {"tokens": "AA== AQ=="},
        {"tokens": 3},
        {"tokens": None},
        {"name": "char"},
        {"name": "char", "characters": "ba", "byte_fallback": False},
        {"name": "char", "characters": "\ud800", "byte_fallback": False},
    ],
)
def test_a_damaged_dictionary_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(UserError, match="damaged"):
        tokenizer_from_dict({**train_tokenizer("byte", []).to_dict(), **change})
    with pytest.raises(UserError, match="damaged"):
        tokenizer_from_dict({})


def test_a_damaged_pattern_is_refused_when_it_is_needed() -> None:
    values = {**train_tokenizer("bpe", [ENGLISH], 300).to_dict(), "pattern": "("}
    with pytest.raises(UserError, match="damaged"):
        tokenizer_from_dict(values).encode("text")


def test_own_tokenizers_have_no_undefined_ids() -> None:
    assert all(len(tokenizer.undefined_ids) == 0 for tokenizer in LOSSLESS)


def test_bpe_needs_every_byte() -> None:
    with pytest.raises(ValueError, match="256 bytes"):
        BpeTokenizer("bpe", BYTES[1:], SPLIT_PATTERN)
