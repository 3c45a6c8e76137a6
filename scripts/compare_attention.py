"""Hold attention against fixed examples: worked numbers, your own code, and
what a trained model has learned.
"""

from minigpt.signals import quiet_interrupts

if __name__ == "__main__":
    quiet_interrupts()  # before the imports below, which take their time

import argparse
import sys
from importlib import import_module

from minigpt.cli import parse_options, run_script
from minigpt.config import nearest
from minigpt.errors import UserError
from minigpt.shipped import command as command_here

COMMANDS: dict[str, str] = {
    "examples": "worked examples by every implementation, step by step",
    "scaling": "why scores are divided by the square root of d",
    "heads": "every head against fixed patterns, and against chance",
    "replace": "force heads to a reference: closeness beside use",
    "ablate": "take heads out, one by one, in pairs, or all but some",
    "links": "what heads move along known links, and whether it matters",
    "sentences": "sentences side by side, word by word",
    "film": "heads while they were trained, frame by frame",
}


def main() -> int:
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help"):
        print(overview())
        return 0
    name = words[0]
    if name not in COMMANDS:
        raise UserError(f"{name}: no such part of compare_attention.py{nearest(name, list(COMMANDS))}")
    command = import_module(f"minigpt.inspection.commands.{name}")
    parser = argparse.ArgumentParser(
        prog=f"compare_attention.py {name}",
        description=command.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_arguments(parser)
    return command.run(parse_options(parser, words[1:]))


def overview() -> str:
    """What the parts are for."""
    lines = [f"  {name:<12}{about}" for name, about in COMMANDS.items()]
    return "\n".join([(__doc__ or "").strip(), "", f"{command_here('compare_attention')} PART [--help]", "", *lines])


if __name__ == "__main__":
    run_script(main)
