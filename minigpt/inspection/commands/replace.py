"""Force heads to attend exactly as a reference says, and see how the loss changes.

Rows where the reference is not defined keep the head's own attention. With
--all every head is forced to every reference: closeness beside use.
"""

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from minigpt.inspection.labels import shortened
from minigpt.inspection.subject import add_run_arguments, add_text_arguments, load_subject, sequences, told

if TYPE_CHECKING:
    from minigpt.inspection.compare import Closeness
    from minigpt.inspection.heads import Head
    from minigpt.inspection.intervene import Interval

    Effects = Mapping[tuple[Head, str], Interval]  # by head and reference's name

SEQUENCES = 32
REFERENCES = ("previous", "first", "self", "uniform", "induction")
ACROSS = 5  # references side by side in 80 columns
LEGEND = (
    "TV      share of the head's attention that is elsewhere than the reference says,",
    "        on the rows where it is defined",
    "change  of the loss, nats a token, when the head is made to attend just so",
    "",
    "small TV, small change: the head is that pattern",
    "large TV, small change: the head does not matter here",
    "small TV, large change: the small remainder is the point",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The run, the heads, the references, the text."""
    add_run_arguments(parser)
    heads = parser.add_mutually_exclusive_group(required=True)
    heads.add_argument("--head", action="append", metavar="L1H2", help="the head to force; repeatable")
    heads.add_argument("--all", action="store_true", help="every head, to every reference")
    names = " ".join(REFERENCES)
    parser.add_argument("--ref", action="append", metavar="NAME|FILE", help=f"repeatable (default: {names})")
    add_text_arguments(parser, sequences=SEQUENCES)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")


def run(options: argparse.Namespace) -> int:
    """Measure and print."""
    from minigpt.inspection.intervene import (
        bootstrap,
        closeness_to,
        facts,
        heading,
        heads_of,
        losses_under,
        sequence_losses,
        watched,
    )
    from minigpt.inspection.patterns import parse_reference

    subject = load_subject(options.run, options.which, unseen=options.unseen)
    heads = heads_of(subject.model, options.head or ())
    names = dict.fromkeys(options.ref or REFERENCES)  # each once
    references = [parse_reference(name, subject.tokenizer) for name in names]
    read = sequences(subject, options)
    tokens = read.tokens
    near = closeness_to(subject.model, tokens, references)
    before = sequence_losses(subject.model, tokens, targets=read.targets)
    pairs = [(head, reference) for head in heads for reference in references if near[reference.name].rows]
    losses = losses_under(subject.model, tokens, watched(pairs), targets=read.targets)
    effects = {pair: bootstrap(loss - before) for pair, loss in losses.items()}
    answer = facts(options.run, subject.checkpoint.step, tokens, before)
    if options.json:
        print(json.dumps(answer | {"effects": as_rows(heads, near, effects)}))
        return 0
    print(heading(options.run, subject.checkpoint.step, told(tokens, options), before) + "\n")
    lines = grid(heads, near, effects) if options.all else table(heads, near, effects)
    print("\n".join(line.rstrip() for line in lines))
    print("\n" + "\n".join(LEGEND))
    return 0


# ── words ──────────────────────────────────────────────────────────────────────────────────────────────────────


def as_rows(heads: "Sequence[Head]", near: "Mapping[str, Closeness]", effects: "Effects") -> list[dict[str, object]]:
    """Every head and reference as plain values; null where the reference is defined on no row."""
    return [
        {
            "head": str(head),
            "reference": name,
            "coverage": close.coverage,
            "total_variation": float(close.total_variation[head]) if close.rows else None,
            "change": effects[head, name].to_dict() if close.rows else None,
        }
        for head in heads
        for name, close in near.items()
    ]


def table(heads: "Sequence[Head]", near: "Mapping[str, Closeness]", effects: "Effects") -> list[str]:
    """A line a head and reference, with intervals."""
    lines = [f"{'head':<8}{'reference':<18}{'rows':>5}{'TV':>8}{'change':>11}  95 % interval"]
    for head in heads:
        for name, close in near.items():
            start = f"{head!s:<8}{shortened(name, 16, keep_end=True):<18}{close.coverage:>5.0%}"
            if close.rows:
                lines.append(f"{start}{close.total_variation[head]:>8.3f}   {effects[head, name]}")
            else:
                lines.append(f"{start}   is not defined anywhere in this text")
    return lines


def grid(heads: "Sequence[Head]", near: "Mapping[str, Closeness]", effects: "Effects") -> list[str]:
    """TV beside change of every head and reference; a star where the interval is all on one side of 0."""
    names, lines = list(near), []
    for start in range(0, len(names), ACROSS):
        shown = names[start : start + ACROSS]
        lines += ["".join([" " * 6, *(f"  {shortened(name, 12, keep_end=True):>12}" for name in shown)])]
        lines += ["".join([f"{'rows':<6}", *(f"{near[name].coverage:>13.0%} " for name in shown)])]
        lines += ["".join([f"{'head':<6}", *["    TV  change "] * len(shown)])]
        lines += ["".join([f"{head!s:<6}", *(cell(head, name, near, effects) for name in shown)]) for head in heads]
        lines += [""]
    starred = any(not math.isnan(change.low) for change in effects.values())
    return [*lines, "*: the 95 % interval over the sequences does not hold 0"] if starred else lines


def cell(head: "Head", name: str, near: "Mapping[str, Closeness]", effects: "Effects") -> str:
    """14 columns."""
    if not near[name].rows:
        return f"{'-':>6}{'-':>7} "
    change = effects[head, name]
    star = "*" if change.low > 0 or change.high < 0 else " "
    return f"{near[name].total_variation[head]:>6.2f}{change.mean:>+7.3f}{star}"
