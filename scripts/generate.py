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
import json
import sys
from pathlib import Path

from minigpt.checkpoint import find_checkpoint
from minigpt.cli import parse_options, run_script, unescape
from minigpt.console import say, visible
from minigpt.engines import writing_engine
from minigpt.errors import UserError
from minigpt.reading import normalise_newlines
from minigpt.sampling import SamplingOptions, WritingEngine
from minigpt.tokenizer import tokenizer_from_dict
from minigpt.unseen import as_read
from minigpt.writing import Sample, Writer

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
    n_token = min(options.max_new_tokens * options.num_samples, MANY_TOKENS)
    writer.engine = writing_engine(checkpoint, n_token, engine=options.engine, device=options.device)
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


if __name__ == "__main__":
    run_script(main)
