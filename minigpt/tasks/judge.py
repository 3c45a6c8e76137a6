"""Judging a model of the tales: does it find the words that a story determines, and write sentences of its grammar?"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np

from minigpt.sampling import Engine, SamplingOptions, generate
from minigpt.scoring import Reader
from minigpt.tasks import tales
from minigpt.tasks.tales import Story
from minigpt.tokenizer import END, Tokenizer

STORIES, SENTENCES = 400, 200
TEMPERATURE = 0.8
SEED = 1_000_003  # far from the corpus's own, whose stories hold no held-out combination anyway


class Model(Reader, Engine, Protocol):
    """An engine that can both read a window and go on with it."""


@dataclass(frozen=True)
class Row:
    """Part of the words of one kind that are found, and the better of two guesses that read nothing."""

    kind: str
    count: int
    found: float
    guess: float


@dataclass(frozen=True)
class Verdict:
    """One row a kind, "overall" last; and the part of sampled sentences that the grammar can make."""

    rows: tuple[Row, ...]
    grammatical: float

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def judge_tales(model: Model, tokenizer: Tokenizer) -> Verdict:
    """Judge on stories whose word combinations the corpus does not have.

    A word counts as found if each of its tokens is the likeliest one after the true text before it. Words whose
    cause lies outside the context are left out.
    """
    stories = tales.held_out_stories(SEED, STORIES)
    found: dict[str, list[bool]] = {kind: [] for kind in tales.KINDS}
    for story in stories:
        for kind, hit in _hits(story, model, tokenizer):
            found[kind].append(hit)
    found["overall"] = [hit for hits in found.values() for hit in hits]
    guesses = tales.guesses(stories)
    rows = [
        Row(kind, len(hits), float(np.mean(hits)), max(guesses[kind].commonest, guesses[kind].last))
        for kind, hits in found.items()
        if hits
    ]
    written = [tales.recognise(sentence) for sentence in _sampled_sentences(model, tokenizer)]
    return Verdict(tuple(rows), float(np.mean(written)))


def table(verdict: Verdict) -> str:
    """The verdict as text."""
    lines = ["words that the story determines, in held-out combinations:", "kind         words   found   guess"]
    lines += [f"{row.kind:<10}{row.count:>8}{row.found:>8.1%}{row.guess:>8.1%}" for row in verdict.rows]
    return "\n".join([*lines, f"sampled sentences that the grammar can make: {verdict.grammatical:.1%}"])


def _hits(story: Story, model: Model, tokenizer: Tokenizer) -> Iterator[tuple[str, bool]]:
    """For each held-out determined word: its kind, and whether it is found."""
    ids = np.concatenate([[END], tokenizer.encode(story.text)])
    ends = np.cumsum(tokenizer.byte_lengths[ids])  # place in the text (bytes; the tales are ASCII) after each token
    context = model.context_length
    likeliest: dict[int, np.ndarray] = {}  # by window start
    for word, link in zip(story.determined, story.links, strict=True):
        tokens = np.flatnonzero((ends > word.span.start) & (ends - tokenizer.byte_lengths[ids] < word.span.end))
        begin = max(0, int(tokens[-1]) - context)
        cause = int(np.searchsorted(ends, link.target.start, side="right"))
        if not word.held_out or cause < begin:
            continue
        if begin not in likeliest:
            window = ids[begin : begin + context]
            likeliest[begin] = model.all_logits(window, model.new_memory()).argmax(axis=-1)
        yield word.kind, bool((likeliest[begin][tokens - 1 - begin] == ids[tokens]).all())


def _sampled_sentences(model: Model, tokenizer: Tokenizer) -> list[str]:
    """The first 200 sentences of stories that the model makes up."""
    sentences: list[str] = []
    options, seed = SamplingOptions(temperature=TEMPERATURE), SEED
    while len(sentences) < SENTENCES:
        ids = generate(model, [END], max_new_tokens=model.context_length - 1, options=options, seed=seed)
        story = list(ids)
        whole = tales.sentences(tokenizer.decode(story))
        if len(story) == model.context_length - 1:
            whole = whole[:-1]  # cut by the length, not by the model
        sentences += whole or ["(nothing)"]
        seed += 1
    return sentences[:SENTENCES]
