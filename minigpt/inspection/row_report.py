"""What is told of a published row of attention beside a model's rows: text and JSON."""

import textwrap
from typing import TYPE_CHECKING, Any

from minigpt.inspection.heads import Head
from minigpt.inspection.labels import shortened
from minigpt.inspection.word_tables import WIDTH

if TYPE_CHECKING:
    from minigpt.inspection.compare import Floats
    from minigpt.inspection.sentences import ReferenceRow, RowComparison

NEAREST = 8  # heads beside a published row


def reference_lines(reference: "ReferenceRow", steps: list[int], found: "list[RowComparison]") -> list[str]:
    """A published row, and the rows of the heads nearest to it."""
    words = [shortened(word, 8) for word in reference.words]
    query = f'"{reference.query}"'
    about = (
        f"The row of {query} as published ({reference.name}), every word in sight. A causal model's first {query} sees "
        "only itself and <|end|>: there its row can't be compared. So the sentence is read twice, and the row of the "
        f"second {query} taken over the words of the first copy and scaled up to 100; what it receives from elsewhere "
        'is "other" and left out. TV: share of the weight that is elsewhere than published. order: pairs of words in '
        "the published order, 50 by chance. All numbers but TV in percent."
    )
    lines = ["", *textwrap.wrap(about, WIDTH), ""]
    lines.append(f"{'':<16}" + "".join(f"{word:>9}" for word in words) + f"{'TV':>6}{'order':>7}{'other':>6}")
    lines.append(_row_line("published", reference.weights, ""))
    for name, null in (("equal words", found[0].equal_words), ("equal tokens", found[0].equal_tokens)):
        lines.append(_row_line(name, null.weights, f"{null.distance:>6.2f}{100 * null.order:>7.0f}"))
    for step, comparison in zip(steps, found, strict=True):
        order = comparison.distance.ravel().argsort(kind="stable")[:NEAREST]
        for place in order:
            head = divmod(int(place), comparison.distance.shape[1])
            numbers = f"{comparison.distance[head]:>6.2f}{100 * comparison.order[head]:>7.0f}"
            numbers += f"{100 * comparison.removed[head]:>6.0f}"
            lines.append(_row_line(f"{Head(*head)} step {step}", comparison.rows[head], numbers))
    return lines


def _row_line(name: str, weights: "Floats", numbers: str) -> str:
    return f"{name:<16}" + "".join(f"{100 * weight:>9.0f}" for weight in weights) + numbers


def row_as_json(reference: "ReferenceRow", steps: list[int], found: "list[RowComparison]") -> dict[str, Any]:
    """A published row and all heads' rows, by (step, layer, head)."""
    return {
        "name": reference.name,
        "query": reference.query,
        "words": reference.words,
        "published": reference.weights.tolist(),
        **{
            name: {"weights": null.weights.tolist(), "distance": null.distance, "order": null.order}
            for name, null in (("equal_words", found[0].equal_words), ("equal_tokens", found[0].equal_tokens))
        },
        "steps": [
            {"step": step}
            | {key: getattr(comparison, key).tolist() for key in ("rows", "removed", "distance", "order")}
            for step, comparison in zip(steps, found, strict=True)
        ],
    }
