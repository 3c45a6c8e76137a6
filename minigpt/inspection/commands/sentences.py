"""Sentences side by side, word by word: what each word's row receives from each
word, and what differs.

A row is a word that information is moved to, a column one that it is moved
from, by its number; cells are percent of the row. A word's tokens are taken
together: the sum over its columns, the mean over its rows. Every sentence is
read with <|end|> in front, as every document is.

  compare_attention.py sentences RUN "The bank of the river was muddy" \\
                                     "The money was deposited in the bank"
  compare_attention.py sentences RUN "..." "..." --which 0 --which best
                               before and after training, side by side
  compare_attention.py sentences RUN "Orange is my favorite fruit"
                               beside the published row of that sentence
"""

import argparse
import json
import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minigpt.cli import unescape
from minigpt.console import say
from minigpt.errors import UserError
from minigpt.inspection.heads import Head, parse_head
from minigpt.inspection.page_option import add_html_option, write_page
from minigpt.inspection.row_report import reference_lines, row_as_json
from minigpt.inspection.subject import Subject, load_subject
from minigpt.inspection.word_tables import WIDTH, side_by_side, signed
from minigpt.text_options import add_unseen_option
from minigpt.unseen import tell_lost

if TYPE_CHECKING:
    from minigpt.inspection.compare import Floats
    from minigpt.inspection.sentences import Reading, ReferenceRow, RowComparison

SHOWN = 2  # heads, when none is named
Shown = Head | None  # None: the mean over all heads


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this part."""
    parser.add_argument("run", type=Path, help="a run's folder or one checkpoint file")
    parser.add_argument("sentences", nargs="+", metavar="SENTENCE", help="each is held against the first")
    parser.add_argument(
        "--which", action="append", metavar="best|last|STEP", help="checkpoint, also several (default: best)"
    )
    parser.add_argument(
        "--head", action="append", default=[], metavar="L1H2", help="head to show (default: those that differ most)"
    )
    parser.add_argument("--reference", metavar="NAME", help="hold a published row against the model's")
    add_unseen_option(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    add_html_option(parser)


def run(options: argparse.Namespace) -> int:
    """Read, compare, print."""
    from minigpt.inspection.sentences import read

    subjects = load_subjects(options.run, options.which or ["best"], options.unseen)
    sentences = [unescape(sentence) for sentence in options.sentences]
    tell_lost(subjects[0].tokenizer, sentences, say)
    readings = [[read(subject, sentence) for sentence in sentences] for subject in subjects]
    heads = chosen_heads(subjects[-1], readings, options.head)
    steps = [subject.checkpoint.step for subject in subjects]
    earlier = subjects[0].checkpoint.path if len(subjects) > 1 else None
    last = str(subjects[-1].checkpoint.step)
    write_page(options, "compare", texts=options.sentences, which=last, compare=earlier)
    references = list(compared_rows(subjects, asked_references(options.reference, readings[0]), options.reference))
    if options.json:
        answer = as_json(sentences, steps, readings, heads) | {"run": str(options.run)}
        answer["references"] = [row_as_json(reference, steps, found) for reference, found in references]
        print(json.dumps(answer, ensure_ascii=False))
        return 0
    print(f"{options.run}; <|end|> in front of each sentence; percent of each row")
    lines = [line for head in heads for line in head_lines(head, steps, readings)]
    lines += sight_lines(readings[0])
    print("\n".join(lines + [line for pair in references for line in reference_lines(pair[0], steps, pair[1])]))
    return 0


def load_subjects(run: Path, which: list[str], unseen: str | None) -> list[Subject]:
    """Several checkpoints of a run; a damaged one that each search comes upon is told of once."""
    heard: list[list[str]] = [[] for _ in which]
    found = [load_subject(run, one, unseen=unseen, say=said.append) for one, said in zip(which, heard, strict=True)]
    for sentence in next(filter(None, heard), []):
        say(sentence)
    return found


def chosen_heads(subject: Subject, readings: "list[list[Reading]]", names: list[str]) -> list[Shown]:
    """The named heads; or those whose maps differ most, between the sentences or else the checkpoints, and the mean.

    Raises:
        UserError: for a name that is no head of the model.
    """
    config = subject.model.config
    if names:
        return [parse_head(name, config.n_layer, config.n_head) for name in names]
    spread = spreads(readings)
    if spread is None:
        return [None]
    order = (-spread).ravel().argsort(kind="stable")[:SHOWN]
    most: list[Shown] = [Head(*divmod(int(place), config.n_head)) for place in order]
    return [*most, None] if spread.size > 1 else most


def spreads(readings: "list[list[Reading]]") -> "Floats | None":
    """How far each head's maps differ, (L, H): last checkpoint, sentences against the first; or last against first."""
    from minigpt.inspection.sentences import aligned, difference, total_variation

    first, *others = readings[-1]
    if others:
        pairs = [aligned(first.texts, other.texts) for other in others]
        differences = [difference(first.maps, other.maps, pair) for other, pair in zip(others, pairs, strict=True)]
        return sum(map(total_variation, differences)) / len(others)  # type: ignore[return-value]
    return total_variation(first.maps - readings[0][0].maps) if len(readings) > 1 else None


def asked_references(name: str | None, readings: "list[Reading]") -> "list[ReferenceRow]":
    """The published row of this name, and those of the sentences that were read.

    Raises:
        UserError: for a name that there is not.
    """
    from minigpt.inspection.sentences import reference_rows

    known = reference_rows()
    if name and name not in [row.name for row in known]:
        raise UserError(f"--reference {name}: no such row; known are {', '.join(row.name for row in known)}")
    spoken = [reading.texts[1:] for reading in readings]
    return [row for row in known if row.name == name or list(row.words) in spoken]


def compared_rows(
    subjects: list[Subject], references: "list[ReferenceRow]", asked: str | None
) -> "Iterator[tuple[ReferenceRow, list[RowComparison]]]":
    """Each row beside that of each checkpoint; one that can't be compared is passed over, unless it is asked for."""
    from minigpt.inspection.sentences import compare_row

    for reference in references:
        try:
            yield reference, [compare_row(subject, reference) for subject in subjects]
        except UserError as error:
            if reference.name == asked:
                raise
            say(f"not held against the published row: {error}")


def weights_of(reading: "Reading", head: Shown) -> "Floats":
    """The map (W, W) of a head, or the mean over all."""
    return reading.maps[head] if head else reading.maps.mean(axis=(0, 1))


def name_of(head: Shown) -> str:
    """In words."""
    return str(head) if head else "mean over all heads"


# ── text ───────────────────────────────────────────────────────────────────────────────────────────────────────


def head_lines(head: Shown, steps: list[int], readings: "list[list[Reading]]") -> list[str]:
    """Maps of one head, checkpoints side by side, and the differences from the first sentence."""
    from minigpt.inspection.sentences import aligned, difference

    found = []
    for number, reading in enumerate(readings[0]):
        labels = [f"{place:>2} {word}" for place, word in enumerate(reading.texts)]
        maps = [weights_of(of_step[number], head) for of_step in readings]
        cells = [[[f"{100 * weight:.0f}" for weight in row[: place + 1]] for place, row in enumerate(m)] for m in maps]
        columns = [str(place) for place in range(len(labels))]
        found += ["", f"{name_of(head)}, sentence {number + 1}", *side_by_side(labels, columns, steps, cells)]
    first, *others = readings[0]
    for number, other in enumerate(others, start=1):
        pairs = aligned(first.texts, other.texts)
        labels = [f"{i:>2}={j:<2} {first.texts[i]}" for i, j in pairs]
        changes = [
            difference(weights_of(of_step[0], head), weights_of(of_step[number], head), pairs) for of_step in readings
        ]
        cells = [[[signed(100 * change) for change in row] for row in part] for part in changes]
        columns = [*(str(i) for i, _ in pairs), "rest"]
        found += ["", f"{name_of(head)}, sentence {number + 1} minus sentence 1, over the words that both have"]
        found += side_by_side(labels, columns, steps, cells)
    return found


def sight_lines(readings: "list[Reading]") -> list[str]:
    """What the rows of words that two sentences share can see, in words."""
    from minigpt.inspection.sentences import common_start, sight

    found: list[str] = []
    first, *others = readings
    for number, other in enumerate(others, start=2):
        found += ["", f"what a row sees in sentences 1 and {number}, besides <|end|>, whatever the head:"]
        same = common_start(first.texts, other.texts)
        if same > 1:
            words = ", ".join(first.texts[1:same])
            found += _wrapped(f"- {words}: the same row in both sentences, since all it sees is the same")
        for place, words, against in ((1, first.texts, other.texts), (number, other.texts, first.texts)):
            found += [
                line
                for seen in sight(words, against)
                if seen.place >= same
                for line in _wrapped(f"- sentence {place}: {seen.told}")
            ]
    return found


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ")


# ── JSON ───────────────────────────────────────────────────────────────────────────────────────────────────────


def as_json(
    sentences: list[str], steps: list[int], readings: "list[list[Reading]]", heads: list[Shown]
) -> dict[str, Any]:
    """Everything printed, unrounded."""
    from minigpt.inspection.sentences import aligned, common_start, difference, sight

    first, *others = readings[0]
    pairs = [aligned(first.texts, other.texts) for other in others]
    return {
        "sentences": [
            {"sentence": sentence, "words": reading.texts}
            for sentence, reading in zip(sentences, readings[0], strict=True)
        ],
        "steps": steps,
        "maps": {
            name_of(head): [[weights_of(one, head).tolist() for one in row] for row in readings] for head in heads
        },
        "against_first": [
            {
                "sentence": number,
                "aligned": pair,
                "same_start": common_start(first.texts, other.texts),
                "difference": {
                    name_of(head): [
                        difference(weights_of(row[0], head), weights_of(row[number], head), pair).tolist()
                        for row in readings
                    ]
                    for head in heads
                },
                "sight": [
                    [asdict(seen) for seen in sight(a.texts, b.texts)] for a, b in ((first, other), (other, first))
                ],
            }
            for number, (other, pair) in enumerate(zip(others, pairs, strict=True), start=1)
        ],
    }
