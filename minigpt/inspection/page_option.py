"""``--html FILE``: what a part reads, as the page of ``explore.py``, opened where it shows."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from minigpt.console import say


def add_html_option(parser: argparse.ArgumentParser) -> None:
    """The file."""
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a page to look at it (see explore.py)")


def write_page(
    options: argparse.Namespace,
    view: str,
    *,
    texts: Sequence[str] = (),
    which: str = "best",
    compare: Path | None = None,
) -> None:
    """Write the page of ``options.run`` if it is asked for, and say so on stderr.

    Args:
        options: those of the part; ``file`` and ``encoding``, where it has them, give a text too.
        view: what the page opens at, see ``minigpt.explorer.payload.VIEWS``.
        texts: what it opens with, as typed on a command line.
        which: the checkpoint.
        compare: another one to hold beside it.

    Raises:
        UserError: if the page can't be made or written.
    """
    if not options.html:
        return
    from minigpt.explorer.making import Wish, export, made
    from minigpt.explorer.payload import Opening

    wish = Wish(
        which=which,
        texts=texts,
        file=getattr(options, "file", None),
        encoding=getattr(options, "encoding", None),
        unseen=getattr(options, "unseen", None),
        compare=compare,
        opening=Opening(view=view),
    )
    say(export(made(options.run, wish), "--html", options.html))
