"""Where the merges of a byte pair encoding come from: learned from a text, or fetched under a known name.

Both give tiktoken's form: tokens in the order of their rank, and the pattern that splits text before merging.
"""

import json
import threading
from collections.abc import Iterable

from minigpt.config import nearest
from minigpt.errors import UserError

BYTES = tuple(bytes([value]) for value in range(256))

# The split that GPT-2 made common: a word with the space before it, or a run of digits, of signs, of blanks. Letters
# of every script count as letters. llama.cpp knows it as the pre-tokenizer "gpt-2".
SPLIT_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

DOWNLOAD_SECONDS = 20.0


def learning_bytes(vocab_size: int) -> int:
    """Bytes at most, spread over a longer text, that so many tokens are learned from (0: the default number).

    More would cost memory and minutes, in Japanese 85 bytes and 2 µs a byte, for little: tokens learned from 2 MB in
    place of 18 are 0.4 % shorter, in English and in Japanese.
    """
    return min(max(4_000_000, 500 * vocab_size), 32_000_000)


def learn_tokens(texts: Iterable[str], size: int) -> list[bytes]:
    """The 256 bytes, then merges learned from ``texts`` in the order found; fewer than ``size`` if no pair is left."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    learner = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated")
    to_letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    learner.pre_tokenizer = pre_tokenizers.Sequence([split, to_letters])
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    learner.train_from_iterator(texts, trainer)
    byte_of = byte_letters()
    tokens = dict.fromkeys(BYTES)  # a dictionary: in order, and two merges can make the same token
    for left, right in json.loads(learner.to_str())["model"]["merges"]:
        tokens[bytes(byte_of[letter] for letter in left + right)] = None
    return list(tokens)


def byte_letters() -> dict[str, int]:
    """The letters by which the library writes bytes: Latin-1 where that is printable, the others from U+0100 on."""
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    byte_of = {letter: ord(letter) for letter in alphabet if letter <= "\xff"}
    return byte_of | dict(zip(alphabet[len(byte_of) :], sorted({*range(256)} - {*byte_of.values()}), strict=True))


def named_tokens(name: str) -> tuple[list[bytes | None], str]:
    """Tokens by rank (None where a rank is not used) and split pattern of one of tiktoken's encodings.

    Raises:
        UserError: for an unknown name, or if the table is neither in tiktoken's cache nor to be had.
    """
    import tiktoken

    known = tiktoken.list_encoding_names()
    if name not in known:
        raise UserError(f"data.tokenizer = {name}: unknown tokenizer{nearest(name, ['char', 'bpe', 'byte', *known])}")
    outcome: list[tiktoken.Encoding | Exception] = []

    def fetch() -> None:
        try:
            outcome.append(tiktoken.get_encoding(name))
        except Exception as error:  # whatever the library's download raises
            outcome.append(error)

    # tiktoken downloads without a time limit: it works in a thread that may be left behind
    thread = threading.Thread(target=fetch, daemon=True)
    thread.start()
    thread.join(DOWNLOAD_SECONDS)
    encoding = outcome[0] if outcome else TimeoutError()
    if isinstance(encoding, Exception):
        raise UserError(
            f"the table of the tokenizer {name} could not be downloaded ({type(encoding).__name__}): connect to the "
            "network once, point TIKTOKEN_CACHE_DIR at a folder that holds it, or use --data.tokenizer bpe, char or "
            "byte, which need no network"
        )
    ranks = encoding._mergeable_ranks  # tiktoken's README shows this and _pat_str as the way to build on an encoding
    tokens: list[bytes | None] = [None] * (max(ranks.values()) + 1)
    for token, rank in ranks.items():
        tokens[rank] = token
    return tokens, encoding._pat_str
