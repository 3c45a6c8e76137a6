"""The log-probability of each token of a text, and the likeliest at its place, as OpenAI's completions tell them.

They are the model's own, before temperature and cuts, in the windows that the text was written in.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from minigpt.normal_form import Array
from minigpt.sampling import window_start
from minigpt.scoring import Reader
from minigpt.streaming import StreamDecoder
from minigpt.tokenizer import Tokenizer, shown


@dataclass
class TokenLogprobs:
    """One entry a token; a text's first is predicted from nothing and has None."""

    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)

    def drop(self, count: int) -> None:
        """Forget the first tokens."""
        for entries in (self.tokens, self.token_logprobs, self.top_logprobs):
            del entries[:count]


def scored(
    reader: Reader, tokenizer: Tokenizer, tokens: Sequence[int], found: TokenLogprobs, count: int
) -> Iterator[None]:
    """Fill ``found`` with the tokens, and at each place with ``count`` of the likeliest and the token itself.

    Ids that stand for nothing are not among the likeliest; of two tokens with one text the likelier counts. Pauses
    after each window.
    """
    named = np.setdiff1d(np.arange(tokenizer.vocab_size), tokenizer.undefined_ids)
    found.tokens += [shown(tokenizer, token) for token in tokens]
    found.token_logprobs.append(None)
    found.top_logprobs.append(None)
    total, context = 1, reader.context_length
    while total < len(tokens):
        start = window_start(total, context)
        end = min(len(tokens), start + context + 1)
        logits = reader.all_logits(np.array(tokens[start : end - 1]), reader.new_memory())[total - start - 1 :]
        for token, row in zip(tokens[total:end], _log_softmax(logits), strict=True):
            top = named[np.argpartition(-row[named], min(count, len(named) - 1))[:count]]
            chosen: dict[str, float] = {}
            for other in sorted({*top.tolist(), token}, key=lambda other, row=row: (-row[other], other)):
                chosen.setdefault(shown(tokenizer, other), float(row[other]))
            found.token_logprobs.append(float(row[token]))
            found.top_logprobs.append(chosen)
        total = end
        yield


def text_offsets(tokenizer: Tokenizer, *parts: Sequence[int]) -> list[int]:
    """Where in a text each token begins, in characters; no character is made of two parts' bytes."""
    offsets, at = [], 0
    for part in parts:
        decoder = StreamDecoder(tokenizer)
        for token in part:
            offsets.append(at)
            at += len(decoder.push(token))
        at += len(decoder.flush())
    return offsets


def _log_softmax(logits: Array) -> Array:
    """(T, V) → (T, V): ln p, in float64."""
    scores = logits.astype(np.float64)
    scores -= scores.max(axis=-1, keepdims=True)
    return scores - np.log(np.exp(scores).sum(axis=-1, keepdims=True))
