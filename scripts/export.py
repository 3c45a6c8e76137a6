"""Write a trained model in a format that other tools open.

  python scripts/export.py runs/bard --format hf --out bard-hf

hf is a folder for Hugging Face's transformers, which loads it without any code
of this project:

  AutoModelForCausalLM.from_pretrained("bard-hf")
  AutoTokenizer.from_pretrained("bard-hf")
"""

from minigpt.signals import quiet_interrupts

if __name__ == "__main__":
    quiet_interrupts()  # before the imports below, which take their time

import argparse
from pathlib import Path

from minigpt.checkpoint import find_checkpoint
from minigpt.cli import parse_options, run_script
from minigpt.interop.hugging_face import write_folder


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("run", type=Path, help="a run's folder or one checkpoint file")
    parser.add_argument("--which", default="best", metavar="best|last|STEP", help="checkpoint (default: best)")
    parser.add_argument("--format", choices=["hf"], default="hf", help="hf: a folder for transformers (default)")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the new folder")
    options = parse_options(parser)
    checkpoint = find_checkpoint(options.run, options.which)
    layout = write_folder(checkpoint, options.out)
    print(f"{options.out}: step {checkpoint.step} of {options.run} as {layout.architecture}")


if __name__ == "__main__":
    run_script(main)
