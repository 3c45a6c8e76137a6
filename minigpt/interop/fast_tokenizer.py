"""This project's tokenizers as fast tokenizers of Hugging Face (tokenizer.json), and back.

All of them are byte-level there: text is split, each part written in 256 letters that stand for bytes, a part that is a
token as a whole becomes that token, and others are merged from their bytes. For ``char`` a part is one character.
``<|end|>`` is in the vocabulary, and no text is ever read as it.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from minigpt.bpe import BYTES, SPLIT_PATTERN, byte_letters
from minigpt.errors import UserError
from minigpt.tokenizer import END, BpeTokenizer, CharTokenizer, Tokenizer

END_NAME = "<|end|>"
CHARACTER = r"[\s\S]"
POSSESSIVE = re.compile(r"\d\}\+")  # {1,3}+: takes no more than 3 for tiktoken, any number there


def tokenizer_files(tokenizer: Tokenizer, context_length: int) -> dict[str, str]:
    """The texts of tokenizer.json and tokenizer_config.json.

    Raises:
        UserError: for a tokenizer whose split pattern Hugging Face's library reads otherwise.
    """
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_NAME,
        "eos_token": END_NAME,
        "split_special_tokens": True,  # no text is read as <|end|>
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_length,
    }
    return {"tokenizer.json": _fast(tokenizer), "tokenizer_config.json": json.dumps(settings, indent=2)}


def _fast(tokenizer: Tokenizer) -> str:
    from tokenizers import Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as FastTokenizer

    undefined = set(tokenizer.undefined_ids.tolist())
    ids = [token for token in range(tokenizer.vocab_size) if token != END and token not in undefined]
    vocab = {END_NAME: END} | {written(tokenizer.token_bytes(token)): token for token in ids}
    if len(vocab) != len(ids) + 1:
        raise UserError(f"this tokenizer reads {END_NAME} in a text as one token, which can't be told from its own")
    pattern, merges, unknown = CHARACTER, [], None
    if isinstance(tokenizer, BpeTokenizer):
        pattern = tokenizer.pattern
        if POSSESSIVE.search(pattern):
            raise UserError(
                f"data.tokenizer = {tokenizer.name}: the library behind tokenizer.json reads its split pattern "
                "otherwise; train with --data.tokenizer bpe"
            )
        merges = [(written(left), written(right)) for left, right in merges_of(tokenizer.tokens)]
    elif tokenizer.unseen == "replace" and isinstance(tokenizer, CharTokenizer) and tokenizer.replacement:
        unknown = written(tokenizer.replacement.encode())
    model = models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, ignore_merges=True)
    fast = FastTokenizer(model)
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    to_letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.pre_tokenizer = pre_tokenizers.Sequence([split, to_letters])  # type: ignore[assignment]
    fast.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    return fast.to_str(pretty=True)


def difference(tokenizer: Tokenizer) -> str:
    """In what a fast tokenizer is not as this one, in a sentence; empty: in nothing."""
    stops = isinstance(tokenizer, CharTokenizer) and not tokenizer.byte_fallback and tokenizer.unseen == "stop"
    return "AutoTokenizer drops characters that the tokenizer has never seen; here they are refused" if stops else ""


@cache
def _letters() -> dict[int, str]:
    return {byte: letter for letter, byte in byte_letters().items()}


def written(token: bytes) -> str:
    """A token in the letters that stand for bytes."""
    return "".join(_letters()[byte] for byte in token)


def merges_of(tokens: Sequence[bytes | None]) -> list[tuple[bytes, bytes]]:
    """Pairs of tokens that make another, in the order of its rank: what tiktoken merges."""
    known = [token for token in tokens if token is not None]
    there = set(known)
    cuts = ((token[:i], token[i:]) for token in known for i in range(1, len(token)))
    return [(left, right) for left, right in cuts if left in there and right in there]


# ── in ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def read_fast(spec: Mapping[str, Any], end: int, size: int) -> tuple[Tokenizer, list[int]]:
    """The tokenizer of a tokenizer.json whose texts end with the id ``end``, for a network of ``size`` ids.

    Returns:
        It, and for each of its ids that of the file: ``end`` first, the others in their order.

    Raises:
        UserError: for a kind of tokenizer that this project lacks.
    """
    try:
        return _read_fast(spec, end, size)
    except UserError as error:
        raise UserError(f"not a tokenizer that this project can hold: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError, IndexError):
        raise UserError(
            "not a tokenizer that this project can hold: parts that a byte-level BPE has are missing or of another kind"
        ) from None


def _read_fast(spec: Mapping[str, Any], end: int, size: int) -> tuple[Tokenizer, list[int]]:
    model, byte_of = spec["model"], byte_letters()
    if (kind := model.get("type", "BPE")) != "BPE":
        raise UserError(f"it is of the kind {kind}, no BPE")
    if spec.get("normalizer") is not None:
        raise UserError("it changes the text first (normalizer)")
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise UserError(f"it marks parts of words ({key} = {model[key]!r})")
    after: Mapping[str, Any] = spec.get("post_processor") or {"type": "ByteLevel"}
    if any(_adds_tokens(step) for step in after.get("processors", [after])):
        raise UserError("it puts tokens around each text (post_processor)")
    if read := [entry["content"] for entry in spec.get("added_tokens", ()) if not entry["special"]]:
        raise UserError(f"it has words of its own beside the merges ({read[0]!r} in added_tokens)")
    pattern = _pattern(spec["pre_tokenizer"])
    special = {entry["id"] for entry in spec.get("added_tokens", ())} | {end}
    vocab: dict[str, int] = {text: token for text, token in model["vocab"].items() if token not in special}
    bytes_of = {token: bytes(byte_of[letter] for letter in text) for text, token in vocab.items()}
    if not 0 <= end < size or max(bytes_of) >= size:
        raise UserError(f"it has ids that the network, of {size}, lacks")
    theirs = [end, *(token for token in range(size) if token != end)]
    tokens = [bytes_of.get(token) for token in theirs[1:]]
    merges = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    made = [vocab[left + right] for left, right in merges]
    if made != sorted(made):
        raise UserError("its merges do not stand in the order of their ids")
    if pattern != CHARACTER:
        name = "byte" if tuple(tokens) == BYTES else "bpe"
        return BpeTokenizer(name, tokens, pattern), theirs
    own = [token for token in tokens if token is not None]
    if len(own) < len(tokens):
        raise UserError(f"it reads {len(own) + 1} characters, and the network has {size} ids")
    fallback = tuple(own[:256]) == BYTES
    characters = b"".join(own[256 if fallback else 0 :]).decode()
    unseen = "replace" if model.get("unk_token") else "stop"
    return CharTokenizer(characters, byte_fallback=fallback, unseen=unseen), theirs


def _adds_tokens(step: Mapping[str, Any]) -> bool:
    """Whether a step after the merges changes the ids; transformers writes a template of the text alone."""
    if step["type"] == "TemplateProcessing":
        return any("Sequence" not in part for part in step["single"])
    return step["type"] != "ByteLevel"


def _pattern(pre_tokenizer: Mapping[str, Any]) -> str:
    """The pattern that splits text before bytes are taken."""
    steps = pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]
    if any(step.get("add_prefix_space") for step in steps) or steps[-1]["type"] != "ByteLevel":
        raise UserError("it is not byte-level, or puts a space in front")
    if len(steps) == 1 and steps[0].get("use_regex", True):
        return SPLIT_PATTERN
    split = steps[0]
    if len(steps) != 2 or split["type"] != "Split" or (split["behavior"], split["invert"]) != ("Isolated", False):
        raise UserError("it splits text in several ways")
    return split["pattern"]["Regex"]
