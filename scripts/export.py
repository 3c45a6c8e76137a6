"""Write a trained model in a format that other tools open.

  python scripts/export.py runs/bard --format hf --out bard-hf
  python scripts/export.py runs/bard --format gguf --dtype f16 --out bard.gguf

hf is a folder for Hugging Face's transformers, which loads it without any code
of this project:

  AutoModelForCausalLM.from_pretrained("bard-hf")
  AutoTokenizer.from_pretrained("bard-hf")

gguf is a file for llama.cpp, of the layouts llama and gpt2 with a BPE.
"""

from minigpt.signals import quiet_interrupts

if __name__ == "__main__":
    quiet_interrupts()  # before the imports below, which take their time

import argparse
from pathlib import Path

from minigpt.checkpoint import find_checkpoint
from minigpt.cli import parse_options, run_script
from minigpt.errors import UserError
from minigpt.interop.fast_tokenizer import difference
from minigpt.interop.gguf_file import write_gguf
from minigpt.interop.hugging_face import write_folder
from minigpt.tokenizer import tokenizer_from_dict


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("run", type=Path, help="a run's folder or one checkpoint file")
    parser.add_argument("--which", default="best", metavar="best|last|STEP", help="checkpoint (default: best)")
    parser.add_argument("--format", choices=["hf", "gguf"], default="hf", help="hf (default) or gguf")
    parser.add_argument("--dtype", choices=["f32", "f16"], help="with gguf: of the matrices (default: f32)")
    parser.add_argument("--out", type=Path, required=True, metavar="PATH", help="the new folder or file")
    options = parse_options(parser)
    if options.dtype and options.format != "gguf":
        raise UserError(f"--dtype {options.dtype}: is for --format gguf; hf keeps every bit")
    checkpoint = find_checkpoint(options.run, options.which)
    if options.format == "gguf":
        dtype = options.dtype or "f32"
        note, form = write_gguf(checkpoint, options.out, dtype), f"GGUF, {dtype}"
    else:
        form = write_folder(checkpoint, options.out).architecture
        note = difference(tokenizer_from_dict(checkpoint.tokenizer))
    print(f"{options.out}: step {checkpoint.step} of {options.run} as {form}")
    if note:
        print(note)


if __name__ == "__main__":
    run_script(main)
