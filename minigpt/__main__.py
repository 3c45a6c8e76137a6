"""The scripts by name, from anywhere: ``python -m minigpt train ...`` and, once installed, ``minigpt train ...``."""

import ast
import runpy
import sys

from minigpt.cli import run_script
from minigpt.config import nearest
from minigpt.errors import UserError
from minigpt.shipped import SCRIPTS


def main() -> None:
    """Run the script that the first word names; the others are its own."""
    run_script(_called)


def _called() -> None:
    words, paths = sys.argv[1:], {path.stem: path for path in sorted(SCRIPTS.glob("*.py"))}
    if not words or words[0] in ("-h", "--help"):
        lines = [f"  {name:<20}{about(path.read_text(encoding='utf-8'))}" for name, path in paths.items()]
        print("\n".join(["minigpt SCRIPT [--help]", "", *lines]))
        return
    if words[0] not in paths:
        raise UserError(f"{words[0]}: no such script{nearest(words[0], list(paths))}")
    sys.argv = [str(paths[words[0]]), *words[1:]]
    runpy.run_path(sys.argv[0], run_name="__main__")


def about(source: str) -> str:
    """The first sentence of a script's docstring."""
    words = " ".join((ast.get_docstring(ast.parse(source)) or "").partition("\n\n")[0].split())
    return words.partition(". ")[0].removesuffix(".")


if __name__ == "__main__":
    main()
