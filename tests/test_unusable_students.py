"""A student's code that gives no numbers: what went wrong is one sentence."""

from collections.abc import Callable
from typing import Any

import pytest
import student_variants
from student_classes import ARRAY_NAMES, Arrays, Course
from student_judging import judged, judged_class
from torch import nn

from minigpt.inspection.students.layer import Unusable


def raises(q, k, v, mask=None):
    s = q @ k.mT
    return undefined_name(s)  # type: ignore[name-defined]  # noqa: F821


def returns_nothing(q, k, v, mask=None):
    _ = q @ k.mT


def returns_text(q, k, v, mask=None):
    return "done"


def returns_other_shape(q, k, v, mask=None):
    return v[..., :2]


def stops_at_masks(q, k, v, mask=None):
    if mask is not None:
        raise NotImplementedError("masks come next week")
    return student_variants.mask_and_scale(q, k, v)


def knows_squares_alone(q, k, v, mask=None):
    hidden = q.new_zeros(q.shape[-2], q.shape[-2], dtype=bool)
    s = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(hidden, -1e9)
    return (s if mask is None else s.masked_fill(mask == 0, -1e9)).softmax(-1) @ v


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (raises, "NameError: name 'undefined_name' is not defined"),
        (returns_nothing, "returned nothing (None)"),
        (returns_text, "returned a str"),
        (returns_other_shape, "returned an output of shape"),
        (stops_at_masks, "NotImplementedError: masks come next week"),
        (knows_squares_alone, "RuntimeError: The size of tensor"),
    ],
)
def test_what_went_wrong_is_one_sentence(function: Callable[..., Any], message: str) -> None:
    verdict = judged(function)
    assert not verdict.correct and verdict.mistake is None
    assert message in verdict.message
    if "Error" in message:
        line = int(verdict.message.split(":")[0].removeprefix("line "))
        first = function.__code__.co_firstlineno
        assert first < line < first + 6


def never_the_same(q, k, v, mask=None):
    import torch

    return v + torch.rand_like(v)


class NoProjections(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.wq = nn.Linear(d_model, d_model)


class OtherSizes(Course):
    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        self.value_linear = nn.Linear(d_model, 2 * d_model)


def test_code_that_can_not_be_asked_is_refused() -> None:
    with pytest.raises(Unusable, match="other numbers each time"):
        judged(never_the_same)
    with pytest.raises(Unusable, match="needs the argument 'd_k'"):
        judged(lambda q, k, v, d_k: v)
    with pytest.raises(Unusable, match="takes 1 arguments"):
        judged(lambda x: x)
    with pytest.raises(Unusable, match="has no query_linear, but wq") as error:
        judged_class(NoProjections)
    assert error.value.absent
    with pytest.raises(Unusable, match=r"value_linear.weight has the shape \(24, 12\)"):
        judged_class(OtherSizes)
    with pytest.raises(Unusable, match="has no query_linear, but W_q, W_k, W_v, W_o, b_o; say --names"):
        judged_class(Arrays)
    with pytest.raises(Unusable, match="h is of type int, no array or layer with a weight"):
        judged_class(Arrays, ARRAY_NAMES | {"query": "h"})
    with pytest.raises(Unusable, match=r"has no method forward\(query"):
        judged_class(type("Nothing", (), {"__init__": lambda self, d_model, num_heads: None}))
    with pytest.raises(Unusable, match=r"can't be made by \(12, 3\)"):
        judged_class(dict)
