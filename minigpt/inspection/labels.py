"""Names that must fit a column of a table."""

from itertools import accumulate

from minigpt.console import columns


def shortened(text: str, width: int, *, keep_end: bool = False) -> str:
    """The text in at most ``width`` columns of a terminal; three dots stand for what its end lacks, or its beginning.

    Args:
        keep_end: for paths, whose end tells most.
    """
    if sum(map(columns, text)) <= width:
        return text
    ordered = text[::-1] if keep_end else text
    kept = ordered[: sum(taken <= width - 3 for taken in accumulate(map(columns, ordered)))]
    return "..." + kept[::-1] if keep_end else kept + "..."


def filled(text: str, width: int) -> str:
    """The text, shortened or with spaces after it, in exactly ``width`` columns; one is always free."""
    text = shortened(text, width - 1)
    return text + " " * (width - sum(map(columns, text)))
