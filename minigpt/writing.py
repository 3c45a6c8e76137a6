"""A model that writes: text from a prompt, piece by piece as each is certain, several texts side by side."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from minigpt.console import say
from minigpt.sampling import Engine, SamplingOptions, Text, WritingEngine, continued, generate_together
from minigpt.streaming import StopFilter, StreamDecoder
from minigpt.tokenizer import END, Tokenizer
from minigpt.unseen import encoded


@dataclass
class Sample:
    """One text as it comes."""

    seed: int
    decoder: StreamDecoder
    stop: StopFilter
    tokens: list[int] = field(default_factory=list)
    pieces: Iterable[str] = ()

    def push(self, token: int) -> str:
        """What may be shown with this id."""
        self.tokens.append(token)
        return self.stop.push(self.decoder.push(token))

    def flush(self) -> str:
        """What was held back, when no more comes."""
        return "" if self.stop.met else self.stop.push(self.decoder.flush()) + self.stop.flush()


class Writer:
    """A model with all that decides its text but the prompt."""

    engine: Engine | WritingEngine  # set last: to load it takes a while, and the rest may be refused

    def __init__(
        self, tokenizer: Tokenizer, sampling: SamplingOptions, max_new_tokens: int, stops: list[str], seed: int
    ) -> None:
        self.tokenizer, self.sampling, self.max_new_tokens = tokenizer, sampling, max_new_tokens
        self.stops, self.seed = stops, seed
        self._text([END], self._sample(0))  # refuses what can't be

    def write(self, prompt: str, number: int = 0) -> Sample:
        """The text that goes on from the prompt, each piece as soon as it is certain."""
        sample = self._sample(number)
        sample.pieces = self._pieces(self._prompt_ids(prompt, say if number == 0 else unsaid), sample)
        return sample

    def write_together(self, engine: WritingEngine, prompt: str, n_sample: int) -> Iterator[Sample]:
        """Several, to be read in their order: they grow side by side, and what comes of later ones waits."""
        prompt_ids, at_once = self._prompt_ids(prompt, say), engine.texts_at_once
        for first in range(0, n_sample, at_once):
            samples = [self._sample(number) for number in range(first, min(first + at_once, n_sample))]
            texts, waiting = [self._text(prompt_ids, sample) for sample in samples], [list[str]() for _ in samples]
            events = generate_together(engine, texts)
            for number, sample in enumerate(samples):
                sample.pieces = self._in_turn(number, samples, texts, waiting, events)
                yield sample

    def _in_turn(
        self,
        number: int,
        samples: list[Sample],
        texts: list[Text],
        waiting: list[list[str]],
        events: Iterator[tuple[int, int]],
    ) -> Iterator[str]:
        while True:
            yield from waiting[number]
            waiting[number].clear()
            if texts[number].left == 0 or not (event := next(events, None)):
                break
            other, token = event
            waiting[other].append(samples[other].push(token))
            if samples[other].stop.met:
                texts[other].left = 0
        yield samples[number].flush()

    def _sample(self, number: int) -> Sample:
        return Sample(self.seed + number, StreamDecoder(self.tokenizer), StopFilter(self.stops))

    def _text(self, prompt_ids: list[int], sample: Sample) -> Text:
        return Text.begin(
            prompt_ids,
            max_new_tokens=self.max_new_tokens,
            options=self.sampling,
            seed=sample.seed,
            banned=self.tokenizer.undefined_ids,
        )

    def _pieces(self, prompt_ids: list[int], sample: Sample) -> Iterator[str]:
        for token in continued(self.engine, self._text(prompt_ids, sample)):
            yield sample.push(token)
            if sample.stop.met:
                return
        yield sample.flush()

    def _prompt_ids(self, prompt: str, tell: Callable[[str], None]) -> list[int]:
        ids = encoded(self.tokenizer, prompt, tell).tolist() or [END]
        seen = self.engine.context_length
        if len(ids) > seen:
            tell(f"the prompt has {len(ids)} tokens: the model sees the last {seen} at most")
        return ids


def unsaid(_sentence: str) -> None:
    """For what has been said before."""
