"""Let a trained model write, token by token as they come.

  python scripts/generate.py runs/bard --prompt "ROMEO:" --temperature 0.8
  python scripts/generate.py runs/bard --interactive
  python scripts/generate.py runs/bard --num-samples 3 --stop "\\n\\n" --json

In --prompt and --stop, \\n, \\t and \\\\ stand for newline, tab and backslash. On a
CPU a Transformer runs in NumPy, so the first word comes at once, or for long
texts compiled by numba, where that is installed; --device cuda or mps, and
recurrent networks, run in torch. A terminal is shown control characters as
\\x1b; in a file or a pipe they are as the model wrote them.
"""

from minigpt.signals import quiet_interrupts

if __name__ == "__main__":
    quiet_interrupts()  # before the imports below, which take their time

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from minigpt.checkpoint import Checkpoint, find_checkpoint
from minigpt.cli import parse_options, run_script, unescape
from minigpt.console import visible
from minigpt.errors import UserError
from minigpt.reading import normalise_newlines
from minigpt.sampling import Engine, SamplingOptions, Text, WritingEngine, continued, generate_together
from minigpt.streaming import StopFilter, StreamDecoder
from minigpt.threads import usual_threads
from minigpt.tokenizer import END, Tokenizer, tokenizer_from_dict
from minigpt.unseen import as_read, encoded

if TYPE_CHECKING:
    from minigpt.normal_form import NormalForm

# What NumPy needs for a token, measured on two cores of an AMD EPYC: so long at least, and so long for each weight.
NUMPY_SECONDS, NUMPY_SECONDS_PER_WEIGHT = 2.4e-4, 2.6e-10
# A text for which it needs longer is worth loading compiled code (0.5 s), or compiling it (5 to 10 s).
WORTH_LOADING, WORTH_COMPILING = 1.0, 10.0
MANY_TOKENS = 10**9  # nobody needs to know how many more


def main() -> None:
    options = parse_options(make_parser())
    if options.num_samples < 1:
        raise UserError(f"--num-samples = {options.num_samples}: must be at least 1")
    if options.interactive and (options.json or options.prompt or options.num_samples != 1):
        raise UserError("--interactive asks for each prompt: leave out --prompt, --json and --num-samples")
    law = SamplingOptions(
        options.temperature, options.top_k, options.top_p, options.min_p, options.repetition_penalty
    )  # fmt: skip
    stops = [normalise_newlines(unescape(stop)) for stop in options.stop]
    checkpoint = find_checkpoint(options.run, options.which)
    tokenizer = tokenizer_from_dict(checkpoint.tokenizer, unseen=options.unseen)
    writer = Writer(tokenizer, law, options.max_new_tokens, stops, options.seed)
    writer.engine = load_engine(checkpoint, options)
    if options.interactive:
        converse(writer)
        return
    prompt = normalise_newlines(unescape(options.prompt))
    if options.num_samples > 1 and isinstance(writer.engine, WritingEngine):
        samples = writer.write_together(writer.engine, prompt, options.num_samples)
    else:
        samples = (writer.write(prompt, number) for number in range(options.num_samples))
    shown = as_read(writer.tokenizer, prompt)
    answers = [write_sample(sample, number, shown, options) for number, sample in enumerate(samples)]
    if options.json:
        answer = {"run": str(options.run), "step": checkpoint.step, "prompt": prompt, "samples": answers}
        print(json.dumps(answer, ensure_ascii=False))


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("run", type=Path, help="a run's folder or one checkpoint file")
    parser.add_argument("--which", default="best", metavar="best|last|STEP", help="checkpoint (default: best)")
    parser.add_argument("--prompt", default="", metavar="TEXT", help="text to go on from (default: a new beginning)")
    parser.add_argument("--max-new-tokens", type=int, default=200, metavar="N", help="most tokens to add (200)")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="T", help="0: always the likeliest")
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="draw from the K likeliest; 0: from all")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="from the fewest that reach P")
    parser.add_argument("--min-p", type=float, default=0.0, metavar="P", help="from those above P x the likeliest's")
    parser.add_argument("--repetition-penalty", type=float, default=1.0, metavar="R", help="above 1: repeat less")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="same seed, same text on the same engine (0)")
    parser.add_argument("--num-samples", type=int, default=1, metavar="N", help="texts to write (default: 1)")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this; may be repeated")
    parser.add_argument("--interactive", action="store_true", help="ask for prompts until Ctrl-D")
    parser.add_argument(
        "--engine",
        default="auto",
        choices=["auto", "numpy", "numba", "torch"],
        help="what runs the model (default: the soonest done)",
    )
    parser.add_argument("--device", default="cpu", metavar="cpu|cuda|mps", help="where the model runs (default: cpu)")
    parser.add_argument(
        "--unseen",
        choices=["stop", "skip", "replace"],
        help="characters the tokenizer has never seen (default: as in the run)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    return parser


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
        if max_new_tokens < 0:
            raise UserError(f"--max-new-tokens = {max_new_tokens}: must be at least 0")
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


# ── engines ────────────────────────────────────────────────────────────────────────────────────────────────────


def load_engine(checkpoint: Checkpoint, options: argparse.Namespace) -> Engine | WritingEngine:
    """The model in NumPy or, for long texts, compiled; in torch if asked for or away from the CPU."""
    if options.engine in ("numpy", "numba") and options.device != "cpu":
        raise UserError(f"--engine {options.engine} runs on the CPU alone: leave out --device {options.device}")
    kind = checkpoint.config.model.kind
    if kind != "gpt" and options.engine in ("numpy", "numba"):
        raise UserError(f"--engine {options.engine} runs Transformers alone; {kind} takes --engine torch, or none")
    if options.engine == "torch" or options.device != "cpu" or kind != "gpt":
        from minigpt.assembly import load_model
        from minigpt.network import TorchEngine

        return TorchEngine(load_model(checkpoint, options.device))
    from minigpt.normal_form import from_checkpoint
    from minigpt.plain import PlainEngine

    model, n_token = from_checkpoint(checkpoint), min(options.max_new_tokens * options.num_samples, MANY_TOKENS)
    try:
        if options.engine == "numba" or (options.engine == "auto" and worth_numba(model, n_token)):
            return compiled_engine(model)
    except Exception as error:  # numba does not suit this NumPy, finds the disk full, ...: there is another way
        if options.engine == "auto":
            say(f"numba failed ({error}): NumPy goes on")
        elif isinstance(error, ImportError):
            raise UserError(f"--engine numba: {error}; pip install numba, or leave the option out") from None
        else:
            raise
    return PlainEngine(model)


def worth_numba(model: "NormalForm", n_token: int) -> bool:
    """Whether numba is there and saves more time than it costs to begin with."""
    n_weight = model.head.size + sum(array.size for array in model.layers)
    seconds = n_token * max(NUMPY_SECONDS, NUMPY_SECONDS_PER_WEIGHT * n_weight)
    if seconds < WORTH_LOADING or not importlib.util.find_spec("numba"):
        return False
    from minigpt import fast

    return seconds > WORTH_COMPILING or fast.kept_on_disk()


def compiled_engine(model: "NormalForm") -> WritingEngine:
    """The model compiled by numba."""
    from minigpt import fast

    if not fast.kept_on_disk():
        say("compiling with numba: once, about 10 s")
    engine = fast.FastEngine(model, usual_threads())
    engine.prepare()
    return engine


# ── showing ────────────────────────────────────────────────────────────────────────────────────────────────────


def write_sample(sample: Sample, number: int, prompt: str, options: argparse.Namespace) -> dict[str, object]:
    """Write one text, to the terminal as it comes unless it is wanted as JSON."""
    pieces = []
    if not options.json:
        if options.num_samples > 1:
            print(f"── sample {number + 1} of {options.num_samples} ──")
        show(prompt)
    for piece in sample.pieces:
        pieces.append(piece)
        if not options.json:
            show(piece)
    if not options.json:
        print()
    return {"text": "".join(pieces), "tokens": sample.tokens, "seed": sample.seed}


def converse(writer: Writer) -> None:
    """A prompt a line, a text for each."""
    say("Type a beginning and press Enter; Ctrl-D (Ctrl-Z on Windows) ends.")
    while True:
        print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        prompt = normalise_newlines(unescape(line.removesuffix("\n")))
        try:
            sample = writer.write(prompt)
            show(as_read(writer.tokenizer, prompt))
            for piece in sample.pieces:
                show(piece)
            print()
        except UserError as error:  # this prompt can't be written on; the next may
            say(str(error))


def show(text: str) -> None:
    """Write at once what has come; a terminal gets no control characters, a file or a pipe every character."""
    print(visible(text) if sys.stdout.isatty() else text, end="", flush=True)


def say(sentence: str) -> None:
    print(sentence, file=sys.stderr)


def unsaid(_sentence: str) -> None:
    """For what has been said before."""


if __name__ == "__main__":
    run_script(main)
