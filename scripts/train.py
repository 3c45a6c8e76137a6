"""Train a small GPT on the embedded stories, a known text or your own; watch it;
go on with it later.

  python scripts/train.py                 the embedded stories, a minute or so
  python scripts/train.py configs/shakespeare_char.toml --run.name bard
  python scripts/train.py --data.source my-texts/ --data.tokenizer bpe
  python scripts/train.py --resume runs/bard
  python scripts/train.py --init-from runs/bard --data.source other.txt
"""

from minigpt.signals import StopSignal, quiet_interrupts

if __name__ == "__main__":
    quiet_interrupts()  # before the imports below, which take their time

import argparse
from pathlib import Path

from minigpt.cli import add_config_options, config_overrides, parse_options, run_script
from minigpt.config import DEFAULT_CONFIG, merge, read_toml, validate
from minigpt.errors import UserError
from minigpt.run import as_word


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("config", nargs="?", type=Path, help=f"TOML file of settings (default: {DEFAULT_CONFIG.name})")
    parser.add_argument("--resume", type=Path, metavar="RUN", help="go on with this run")
    parser.add_argument("--init-from", type=Path, metavar="RUN", help="begin with this run's weights and tokenizer")
    add_config_options(parser)
    options = parse_options(parser)
    overrides = config_overrides(options)
    if options.config and (options.resume or options.init_from):
        raise UserError(f"{options.config}: --resume and --init-from bring their own settings; leave the file out")
    if options.resume and options.init_from:
        raise UserError("--resume goes on with a run, --init-from begins a new one: give one of them")

    with StopSignal() as stop:
        if options.resume:
            from minigpt import launch

            outcome = launch.resume(options.resume, overrides, stop=stop)
        else:
            given = overrides.get("data", {})
            source_given = "source" in given
            if not options.init_from:
                tables = read_toml(options.config or DEFAULT_CONFIG)
                other_text = "tokenizer" in given or (source_given and not options.config)
                if other_text and isinstance(tables.get("data"), dict):
                    tables["data"].pop("vocab_size", None)  # it was chosen for the file's own text and tokenizer
                overrides = merge(tables, overrides)
                validate(overrides)  # a wrong key is told at once, before torch is loaded
            from minigpt import launch

            outcome = launch.start(
                overrides,
                config_path=options.config,
                source_given=source_given,
                init_from=options.init_from,
                stop=stop,
            )

    if not outcome.leads:
        return stop.exit_code
    progress, path = outcome.progress, outcome.path
    best = f", best validation loss {progress.best_val_loss:.4f}" if progress.best_val_loss < float("inf") else ""
    print(f"{path}: step {progress.step} of {outcome.config.train.max_steps}{best}, {progress.seconds:.0f} s")
    if stop():
        print(f"interrupted and saved; go on with: python scripts/train.py --resume {as_word(path)}")
    else:
        print(f"next: python scripts/generate.py {as_word(path)}")
        print(f"      python scripts/evaluate.py {as_word(path)}")
        print(f"      tensorboard --logdir {as_word(path.parent)}")
    return stop.exit_code


if __name__ == "__main__":
    run_script(main)
