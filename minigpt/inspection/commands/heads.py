"""Hold every head against fixed patterns: how near it is, and whether chance
would be as near.

References: uniform, previous, first, self, window:W (the last W tokens),
duplicate (earlier places of the row's token), induction (what followed them),
punctuation (all marks so far), brackets (the innermost open one), links (of
runs on the tales: held-out tales are read, and each row that predicts a known
word should read the word that fixes it), or a JSON file: a T x T matrix of
weights, or a list of [query, key] or [query, key, weight]. Rows and keys are
tokens, counted from 0; --text begins with <|end|>.

A head is named after the nearest reference if its total variation from it is at
most 0.5 and smaller than that of 99 in 100 heads of the same network before
training (uniform: at most 0.1); all others are "none". Weights tell where
information is moved from, not what it does there: see the part "replace".

The heads of induction of a GPT-2, say, in transformers' own folder of it:

  compare_attention.py heads gpt2/ --repeated 50 --ref induction --nearest-first
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from minigpt.console import say
from minigpt.errors import UserError
from minigpt.files import write_whole
from minigpt.inspection.compare import Closeness, Maps, Null, closeness, describe, pooled
from minigpt.inspection.head_report import HeadReport, as_csv, as_json, as_text
from minigpt.inspection.heads import Head, parse_head
from minigpt.inspection.maps import read_foreign_maps, read_foreign_tokens
from minigpt.inspection.page_option import add_html_option, write_page
from minigpt.inspection.patterns import LINKS, Pattern, Reference, Tokens, Vocabulary, parse_reference
from minigpt.inspection.subject import Subject, add_text_arguments, asked_size, load_subject, sequences, told

if TYPE_CHECKING:
    from minigpt.inspection.links import LinkedText

DEFAULT = ("uniform", "previous", "first", "self", "induction")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The run or the foreign maps, what is read, the references, and the form of the answer."""
    parser.add_argument("run", type=Path, nargs="?", help="a run's folder or one checkpoint file")
    parser.add_argument("--which", default="best", metavar="best|last|STEP", help="checkpoint (default: best)")
    add_text_arguments(parser)
    parser.add_argument("--maps", type=Path, metavar="FILE", help="instead of a run: layers x heads x T x T weights")
    parser.add_argument("--tokens", type=Path, metavar="FILE", help="tokens of --maps: JSON list, or one a line")
    parser.add_argument(
        "--ref", action="append", metavar="NAME|FILE", help=f"reference, repeatable (default: {' '.join(DEFAULT)})"
    )
    parser.add_argument(
        "--nearest-first", action="store_true", help="with one --ref: order the heads by their distance from it"
    )
    parser.add_argument("--full", action="store_true", help="one more table for each reference")
    parser.add_argument("--json", action="store_true", help="all numbers as one object")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write all numbers, a row a head and reference")
    add_html_option(parser)
    parser.add_argument("--head", metavar="L1H2", help="only this head")
    parser.add_argument(
        "--max-tv", type=float, metavar="X", help="with --head and one --ref: exit 1 if farther than this"
    )


def run(options: argparse.Namespace) -> int:
    """Read, compare, and tell."""
    _check_options(options)
    material = _foreign(options) if options.maps else _of_run(options)
    references = _references(options.ref, material)
    heads = _heads(options.head, material)
    write_page(options, "look", texts=[] if options.text is None else [options.text], which=options.which)
    if options.max_tv is not None:
        return _judge(heads[0], references[0], material, options)
    patterns = {reference.name: material.patterns(reference) for reference in references}
    compared = {name: _compare(material.maps, drawn) for name, drawn in patterns.items()}
    if options.nearest_first:
        distances = compared[references[0].name].total_variation
        heads.sort(key=lambda head: float(distances[head]))
    report = HeadReport(
        references=compared,
        nulls=material.nulls(patterns),
        description=describe(material.maps, causal=material.causal),
        about=material.about,
        heads=heads,
        title=material.title,
    )
    for name, close in report.references.items():
        if not close.rows:
            say(f"{name}: is defined in no row of what was read")
    if options.csv:
        write_whole(options.csv, as_csv(report).encode())
    print(json.dumps(as_json(report)) if options.json else as_text(report, full=options.full))
    return 0


@dataclass(frozen=True)
class Material:
    """Maps of some texts, and what is known of the texts and of chance."""

    maps: Maps  # (N, layers, H, T, T)
    causal: bool
    tokens: Tokens | None  # (N, T); None if they are not known
    vocabulary: Vocabulary | None
    about: Mapping[str, Any]
    title: str  # the same in words
    chance: Callable[[Mapping[str, Sequence[Pattern]]], dict[str, Null]] | None
    """Patterns of each reference → its null; None if the network is not known."""
    links: Reference | None = None  # where they are known

    def patterns(self, reference: Reference) -> list[Pattern]:
        """A reference as it is on each of the texts."""
        count, length = self.maps.shape[0], self.maps.shape[-1]
        if self.tokens is not None:
            return [reference.pattern(text) for text in self.tokens]
        if reference.reads_tokens:
            raise UserError(f"{reference.name}: depends on the tokens; give them by --tokens FILE")
        return [reference.pattern(np.zeros(length, np.int64))] * count

    def nulls(self, patterns: Mapping[str, Sequence[Pattern]]) -> dict[str, Null]:
        """What chance gives, for the references that are defined anywhere."""
        defined = {name: drawn for name, drawn in patterns.items() if any(one.defined.any() for one in drawn)}
        return self.chance(defined) if self.chance and defined else {}


def _of_run(options: argparse.Namespace) -> Material:
    from minigpt.inspection.links import reference_of
    from minigpt.inspection.nulls import FreshNetworks, kept_nulls, read_maps

    subject = load_subject(options.run, options.which, unseen=options.unseen)
    linked = _linked_texts(subject, options) if LINKS in (options.ref or ()) else []
    tokens = np.stack([text.tokens for text in linked]) if linked else sequences(subject, options).tokens
    what = f"{told(tokens, options)}{', starts of held-out tales' if linked else ''}"
    config = subject.checkpoint.config
    fresh = FreshNetworks(config.model, subject.model.vocab_size, config.run.seed, tokens)
    folder = options.run / "attention" if options.run.is_dir() else None
    return Material(
        maps=read_maps(subject.model, tokens),
        causal=True,
        tokens=tokens,
        vocabulary=subject.tokenizer,
        about={
            "checkpoint": str(subject.checkpoint.path),
            "step": subject.checkpoint.step,
            "texts": len(tokens),
            "length": tokens.shape[1],
        },
        title=f"{options.run}, step {subject.checkpoint.step}: {what}",
        links=reference_of(linked) if linked else None,
        chance=lambda patterns: kept_nulls(fresh, patterns, folder),
    )


def _linked_texts(subject: Subject, options: argparse.Namespace) -> "list[LinkedText]":
    """Starts of tales, where the run has been trained on tales and nothing else is to be read.

    Raises:
        UserError: where not.
    """
    from minigpt.inspection.links import story_starts

    if options.text is not None or options.repeated is not None or options.file or options.source != "val":
        raise UserError("--ref links: reads held-out tales, whose links are known; leave out other texts")
    if subject.checkpoint.config.data.source != "tales":
        raise UserError("--ref links: for runs on the tales; of other texts, write the links as a JSON file of pairs")
    return story_starts(subject.tokenizer, *asked_size(subject, options))


def _foreign(options: argparse.Namespace) -> Material:
    found = read_foreign_maps(options.maps)
    length = found.maps.shape[-1]
    if not found.causal:
        say(f"{options.maps}: not causal, rows move information from later tokens too")
    say(f"{options.maps}: what chance gives is not known, names rest on total variation alone")
    tokens = read_foreign_tokens(options.tokens, length) if options.tokens else None
    return Material(
        maps=found.maps[None],
        causal=found.causal,
        tokens=tokens.ids[None] if tokens else None,
        vocabulary=tokens if tokens and tokens.texts else None,
        about={"maps": str(options.maps), "causal": found.causal, "texts": 1, "length": length},
        title=f"{options.maps}: 1 sequence of {length} tokens",
        chance=None,
    )


def _references(names: Sequence[str] | None, material: Material) -> list[Reference]:
    """Each reference once; by default without those that need tokens that are not known."""
    known = {LINKS: material.links} if material.links else {}
    found = [known.get(name) or parse_reference(name, material.vocabulary) for name in names or DEFAULT]
    if not names and material.tokens is None:
        found = [reference for reference in found if not reference.reads_tokens]
    return list({reference.name: reference for reference in found}.values())


def _heads(name: str | None, material: Material) -> list[Head]:
    n_layer, n_head = material.maps.shape[1:3]
    if name is None:
        return [Head(layer, head) for layer in range(n_layer) for head in range(n_head)]
    return [parse_head(name, n_layer, n_head)]


def _compare(maps: Maps, patterns: Sequence[Pattern]) -> Closeness:
    return pooled([closeness(of_text, pattern) for of_text, pattern in zip(maps, patterns, strict=True)])


def _judge(head: Head, reference: Reference, material: Material, options: argparse.Namespace) -> int:
    """Whether the head is near enough to the reference: 0, or 1 if not."""
    close = _compare(material.maps, material.patterns(reference))
    if not close.rows:
        raise UserError(f"{reference.name}: is defined in no row of what was read; give a longer text")
    distance, most = float(close.total_variation[head]), options.max_tv
    holds = distance <= most
    if options.json:
        verdict = {"head": str(head), "reference": reference.name, "total_variation": distance, "max_tv": most}
        print(json.dumps({**material.about, **verdict, "holds": holds}))
    sentence = f"{head}: total variation {distance:.4f} from {reference.name}, "
    sentence += f"{'at most' if holds else 'above'} {most:g}"
    print(sentence, file=sys.stderr if options.json or not holds else sys.stdout)
    return 0 if holds else 1


def _check_options(options: argparse.Namespace) -> None:
    if bool(options.run) == bool(options.maps):
        raise UserError("give a run, or maps by --maps FILE, and not both")
    if options.maps and options.html:
        raise UserError("--html: shows a run's model; of --maps alone there is no page")
    if options.tokens and not options.maps:
        raise UserError("--tokens: belongs to --maps; what a run reads is given by --text, --file or --source")
    if options.maps and (options.text is not None or options.repeated is not None or options.file):
        raise UserError("--maps: these are maps of a text already; give its tokens by --tokens FILE")
    if options.csv and options.csv.is_dir():
        raise UserError(f"--csv {options.csv}: is a folder; name a file in it")
    if options.csv and not options.csv.parent.is_dir():
        raise UserError(f"--csv {options.csv}: there is no folder {options.csv.parent}; make it first")
    if options.nearest_first and not (options.ref and len(options.ref) == 1):
        raise UserError("--nearest-first: name the one reference that is meant, as in --ref induction")
    if options.max_tv is not None:
        if not (options.head and options.ref and len(options.ref) == 1):
            raise UserError("--max-tv: name the head and one reference, as in --head L1H2 --ref previous --max-tv 0.2")
        if not 0 <= options.max_tv <= 1:
            raise UserError(f"--max-tv = {options.max_tv}: must be at least 0 and at most 1")
