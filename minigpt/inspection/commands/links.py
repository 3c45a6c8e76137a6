"""How much each head moves along links between words that are known, and
whether it matters.

The text is stories that no model was trained on (minigpt/tasks/tales.py), in
which earlier words fix later ones. A link is read in the row that predicts the
later word: the weight on the earlier word's tokens, their sum.

  uniform      if all that the row sees weighed the same
  fresh        the head that moves most in networks with the same shape and
               random weights, the mean over such networks
  other words  the same head in rows of the same kind, on what is as far away
               but not the cause
  own row      the row of the later word itself, which comes too late to help

Does it matter? The earlier word is dropped from the rows that predict the later
one, and the rest of each row scaled up to 1. The control removes as much weight
from the heaviest other words. A link is compared with it if it found 80 % of
that in every row of every head that is changed; others are left out on the
right, and told on the left, where the drop stands alone. Links with a row that
has nothing else are left out of both. The last table counts such rows and
links. (To leave out the rows alone would spare just the heads that carry the
link.) A word that stands in the story twice can still be read from the other
place.

  compare_attention.py links runs/tales
  compare_attention.py links runs/tales --which 0      before training
  compare_attention.py links runs/tales --all-heads    drop in each single head
"""

import argparse
import dataclasses
import json
import math
from typing import TYPE_CHECKING, Any

from minigpt.console import counted, say
from minigpt.errors import UserError
from minigpt.inspection.subject import Subject, add_run_arguments, load_subject
from minigpt.text_options import add_unseen_option
from minigpt.unseen import tell_lost

if TYPE_CHECKING:
    from minigpt.inspection.link_table import DropRow, LinkTable, MassRow

STORIES, FRESH = 100, 5
ACROSS = 9  # heads side by side


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this part."""
    add_run_arguments(parser)
    add_unseen_option(parser)
    parser.add_argument("--stories", type=int, default=STORIES, metavar="N", help=f"stories (default: {STORIES})")
    parser.add_argument("--fresh", type=int, default=FRESH, metavar="N", help=f"fresh networks (default: {FRESH})")
    parser.add_argument("--all-heads", action="store_true", help="drop the links in each head, not in the strongest")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")


def run(options: argparse.Namespace) -> int:
    """Read, drop, print."""
    for name, least in (("stories", 1), ("fresh", 0)):
        if getattr(options, name) < least:
            raise UserError(f"--{name} = {getattr(options, name)}: must be at least {least}")
    from minigpt.inspection.link_nulls import fresh_masses
    from minigpt.inspection.link_table import link_table
    from minigpt.inspection.links import linked_story, windows
    from minigpt.tasks.judge import SEED
    from minigpt.tasks.tales import held_out_stories

    subject = load_subject(options.run, options.which, unseen=options.unseen)
    if subject.checkpoint.config.data.source != "tales":
        say("this model has not been trained on the tales it reads here")
    stories = held_out_stories(SEED, options.stories)
    texts = [linked_story(story, subject.tokenizer) for story in stories]
    tell_lost(subject.tokenizer, [story.text for story in stories], say)
    if not any(text.links for text in texts):
        raise UserError("nothing is left of the linked words without the characters that the tokenizer has never seen")
    folder = options.run / "attention" if options.run.is_dir() else None
    fresh = fresh_masses(subject, windows(texts, subject.context_length)[0], options.fresh, folder)
    table = link_table(subject.model, texts, fresh=fresh, all_heads=options.all_heads)
    if options.json:
        print(json.dumps(as_json(subject, options, table), ensure_ascii=False))
    else:
        print("\n".join(lines(subject, options, table)))
    return 0


def as_json(subject: Subject, options: argparse.Namespace, table: "LinkTable") -> dict[str, Any]:
    """All numbers; those that are not there are null."""
    about = {"run": str(options.run), "step": subject.checkpoint.step, "stories": options.stories}
    return about | _nullable(dataclasses.asdict(table))


def lines(subject: Subject, options: argparse.Namespace, table: "LinkTable") -> list[str]:
    """The tables as text, at most 80 columns wide."""
    return [
        f"{options.run}, step {subject.checkpoint.step}: {counted(table.links, 'link')} in "
        f"{counted(options.stories, 'story', 'stories')}, read in windows of {subject.context_length}",
        *_left_out(table),
        "",
        "weight on the word that fixes the next one, in the row that predicts that:",
        f"{'':<34}{'fresh,':>21}{'other':>8}{'own':>7}",
        f"{'kind':<9}{'links':>6}  {'strongest':<9}{'weight':>8}{'uniform':>10}{'strongest':>11}{'words':>8}{'row':>7}",
        *map(_mass_line, table.strongest()),
        "",
        "every head:",
        *_head_lines(table),
        "",
        "that word dropped from the row (control: as much from the heaviest others):",
        f"{'':<19}all links {'':<3}| links with a control",
        f"{'':<27}prob.|{'probability of word':>30}{'loss':>14}",
        f"{'kind':<9}{'heads':<10}{'links':>5}{'drop':>8}|{'links':>6}{'before':>7}{'drop':>8}{'control':>9}"
        f"{'drop':>8}{'control':>9}",
        *map(_drop_line, table.drops),
        "",
        "left out (a row is that of one head, predicting one token of the word):",
        f"{'':<19}{'rows':>6}{'nothing left':>13}{'unmatched':>10}|{'links':>6}{'nothing left':>13}{'unmatched':>10}",
        *map(_left_out_line, table.drops),
    ]


def _left_out(table: "LinkTable") -> list[str]:
    count = sum(table.left_out.values())
    return [f"left out: {count} links that no window holds whole"] if count else []


def _mass_line(row: "MassRow") -> str:
    return (
        f"{row.kind:<9}{row.links:>6}  {row.head:<9}{row.mass:>8.3f}{row.uniform:>10.3f}"
        f"{_number(row.fresh_strongest, 11)}{_number(row.other_words, 8)}{row.own_mass:>7.3f}"
    )


def _head_lines(table: "LinkTable") -> list[str]:
    heads = list(dict.fromkeys(row.head for row in table.masses))
    mass = {(row.kind, row.head): row.mass for row in table.masses}
    kinds = list(dict.fromkeys(row.kind for row in table.masses))
    found: list[str] = []
    for start in range(0, len(heads), ACROSS):
        part = heads[start : start + ACROSS]
        found.append(f"{'kind':<9}" + "".join(f"{head:>7}" for head in part))
        found += [f"{kind:<9}" + "".join(f"{mass[kind, head]:>7.3f}" for head in part) for kind in kinds]
    return found


def _drop_line(row: "DropRow") -> str:
    first, every = row.first, row.without_control
    return (
        f"{row.kind:<9}{row.heads:<10}{every.links:>5}{_number(every.probability_drop, 8, '+')}|{first.links:>6}"
        f"{_number(first.probability, 7)}{_number(first.probability_drop, 8, '+')}"
        f"{_number(first.probability_control, 9, '+')}{_number(first.loss_drop, 8, '+')}"
        f"{_number(first.loss_control, 9, '+')}"
    )


def _left_out_line(row: "DropRow") -> str:
    return (
        f"{row.kind:<9}{row.heads:<10}{row.rows:>6}{row.rows_nothing_left:>13}{row.rows_unmatched:>10}|"
        f"{row.links:>6}{row.nothing_left:>13}{row.unmatched:>10}"
    )


def _number(value: float, width: int, sign: str = "") -> str:
    return f"{'-':>{width}}" if math.isnan(value) else f"{value:>{sign}{width}.3f}"


def _nullable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _nullable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_nullable(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
