"""A worked example as small tables to follow with a pencil, at most 80 columns wide."""

import math
import textwrap

import numpy as np

from minigpt.inspection.worked.agreement import Steps
from minigpt.inspection.worked.cases import AttentionCase, Case, MultiHeadCase, Part
from minigpt.inspection.worked.fields import Array
from minigpt.inspection.worked.plain_steps import plain_steps

WIDTH = 80
MOST_ROWS = 12
AXES = ("sequence", "head")  # of what lies above rows and columns

OF_SCORES = {
    "raw_scores": "raw scores = Q K^T: row i, column j is query i times key j",
    "scaled_scores": "scaled scores = raw scores / sqrt({size}) = raw scores / {root:.4f}",
    "masked_scores": "mask: -inf where the query may not look",
    "weights": "weights = e^score / (sum of e^score along the row); 0 where all is -inf",
}
OF_MULTI_HEAD = {
    "query": "Q = x W_Q^T",
    "key": "K = x W_K^T",
    "value": "V = x W_V^T",
    "raw_scores": "raw scores = Q K^T, each head with its own {size} columns of Q and K",
    **{step: OF_SCORES[step] for step in ("scaled_scores", "masked_scores", "weights")},
    "heads": "heads = weights V, each head with its own columns of V, side by side",
    "output": "output = heads W_O^T + b_O",
}
OF_PARTS = {
    "sinusoidal_positions": {
        "value": "position p: sin(p / 10000^(2i/D)) at index 2i, cos of the same at 2i+1",
    },
    "rotary_table": {
        "cos": "cos(p * 10000^(-2i/K)) of position p and pair i",
        "sin": "sin(p * 10000^(-2i/K))",
        "value": "pair (x1, x2) = (x[i], x[i+K/2]) -> (x1 cos - x2 sin, x2 cos + x1 sin)",
    },
    "rotary_relative": {
        "turned_query": "the query turned by each of its positions {positions}",
        "turned_key": "the key turned by each position - {distance}",
        "product": "their products: the distance alone counts",
    },
    "layer_norm": {"value": "(x - mean) / sqrt(variance + 1e-5)"},
    "rms_norm": {"value": "x / sqrt(mean of x^2 + 1e-6)"},
    "feed_forward_relu": {"hidden": "hidden = max(0, x W1^T + b1)", "value": "hidden W2^T + b2"},
    "masking": {
        "bare_softmax": "-inf in masked places, softmax as it is: a row of -inf gives 0/0",
        "minus_infinity": "-inf, and a row that sees nothing has weights 0",
        "minus_1e9": "-1e9 in masked places: a row that sees nothing is uniform over them",
    },
    "transformer_block": {
        "attn_norm": "n = (x - mean) / sqrt(variance + 1e-5), row by row",
        **{step: text.replace("= x ", "= n ") for step, text in OF_MULTI_HEAD.items() if step != "output"},
        "after_attention": "y = x + heads W_O^T + b_O",
        "mlp_norm": "m = (y - mean) / sqrt(variance + 1e-5)",
        "hidden": "hidden = max(0, m W1^T + b1)",
        "output": "output = y + hidden W2^T + b2",
    },
}
WITH_ROW_SUMS = ("weights", "bare_softmax", "minus_infinity", "minus_1e9")


def pencil(case: Case) -> str:
    """What is given and every step after it, each under its formula."""
    about = textwrap.wrap(case.about, WIDTH, break_on_hyphens=False)
    given, formulas = _given(case), _formulas(case)
    steps = {step: array for step, array in plain_steps(case).items() if step in formulas}
    blocks = [*(_titled(name, array) for name, array in given.items())]
    blocks += [_titled(formulas[step], array, row_sums=step in WITH_ROW_SUMS) for step, array in steps.items()]
    return "\n\n".join(["\n".join([f"== {case.name} ==", *about]), *blocks])


def _given(case: Case) -> Steps:
    match case:
        case AttentionCase():
            return {"Q": case.query, "K": case.key, "V": case.value}
        case MultiHeadCase():
            matrices = case.query_weight, case.key_weight, case.value_weight, case.output_weight
            names = ("W_Q", "W_K", "W_V", "W_O")
            return {"x": case.x, **dict(zip(names, matrices, strict=True)), "b_O": case.output_bias}
        case Part():
            return {name: array for name, array in case.given.items() if array.ndim and name != "positions"}


def _formulas(case: Case) -> dict[str, str]:
    match case:
        case AttentionCase():
            size = case.query.shape[-1]
            formulas = OF_SCORES | {"output": "output = weights V"}
            if not case.scaled:
                formulas = formulas | {"scaled_scores": "not divided by sqrt({size}) = {root:.4f} in this example"}
            if case.group > 1:
                about = f"raw scores = Q K^T, query head h with key (and value) head h // {case.group}"
                formulas = formulas | {"raw_scores": about}
        case MultiHeadCase():
            size, formulas = case.x.shape[-1] // case.n_head, OF_MULTI_HEAD
        case Part():
            formulas = OF_PARTS[case.kind]
            size = case.given["x"].shape[-1] // len(case.results["weights"]) if "weights" in case.results else 1
    values = {"size": size, "root": math.sqrt(size)}
    if isinstance(case, Part) and "positions" in case.given:
        places = [f"{place:g}" for place in case.given["positions"]]
        values |= {"positions": ", ".join(places), "distance": f"{float(case.given['distance']):g}"}
    return {step: text.format(**values) for step, text in formulas.items()}


def _titled(title: str, array: Array, *, row_sums: bool = False) -> str:
    array = np.atleast_2d(array)
    lines = [title]
    for index in np.ndindex(array.shape[:-2]):
        if math.prod(array.shape[:-2]) > 1:
            lines.append(", ".join(f"{axis} {i}" for axis, i in zip(AXES[-len(index) :], index, strict=True)))
        lines.append(matrix(array[index], row_sums=row_sums))
    return "\n".join(lines)


def matrix(array: Array, *, row_sums: bool = False) -> str:
    """Numbers (rows, columns), right-aligned, to four places where needed; the middle of large ones is left out."""
    whole = bool((array == np.rint(array)).all())  # infinite ones count as whole, NaN does not
    cells = [[_number(value, whole) for value in row] for row in array]
    column = max(len(cell) for row in cells for cell in row) + 2
    room = max((WIDTH - len("   sum -0.0000") * row_sums) // column, 3)
    if array.shape[1] > room:
        cells = [[*row[: room - 2], "...", row[-1]] for row in cells]
    lines = ["".join(cell.rjust(column) for cell in row) for row in cells]
    if row_sums:
        lines = [f"{line}   sum {_number(total, False)}" for line, total in zip(lines, array.sum(-1), strict=True)]
    if len(lines) > MOST_ROWS:
        lines = [*lines[: MOST_ROWS - 2], "...".rjust(column), lines[-1]]
    return "\n".join(lines)


def _number(value: float, whole: bool) -> str:
    if abs(value) >= 1e7 and math.isfinite(value):
        return f"{value:.4e}"
    text = f"{value:.0f}" if whole else f"{value:.4f}"
    return text.removeprefix("-") if float(text) == 0 else text
