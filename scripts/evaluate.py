"""Measure how well a trained model predicts a text: loss, perplexity, bits per
byte; token by token on request.

  python scripts/evaluate.py runs/bard                 its own validation part
  python scripts/evaluate.py runs/bard --source test   (data.test_fraction)
  python scripts/evaluate.py runs/bard --source tales  all of another known text
  python scripts/evaluate.py runs/bard --file other.txt
  python scripts/evaluate.py runs/bard --text "To be" --per-token
  python scripts/evaluate.py runs/bard --stride 32     windows that overlap
  python scripts/evaluate.py runs/bard --verify 200    replay: the same bits?

A run on the embedded stories also tells how often the words that the story
determines are found; one on a task, how many of its answers are right. All but
--verify and recurrent networks runs in NumPy. The first token of a text is not
predicted.

Windows have the context's length and do not overlap. With --stride N one begins
every N tokens, and what no window before it held is predicted in it, from at
least the context less N tokens, as in Hugging Face's guide "Perplexity of
fixed-length models". The guide's code weighs windows a little otherwise: its
number is told too.
"""

from minigpt.signals import quiet_interrupts

if __name__ == "__main__":
    quiet_interrupts()  # before the imports below, which take their time

import argparse
import json
import math
from dataclasses import asdict
from pathlib import Path

from minigpt.checkpoint import find_checkpoint
from minigpt.cli import parse_options, run_script
from minigpt.console import counted, say
from minigpt.engines import reading_engine
from minigpt.errors import UserError
from minigpt.scoring import TokenScore, guide_perplexity, score, score_sliding
from minigpt.tasks import judge
from minigpt.text_options import PARTS, add_text_options, asked_text
from minigpt.tokenizer import tokenizer_from_dict


def main() -> int:
    options = parse_options(make_parser())
    if options.verify is not None:
        return verify(options)
    checkpoint = find_checkpoint(options.run, options.which)
    tokenizer = tokenizer_from_dict(checkpoint.tokenizer, unseen=options.unseen)
    asked = asked_text(options, checkpoint, tokenizer)
    name, tokens = asked.name, asked.tokens
    if len(tokens) < 2:
        raise UserError(
            f"{name}: {counted(len(tokens), 'token')}; at least 2 are needed, since the first is not predicted"
        )
    engine = reading_engine(checkpoint)
    if options.stride is not None and asked.targets is not None:
        raise UserError(f"--stride {options.stride}: a task's examples are windows that do not overlap; leave it out")
    if options.stride is not None:
        scores = score_sliding(engine, tokens, options.stride)
    else:
        scores = score(engine, tokens, asked.targets)
    result = scores.evaluation(tokenizer.byte_lengths)
    if not math.isfinite(result.loss):
        raise UserError(
            f"{checkpoint.path}: the loss is not finite: this checkpoint is damaged or its training diverged; score an "
            "earlier step (--which)"
        )
    answer = {
        "run": str(options.run),
        "step": checkpoint.step,
        "text": name,
        "window": engine.context_length,
        "tokens": result.n_token,
        "loss": result.loss,
        "perplexity": result.perplexity,
        "bits_per_byte": result.bits_per_byte,
    }
    if options.stride is not None:
        answer |= {
            "stride": options.stride,
            "guide_perplexity": guide_perplexity(scores, engine.context_length, options.stride),
        }
    if asked.targets is not None:
        answer["accuracy"] = result.accuracy
    if options.per_token:
        rows = scores.listed(tokenizer)
        answer["per_token"] = [asdict(row) for row in rows]
        if not options.json:
            print_rows(rows)
    if not options.json:
        windows = f"windows of {engine.context_length}{f', one every {options.stride}' if options.stride else ''}"
        print(f"{name}, step {checkpoint.step}: {counted(result.n_token, 'token')} in {windows}")
        print(f"loss {result.loss:.4f}   perplexity {result.perplexity:.3f}   bits per byte {result.bits_per_byte:.4f}")
        if options.stride is not None:
            print(f"perplexity by the weights of the guide's code: {answer['guide_perplexity']:.3f}")
        if asked.targets is not None:
            print(f"right: {result.accuracy:.1%} of what the task asks for")
    if checkpoint.config.data.source == "tales" and not (options.text or options.file) and options.source in PARTS:
        verdict = judge.judge_tales(engine, tokenizer)
        answer["tales"] = verdict.as_dict()
        if not options.json:
            print(judge.table(verdict))
    if options.json:
        print(json.dumps(answer, ensure_ascii=False, allow_nan=False))
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("run", type=Path, help="a run's folder or one checkpoint file")
    parser.add_argument("--which", default="best", metavar="best|last|STEP", help="checkpoint (default: best)")
    text = add_text_options(parser, text_help="read this text")
    text.add_argument("--verify", type=int, metavar="STEP", help="replay the training up to this checkpoint")
    parser.add_argument(
        "--stride", type=int, metavar="N", help="windows that overlap, one every N tokens (default: none overlap)"
    )
    parser.add_argument("--per-token", action="store_true", help="list each token, its log-probability and rank")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    return parser


def print_rows(rows: list[TokenScore]) -> None:
    print(f"{'token':<24}{'ln p':>9}{'rank':>7}")
    for row in rows:
        print(f"{row.token!r:<24}{row.log_probability:>9.3f}{row.rank:>7}")


def verify(options: argparse.Namespace) -> int:
    """Say whether training from the checkpoint before a step ends in the same bits; exit code 1 if not."""
    from minigpt.launch import verify as replay

    begin, different = replay(options.run, options.verify, say)
    if options.json:
        print(json.dumps({"from": begin, "to": options.verify, "equal": not different, "different": different}))
    elif different:
        others = f"other bits in {counted(len(different), 'tensor')}, first in {different[0]}"
        print(f"steps {begin} to {options.verify}: trained anew, {others}")
    else:
        print(f"steps {begin} to {options.verify}: trained anew, every bit of weights and optimizer is the same")
    return 1 if different else 0


if __name__ == "__main__":
    run_script(main)
