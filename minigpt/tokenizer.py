"""Text ↔ token ids: single characters, byte-level BPE, plain bytes, and the named encodings of tiktoken.

Id 0 is ``<|end|>``. No text ever encodes to it, whatever the text holds; it decodes to nothing. All tokenizers are
lossless, never normalise Unicode, and go into a JSON-able dictionary and back, so that a saved run needs no network.
"""

import base64
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from minigpt.bpe import BYTES, SPLIT_PATTERN, learn_tokens, named_tokens
from minigpt.errors import UserError
from minigpt.threads import in_threads
from minigpt.unseen import UnseenError

if TYPE_CHECKING:
    import tiktoken

END = 0
PIECE_LENGTH = 100_000  # characters; BPE libraries overflow their stack on far longer ones
LARGEST_VOCAB = 1 << 20  # ids that can be asked for; the learner lays out memory for all of them and aborts without it


class Tokenizer(ABC):
    """What all tokenizers share: a table from id to bytes. Below, V is the number of ids."""

    unseen = "stop"

    def __init__(self, name: str, tokens: Sequence[bytes | None]) -> None:
        """``tokens[i]`` are the bytes of id i + 1; None marks an id that stands for nothing."""
        self.name = name
        self._bytes = (b"", *(token or b"" for token in tokens))
        self.vocab_size = len(self._bytes)
        self.byte_lengths: NDArray[np.int64] = np.array([len(token) for token in self._bytes], dtype=np.int64)
        self.undefined_ids: NDArray[np.int64] = 1 + np.flatnonzero([token is None for token in tokens])

    def encode(self, text: str) -> NDArray[np.int32]:
        """Ids of a text, shape (N,). Long texts are encoded in the pieces that ``pieces`` cuts.

        Raises:
            UserError: for lone surrogates, which are not text, and for characters that no id stands for.
        """
        parts = list(self.encode_each(pieces([text])))
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)

    def encode_each(self, texts: Iterable[str]) -> Iterator[NDArray[np.int32]]:
        """The ids of each of some pieces as ``pieces`` cuts them, in their order; raises as ``encode`` does."""
        return map(self._encode_piece, texts)

    def count_unseen(self, text: str) -> int:
        """Characters of a text that ``encode`` leaves out or replaces."""
        return 0

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids; bytes that are not UTF-8 become U+FFFD, and ``END`` nothing."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one id (empty for ``END`` and for undefined ids)."""
        if not 0 <= token < self.vocab_size:
            raise ValueError(f"token id {token}: must be at least 0 and below {self.vocab_size}")
        return self._bytes[token]

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """All that ``tokenizer_from_dict`` needs, as plain JSON types."""

    @abstractmethod
    def _encode_piece(self, piece: str) -> NDArray[np.int32]: ...


class CharTokenizer(Tokenizer):
    """A character is a token. With ``byte_fallback``, characters that have no id of their own become their bytes.

    Without, ``unseen`` tells what becomes of them: ``stop`` is an error, ``skip`` leaves them out, ``replace`` puts the
    first known one of U+FFFD, question mark and space.
    """

    def __init__(self, characters: str, *, byte_fallback: bool, unseen: str = "stop") -> None:
        if sorted(set(characters)) != list(characters):
            raise ValueError("characters must differ and stand in the order of their code points")
        own = [character.encode("utf-8") for character in characters]
        super().__init__("char", [*BYTES, *own] if byte_fallback else own)
        self.characters = characters
        self.byte_fallback = byte_fallback
        self.unseen = unseen
        codes = _code_points(characters)
        # the id of each code point up to the largest known one, −1 for the rest and, in the last place, for all above
        self._ids = np.full(max(128, int(codes[-1]) + 1 if len(codes) else 0) + 1, -1, dtype=np.int32)
        if byte_fallback:
            self._ids[:128] = np.arange(1, 129)
        self._ids[codes] = np.arange(self.vocab_size - len(codes), self.vocab_size)

    def _encode_piece(self, piece: str) -> NDArray[np.int32]:
        codes = _code_points(piece)
        ids = self._known_ids(codes)
        unknown = ids < 0
        if not unknown.any():
            return ids
        rare = codes[unknown]
        unknown_text = rare.tobytes().decode("utf-32-le")
        if not self.byte_fallback:
            return self._without_unseen(ids, unknown, unknown_text)
        lengths = np.ones(len(codes), dtype=np.int64)
        lengths[unknown] += (rare >= 0x80).astype(np.int64) + (rare >= 0x800) + (rare >= 0x10000)
        spread = np.repeat(ids, lengths)
        spread[spread < 0] = _byte_ids(unknown_text.encode("utf-8"))
        return spread

    def count_unseen(self, text: str) -> int:
        if self.byte_fallback or self.unseen == "stop":
            return 0
        return sum(int((self._known_ids(_code_points(piece)) < 0).sum()) for piece in pieces([text]))

    @property
    def replacement(self) -> str | None:
        """What ``replace`` puts for a character without an id; None if the text had nothing that suits."""
        return next((char for char in "\ufffd? " if char in self.characters), None)

    def _known_ids(self, codes: NDArray[np.uint32]) -> NDArray[np.int32]:
        """The ids of code points, −1 where there is none."""
        return self._ids[np.minimum(codes, len(self._ids) - 1)]

    def _without_unseen(self, ids: NDArray[np.int32], unknown: NDArray[np.bool_], text: str) -> NDArray[np.int32]:
        if self.unseen == "skip":
            return ids[~unknown]
        replacement = self.replacement
        if self.unseen == "stop" or replacement is None:
            raise UnseenError(text, can_replace=replacement is not None)
        ids[unknown] = self._ids[ord(replacement)]
        return ids

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "characters": self.characters,
            "byte_fallback": self.byte_fallback,
            "unseen": self.unseen,
        }


class BpeTokenizer(Tokenizer):
    """Byte pair encoding, run by tiktoken without special tokens: id = rank + 1, and lower ranks merge first.

    With no merges, the tokenizer ``byte``, lone surrogates U+DC80 … U+DCFF stand for bytes that are not UTF-8.
    """

    def __init__(self, name: str, tokens: Sequence[bytes | None], pattern: str) -> None:
        known = [token for token in tokens if token is not None]
        if len(set(known)) != len(known) or not set(BYTES) <= set(known):
            raise ValueError("tokens must differ and hold all 256 bytes")
        super().__init__(name, tokens)
        self.tokens = tuple(tokens)
        self.pattern = pattern

    @cached_property
    def _encoding(self) -> "tiktoken.Encoding":
        import tiktoken  # here: sampling from a character model should not wait for it

        ranks = {token: rank for rank, token in enumerate(self.tokens) if token is not None}
        try:
            return tiktoken.Encoding(self.name, pat_str=self.pattern, mergeable_ranks=ranks, special_tokens={})
        except ValueError as error:
            raise UserError(f"the tokenizer {self.name} is damaged: its split pattern is not valid ({error})") from None

    def encode_each(self, texts: Iterable[str]) -> Iterator[NDArray[np.int32]]:
        if self.tokens == BYTES:
            return super().encode_each(texts)
        return in_threads(self._encode_piece, texts, size=len, enough=PIECE_LENGTH)

    def _encode_piece(self, piece: str) -> NDArray[np.int32]:
        if self.tokens == BYTES:
            return _byte_ids(_encoded(piece, "utf-8", errors="surrogateescape"))
        utf8 = _encoded(piece, "utf-8")
        try:  # encode_ordinary is faster than encode_to_numpy, which looks for special tokens
            ids = np.array(self._encoding.encode_ordinary(piece), dtype=np.int32) + 1
            if self.byte_lengths[ids].sum() == len(utf8):
                return ids  # else the library has left out what the pattern does not match
        except BaseException as error:  # where a pattern matches nothing the library panics
            if type(error).__name__ != "PanicException":
                raise
        raise UserError(f"the tokenizer {self.name} is damaged: its split pattern does not take in every text")

    def to_dict(self) -> dict[str, Any]:
        # base64 words in the order of rank; the word of an undefined rank is empty
        words = " ".join(base64.b64encode(token or b"").decode("ascii") for token in self.tokens)
        return {"name": self.name, "pattern": self.pattern, "tokens": words}


# ── making and restoring ───────────────────────────────────────────────────────────────────────────────────────


def shown(tokenizer: Tokenizer, token: int) -> str:
    r"""A token by itself: its text; bytes that are none as ``bytes:\xe3``, the end as ``<|end|>``."""
    if token == END:
        return "<|end|>"
    some = tokenizer.token_bytes(token)
    try:
        return some.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in some)


def train_tokenizer(name: str, documents: Iterable[str], vocab_size: int = 0) -> Tokenizer:
    """A tokenizer for some texts. ``vocab_size`` counts all ids, ``END`` included.

    - ``char``: 0 makes every character a token. A number gives 256 ids to bytes and the rest to the most frequent
      characters longer than a byte, so that any text can be encoded. (The number that 0 would give means 0.)
    - ``bpe``: 0 takes 2048, fewer for less than 180,000 characters (see ``bpe_vocab_size``). Training stops early
      when nothing is left to merge; the tokenizer's own ``vocab_size`` is the true one.
    - ``byte`` and tiktoken's encodings need no training and have their own size; the documents are not read.

    Raises:
        UserError: for an unknown name, an impossible size, or an encoding whose table cannot be fetched.
    """
    if name == "char":
        return _train_char(documents, vocab_size)
    if name == "bpe":
        return _train_bpe(documents, vocab_size)
    tokens, pattern = (BYTES, SPLIT_PATTERN) if name == "byte" else named_tokens(name)
    tokenizer = BpeTokenizer(name, tokens, pattern)
    if vocab_size not in (0, tokenizer.vocab_size):
        raise UserError(
            f"data.vocab_size = {vocab_size}: the tokenizer {name} always has {tokenizer.vocab_size} ids; leave it 0"
        )
    return tokenizer


def tokenizer_from_dict(values: Mapping[str, Any], *, unseen: str | None = None) -> Tokenizer:
    """The tokenizer whose ``to_dict`` this is; ``unseen`` changes what ``char`` does with characters it does not know.

    Raises:
        UserError: if the dictionary is damaged.
    """
    try:
        if values["name"] == "char":
            fallback, unseen = bool(values["byte_fallback"]), unseen or str(values.get("unseen", "stop"))
            return CharTokenizer(values["characters"], byte_fallback=fallback, unseen=unseen)
        words = values["tokens"].split(" ")
        tokens = [base64.b64decode(word, validate=True) if word else None for word in words]
        return BpeTokenizer(str(values["name"]), tokens, str(values["pattern"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"the tokenizer stored here is damaged ({error}); take another checkpoint") from None


def bpe_vocab_size(characters: int) -> int:
    """Ids that a BPE gets when none are asked for: one merge for each 100 characters, 2048 ids at most."""
    return min(2048, 257 + characters // 100)


def pieces(chunks: Iterable[str]) -> Iterator[str]:
    """A text that comes in chunks, cut anew: at most 100,000 characters, after the last line end among them if any.

    The cuts depend on the text alone, not on the chunks. They are part of what BPE encodes: no token spans a cut.
    """
    rest = ""
    for chunk in chunks:
        text, start = rest + chunk, 0
        while len(text) - start > PIECE_LENGTH:
            cut = text.rfind("\n", start, start + PIECE_LENGTH) + 1 or start + PIECE_LENGTH
            yield text[start:cut]
            start = cut
        rest = text[start:]
    if rest:
        yield rest


def _train_char(documents: Iterable[str], vocab_size: int) -> CharTokenizer:
    counts = np.zeros(0x110000, dtype=np.int64)
    for document in documents:
        found = np.bincount(_code_points(document))
        counts[: len(found)] += found
    codes = np.flatnonzero(counts)
    fallback = vocab_size not in (0, len(codes) + 1)
    if fallback:
        longer_than_a_byte = codes[codes > 0x7F]
        by_frequency = longer_than_a_byte[np.argsort(-counts[longer_than_a_byte], kind="stable")]
        codes = np.sort(by_frequency[: _room("char", vocab_size)])
    return CharTokenizer("".join(map(chr, codes)), byte_fallback=fallback)


def _train_bpe(documents: Iterable[str], vocab_size: int) -> BpeTokenizer:
    characters = 0

    def texts() -> Iterator[str]:
        nonlocal characters
        for document in documents:
            for piece in pieces([document]):
                _encoded(piece, "utf-8")  # refuses what is not text
                characters += len(piece)
                yield piece

    tokens = learn_tokens(texts(), 256 + _room("bpe", vocab_size or bpe_vocab_size(sys.maxsize)))
    return BpeTokenizer("bpe", tokens[: (vocab_size or bpe_vocab_size(characters)) - 1], SPLIT_PATTERN)


def _room(name: str, vocab_size: int) -> int:
    """Ids left for other tokens than END and the bytes."""
    if vocab_size < 257:
        raise UserError(
            f"data.vocab_size = {vocab_size}: the tokenizer {name} needs at least 257 (<|end|> and 256 bytes), "
            "or 0 to choose by itself"
        )
    if vocab_size > LARGEST_VOCAB:
        raise UserError(f"data.vocab_size = {vocab_size}: must be at most {LARGEST_VOCAB}")
    return vocab_size - 257


# ── small parts ────────────────────────────────────────────────────────────────────────────────────────────────


def _encoded(text: str, encoding: str, errors: str = "strict") -> bytes:
    try:
        return text.encode(encoding, errors)
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        # Python's "surrogateescape": what came from the command line or the keyboard
        byte = f", for the byte 0x{code - 0xDC00:02x} that is no text in the console's encoding" * (code >= 0xDC80)
        raise UserError(
            f"the text holds U+{code:04X}, half of a surrogate pair and no character{byte}: remove it"
        ) from None


def _code_points(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(_encoded(text, "utf-32-le"), dtype="<u4")


def _byte_ids(utf8: bytes) -> NDArray[np.int32]:
    return np.frombuffer(utf8, dtype=np.uint8).astype(np.int32) + 1
