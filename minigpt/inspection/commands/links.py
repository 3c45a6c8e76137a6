"""How much each head moves along links between words that are known, and
whether it matters.

The text is stories that no model was trained on (minigpt/tasks/tales.py), in
which earlier words fix later ones; for a run on a task (data.source task:NAME)
it is examples kept from training, with the token that each answer is read from.
A link is read in the row that predicts the later word: the weight on the
earlier word's tokens, their sum.

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
  compare_attention.py links runs/a --seeds runs/b runs/c     of one task, side
                      by side: as often right, but looking at the same place?
"""

import argparse
import dataclasses
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minigpt.console import counted, say
from minigpt.corpora import is_task
from minigpt.errors import UserError
from minigpt.inspection.page_option import add_html_option, write_page
from minigpt.inspection.subject import Subject, add_run_arguments, load_subject
from minigpt.text_options import add_unseen_option
from minigpt.unseen import tell_lost

if TYPE_CHECKING:
    from minigpt.inspection.link_table import DropRow, LinkTable, MassRow
    from minigpt.inspection.links import LinkedText

TEXTS, FRESH = 100, 5
ACROSS = 9  # heads side by side


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this part."""
    add_run_arguments(parser)
    add_unseen_option(parser)
    parser.add_argument(
        "--texts", type=int, default=TEXTS, metavar="N", help=f"stories, or examples of a task (default: {TEXTS})"
    )
    parser.add_argument("--fresh", type=int, default=FRESH, metavar="N", help=f"fresh networks (default: {FRESH})")
    parser.add_argument("--all-heads", action="store_true", help="drop the links in each head, not in the strongest")
    parser.add_argument(
        "--seeds", type=Path, nargs="+", metavar="RUN", help="other runs on the same task, shown beside this one"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    add_html_option(parser)


def run(options: argparse.Namespace) -> int:
    """Read, drop, print."""
    for name, least in (("texts", 1), ("fresh", 0)):
        if getattr(options, name) < least:
            raise UserError(f"--{name} = {getattr(options, name)}: must be at least {least}")
    from minigpt.inspection.link_nulls import fresh_masses
    from minigpt.inspection.link_table import link_table
    from minigpt.inspection.links import windows

    subject = load_subject(options.run, options.which, unseen=options.unseen)
    if options.seeds and options.html:
        raise UserError("--html: shows one run; leave out --seeds")
    if options.seeds:
        return side_by_side(subject, options)
    texts = linked_texts(subject, options.texts)
    folder = options.run / "attention" if options.run.is_dir() else None
    fresh = fresh_masses(subject, windows(texts, subject.context_length)[0], options.fresh, folder)
    table = link_table(subject.model, texts, fresh=fresh, all_heads=options.all_heads)
    if options.json:
        print(json.dumps(as_json(subject, options, table), ensure_ascii=False))
    else:
        print("\n".join(lines(subject, options, table)))
    text = subject.tokenizer.decode(texts[0].tokens.tolist()).replace("\\", "\\\\")  # as it would be typed
    write_page(options, "look", texts=[text], which=options.which)
    return 0


def linked_texts(subject: Subject, count: int) -> "list[LinkedText]":
    """Examples of the run's task that were kept from training, or stories."""
    from minigpt.inspection.links import linked_story, task_texts
    from minigpt.tasks.judge import SEED
    from minigpt.tasks.tales import held_out_stories

    config = subject.checkpoint.config
    if is_task(config.data.source):
        return task_texts(config, count)
    if config.data.source != "tales":
        say("this model has not been trained on the tales it reads here")
    stories = held_out_stories(SEED, count)
    texts = [linked_story(story, subject.tokenizer) for story in stories]
    tell_lost(subject.tokenizer, [story.text for story in stories], say)
    if not any(text.links for text in texts):
        raise UserError("nothing is left of the linked words without the characters that the tokenizer has never seen")
    return texts


def side_by_side(subject: Subject, options: argparse.Namespace) -> int:
    """The run and others on the same task, a line each."""
    from minigpt.inspection.links import task_texts
    from minigpt.inspection.seeds import looks, seeds_table

    config = subject.checkpoint.config
    if not is_task(config.data.source):
        raise UserError(f"--seeds: {options.run} has not been trained on a task (data.source = {config.data.source})")
    texts, found = task_texts(config, options.texts), {str(options.run): subject}
    for run in options.seeds:
        other = load_subject(run, options.which)
        theirs = other.checkpoint.config
        if (theirs.data.source, theirs.task, other.context_length) != (
            config.data.source, config.task, subject.context_length,
        ):  # fmt: skip
            raise UserError(f"--seeds: {run} was trained on another task than {options.run}, or with other options")
        found[str(run)] = other
    told = {name: looks(one.model, texts) for name, one in found.items()}
    if options.json:
        print(json.dumps({name: dataclasses.asdict(look) for name, look in told.items()}, ensure_ascii=False))
    else:
        print(f"{counted(options.texts, 'example')} of {config.data.source} that no run was trained on;")
        print("mean weight in the rows that have to know the answer:\n")
        print("\n".join(seeds_table(told)))
    return 0


def as_json(subject: Subject, options: argparse.Namespace, table: "LinkTable") -> dict[str, Any]:
    """All numbers; those that are not there are null."""
    about = {"run": str(options.run), "step": subject.checkpoint.step, "texts": options.texts}
    return about | _nullable(dataclasses.asdict(table))


def lines(subject: Subject, options: argparse.Namespace, table: "LinkTable") -> list[str]:
    """The tables as text, at most 80 columns wide."""
    return [
        f"{options.run}, step {subject.checkpoint.step}: {counted(table.links, 'link')} in "
        f"{told_texts(subject, options.texts)}, read in windows of {subject.context_length}",
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
        f"{'kind':<10}{'heads':<9}{'links':>5}{'drop':>8}|{'links':>6}{'before':>7}{'drop':>8}{'control':>9}"
        f"{'drop':>8}{'control':>9}",
        *map(_drop_line, table.drops),
        "",
        "left out (a row is that of one head, predicting one token of the word):",
        f"{'':<19}{'rows':>6}{'nothing left':>13}{'unmatched':>10}|{'links':>6}{'nothing left':>13}{'unmatched':>10}",
        *map(_left_out_line, table.drops),
    ]


def told_texts(subject: Subject, count: int) -> str:
    """``100 stories``, ``1 example``."""
    source = subject.checkpoint.config.data.source
    return counted(count, "example") if is_task(source) else counted(count, "story", "stories")


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
        f"{row.kind:<10}{row.heads:<9}{every.links:>5}{_number(every.probability_drop, 8, '+')}|{first.links:>6}"
        f"{_number(first.probability, 7)}{_number(first.probability_drop, 8, '+')}"
        f"{_number(first.probability_control, 9, '+')}{_number(first.loss_drop, 8, '+')}"
        f"{_number(first.loss_control, 9, '+')}"
    )


def _left_out_line(row: "DropRow") -> str:
    return (
        f"{row.kind:<10}{row.heads:<9}{row.rows:>6}{row.rows_nothing_left:>13}{row.rows_unmatched:>10}|"
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
