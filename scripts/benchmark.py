"""Measure minigpt on this machine, beside other programs where they are at hand.

  benchmark.py default               the run without arguments: seconds, memory
  benchmark.py tales                 what that run has learnt, by evaluate.py
  benchmark.py train --seeds 5       configs/speedrun_cpu.toml: seconds and loss
  benchmark.py curve --picture F.png   its loss against seconds
  benchmark.py step --nanogpt DIR    a training step
  benchmark.py decode --transformers --size 0.8M --streams 32
  benchmark.py startup               seconds until help, first step, first token
  benchmark.py tokens --megabytes 300   text to token ids: MB a second, memory
  benchmark.py page                  the explorer's page in a browser
  benchmark.py growth                a step against size, context, batch, cores

Contenders take turns; medians and quartiles are shown. Figures taken while
other programs computed are marked as no claim, with exit code 1. Options of
train.py given here, --data.source and --train.max-steps, are handed on.
"""

from minigpt.signals import quiet_interrupts

if __name__ == "__main__":
    quiet_interrupts()  # before the imports below, which take their time

import argparse
import json
import os
import sys
from pathlib import Path

from minigpt.cli import parse_options, run_script
from minigpt.errors import UserError
from minigpt.files import check_writable
from minigpt.studies.measure import OthersWatch, Report, machine_facts, share_now, verdict
from minigpt.studies.whole_runs import as_flags
from minigpt.threads import core_count

REPEATS = {"default": 1, "step": 10, "decode": 3, "startup": 5, "tokens": 3, "growth": 7, "page": 5}


def main() -> int:
    options = parse_options(make_parser())
    if options.nanogpt and not (options.nanogpt / "model.py").is_file():
        raise UserError(f"--nanogpt {options.nanogpt}: has no model.py; give a checkout of github.com/karpathy/nanoGPT")
    if options.threads:  # read by the libraries when they are loaded, here and in the processes started from here
        for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"):
            os.environ[name] = str(options.threads)
    for name, path in (("--json", options.json), ("--picture", options.picture)):
        if path:
            check_writable(name, path)
    machine = machine_facts(options.threads or core_count())
    print(f"{machine['cpu']}, {machine['cores']} cores, threads {machine['threads']}\n{machine['system']}")
    print(f"Python {machine['python']}, torch {machine['torch']}, numpy {machine['numpy']}\n", flush=True)
    before = share_now()
    quiet, sentence = verdict({"before": before})
    if not quiet:
        print(f"{sentence}; measuring all the same", file=sys.stderr)
    watch = OthersWatch()
    report = measure(options)
    shares = {"before": before}
    if options.what != "page":  # whose browser counts as another program
        shares["during"] = watch.share()
    quiet, sentence = verdict(shares)
    print("\n".join([*report.lines, "", sentence]))
    if options.json:
        numbers = {"benchmark": options.what, "machine": machine, "claim": quiet, "others": shares, **report.numbers}
        options.json.write_text(json.dumps(numbers, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    return 0 if report.holds and (quiet or options.anyway) else 1


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    choices = ["default", "tales", "train", "step", "decode", "startup", "tokens", "growth", "curve", "page"]
    parser.add_argument("what", choices=choices, metavar="WHAT", help="what to measure: one of those above")
    parser.add_argument("--nanogpt", type=Path, metavar="DIR", help="compare with this checkout of karpathy/nanoGPT")
    parser.add_argument("--transformers", action="store_true", help="decode: compare with transformers, if installed")
    parser.add_argument("--size", choices=["0.8M", "10.6M"], help="decode: networks of this size alone")
    parser.add_argument("--streams", type=int, choices=[1, 32], help="decode: so many texts at once alone")
    parser.add_argument("--x-transformers", action="store_true", help="train: compare with it, if installed")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="curve: draw loss against seconds into a .png")
    parser.add_argument("--full", action="store_true", help="train: nanoGPT's own recipe too (minutes)")
    parser.add_argument("--seeds", type=positive, default=1, metavar="N", help="train: runs with seeds 1 to N (1)")
    parser.add_argument("--run", type=Path, metavar="RUN", help="tales: this run, instead of training one")
    parser.add_argument("--megabytes", type=positive, default=20, metavar="N", help="tokens: size of a text (20)")
    parser.add_argument("--repeats", type=positive, metavar="N", help=f"times each thing is measured {REPEATS}")
    parser.add_argument("--threads", type=positive, metavar="N", help="CPU threads (default: all cores)")
    parser.add_argument("--data.source", dest="source", metavar="TEXT", help="text to train on instead of the config's")
    parser.add_argument("--train.max-steps", dest="max_steps", metavar="N", help="a shorter run, to try things out")
    parser.add_argument("--anyway", action="store_true", help="exit code 0 even if the machine was busy")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there")
    return parser


def measure(options: argparse.Namespace) -> Report:
    """Run what was asked for. Only what needs torch loads it: the memory of a small process hides no child's."""
    repeats, threads = options.repeats or REPEATS.get(options.what, 1), options.threads or core_count()
    given = {
        "data": {"source": options.source},
        "train": {"max_steps": options.max_steps},
        "run": {"threads": options.threads},
    }
    overrides = {name: table for name, table in given.items() if all(table.values())}
    flags = as_flags(overrides)
    if options.what in ("default", "tales", "train"):
        from minigpt.studies import whole_runs

        if options.what == "default":
            return whole_runs.default(repeats=repeats, flags=flags)
        if options.what == "tales":
            return whole_runs.tales(run=options.run, flags=flags)
        asked = {"nanoGPT, its recipe": options.nanogpt and options.full, "x-transformers": options.x_transformers}
        peers = [name for name, there in asked.items() if there]
        return whole_runs.train(
            seeds=options.seeds, peers=peers, nanogpt=options.nanogpt, threads=threads, overrides=overrides
        )
    if options.what == "curve":
        from minigpt.studies.curve import curve

        return curve(nanogpt=options.nanogpt, threads=threads, flags=flags, picture=options.picture)
    if options.what == "startup":
        from minigpt.studies.startup import startup

        return startup(repeats=repeats, flags=flags)
    if options.what == "tokens":
        from minigpt.studies.tokens import tokens

        source = Path(options.source) if options.source else None
        return tokens(source=source, megabytes=options.megabytes, repeats=repeats)
    if options.what == "growth":
        from minigpt.studies.growth import growth

        return growth(repeats=repeats, threads=threads, overrides={})
    if options.what == "page":
        from minigpt.studies.page import page

        return page(repeats=repeats)
    if options.what == "step":
        from minigpt.studies import benchmark

        text = {name: table for name, table in overrides.items() if name == "data"}
        return benchmark.step(nanogpt=options.nanogpt, repeats=repeats, threads=threads, overrides=text)
    from minigpt.studies import decoding

    sizes, streams = (options.size,) if options.size else decoding.SIZES, options.streams
    cases = [case for case in decoding.DECODE_CASES if case.size in sizes and streams in (None, case.n_stream)]
    if not cases:
        raise UserError(f"--size {options.size} --streams {streams}: not measured together; leave one of them out")
    return decoding.decode(
        cases=cases, nanogpt=options.nanogpt, transformers=options.transformers, repeats=repeats, threads=threads
    )


def positive(text: str) -> int:
    """A whole number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 1")
    return number


if __name__ == "__main__":
    run_script(main)
