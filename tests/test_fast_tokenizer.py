"""This project's tokenizers and their tokenizer.json: the same ids, the same text, and back."""

import json
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer

from minigpt.errors import UserError
from minigpt.interop.fast_tokenizer import read_fast, tokenizer_files
from minigpt.tokenizer import END, BpeTokenizer, CharTokenizer, Tokenizer, train_tokenizer

TEXT = "The café's clock counts  7 lanterns;\n\tthe <|end|> of 1234 nights. 古い時計は静かに。" * 30
KINDS = {
    "char with bytes": lambda: train_tokenizer("char", [TEXT], 262),
    "byte": lambda: train_tokenizer("byte", []),
    "bpe": lambda: train_tokenizer("bpe", [TEXT], 340),
}
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"])) | st.text("<|end>é古い \n'stha7")


@cache
def both(kind: str) -> tuple[Tokenizer, FastTokenizer]:
    tokenizer = KINDS[kind]()
    return tokenizer, fast(tokenizer)


def fast(tokenizer: Tokenizer) -> FastTokenizer:
    return FastTokenizer.from_str(tokenizer_files(tokenizer, 8)["tokenizer.json"])


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=200, deadline=None)
@given(text=ANY_TEXT)
def test_ids_and_text_are_the_same(kind: str, text: str) -> None:
    tokenizer, theirs = both(kind)
    ids = tokenizer.encode(text).tolist()
    assert theirs.encode(text).ids == ids
    assert theirs.decode(ids) == text
    assert END not in ids


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_ids_that_are_no_text_read_the_same(kind: str, data: st.DataObject) -> None:
    tokenizer, theirs = both(kind)
    ids = data.draw(st.lists(st.integers(1, tokenizer.vocab_size - 1)))
    assert theirs.decode(ids) == tokenizer.decode(ids)


@pytest.mark.parametrize(("unseen", "expected"), [("skip", "ab"), ("replace", "a??b"), ("stop", "ab")])
def test_characters_without_an_id(unseen: str, expected: str) -> None:
    """They can't stop the library; it leaves them out then."""
    tokenizer = CharTokenizer("?ab", byte_fallback=False, unseen=unseen)
    theirs = fast(tokenizer)
    assert theirs.decode(theirs.encode("aé古b").ids) == expected
    if unseen != "stop":
        assert theirs.encode("aé古b").ids == tokenizer.encode("aé古b").tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_back(kind: str) -> None:
    tokenizer, theirs = both(kind)
    found, rows = read_fast(json.loads(theirs.to_str()), END, tokenizer.vocab_size)
    assert found.to_dict() == tokenizer.to_dict()
    assert rows == list(range(tokenizer.vocab_size))


def test_from_elsewhere_the_end_comes_first() -> None:
    """As in GPT-2's, where it is last; ids that only pad the network's table stand for nothing."""
    tokenizer, theirs = both("bpe")
    spec = json.loads(theirs.to_str())
    last = tokenizer.vocab_size - 1
    spec["model"]["vocab"] = {text: token - 1 if token else last for text, token in spec["model"]["vocab"].items()}
    spec["added_tokens"] = [{"id": last, "content": "<|end|>", "special": True}]
    spec["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    found, rows = read_fast(spec, last, last + 3)
    assert rows == [last, *range(last), last + 1, last + 2]
    assert found.encode(TEXT).tolist() == tokenizer.encode(TEXT).tolist()
    assert found.undefined_ids.tolist() == [last + 1, last + 2]


def test_what_can_not_be_held() -> None:
    spec = json.loads(both("bpe")[1].to_str())
    for changes, words in (
        ({"normalizer": {"type": "NFC"}}, "changes the text first"),
        ({"pre_tokenizer": {"type": "Metaspace"}}, "not byte-level"),
        ({"model": {"type": "Unigram", "vocab": []}}, "no BPE"),
        ({"model": spec["model"] | {"merges": spec["model"]["merges"][::-1]}}, "order of their ids"),
        ({"model": spec["model"] | {"vocab": {"<|end|>": 0, "a": 1}}}, "parts that a byte-level BPE has are missing"),
    ):
        with pytest.raises(UserError, match=words):
            read_fast(spec | changes, END, 340)
    with pytest.raises(UserError, match="train with --data"):
        fast(BpeTokenizer("other", KINDS["byte"]().tokens, r"\p{N}{1,3}+|."))  # type: ignore[attr-defined]
