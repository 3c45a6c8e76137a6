"""Look into a trained model, number by number, in a browser.

  python scripts/explore.py runs/bard --export page.html
  python scripts/explore.py runs/bard --serve --open
  python scripts/explore.py --demo --export page.html

--export writes one file that needs no network: it can be mailed, and opens in
any browser. Of a small model (a million parameters at most) it carries the
weights, and computes whatever is typed; of a larger one it carries what the
model did with some texts, unless --serve computes on this machine. --demo
trains a tiny model first, in less than a minute.

--serve also answers OpenAI's clients, at http://127.0.0.1:8765/v1: completions,
as text comes or at once. Other machines reach that (not the page) with --host
0.0.0.0 and a key; nothing is encrypted.
"""

from minigpt.signals import quiet_interrupts

if __name__ == "__main__":
    quiet_interrupts()  # before the imports below, which take their time

import argparse
import os
from pathlib import Path

from minigpt.cli import parse_options, run_script
from minigpt.errors import UserError
from minigpt.explorer.making import Made, Wish, export, made
from minigpt.explorer.payload import VIEWS, Opening
from minigpt.files import check_writable
from minigpt.text_options import add_unseen_option

PORT = 8765


def main() -> None:
    options = parse_options(make_parser())
    check_options(options)
    wish = Wish(
        which=options.which,
        texts=options.text,
        file=options.file,
        encoding=options.encoding,
        unseen=options.unseen,
        half=options.f16,
        compare=options.compare,
        live=options.serve,
        opening=Opening(view=options.view, lang=options.lang),
    )
    if options.export:
        if options.demo:
            check_writable("--export", options.export)  # told before a minute of training
        print(export(prepared(options, wish), "--export", options.export))
    else:
        serve(options, wish)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("run", type=Path, nargs="?", help="a run's folder or one checkpoint file")
    parser.add_argument("--which", default="best", metavar="best|last|STEP", help="checkpoint (default: best)")
    parser.add_argument("--export", type=Path, metavar="FILE", help="write the page to this file")
    parser.add_argument("--serve", action="store_true", help="show the page on this machine until Ctrl-C")
    parser.add_argument("--port", type=int, metavar="N", help=f"with --serve (default: {PORT}; 0: any that is free)")
    parser.add_argument(
        "--host", metavar="ADDRESS", help="with --serve: listen at this address (default: this machine alone)"
    )
    parser.add_argument(
        "--api-key", metavar="KEY", help="with --serve: what /v1 asks for (default: $MINIGPT_API_KEY, or nothing)"
    )
    parser.add_argument("--open", action="store_true", help="with --serve: open it in the browser")
    parser.add_argument("--demo", action="store_true", help="without a run: train a tiny model on the tales first")
    parser.add_argument(
        "--text",
        action="append",
        default=[],
        metavar="TEXT",
        help="text to open with, repeatable (default: of the run)",
    )
    parser.add_argument("--file", type=Path, metavar="PATH", help="open with the beginning of this file")
    parser.add_argument("--encoding", metavar="NAME", help="encoding of --file (default: the run's)")
    add_unseen_option(parser)
    parser.add_argument("--f16", action="store_true", help="weights rounded to 16 bits: half the size, and so shown")
    parser.add_argument(
        "--compare", type=Path, metavar="RUN", help="a run or checkpoint to hold beside it (default: step 0)"
    )
    parser.add_argument("--lang", default="en", choices=["en", "ja"], help="language of the page (default: en)")
    parser.add_argument("--view", default="", choices=VIEWS, help="what to open at")
    return parser


def check_options(options: argparse.Namespace) -> None:
    """Refuse what contradicts itself."""
    if bool(options.export) == options.serve:
        raise UserError("say what to do with the page: --export FILE writes it, --serve shows it; give one of them")
    if bool(options.run) == options.demo:
        raise UserError("give a run's folder or a checkpoint file, or --demo, and not both")
    of_serving = (options.port, options.host, options.api_key, options.open or None)
    if not options.serve and any(option is not None for option in of_serving):
        raise UserError("--port, --host, --api-key and --open belong to --serve")
    if options.text and options.file:
        raise UserError("--text and --file: give one of them")
    if options.demo and (options.compare or options.which != "best"):
        raise UserError("--demo trains its own model: leave out --which and --compare")


def prepared(options: argparse.Namespace, wish: Wish) -> Made:
    """The payload of the run, or of a model trained now."""
    if not options.demo:
        return made(options.run, wish)
    from minigpt.explorer.demo import demo  # torch

    return demo(wish)


def serve(options: argparse.Namespace, wish: Wish) -> None:
    """Serve the page, and the model for OpenAI's clients."""
    try:
        from minigpt.explorer import guard, server
    except ModuleNotFoundError as error:
        raise UserError(f"--serve needs {error.name}, which is not here: pip install starlette uvicorn") from None
    host = guard.HOST if options.host is None else options.host
    key = (os.environ.get("MINIGPT_API_KEY") or None) if options.api_key is None else options.api_key
    with server.listening(PORT if options.port is None else options.port, host) as listener:
        watch = guard.Guard(listener.getsockname()[1], host, key)
        server.serve(prepared(options, wish), listener, watch, browser=options.open)


if __name__ == "__main__":
    run_script(main)
