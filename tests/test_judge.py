"""Judging a model of the tales, by models whose marks are known beforehand."""

import json
from typing import Any

import numpy as np
import pytest

from minigpt.tasks import judge, tales
from minigpt.tasks.judge import Row, Verdict, judge_tales, table
from minigpt.tasks.tales import KINDS, Story
from minigpt.tokenizer import END, Tokenizer, train_tokenizer

Array = np.ndarray[Any, np.dtype[Any]]
WHOLE, SHORT = 1024, 300  # bytes: a context that holds every story, and one that holds about half of one
BYTES = train_tokenizer("byte", [])


class Oracle:
    """Knows the stories by heart, but for tokens that hold the letter ``unknown``; notes the windows it reads."""

    def __init__(
        self, stories: list[Story], tokenizer: Tokenizer = BYTES, *, context_length: int = WHOLE, unknown: str = "\0"
    ) -> None:
        self.context_length, self.vocab_size, self.windows = context_length, tokenizer.vocab_size, list[list[int]]()
        ids = [id for story in stories for id in (END, *tokenizer.encode(story.text).tolist())]
        self.known = "".join(map(chr, [*ids, END]))
        self.forgets = {id for id in range(self.vocab_size) if unknown.encode() in tokenizer.token_bytes(id)}

    def new_memory(self) -> list[int]:
        return []

    def logits(self, tokens: Array, memory: list[int]) -> Array:
        memory.extend(tokens.tolist())
        return self._after(memory)[-1]

    def all_logits(self, tokens: Array, memory: list[int]) -> Array:
        assert not memory and len(tokens) <= self.context_length
        self.windows.append(tokens.tolist())
        return self._after(self.windows[-1])

    def _after(self, tokens: list[int]) -> Array:
        at = self.known.index("".join(map(chr, tokens)))
        following = [ord(character) for character in self.known[at + 1 : at + 1 + len(tokens)]]
        return 1000 * np.eye(self.vocab_size)[[END if id in self.forgets else id for id in following]]


class Uniform(Oracle):
    """Knows nothing."""

    def _after(self, tokens: list[int]) -> Array:
        return np.zeros((len(tokens), self.vocab_size))


@pytest.fixture(autouse=True)
def stories(monkeypatch: pytest.MonkeyPatch) -> list[Story]:
    """Those that the judge will take: few, so that it is quick."""
    monkeypatch.setattr(judge, "STORIES", 30)
    monkeypatch.setattr(judge, "SENTENCES", 25)
    return tales.held_out_stories(judge.SEED, 30)


def judged_words(stories: list[Story], kind: str) -> list[str]:
    return [
        story.text[word.span.start : word.span.end]
        for story in stories
        for word in story.determined
        if word.held_out and kind in (word.kind, "overall")
    ]


@pytest.mark.parametrize("name", ["byte", "char", "bpe"])
def test_an_oracle_finds_all_and_writes_grammar(stories: list[Story], name: str) -> None:
    """Whatever the tokens are; every held-out word counts once, and its row tells the better guess."""
    tokenizer = train_tokenizer(name, tales.corpus(0, 20_000))
    verdict = judge_tales(Oracle(stories, tokenizer), tokenizer)
    assert [row.kind for row in verdict.rows] == [*KINDS, "overall"]
    guesses = tales.guesses(stories)
    for row in verdict.rows:
        assert (row.count, row.found) == (len(judged_words(stories, row.kind)), 1.0)
        assert row.guess == max(guesses[row.kind].commonest, guesses[row.kind].last)
    assert verdict.grammatical == 1.0
    assert json.loads(json.dumps(verdict.as_dict()))["rows"][-1]["found"] == 1.0


def test_a_model_that_knows_nothing_finds_nothing(stories: list[Story]) -> None:
    verdict = judge_tales(Uniform(stories), BYTES)
    assert len(verdict.rows) == len(KINDS) + 1
    assert all(row.found == 0 for row in verdict.rows)
    assert verdict.grammatical == 0


def test_a_word_is_found_only_if_all_its_tokens_are(stories: list[Story]) -> None:
    verdict = judge_tales(Oracle(stories, unknown="e"), BYTES)
    for row in verdict.rows:
        assert row.found == pytest.approx(np.mean(["e" not in word for word in judged_words(stories, row.kind)]))
    assert 0.1 < verdict.rows[-1].found < 0.9


def test_a_story_longer_than_the_context_is_judged_in_windows(stories: list[Story]) -> None:
    """Words whose cause the window does not hold are left out; a sentence cut by the length is no mistake."""
    assert all(len(story.text) > SHORT for story in stories)
    oracle = Oracle(stories, context_length=SHORT)
    verdict = judge_tales(oracle, BYTES)
    assert any(window[0] != END for window in oracle.windows)
    assert all(row.found == 1 for row in verdict.rows)
    fitting = sum(
        word.held_out and word.span.end - 1 - link.target.start <= SHORT  # from the cause to before the last byte
        for story in stories
        for word, link in zip(story.determined, story.links, strict=True)
    )
    assert verdict.rows[-1].count == fitting
    assert verdict.grammatical == 1.0
    narrow = judge_tales(Oracle(stories, context_length=64), BYTES)
    assert 0 < narrow.rows[-1].count < fitting


def test_the_table() -> None:
    rows = (Row("name", 1200, 1.0, 0.25), Row("overall", 3, 2 / 3, 0.0))
    assert table(Verdict(rows, 0.985)).splitlines() == [
        "words that the story determines, in held-out combinations:",
        "kind         words   found   guess",
        "name          1200  100.0%   25.0%",
        "overall          3   66.7%    0.0%",
        "sampled sentences that the grammar can make: 98.5%",
    ]
