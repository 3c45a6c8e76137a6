"""Take heads out of a trained model, and see how the loss changes.

A head's result is replaced, before the output projection. The methods disagree
at times, so the one that was used is always told:
  zero      the head gives nothing
  mean      it gives its mean over sequences and positions
  resample  it gives its result at the same position of another sequence
"""

import argparse
import json
from collections.abc import Mapping
from itertools import combinations
from typing import TYPE_CHECKING

from minigpt.errors import UserError
from minigpt.inspection.subject import add_run_arguments, add_text_arguments, load_subject, sequences, told

if TYPE_CHECKING:
    from minigpt.inspection.intervene import Group, Interval
    from minigpt.model import GPT

SEQUENCES = 32
PAIRS_SHOWN = 20  # --json has all
GIVEN = {
    "zero": "nothing",
    "mean": "its mean over sequences and positions",
    "resample": "its result in another sequence",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The run, the heads, the method, the text."""
    add_run_arguments(parser)
    heads = parser.add_mutually_exclusive_group()
    heads.add_argument("--head", action="append", metavar="L1H2", help="take out this head; repeatable (default: each)")
    heads.add_argument("--all-but", action="append", metavar="L1H2", help="take out all heads but this; repeatable")
    parser.add_argument("--method", choices=list(GIVEN), default="mean", help="what it gives instead (default: mean)")
    parser.add_argument("--pairs", action="store_true", help="also take out each two of the heads together")
    add_text_arguments(parser, sequences=SEQUENCES)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")


def run(options: argparse.Namespace) -> int:
    """Measure and print."""
    from minigpt.inspection.intervene import ablate, bootstrap, facts, heading, pair_excess, sequence_losses, watched

    subject = load_subject(options.run, options.which, unseen=options.unseen)
    groups = chosen_groups(subject.model, options)
    read = sequences(subject, options)
    tokens = read.tokens
    before = sequence_losses(subject.model, tokens, targets=read.targets)
    losses = ablate(subject.model, tokens, watched(groups), targets=read.targets, method=options.method)
    changes = {group: loss - before for group, loss in losses.items()}
    effects = {group: bootstrap(change) for group, change in changes.items()}
    excess = pair_excess(changes) if options.pairs else {}
    beyond = {pair: bootstrap(change) for pair, change in excess.items()}
    answer = {**facts(options.run, subject.checkpoint.step, tokens, before), "method": options.method}
    if options.json:
        print(json.dumps(answer | {"effects": as_rows(effects, beyond)}))
        return 0
    print(heading(options.run, subject.checkpoint.step, told(tokens, options), before))
    print(f"method {options.method}: a head taken out gives {GIVEN[options.method]}\n")
    if options.all_but:
        print(f"all but {' '.join(options.all_but)}: {next(iter(effects.values()))}")
    else:
        print("\n".join([*table_of_heads(effects), *table_of_pairs(effects, beyond)]))
    return 0


def chosen_groups(model: "GPT", options: argparse.Namespace) -> "list[Group]":
    """The heads that are taken out together, group by group.

    Raises:
        UserError: for heads that are not there, and choices that leave nothing to do.
    """
    from minigpt.inspection.intervene import heads_of

    if options.all_but:
        kept = heads_of(model, options.all_but)
        others = tuple(head for head in heads_of(model) if head not in kept)
        if options.pairs:
            raise UserError("--pairs: not with --all-but, which takes out all the others at once")
        if not others:
            raise UserError(f"--all-but {' '.join(map(str, kept))}: the model has no other heads")
        return [others]
    heads = heads_of(model, options.head or ())
    if options.pairs and len(heads) < 2:
        raise UserError("--pairs: name at least two heads, or none for all")
    return [*((head,) for head in heads), *(combinations(heads, 2) if options.pairs else ())]


# ── words ──────────────────────────────────────────────────────────────────────────────────────────────────────


def as_rows(effects: "Mapping[Group, Interval]", beyond: "Mapping[Group, Interval]") -> list[dict[str, object]]:
    """The effects as plain values, each group a row."""
    rows: list[dict[str, object]] = []
    for group, change in effects.items():
        row: dict[str, object] = {"heads": [str(head) for head in group], "change": change.to_dict()}
        rows.append(row | ({"excess": beyond[group].to_dict()} if group in beyond else {}))
    return rows


def table_of_heads(effects: "Mapping[Group, Interval]") -> list[str]:
    """Single heads, in the model's order."""
    lines = [f"{group[0]!s:<14}{change}" for group, change in effects.items() if len(group) == 1]
    return [f"{'head':<14}{'change':>8}  95 % interval", *lines]


def table_of_pairs(effects: "Mapping[Group, Interval]", beyond: "Mapping[Group, Interval]") -> list[str]:
    """Pairs, the largest excess first; nothing without pairs."""
    if not beyond:
        return []
    pairs = sorted(beyond, key=lambda pair: -beyond[pair].mean)
    lines = [f"{' '.join(map(str, pair)):<14}{effects[pair]!s:<28}  {beyond[pair]}" for pair in pairs[:PAIRS_SHOWN]]
    left = [f"... and {len(pairs) - PAIRS_SHOWN} more; --json has all"] if len(pairs) > PAIRS_SHOWN else []
    return [
        "",
        f"{'pair':<14}{'change':>8}  {'95 % interval':<20}{'excess':>8}  95 % interval",
        *lines,
        *left,
        "",
        "excess: beyond the sum of what the two change alone. Above 0: each can stand in",
        "for the other, so that one alone seems to matter less than it does.",
    ]
