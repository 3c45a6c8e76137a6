"""Orders for text, and the pieces by which they are filled: what generate.py writes with the same seed."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from minigpt.engines import soonest_engine
from minigpt.explorer.token_logprobs import TokenLogprobs, scored
from minigpt.normal_form import NormalForm
from minigpt.plain import PlainEngine
from minigpt.sampling import Engine, SamplingOptions, Text, WritingEngine, continued, generate_together
from minigpt.streaming import StopFilter, StreamDecoder
from minigpt.tokenizer import Tokenizer

SHARE = 8  # where others write too, an order has an eighth of the texts that the engine likes side by side


@dataclass(frozen=True)
class Order:
    """What is to be written: for each prompt so many texts, the first of each with ``seed``, the next with seed + 1."""

    prompts: Sequence[list[int]]
    n: int
    max_tokens: int
    sampling: SamplingOptions
    seed: int
    stops: Sequence[str] = ()
    echo: bool = False
    logprobs: int | None = None  # so many of the likeliest tokens at each place; None: no probability at all


@dataclass(frozen=True)
class Finished:
    """What is known of a text at its end."""

    reason: str  # "stop": the model or a stop string ended it; "length": it has as many tokens as were asked for
    written: list[int]  # the ids after the prompt
    cut: bool  # whether a stop string, and what follows it, is left out of the text
    logprobs: TokenLogprobs | None


@dataclass(frozen=True)
class Piece:
    """What a text grows by, often nothing; texts are counted over all prompts."""

    number: int
    text: str
    finished: Finished | None = None


class Growing:
    """A text of an order."""

    def __init__(self, order: Order, number: int, tokenizer: Tokenizer) -> None:
        self.order, self.number = order, number
        self.prompt = order.prompts[number // order.n]
        self.decoder, self.stop = StreamDecoder(tokenizer), StopFilter(order.stops)
        self.text = Text.begin(
            self.prompt,
            max_new_tokens=order.max_tokens,
            options=order.sampling,
            seed=order.seed + number % order.n,
            banned=tokenizer.undefined_ids,
        )

    def push(self, token: int) -> Piece:
        """What may be shown with this id."""
        piece = self.stop.push(self.decoder.push(token))
        if self.stop.met:
            self.text.left = 0
        return Piece(self.number, piece)

    def flush(self) -> str:
        """What was held back, when no more comes."""
        return "" if self.stop.met else self.stop.push(self.decoder.flush()) + self.stop.flush()

    def finished(self, logprobs: TokenLogprobs | None) -> Finished:
        """At its end."""
        written = self.text.tokens[len(self.prompt) :]
        reason = "stop" if self.stop.met or len(written) < self.order.max_tokens else "length"
        return Finished(reason, written, self.stop.met, logprobs)


class OrderWriter:
    """A model that writes: by numba's code where numba is, as in generate.py for long texts, else in NumPy."""

    def __init__(self, form: NormalForm, tokenizer: Tokenizer) -> None:
        self.form, self.tokenizer = form, tokenizer

    @cached_property
    def engine(self) -> Engine | WritingEngine:
        """Loaded with the first text, so that whoever wants the page alone does not wait."""
        return soonest_engine(self.form)

    @cached_property
    def reader(self) -> PlainEngine:
        """Tells the logits at every place."""
        return PlainEngine(self.form)

    def pieces(self, order: Order, alone: Callable[[], bool]) -> Iterator[Piece]:
        """All texts, those of each prompt side by side where the engine can: fewer unless the order is ``alone``.

        Raises:
            UserError: if the logits are not finite.
        """
        for first in range(0, len(order.prompts) * order.n, order.n):
            start, end = first, first + order.n
            while start < end:
                numbers = range(start, min(start + self._at_once(alone()), end))
                yield from self._group([Growing(order, number, self.tokenizer) for number in numbers])
                start = numbers.stop

    def _at_once(self, alone: bool) -> int:
        most = self.engine.texts_at_once if isinstance(self.engine, WritingEngine) else 1
        return most if alone else max(1, most // SHARE)

    def _group(self, group: list[Growing]) -> Iterator[Piece]:
        for some in group:
            yield Piece(some.number, self.tokenizer.decode(some.prompt) if some.order.echo else "")
        for place, token in _grown(self.engine, [some.text for some in group]):
            yield group[place].push(token)
        for some in group:
            yield Piece(some.number, some.flush())
            logprobs = None
            if some.order.logprobs is not None:
                logprobs = TokenLogprobs()
                for _ in scored(self.reader, self.tokenizer, some.text.tokens, logprobs, some.order.logprobs):
                    yield Piece(some.number, "")
                logprobs.drop(0 if some.order.echo else len(some.prompt))
            yield Piece(some.number, "", some.finished(logprobs))


def _grown(engine: Engine | WritingEngine, texts: Sequence[Text]) -> Iterator[tuple[int, int]]:
    """The ids by which texts grow, with each its text's number."""
    if isinstance(engine, WritingEngine):
        yield from generate_together(engine, texts)
        return
    for number, text in enumerate(texts):
        for token in continued(engine, text):
            yield number, token
