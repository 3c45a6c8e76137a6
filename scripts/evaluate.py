"""Measure how well a trained model predicts a text: loss, perplexity, bits per
byte; token by token on request.

  python scripts/evaluate.py runs/bard                 its own validation part
  python scripts/evaluate.py runs/bard --source test   (data.test_fraction)
  python scripts/evaluate.py runs/bard --file other.txt
  python scripts/evaluate.py runs/bard --text "To be" --per-token
  python scripts/evaluate.py runs/bard --verify 200    replay: the same bits?

A run on the embedded stories also tells how often the words that the story
determines are found. All but --verify runs in NumPy. The first token of a text
is not predicted.
"""

import argparse
import json
import math
import sys
from pathlib import Path

import numpy as np

from minigpt.checkpoint import Checkpoint, find_checkpoint
from minigpt.cli import parse_options, run_script, unescape
from minigpt.corpus import held_back, open_corpus
from minigpt.errors import UserError
from minigpt.normal_form import from_checkpoint
from minigpt.plain import PlainEngine
from minigpt.reading import encoding_name, normalise_newlines, whole_text
from minigpt.scoring import TokenScores, score
from minigpt.tokenizer import Tokenizer, tokenizer_from_dict
from minigpt.unseen import encoded


def main() -> int:
    options = parse_options(make_parser())
    if options.encoding and not options.file:
        raise UserError(f"--encoding {options.encoding} is that of --file: give both")
    if options.verify is not None:
        return verify(options)
    checkpoint = find_checkpoint(options.run, options.which)
    tokenizer = tokenizer_from_dict(checkpoint.tokenizer, unseen=options.unseen)
    name, tokens = text_to_score(options, checkpoint, tokenizer)
    if len(tokens) < 2:
        raise UserError(f"{name}: {len(tokens)} tokens; at least 2 are needed, since the first is not predicted")
    engine = PlainEngine(from_checkpoint(checkpoint))
    scores = score(engine, tokens)
    predicted = tokens[1:].astype(np.int64)
    result = scores.evaluation(predicted, tokenizer.byte_lengths)
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
    if options.per_token:
        answer["per_token"] = rows = token_rows(predicted, scores, tokenizer)
        if not options.json:
            print_rows(rows)
    if not options.json:
        print(f"{name}, step {checkpoint.step}: {result.n_token:,} tokens in windows of {engine.context_length}")
        print(f"loss {result.loss:.4f}   perplexity {result.perplexity:.3f}   bits per byte {result.bits_per_byte:.4f}")
    if checkpoint.config.data.source == "tales" and not (options.text or options.file):
        from minigpt.tasks.judge import judge_tales, table

        verdict = judge_tales(engine, tokenizer)
        answer["tales"] = verdict.as_dict()
        if not options.json:
            print(table(verdict))
    if options.json:
        print(json.dumps(answer, ensure_ascii=False, allow_nan=False))
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("run", type=Path, help="a run's folder or one checkpoint file")
    parser.add_argument("--which", default="best", metavar="best|last|STEP", help="checkpoint (default: best)")
    text = parser.add_mutually_exclusive_group()
    text.add_argument("--source", default="val", choices=["val", "test"], help="part of the run's text (default: val)")
    text.add_argument("--file", type=Path, metavar="PATH", help="score this file")
    parser.add_argument("--encoding", metavar="NAME", help="encoding of --file (default: the run's)")
    text.add_argument("--text", metavar="TEXT", help="score this text")
    text.add_argument("--verify", type=int, metavar="STEP", help="replay the training up to this checkpoint")
    parser.add_argument("--per-token", action="store_true", help="list each token, its log-probability and rank")
    parser.add_argument(
        "--unseen",
        choices=["stop", "skip", "replace"],
        help="characters the tokenizer has never seen (default: as in the run)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    return parser


def text_to_score(options: argparse.Namespace, checkpoint: Checkpoint, tokenizer: Tokenizer) -> tuple[str, np.ndarray]:
    """A name and the tokens (N,) of what is to be scored."""
    if options.text is not None:
        return "--text", encoded(tokenizer, normalise_newlines(unescape(options.text)), say)
    data = checkpoint.config.data
    if options.file:
        if options.encoding:
            encoding_name(options.encoding, "--encoding")
            data = data.model_copy(update={"encoding": options.encoding})
        return str(options.file), encoded(tokenizer, whole_text(options.file, data, say), say)
    context, seed = checkpoint.config.model.context_length, checkpoint.config.run.seed
    corpus = open_corpus(data, context_length=context, seed=seed, tokenizer=tokenizer)
    part = held_back(corpus, data, options.source)
    for note in corpus.notes:
        say(note)
    own = tokenizer.to_dict() == checkpoint.tokenizer  # else, with --unseen, no fingerprint tells
    if own and corpus.fingerprint != checkpoint.metadata.get("corpus", corpus.fingerprint):
        say(f"{data.source}: the text has changed since the run began")
    return f"{data.source} ({'test' if options.source == 'test' else 'validation'})", part


def token_rows(predicted: np.ndarray, scores: TokenScores, tokenizer: Tokenizer) -> list[dict[str, object]]:
    """One dictionary a predicted token."""
    return [
        {"token": tokenizer.decode([int(token)]), "id": int(token), "log_probability": float(p), "rank": int(rank)}
        for token, p, rank in zip(predicted, scores.log_probability, scores.rank, strict=True)
    ]


def print_rows(rows: list[dict[str, object]]) -> None:
    print(f"{'token':<24}{'ln p':>9}{'rank':>7}")
    for row in rows:
        print(f"{row['token']!r:<24}{row['log_probability']:>9.3f}{row['rank']:>7}")


def verify(options: argparse.Namespace) -> int:
    """Say whether training from the checkpoint before a step ends in the same bits; exit code 1 if not."""
    from minigpt.launch import verify as replay

    begin, different = replay(options.run, options.verify, say)
    if options.json:
        print(json.dumps({"from": begin, "to": options.verify, "equal": not different, "different": different}))
    elif different:
        print(f"steps {begin} to {options.verify}: {len(different)} tensors differ, the first is {different[0]}")
    else:
        print(f"steps {begin} to {options.verify}: trained anew, every bit of weights and optimizer is the same")
    return 1 if different else 0


def say(sentence: str) -> None:
    print(sentence, file=sys.stderr)


if __name__ == "__main__":
    run_script(main)
