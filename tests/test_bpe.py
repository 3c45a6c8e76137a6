"""Byte pair encodings: equal to the libraries they come from, and clear about a table that cannot be had."""

import json
import threading

import pytest
import tiktoken

from minigpt import bpe
from minigpt.bpe import BYTES, SPLIT_PATTERN
from minigpt.errors import UserError
from minigpt.tokenizer import tokenizer_from_dict, train_tokenizer

ENGLISH = "The river rose in spring, and the old bridge didn't hold; 12 boats went under.\n" * 40
JAPANESE = "春の朝、小さな駅で猫が電車を待っていた。「次は何時ですか」と駅長にきいた。\n夏には子猫が三匹ふえた。\n" * 20


def test_bpe_equals_the_library_that_learned_it() -> None:
    from tokenizers import Regex, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Library

    library = Library(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated")
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    texts = [ENGLISH, JAPANESE]
    library.train_from_iterator(texts, trainer)
    ours = train_tokenizer("bpe", texts, 601)
    assert ours.vocab_size == library.get_vocab_size() + 1

    def merged(ranks: list[int]) -> list[int]:
        return [rank if rank >= 256 else -1 for rank in ranks]  # the two order the single bytes differently

    for text in [
        *texts,
        "  a  b \n\n\t",
        "e\u0301 é <|endoftext|>",
        "The riverbank holds 2024 boats, didn't it? 駅の子猫",
    ]:
        assert merged([token - 1 for token in ours.encode(text).tolist()]) == merged(library.encode(text).ids)


def encoding_with_a_gap() -> tiktoken.Encoding:
    """256 bytes and a merge at rank 260: ranks 256 to 259 stand for nothing."""
    ranks = {token: rank for rank, token in enumerate(BYTES)} | {b"ab": 260}
    specials = {"<|endoftext|>": 256}
    return tiktoken.Encoding("gap", pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens=specials)


def test_gaps_in_the_ranks_are_undefined_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: encoding_with_a_gap())
    tokenizer = train_tokenizer("p50k_base", [])
    assert tokenizer.name == "p50k_base" and tokenizer.vocab_size == 262
    assert tokenizer.undefined_ids.tolist() == [257, 258, 259, 260]
    assert tokenizer.decode(range(tokenizer.vocab_size)).endswith("ab")
    assert tokenizer.decode(tokenizer.undefined_ids.tolist()) == ""
    restored = tokenizer_from_dict(json.loads(json.dumps(tokenizer.to_dict())))
    assert restored.undefined_ids.tolist() == [257, 258, 259, 260]
    text = "abc <|endoftext|>"
    assert restored.encode(text).tolist() == [1 + rank for rank in encoding_with_a_gap().encode_ordinary(text)]


def test_offline_is_told_with_the_ways_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(name: str) -> tiktoken.Encoding:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(tiktoken, "get_encoding", no_network)
    with pytest.raises(UserError) as failure:
        train_tokenizer("gpt2", [])
    for part in ("gpt2", "ConnectionError", "TIKTOKEN_CACHE_DIR", "bpe, char or byte"):
        assert part in str(failure.value)


def test_a_download_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: released.wait() and encoding_with_a_gap())
    monkeypatch.setattr(bpe, "DOWNLOAD_SECONDS", 0.01)
    try:
        with pytest.raises(UserError, match=r"cl100k_base.*TIKTOKEN_CACHE_DIR"):
            train_tokenizer("cl100k_base", [])
    finally:
        released.set()


def test_an_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean cl100k_base"):
        train_tokenizer("cl100kbase", [])
    with pytest.raises(UserError, match="did you mean char"):
        train_tokenizer("chars", [])
    with pytest.raises(UserError, match="known are char, bpe, byte, gpt2"):
        train_tokenizer("zzz", [])
