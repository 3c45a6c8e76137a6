"""Text on a terminal: what of it must not get there as it is, how many columns it takes, what is told beside it."""

import re
import sys
import unicodedata
from collections.abc import Iterator

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and newline


def visible(text: str) -> str:
    r"""Control characters, which a terminal would obey, written as ``\x1b``; newlines and tabs stay."""
    return CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def columns(character: str) -> int:
    """Places that a character takes: 2 for East Asian wide ones, 0 for accents and joiners, else 1 (UAX #11)."""
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def wrapped(text: str, width: int) -> str:
    """The text in lines of at most ``width`` columns, cut between words or beside a wide character where possible."""
    return "\n".join(row for line in text.expandtabs().splitlines() for row in (_rows(line, width) if line else [""]))


def counted(number: int, noun: str, several: str = "") -> str:
    """``1 layer``, ``2 layers``, ``1,300 steps``; ``several`` is the plural where it takes more than an s."""
    return f"{number:,} {noun if number == 1 else several or f'{noun}s'}"


def say(sentence: str) -> None:
    """Tell on stderr, beside what a command prints."""
    print(sentence, file=sys.stderr)


def _rows(line: str, width: int) -> Iterator[str]:
    while line:
        end = _fitting(line, width)
        if end < len(line) and not any(columns(character) == 2 for character in line[end - 1 : end + 1]):
            blank = line.rfind(" ", 0, end + 1)
            end = blank if line[: max(0, blank)].strip() else end
        yield line[:end].rstrip()
        line = line[end:].lstrip()


def _fitting(line: str, width: int) -> int:
    """How many characters fit into so many columns, at least one."""
    taken = 0
    for place, character in enumerate(line):
        taken += columns(character)
        if taken > width:
            return max(1, place)
    return len(line)
