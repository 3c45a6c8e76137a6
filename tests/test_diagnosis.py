"""Every mistake is called by its name, and correct code, however it is written, is accused of nothing."""

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import student_class_mistakes
import student_classes
import student_group_mistakes
import student_mistakes
import student_variants
from student_class_mistakes import CLASSES
from student_classes import ARRAY_NAMES, Arrays, Course
from student_judging import judged, judged_class
from student_mistakes import FUNCTIONS
from student_rare_mistakes import (
    PAIRS,
    UNKNOWN,
    cube_root,
    groups_backwards,
    root_of_queries,
    same_weights,
    ten_percent_less,
)  # fmt: skip

from minigpt.inspection.students.layer import NAMES

# ── correct code ───────────────────────────────────────────────────────────────────────────────────────────────


def test_two_hundred_correct_variants_are_accused_of_nothing() -> None:
    functions, classes = list(student_variants.functions()), list(student_classes.classes())
    assert len(functions) + len(classes) >= 200
    verdicts = {name: judged(function) for name, function in functions}
    verdicts |= {f"{kind.__name__}, {number}": judged_class(kind, names or NAMES)
                 for number, (kind, names) in enumerate(classes)}  # fmt: skip
    accused = {name: verdict.message for name, verdict in verdicts.items() if not verdict.correct}
    assert not accused
    assert {verdict.mistake for verdict in verdicts.values()} == {None}
    other_weights = [name for name, verdict in verdicts.items() if any("weights returned" in n for n in verdict.notes)]
    assert not other_weights


def test_what_was_left_out_is_said() -> None:
    notes = " ".join(judged(student_variants.always_causal).notes)
    assert "other masks than the causal one were left out" in notes
    assert "it takes no mask: give it one more argument, mask" in judged(student_mistakes.no_mask).notes
    assert "as many key heads as query heads" in " ".join(judged(student_variants.mask_and_scale).notes)
    assert "may look at nothing" in " ".join(judged(student_variants.bmm).notes)
    with_groups = judged(student_variants.grouped).notes
    assert with_groups[0] == "asked with 2 or 3 or 4 axes, torch float32, masks as bool"
    assert "key heads" not in " ".join(with_groups)


# ── mistakes ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", FUNCTIONS)
def test_mistake_of_a_function_is_named(name: str) -> None:
    for function in FUNCTIONS[name]:
        verdict = judged(function)
        assert verdict.mistake == name, function.__name__
        assert not verdict.correct and verdict.mend and verdict.step
        assert verdict.expected is not None and verdict.got is not None
        assert verdict.expected.shape != verdict.got.shape or not np.allclose(verdict.expected, verdict.got)


@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_mistake_is_named_however_the_mask_is_written(library: str) -> None:
    kinds = student_variants
    scores, masks, softmax = (
        (kinds.TORCH_SCORES["@"], kinds.TORCH_MASKS, kinds.TORCH_SOFTMAXES["softmax"])
        if library == "torch"
        else (kinds.NUMPY_SCORES["@"], kinds.NUMPY_MASKS, kinds.NUMPY_SOFTMAXES["by hand"])
    )
    wrong: dict[str, Callable[..., Any]] = {
        "no sqrt(d)": lambda q, k: scores(q, k) * q.shape[-1] ** 0.5,
        "Q and K swapped": lambda q, k: scores(k, q),
    }
    for (name, wrong_scores), (masking, masked) in product(wrong.items(), masks.items()):

        def attention(
            q: Any, k: Any, v: Any, mask: Any = None, scores: Any = wrong_scores, masked: Any = masked
        ) -> Any:
            s = scores(q, k)
            return softmax(s if mask is None else masked(s, mask)) @ v

        assert judged(lambda q, k, v, mask=None, f=attention: f(q, k, v, mask)).mistake == name, masking


@pytest.mark.parametrize(("name", "kind"), CLASSES, ids=[f"{i} {name}" for i, (name, _) in enumerate(CLASSES)])
def test_mistake_of_a_class_is_named(name: str, kind: type) -> None:
    assert judged_class(kind).mistake == name


def test_mistake_of_a_class_without_torch_is_named() -> None:
    class Swapped(Arrays):
        def forward(self, query, key, value, mask=None):
            self.W_q, self.W_k, W_q = self.W_k, self.W_q, self.W_q
            try:
                return super().forward(query, key, value, mask)
            finally:
                self.W_q, self.W_k = W_q, self.W_q

    assert judged_class(Swapped, ARRAY_NAMES).mistake == "W_Q and W_K swapped"
    without_bias = {role: name for role, name in ARRAY_NAMES.items() if role != "bias"}
    verdict = judged_class(type("Biasless", (Arrays,), {"b_o": property(lambda _: 0, lambda *_: None)}), without_bias)
    assert verdict.mistake == "output bias lost" and "--names bias=" in verdict.mend


def test_first_example_and_first_step_that_differ() -> None:
    verdict = judged(student_mistakes.no_root)
    assert (verdict.example, verdict.step) == ("three_token_full", "scaling")
    assert verdict.expected is not None and verdict.got is not None
    np.testing.assert_allclose(verdict.expected[0], [6.0166813902, 3.9833186098])
    np.testing.assert_allclose(verdict.got[0], [6.3347819738, 3.6652180262], atol=1e-6)
    assert judged(student_mistakes.mask_forgotten).example == "three_token_causal"
    by_d = judged(student_mistakes.by_d)
    assert by_d.weights is not None and by_d.weights[0].shape == (3, 3)
    assert judged_class(student_class_mistakes.NoBias).example == "two_heads_projected"
    assert judged_class(student_class_mistakes.NoBias).step == "output projection"


def test_kind_of_mask_can_be_settled() -> None:
    def additive(q, k, v, mask=None):
        s = q @ k.mT / q.shape[-1] ** 0.5
        return (s if mask is None else s + mask).softmax(-1) @ v

    def with_bool(q, k, v, mask=None):
        s = q @ k.mT / q.shape[-1] ** 0.5
        return (s if mask is None else s.masked_fill(~mask, -1e9)).softmax(-1) @ v

    def ones(q, k, v, mask=None):
        s = q @ k.mT / q.shape[-1] ** 0.5
        return (s if mask is None else s + (1 - mask) * -1e9).softmax(-1) @ v

    right = {additive: {"any", "additive"}, with_bool: {"any", "bool"}, ones: {"any"}}
    for function, kinds in right.items():
        assert {kind for kind in ("any", "bool", "additive") if judged(function, kind).correct} == kinds
    assert judged(additive, "bool").mistake == "-1 instead of -inf"  # True is 1, False 0
    assert judged(student_variants.always_causal, "bool").correct  # who takes no mask is not concerned


@pytest.mark.parametrize("names", PAIRS)
def test_two_mistakes_at_once_are_both_named(names: tuple[str, str]) -> None:
    verdict = judged(PAIRS[names])
    assert verdict.mistake == " and ".join(names)
    assert verdict.step == "scaling"


@pytest.mark.parametrize("function", UNKNOWN)
def test_unknown_mistake_is_given_no_name_but_a_step(function: Callable[..., Any]) -> None:
    verdict = judged(function)
    assert not verdict.correct and verdict.mistake is None
    assert verdict.step == UNKNOWN[function]
    assert "no known mistake" in verdict.message


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (ten_percent_less, "the scaled scores are 0.9 times what they must be"),
        (cube_root, "a multiple of what they must be, another one for other sizes"),  # sqrt(d) / 4.5
        (root_of_queries, "a multiple of what they must be, another one for other sizes"),  # sqrt(d) / sqrt(T)
        (same_weights, "every key gets the same weight, whatever its score"),
        (groups_backwards, "without a mask only heads in groups are off: query head h must use"),
    ],
)
def test_what_is_said_of_an_unknown_mistake_holds_for_the_example_shown(
    function: Callable[..., Any], says: str
) -> None:
    verdict = judged(function)
    assert verdict.mistake is None and says in verdict.message
    assert "times" in says or "times" not in verdict.message


def test_overflow_of_an_honest_softmax_is_a_note() -> None:
    def unscaled_too(q, k, v, mask=None):
        return student_variants.naive_exp(q * k.shape[-1] ** 0.5, k, v, mask)

    for function, mistake in ((student_variants.naive_exp, None), (unscaled_too, "no sqrt(d)")):
        verdict = judged(function)
        assert (verdict.correct, verdict.mistake) == (mistake is None, mistake)
        note = "extreme_scores, not judged: the softmax overflows at huge scores; take each row's largest score away"
        assert any(told.startswith(note) for told in verdict.notes)
    assert not any("overflows" in note for note in judged(student_variants.grouped).notes)


def test_mistake_with_a_batch_alone_is_told_so() -> None:
    def over_axis_1(q, k, v, mask=None):
        s = q @ k.mT / q.shape[-1] ** 0.5
        return (s if mask is None else s.masked_fill(mask == 0, -1e9)).softmax(1) @ v

    verdict = judged(over_axis_1)
    assert verdict.mistake == "softmax over the queries"
    assert "with 2 axes it is right; this shows with 3" in verdict.notes


def test_groups_of_heads_are_judged_where_they_are_taken() -> None:
    verdict = judged(student_group_mistakes.groups_tiled)
    assert verdict.example == "grouped_query"
    assert "with 2 or 3 axes it is right; this shows with 4" in verdict.notes
    assert not any("were left out" in note for note in verdict.notes)


def test_what_fits_one_layer_equally_is_said() -> None:
    class SelfOnly(Course):  # without other inputs, K Q^T and swapped matrices are one and the same
        def forward(self, x, mask=None):  # type: ignore[override]
            return student_class_mistakes.of_a_layer(student_mistakes.keys_by_queries).forward(self, x, x, x, mask)

    assert judged_class(SelfOnly).mistake == "W_Q and W_K swapped or Q and K swapped"
