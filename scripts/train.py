"""Train a small GPT on the embedded stories, a known text or your own; watch it;
go on with it later.

  python scripts/train.py                 the embedded stories, a minute or so
  python scripts/train.py configs/shakespeare_char.toml --run.name bard
  python scripts/train.py --data.source my-texts/ --train.minutes 5
  python scripts/train.py --resume runs/bard
  python scripts/train.py --init-from runs/bard --data.source other.txt
  python scripts/train.py --init-from gpt2-folder --data.source other.txt
"""

from minigpt.signals import StopSignal, quiet_interrupts

if __name__ == "__main__":
    quiet_interrupts()  # before the imports below, which take their time

import argparse
import time
from pathlib import Path
from typing import Any

from minigpt.cli import add_config_options, config_overrides, parse_options, run_script
from minigpt.config import DEFAULT_CONFIG, merge, read_toml, validate
from minigpt.errors import UserError
from minigpt.run import as_word
from minigpt.shipped import command, config_file


def main() -> int:
    begun = time.monotonic()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("config", nargs="?", type=Path, help=f"TOML file of settings (default: {DEFAULT_CONFIG.name})")
    parser.add_argument("--resume", type=Path, metavar="RUN", help="go on with this run")
    parser.add_argument(
        "--init-from",
        type=Path,
        metavar="RUN",
        help="begin with the weights and tokenizer of this run, or Hugging Face folder",
    )
    parser.add_argument("--dry-run", action="store_true", help="tell the plan and what it costs here, and stop")
    add_config_options(parser)
    options = parse_options(parser)
    if options.config:
        options.config = config_file(options.config)
    overrides = config_overrides(options)
    if options.config and (options.resume or options.init_from):
        raise UserError(f"{options.config}: --resume and --init-from bring their own settings; leave the file out")
    if options.resume and options.init_from:
        raise UserError("--resume goes on with a run, --init-from begins a new one: give one of them")
    if options.resume and options.dry_run:
        raise UserError("--dry-run tells what a new run would be; leave it out with --resume")

    with StopSignal() as stop:
        if options.resume:
            from minigpt import launch

            outcome = launch.resume(options.resume, overrides, stop=stop)
        else:
            source_given = "source" in overrides.get("data", {})
            if not options.init_from:
                overrides = merge(base_tables(options.config, overrides), overrides)
                validate(overrides)  # a wrong key is told at once, before torch is loaded
            from minigpt import launch

            asked: dict[str, Any] = {
                "config_path": options.config,
                "source_given": source_given,
                "init_from": options.init_from,
                "begun": begun,
            }
            if options.dry_run:
                print("\n".join(launch.rehearse(overrides, **asked)))
                return 0
            outcome = launch.start(overrides, **asked, stop=stop)

    if not outcome.leads:
        return stop.exit_code
    progress, path = outcome.progress, outcome.path
    best = f", best validation loss {progress.best_val_loss:.4f}" if progress.best_val_loss < float("inf") else ""
    print(f"{path}: step {progress.step} of {outcome.config.train.max_steps}{best}, {progress.seconds:.0f} s")
    if asks_for_minutes(config_overrides(options)):
        took, asked_for = time.monotonic() - begun, options.__dict__["train.minutes"]
        print(f"{took:.0f} s from the command to here; {asked_for} min were asked for")
    if outcome.last_word:
        print(outcome.last_word)
    if stop():
        print(f"interrupted and saved; go on with: {command('train')} --resume {as_word(path)}")
    else:
        print(f"next: {command('generate')} {as_word(path)}")
        print(f"      {command('evaluate')} {as_word(path)}")
        print(f"      tensorboard --logdir {as_word(path.parent)}")
    return stop.exit_code


def asks_for_minutes(overrides: dict[str, dict[str, str]]) -> bool:
    """Whether ``train.minutes`` is set; what is no number is told later, with the other mistakes."""
    try:
        return float(overrides.get("train", {}).get("minutes", "0")) != 0
    except ValueError:
        return True


def base_tables(config: Path | None, overrides: dict[str, dict[str, str]]) -> dict[str, Any]:
    """The tables under the command line's: the file's, less what was chosen in it for another tokenizer or duration.

    The default file chose for its own text too; for ``train.minutes`` it has nothing to say.
    """
    data, minutes = overrides.get("data", {}), asks_for_minutes(overrides)
    if minutes and not config:
        return {}  # everything is chosen for the time
    tables = read_toml(config or DEFAULT_CONFIG)
    if minutes and isinstance(tables.get("train"), dict):
        tables["train"].pop("max_steps", None)
    other_text = "tokenizer" in data or ("source" in data and not config)
    if other_text and isinstance(tables.get("data"), dict):
        tables["data"].pop("vocab_size", None)
    return tables


if __name__ == "__main__":
    run_script(main)
