"""Links between words that are known beforehand: how much each head moves along them.

A link says that one word of a text, its *cause*, determines a later *word*. What the model does about it happens in
the rows that predict the word: p − 1 for each of its tokens p; the row of its first token is the headline.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minigpt.config import Config
from minigpt.errors import UserError
from minigpt.inspection.capture import looking
from minigpt.inspection.compare import Floats
from minigpt.inspection.patterns import LINKS, Reference, links_reference
from minigpt.inspection.words import byte_place, byte_spans, tokens_over
from minigpt.model import GPT
from minigpt.tasks.judge import SEED
from minigpt.tasks.synthetic import PREFIX, examples
from minigpt.tasks.tales import Story, held_out_stories
from minigpt.tokenizer import END, Tokenizer
from minigpt.unseen import as_read

BATCH_TOKENS = 3_000  # a pass reads about so many: small enough for the processor's caches


@dataclass(frozen=True)
class TokenLink:
    """Positions of a determined word's tokens, and of its cause's; all of the cause lie before all of the word."""

    kind: str
    word: tuple[int, ...]
    cause: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.word or not self.cause or not 0 <= min(self.cause) <= max(self.cause) < min(self.word):
            raise ValueError(f"a cause must come before its word, but {self.cause} is to determine {self.word}")

    @property
    def rows(self) -> tuple[int, ...]:
        """The rows that predict the word, that of its first token first."""
        return tuple(place - 1 for place in self.word)

    def moved(self, by: int) -> "TokenLink":
        """The same link where the text begins ``by`` tokens later."""
        return TokenLink(self.kind, tuple(p - by for p in self.word), tuple(p - by for p in self.cause))


@dataclass(frozen=True)
class LinkedText:
    """Tokens (T,) and the links between them."""

    tokens: NDArray[np.int64]
    links: tuple[TokenLink, ...]


def linked_story(story: Story, tokenizer: Tokenizer) -> LinkedText:
    """A tale as tokens, with the END that comes before every document, and those of its links that are left.

    Of a link, word or cause is lost where the tokenizer leaves out all its characters.
    """
    tokens = np.concatenate([[END], tokenizer.encode(story.text)]).astype(np.int64)
    spans = byte_spans(tokens, tokenizer)

    def place(character: int) -> int:
        before = as_read(tokenizer, story.text[:character])
        return byte_place(before, len(before))

    def positions(start: int, end: int) -> tuple[int, ...]:
        return tokens_over(spans, place(start), place(end))

    found = [
        (link.kind, positions(link.source.start, link.source.end), positions(link.target.start, link.target.end))
        for link in story.links
    ]
    return LinkedText(tokens, tuple(TokenLink(kind, word, cause) for kind, word, cause in found if word and cause))


def task_texts(config: Config, count: int) -> list[LinkedText]:
    """Examples of the run's task that no model was trained on, each answer linked to the token that it is read from.

    Raises:
        UserError: if no token alone fixes an answer of this task.
    """
    name = config.data.source.removeprefix(PREFIX)
    drawn = examples(
        name, config.task, length=config.model.context_length, count=count, seed=config.run.seed, part="test"
    )
    if not (drawn.causes >= 0).any():
        raise UserError(f"{config.data.source}: no token alone fixes an answer of this task, so it has no links")
    return [
        LinkedText(
            tokens,
            tuple(
                TokenLink(name, (row + 1,), (int(causes[row]),)) for row in np.flatnonzero(causes[:-1] >= 0).tolist()
            ),
        )
        for tokens, causes in zip(drawn.tokens, drawn.causes, strict=True)
    ]


def story_starts(tokenizer: Tokenizer, count: int, longest: int) -> list[LinkedText]:
    """Starts, all of one length, of tales that no model was trained on, with the links in them."""
    texts = [linked_story(story, tokenizer) for story in held_out_stories(SEED, count)]
    length = min(longest, *(len(text.tokens) for text in texts))
    return [
        LinkedText(text.tokens[:length], tuple(link for link in text.links if link.word[-1] < length)) for text in texts
    ]


def reference_of(texts: Sequence[LinkedText]) -> Reference:
    """On each of these texts, and on no other, the links: each row that predicts a word reads all of the cause."""
    patterns = {
        text.tokens.tobytes(): links_reference([(row, link.cause) for link in text.links for row in link.rows])
        for text in texts
    }
    return Reference(LINKS, lambda tokens: patterns[tokens.tobytes()].pattern(tokens), reads_tokens=True)


# ── windows and batches ────────────────────────────────────────────────────────────────────────────────────────


def windows(texts: Iterable[LinkedText], context_length: int) -> tuple[list[LinkedText], Counter[str]]:
    """Texts as a model can read them, each link in exactly one; and how many of each kind no window holds.

    A text that fits is left whole. Of a longer one, the links that end in the first window are read there, the others
    in as few windows as hold them, each with as much text before it as its last link allows.
    """
    found: list[LinkedText] = []
    left_out: Counter[str] = Counter()
    for text in texts:
        groups: list[tuple[int, int, list[TokenLink]]] = []  # first and last beginning that suits all its links
        for link in sorted(text.links, key=lambda link: link.word[-1]):
            begin = max(0, link.word[-1] + 1 - context_length)
            if link.cause[0] < begin:
                left_out[link.kind] += 1
            elif groups and begin <= groups[-1][1] and (begin == 0 or groups[-1][0] > 0):
                groups[-1] = begin, min(link.cause[0], groups[-1][1]), [*groups[-1][2], link]
            else:
                groups.append((begin, link.cause[0], [link]))
        for begin, _, links in groups:
            tokens = text.tokens[begin : begin + context_length]
            found.append(LinkedText(tokens, tuple(link.moved(begin) for link in links)))
    return found, left_out


def batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Indices of texts of like length, so that little is padded, about ``BATCH_TOKENS`` tokens together."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and (len(batch) + 1) * lengths[index] > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def padded(texts: Sequence[NDArray[np.int64]]) -> Tensor:
    """Texts of any lengths as one tensor (B, T). What pads a text comes after it, where none of its rows sees it."""
    tokens = torch.full((len(texts), max(map(len, texts))), END)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = torch.from_numpy(text)
    return tokens


# ── what is moved along the links ──────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Masses:
    """For N links, in the order of the texts, what each head (L layers, H heads) moves from the cause's tokens."""

    kinds: tuple[str, ...]
    first: Floats  # (N, L, H): to the row that predicts the word's first token
    word: Floats  # (N, L, H): to all rows that predict it, their mean
    own: Floats  # (N, L, H): to the word's own rows, their mean
    uniform: Floats  # (N,): to the first row, if all that it sees weighed the same
    other_words: Floats  # (N, L, H): to the first rows of the kind's other links, from words as far away; or NaN


@torch.inference_mode()
def link_masses(model: GPT, texts: Sequence[LinkedText]) -> Masses:
    """Read the texts, which fit the context, and add up the weights on each link's cause."""
    first, word, own, rows = ([[np.empty(0)] * len(text.links) for text in texts] for _ in range(4))
    for batch in batches([len(text.tokens) for text in texts]):
        with looking(model) as looks:
            model(padded([texts[index].tokens for index in batch]))
        for place, index in enumerate(batch):
            weights_LHTS = torch.stack([look.weights[place] for look in looks]).double().numpy()
            for number, link in enumerate(texts[index].links):
                moved_LHT = weights_LHTS[..., link.cause].sum(axis=-1)
                first[index][number] = moved_LHT[..., link.rows[0]]
                word[index][number] = moved_LHT[..., link.rows].mean(axis=-1)
                own[index][number] = moved_LHT[..., link.word].mean(axis=-1)
                rows[index][number] = weights_LHTS[..., link.rows[0], : link.word[0]]
    links = [link for text in texts for link in text.links]
    return Masses(
        kinds=tuple(link.kind for link in links),
        first=np.stack(list(chain(*first))),
        word=np.stack(list(chain(*word))),
        own=np.stack(list(chain(*own))),
        uniform=np.array([len(link.cause) / link.word[0] for link in links]),
        other_words=_same_distance(links, list(chain(*rows))),
    )


def _same_distance(links: Sequence[TokenLink], rows: Sequence[Floats]) -> Floats:
    """For each link, what rows of the kind's other links receive from as far away, where their own cause is not.

    rows: the first row of each link, (L, H, keys it sees). Returns (N, L, H), NaN where no other row reaches so far.
    """
    outer, longest = rows[0].shape[:2], max(row.shape[-1] for row in rows)
    by_distance = np.full((len(rows), *outer, longest), np.nan)  # NaN: before the text begins, or the row's own cause
    for weights, row, link in zip(by_distance, rows, links, strict=True):
        weights[..., : row.shape[-1]] = row[..., ::-1]
        weights[..., [link.rows[0] - place for place in link.cause]] = np.nan
    found = np.full((len(links), *outer), np.nan)
    for kind in dict.fromkeys(link.kind for link in links):
        members = [index for index, link in enumerate(links) if link.kind == kind]
        others = by_distance[members]
        for index in members:
            distances = [links[index].rows[0] - place for place in links[index].cause]
            moved = others[..., distances].sum(axis=-1)  # NaN for the link itself, by its own cause
            reached = ~np.isnan(moved[:, 0, 0])
            if reached.any():
                found[index] = moved[reached].mean(axis=0)
    return found
