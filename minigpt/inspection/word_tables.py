"""Tables between words as text, some side by side."""

from minigpt.inspection.labels import filled

WIDTH, LABEL, GAP = 80, 14, "  "


def side_by_side(labels: list[str], columns: list[str], steps: list[int], cells: list[list[list[str]]]) -> list[str]:
    """One table of cells (rows, columns) a checkpoint, labelled once a line of tables, as many as fit on it.

    Columns that do not fit beside the labels go into tables of their own.
    """
    cell = 1 + max(3, *map(len, columns), *(len(text) for table in cells for row in table for text in row))
    fitting = (WIDTH - LABEL) // cell
    pieces = []
    for step, table in zip(steps, cells, strict=True):
        for start in range(0, len(columns), fitting):
            part = slice(start, start + fitting)
            lines = ["".join(f"{text:>{cell}}" for text in row[part]) for row in [columns, *table]]
            lines.insert(0, f"{' ' * (cell - 2)}step {step}")
            width = max(map(len, lines))
            pieces.append([line.ljust(width) for line in lines])
    found: list[str] = []
    while pieces:
        line, used = [pieces.pop(0)], LABEL
        used += len(line[0][0])
        while pieces and used + len(GAP) + len(pieces[0][0]) <= WIDTH:
            line.append(pieces.pop(0))
            used += len(GAP) + len(line[-1][0])
        rows = zip(["", "", *labels], *line, strict=True)
        found += [(filled(" ".join(label.split("\n")), LABEL) + GAP.join(parts)).rstrip() for label, *parts in rows]
    return found


def signed(number: float) -> str:
    """A whole number with its sign, and 0 without."""
    return f"{round(number):+d}" if round(number) else "0"
