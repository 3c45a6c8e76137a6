"""Worked examples: their numbers by another route, every implementation held against them."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from torch import Tensor

from minigpt.inspection.commands.examples import results_of
from minigpt.inspection.worked import implementations
from minigpt.inspection.worked.agreement import TOLERANCE, compare
from minigpt.inspection.worked.cases import AttentionCase, Case
from minigpt.inspection.worked.examples import load_examples
from minigpt.inspection.worked.fields import Array
from minigpt.inspection.worked.pencil import pencil
from minigpt.inspection.worked.plain_steps import plain_steps

SHIPPED = json.loads((resources.files("minigpt.inspection") / "examples.json").read_text(encoding="utf-8"))
EXAMPLES = load_examples()
CASES = {case.name: case for case in EXAMPLES.cases()}
PARTS = {part["name"]: part for part in SHIPPED["parts"]}

Rows = list[list[float]]

# ── the numbers of the file, again, with lists and loops alone ─────────────────────────────────────────────────


def dot(a: list[float], b: list[float]) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def linear(x: Rows, weight: Rows, bias: list[float] | None = None) -> Rows:
    return [[dot(row, column) + (bias[i] if bias else 0) for i, column in enumerate(weight)] for row in x]


def add(a: Rows, b: Rows) -> Rows:
    return [[x + y for x, y in zip(one, other, strict=True)] for one, other in zip(a, b, strict=True)]


def softmax(scores: list[float], seen: Sequence[float]) -> list[float]:
    total = math.fsum(math.exp(score - max(scores)) for score, see in zip(scores, seen, strict=True) if see)
    return [math.exp(score - max(scores)) / total if see else 0.0 for score, see in zip(scores, seen, strict=True)]


def attend(query: Rows, key: Rows, value: Rows, mask: Rows | None, *, scaled: bool = True) -> dict[str, Rows]:
    raw = [[dot(q, k) for k in key] for q in query]
    scores = [[score / math.sqrt(len(key[0])) if scaled else score for score in row] for row in raw]
    masks = mask or [[1] * len(key)] * len(query)
    weights = [softmax(row, seen) for row, seen in zip(scores, masks, strict=True)]
    output = [[dot(row, list(column)) for column in zip(*value, strict=True)] for row in weights]
    return {"raw_scores": raw, "scaled_scores": scores, "weights": weights, "output": output}


def multi_head(x: Rows, table: dict[str, Any], n_head: int) -> dict[str, Any]:
    mask = [[1.0 * (j <= i) for j in range(len(x))] for i in range(len(x))]
    steps: dict[str, Any] = {part: linear(x, table[f"W_{part[0].upper()}"]) for part in ("query", "key", "value")}
    size = len(x[0]) // n_head
    cut = [
        {part: [row[h * size : (h + 1) * size] for row in steps[part]] for part in ("query", "key", "value")}
        for h in range(n_head)
    ]
    heads = [attend(head["query"], head["key"], head["value"], mask) for head in cut]
    steps["scaled_scores"] = [head["scaled_scores"] for head in heads]
    steps["weights"] = [head["weights"] for head in heads]
    steps["heads"] = [[number for head in heads for number in head["output"][t]] for t in range(len(x))]
    return steps | {"output": linear(steps["heads"], table["W_O"], table["b_O"])}


def normed(row: list[float], *, centred: bool, epsilon: float) -> list[float]:
    mean = math.fsum(row) / len(row) if centred else 0.0
    variance = math.fsum((x - mean) ** 2 for x in row) / len(row)
    return [(x - mean) / math.sqrt(variance + epsilon) for x in row]


def turned(x: list[float], place: int) -> list[float]:
    half = len(x) // 2
    pairs = [complex(x[i], x[i + half]) for i in range(half)]
    turns = [pair * complex(math.cos(angle), math.sin(angle)) for i, pair in enumerate(pairs)
             for angle in [place / 10000 ** (2 * i / len(x))]]  # fmt: skip
    return [turn.real for turn in turns] + [turn.imag for turn in turns]


def assert_listed(table: dict[str, Any], steps: dict[str, Any]) -> None:
    """All steps are in the file, to its ten places."""
    for step, numbers in steps.items():
        assert_allclose(table[step], numbers, rtol=1e-12, atol=0.6e-10, err_msg=f"{table['name']} {step}")


@pytest.mark.parametrize("table", SHIPPED["attention"], ids=lambda table: table["name"])
def test_attention_numbers(table: dict[str, Any]) -> None:
    query, key, value, mask = (np.array(table[part]).tolist() for part in ("query", "key", "value", "mask"))
    if table["name"] == "nothing_to_see":
        mask = [mask[0], [1, 1]]  # a row without keys has no softmax; the rule is the file's and tested below
        steps = attend(query, key, value, mask)
        steps["weights"][1] = steps["output"][1] = [0, 0]
    elif np.ndim(query) == 2:
        steps = attend(query, key, value, mask, scaled=table["scaled"])
    else:
        group = len(query) // len(key)
        masks = mask or [None] * len(query)
        heads = [attend(q, key[h // group], value[h // group], masks[h]) for h, q in enumerate(query)]
        steps = {step: [head[step] for head in heads] for step in heads[0]}
    assert_listed(table, steps)


@pytest.mark.parametrize("table", SHIPPED["multi_head"], ids=lambda table: table["name"])
def test_multi_head_numbers(table: dict[str, Any]) -> None:
    steps = multi_head(table["x"], table, 2)
    assert_listed(table, {step: steps[step] for step in ("query", "key", "value", "weights", "output")})


def test_block_numbers() -> None:
    table = PARTS["transformer_block"]
    first = [normed(row, centred=True, epsilon=1e-5) for row in table["x"]]
    steps = multi_head(first, table, 2)
    middle = add(table["x"], steps.pop("output"))
    second = [normed(row, centred=True, epsilon=1e-5) for row in middle]
    hidden = [[max(0.0, h) for h in row] for row in linear(second, table["W1"], table["b1"])]
    output = add(middle, linear(hidden, table["W2"], table["b2"]))
    rest = {"attn_norm": first, "after_attention": middle, "mlp_norm": second, "hidden": hidden, "output": output}
    assert_listed(table, steps | rest)


def test_numbers_of_the_other_parts() -> None:
    waves = [[f(p / 100**i) for i in range(2) for f in (math.sin, math.cos)] for p in range(3)]
    assert_listed(PARTS["sinusoidal_positions"], {"value": waves})
    row = [1.0, 2.0, 3.0, 6.0]
    assert_listed(PARTS["layer_norm"], {"value": normed(row, centred=True, epsilon=1e-5)})
    assert_listed(PARTS["rms_norm"], {"value": normed(row, centred=False, epsilon=1e-6)})
    table = PARTS["feed_forward_relu"]
    hidden = [[max(0.0, h) for h in row] for row in linear(table["x"], table["W1"], table["b1"])]
    assert_listed(table, {"hidden": hidden, "value": linear(hidden, table["W2"], table["b2"])})
    table = PARTS["rotary_table"]
    assert_listed(table, {"value": [turned(row, place) for place, row in enumerate(table["x"])]})
    angles = [[place / 100**pair for pair in range(2)] for place in range(3)]
    assert_listed(table, {name: [[f(a) for a in row] for row in angles]
                          for name, f in (("cos", math.cos), ("sin", math.sin))})  # fmt: skip
    table = PARTS["rotary_relative"]
    products = [dot(turned(table["query"], place), turned(table["key"], place - 3)) for place in table["positions"]]
    assert_listed(table, {"product": products})


def test_numbers_of_masking() -> None:
    table = PARTS["masking"]
    both = [softmax([1, 2, 3], [1, 1, 1]), softmax([1, 2, 3], [1, 1, 0])]
    assert_listed(table, {"minus_infinity": [*both, [0, 0, 0]], "minus_1e9": [*both, [1 / 3, 1 / 3, 1 / 3]]})


def test_seed_42() -> None:
    random = np.random.RandomState(42)
    drawn = [random.randn(1, 4, 8) for _ in range(3)]
    for table in SHIPPED["attention"]:
        if table["name"].startswith("seed42"):
            for part, numbers in zip(("query", "key", "value"), drawn, strict=True):
                assert_allclose(table[part], numbers, rtol=0, atol=0.6e-10)


# ── every implementation ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", CASES)
def test_every_implementation_holds(name: str) -> None:
    case = CASES[name]
    results = results_of(case)
    computed = {(result.implementation, result.dtype) for result in results if result.agreement}
    assert {("numpy", "float64"), ("torch", "float64"), ("torch", "float32")} <= computed
    off = [(r.implementation, r.dtype, str(r.agreement.first_wrong)) for r in results if r.agreement and not r.holds]
    assert not off
    for result in results:
        if result.agreement and result.implementation in ("numpy", "torch"):
            assert set(result.agreement.differences) == set(case.expected()), "every step listed is shown"


def test_who_computes_what() -> None:
    """Cached decoding takes all causal cases and no other; the fused kernel takes all of attention."""
    whys = {
        name: {result.implementation: result.why_not for result in results_of(case)} for name, case in CASES.items()
    }
    causal = ["three_token_causal", "seed42_causal", "equal_scores_causal", "grouped_query", "one_key", "value_wider"]
    causal += ["two_heads_identity", "two_heads_projected", "transformer_block"]
    assert sorted(name for name, why in whys.items() if not why["cached"]) == sorted(causal)
    assert whys["three_token_full"]["cached"] == "no mask"
    assert whys["window_of_two"]["cached"] == "other mask"
    attention = [case.name for case in (*EXAMPLES.attention, *EXAMPLES.multi_head)]
    assert not any(whys[name]["fused"] for name in attention)
    refused = {name: whys[name]["kernel"] for name in attention if whys[name]["kernel"]}
    assert refused == {
        "three_token_unscaled": "unscaled",
        "cross_attention": "not self",
        "grouped_query": "groups",
        "value_wider": "wide V",
        "nothing_to_see": "empty row",
    }


def numbers(draw: st.DrawFn, *shape: int) -> Array:
    seed = draw(st.integers(0, 2**32 - 1))
    return np.random.default_rng(seed).standard_normal(shape)


@st.composite
def attention_cases(draw: st.DrawFn) -> AttentionCase:
    """Any case the file could hold, with what ``attend`` above expects of it."""
    groups, group = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    size, n_query, wide = draw(st.integers(1, 6)), draw(st.integers(1, 5)), draw(st.integers(1, 5))
    kind, scaled = draw(st.sampled_from(["causal", "any", "none"])), draw(st.booleans())
    n_key = n_query if kind == "causal" else draw(st.integers(1, 5))
    query, key = numbers(draw, groups * group, n_query, size), numbers(draw, groups, n_key, size)
    value = numbers(draw, groups, n_key, wide)
    mask = np.tri(n_query, n_key) if kind == "causal" else numbers(draw, n_query, n_key) > -0.5
    mask[:, 0] = True
    rows = [
        attend(q.tolist(), key[h // group].tolist(), value[h // group].tolist(),
               None if kind == "none" else mask.tolist(), scaled=scaled)
        for h, q in enumerate(query)
    ]  # fmt: skip
    steps = {step: np.array([row[step] for row in rows]) for step in rows[0]}
    whole = None if kind == "none" else np.broadcast_to(mask.astype(bool), steps["weights"].shape)
    return AttentionCase("drawn", "", query, key, value, whole, scaled, **steps)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(attention_cases())
def test_any_case_comes_out_alike(case: AttentionCase) -> None:
    results = results_of(case)
    assert all(result.holds for result in results)
    assert sum(result.agreement is not None for result in results) >= 5
    assert max(map(len, pencil(case).splitlines())) <= 80


def test_padding_and_a_row_without_keys() -> None:
    """The rule on rows that see nothing, by every implementation that shows weights."""
    case = CASES["nothing_to_see"]
    for implementation in ("numpy", "torch"):
        steps = implementations.computed(case, implementation)
        assert isinstance(steps, dict)
        assert steps["weights"][1].tolist() == steps["output"][1].tolist() == [0, 0]
    bare = plain_steps(CASES["masking"])["bare_softmax"]
    assert np.isnan(bare[2]).all()
    assert np.isfinite(bare[:2]).all()


# ── what is off is found ───────────────────────────────────────────────────────────────────────────────────────


def with_other_output(case: Case, by: float) -> Case:
    assert isinstance(case, AttentionCase)
    output = case.output.copy()
    output[-1, 0] += by
    return replace(case, output=output)


@pytest.mark.parametrize(
    ("by", "off_in"), [(0.0, set()), (3e-6, set()), (9e-6, {"float64"}), (9e-5, {"float64", "float32"})]
)
def test_tolerance(by: float, off_in: set[str]) -> None:
    """The number is 5, so the tolerances are 6e-6 and 6e-5."""
    results = results_of(with_other_output(CASES["three_token_causal"], by))
    assert {result.dtype for result in results if not result.holds} == off_in
    for result in results:
        assert result.agreement
        if not result.holds:
            wrong = result.agreement.first_wrong
            assert wrong
            assert (wrong.step, wrong.place) == ("output", (2, 0))


def test_first_wrong_step_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """An implementation that forgets the scale is caught at the weights, which come before the output."""

    def forgetful(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        weights = implementations.attention_weights(query, key, mask, scale=1.0)
        return weights @ value, weights

    monkeypatch.setattr(implementations, "attention", forgetful)
    off = [result for result in results_of(CASES["three_token_causal"]) if not result.holds]
    assert [(result.implementation, result.dtype) for result in off] == [("torch", "float64"), ("torch", "float32")]
    assert off[0].agreement and off[0].agreement.first_wrong
    assert str(off[0].agreement.first_wrong).startswith("weights[2, 2]: expected 0.5034898435, got 0.5761168848")


def test_nan_and_another_shape_are_off() -> None:
    expected = {"output": np.zeros((2, 2))}
    nan = compare(expected, {"output": np.array([[0, 0], [0, math.nan]])})
    assert not nan.holds
    assert nan.largest == math.inf
    assert nan.first_wrong and nan.first_wrong.place == (1, 1)
    shape = compare(expected, {"output": np.zeros((2, 3))})
    assert str(shape.first_wrong) == "output: expected the shape (2, 2), got (2, 3)"
    assert compare(expected, {"output": np.zeros((2, 2))}, TOLERANCE["float64"]).holds
