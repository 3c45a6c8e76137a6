"""The mistakes that attention is written with, each with its name, the step it is made in, and how to mend it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from minigpt.inspection.students.steps import RIGHT, Steps

PROJECTION, SCORES, SCALING, MASK = "projection", "raw scores", "scaling", "mask"
SOFTMAX, SUM, MERGE, OUTPUT = "softmax", "weighted sum", "merge", "output projection"
ORDER = (PROJECTION, SCORES, SCALING, MASK, SOFTMAX, SUM, MERGE, OUTPUT)


@dataclass(frozen=True)
class Mistake:
    """One wrong way to take a step. Several may bear one name: they are told apart by nobody but their numbers."""

    name: str
    step: str
    mend: str
    changes: tuple[tuple[str, object], ...]  # fields of Steps


def _mistake(name: str, step: str, mend: str, **changes: object) -> Mistake:
    return Mistake(name, step, mend, tuple(changes.items()))


ONLY_WEIGHTS = _mistake("weights returned instead of the output", SUM, "Return weights V, the mix of the values.")
WEIGHTS_FIRST = _mistake("weights returned first", SUM, "Return the output first, then the weights.")
INVERTED = "mask inverted"


def made_of(mistakes: Sequence[Mistake]) -> Steps:
    """The chain of steps with all of these mistakes in it."""
    changes = {field: value for mistake in mistakes for field, value in mistake.changes}
    return replace(RIGHT, **changes)  # type: ignore[arg-type]


def candidates(*, layer: bool, n_axis: int, number: int) -> Iterator[tuple[Mistake, ...]]:
    """All sets of so many mistakes in different steps that a function, or a whole layer, can hold.

    Args:
        layer: four projections around the attention.
        n_axis: axes of the queries (for a layer: of its inputs); a softmax can go wrong over each of them.
        number: 1 or 2.
    """
    known = [*_common(n_axis + layer), *(_of_layers() if layer else _of_functions())]
    known.sort(key=lambda mistake: ORDER.index(mistake.step))
    for chosen in combinations(known, number):
        fields = [field for mistake in chosen for field, _ in mistake.changes]
        if len(set(fields)) == len(fields):
            yield chosen


def _common(n_axis: int) -> Iterator[Mistake]:
    """``n_axis``: axes of the scores."""
    yield _mistake("Q and K swapped", SCORES, "Compute Q K^T: rows belong to queries, columns to keys.", swapped=True)
    scale = "Divide the scores by the square root of d, the size of one head's queries: "
    yield _mistake("no sqrt(d)", SCALING, scale + "nothing is divided yet.", scale="none")
    yield _mistake("d instead of sqrt(d)", SCALING, scale + "now it is d itself.", scale="d")
    yield _mistake("times sqrt(d)", SCALING, scale + "now they are multiplied by it.", scale="times")
    yield _mistake("sqrt(number of keys)", SCALING, scale + "now it is the number of keys.", scale="sqrt_keys")
    yield _mistake("scaled after the softmax", SCALING, scale + "now the softmax comes first.", scale="after")
    yield from _masks()
    yield from _softmaxes(n_axis)
    mend = "Multiply weights V without transposing the weights: row i mixes the values for query i."
    yield _mistake("weights transposed", SUM, mend, weights_transposed=True)


def _masks() -> Iterator[Mistake]:
    mend = "Where the mask says no, set the score to -inf before the softmax: {}."
    for name, kinds, now in (
        ("mask missing", ["missing"], "now the mask has no effect"),
        ("mask transposed", ["transposed"], "rows of the mask are queries and columns keys"),
        ("mask strict", ["strict", "strict_causal", "strict_always"], "now a token's own position is hidden too"),
        (INVERTED, ["inverted"], "here True or 1 means 'may look'; now those keys are hidden"),
        ("mask after the softmax", ["after_softmax"], "weights set to 0 later no longer add up to 1"),
        ("mask multiplied before the softmax", ["multiplied"], "a score of 0 still gets weight, exp(0) = 1"),
        ("-1 instead of -inf", ["minus_one", "minus_one_early"], "-1 still gets weight, exp(-1) = 0.37"),
        ("-1 instead of -inf", ["minus_one_added"], "1 less than before still gets weight, exp(-1) = 0.37 of it"),
        ("own causal mask", ["causal"], "now every mask given is taken for the causal one"),
        ("masked without a mask", ["causal_always"], "now the causal mask is used even if none is given"),
    ):
        for kind in kinds:
            yield _mistake(name, MASK, mend.format(now), mask=kind)


def _softmaxes(n_axis: int) -> Iterator[Mistake]:
    mend = "Take the softmax over the keys, the last axis (dim=-1), so that each row adds up to 1: {}."
    yield _mistake("softmax over the queries", SOFTMAX, mend.format("now columns do"), softmax="queries")
    yield _mistake("softmax over the whole matrix", SOFTMAX, mend.format("now a whole matrix does"), softmax="matrix")
    yield _mistake("softmax missing", SOFTMAX, mend.format("now there is none"), softmax="missing")
    mend_axis = mend.format("now another axis does")
    if n_axis > 2:
        whole = "softmax over the whole matrix"
        yield _mistake(whole, SOFTMAX, mend.format("now all numbers together do"), softmax="everything")
        first = "softmax over the batch" if n_axis > 3 else "softmax over the first axis"
        yield _mistake(first, SOFTMAX, mend_axis, softmax="first_axis")
    if n_axis > 3:
        yield _mistake("softmax over the heads", SOFTMAX, mend_axis, softmax="second_axis")


def _of_functions() -> Iterator[Mistake]:
    mend = "Divide by sqrt(d_k), from the last axis of Q or K: V may have another width."
    yield _mistake("sqrt(d_v) instead of sqrt(d_k)", SCALING, mend, scale="sqrt_d_v")
    yield from _group_maps()
    mend = "Scores come from Q and K; V is what the weights mix."
    yield _mistake("K and V swapped", SCORES, mend, inputs="qvk")
    yield _mistake("Q and V swapped", SCORES, mend, inputs="vkq")


def _group_maps() -> Iterator[Mistake]:
    mend = "With fewer key heads than query heads, query head h uses key and value head h // (heads per group)"
    for kind in ("cycle", "count", "first"):
        both = {"key_group": kind, "value_group": kind}
        yield _mistake("wrong group map", SCORES, f"{mend}: repeat_interleave.", **both)
        yield _mistake("wrong group map", SCORES, f"{mend}; K uses another.", key_group=kind)
        yield _mistake("wrong group map", SUM, f"{mend}; V uses another.", value_group=kind)


def _of_layers() -> Iterator[Mistake]:
    mend = "Divide by the square root of one head's size, d_model / num_heads, not of d_model."
    yield _mistake("sqrt(d_model) instead of sqrt(d_head)", SCALING, mend, scale="sqrt_d_model")
    yield from _projections()
    mend = "Cut heads by view(B, T, heads, size).transpose(1, 2), not by one view."
    yield _mistake("heads split without the transpose", PROJECTION, mend, split=False)
    mend = "Merge heads by transpose(1, 2) first, (B, T, heads, size), and then view(B, T, d_model)."
    yield _mistake("heads merged without the transpose", MERGE, mend, merge=False)
    mend = "The output projection has a bias, added after its matrix: nn.Linear, or bare: --names bias=..."
    yield _mistake("output bias lost", OUTPUT, mend, bias=False)
    mend = "Send the merged heads through the output projection."
    yield _mistake("output projection missing", OUTPUT, mend, output=False)


def _projections() -> Iterator[Mistake]:
    """Matrices used transposed or in each other's place, and inputs taken for one another."""
    for size in range(1, 5):
        for letters in map("".join, combinations("QKVO", size)):
            names = " and ".join(f"W_{letter}" for letter in letters)
            step = OUTPUT if letters == "O" else PROJECTION
            mend = "nn.Linear computes x W^T: call the layer, or transpose its weight."
            yield _mistake(f"{names} transposed", step, mend, transposed=letters)
    for one, other in combinations("QKVO", 2):
        swapped = "QKVO".translate(str.maketrans(one + other, other + one))
        mend = f"Use W_{one} where W_{other} is used now, and the other way round."
        yield _mistake(f"W_{one} and W_{other} swapped", PROJECTION, mend, matrices=swapped)
    for place in "QKVO":
        for used in "QKVO".replace(place, ""):
            matrices = "QKVO".replace(place, used)
            step = OUTPUT if place == "O" else PROJECTION
            mend = f"W_{used} is used twice and W_{place} never."
            yield _mistake(f"W_{used} in place of W_{place}", step, mend, matrices=matrices)
    words = {"q": "query", "k": "key", "v": "value"}
    for inputs in ("qqv", "qkq", "qqq", "qkk", "qvv", "kkv", "qvk", "kqv"):
        now = ", ".join(words[letter] for letter in inputs)
        mend = f"W_Q, W_K and W_V take query, key and value in this order; now they take {now}."
        yield _mistake("inputs taken for one another", PROJECTION, mend, inputs=inputs)
