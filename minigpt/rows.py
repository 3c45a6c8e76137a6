"""Documents in the rows of .jsonl and .csv files: one row, one document, in one of its fields."""

import csv
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from minigpt.errors import UserError

LONGEST_ROW = 1 << 26  # characters in a line and in a field: rows are held in memory whole


def json_rows(path: Path, text: Iterable[str], field: str) -> Iterator[str]:
    """The texts in the objects of a .jsonl file's lines.

    Raises:
        UserError: naming file and line, for one that is too long, is not valid JSON or has no text in that field.
    """
    for number, line in enumerate(_lines(path, text), start=1):
        if line.isspace():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}:{number}: not valid JSON ({error}); each line must hold one object") from None
        yield _field_of(row, field, f"{path}:{number}")


def csv_rows(path: Path, text: Iterable[str], field: str) -> Iterator[str]:
    """The texts in one column of a .csv file, whose first row names the columns. Raises as ``json_rows`` does."""
    csv.field_size_limit(LONGEST_ROW)  # the library's limit is 131,072 characters; a document may be longer
    rows = csv.DictReader(_lines(path, text))
    try:
        for row in rows:
            yield _field_of(row, field, f"{path}:{rows.line_num}")
    except csv.Error as error:
        raise UserError(f"{path}:{rows.line_num}: not valid CSV ({error})") from None


def _lines(path: Path, chunks: Iterable[str]) -> Iterator[str]:
    rest, count = "", 0
    for chunk in chunks:
        *lines, rest = (rest + chunk).split("\n")  # not splitlines, which also cuts at U+2028 and its like
        yield from (line + "\n" for line in lines)
        count += len(lines)
        if len(rest) > LONGEST_ROW:
            raise UserError(
                f"{path}:{count + 1}: a line of more than {LONGEST_ROW:,} characters; cut it into several rows, or "
                "give long texts as files of their own"
            )
    if rest:
        yield rest


def _field_of(row: Any, field: str, where: str) -> str:
    if not isinstance(row, dict):
        raise UserError(f"{where}: an object is needed here, with the text in its field {field!r}")
    if field not in row:
        names = ", ".join(str(name) for name in list(row)[:20])
        raise UserError(f"{where}: no field {field!r}; name one of those there are with --data.text-field: {names}")
    if not isinstance(row[field], str):
        raise UserError(f"{where}: the field {field!r} holds no text; mend or remove this row")
    return row[field]
