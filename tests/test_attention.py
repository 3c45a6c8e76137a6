"""The one attention function against worked numbers, PyTorch's own modules and the fused kernel."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minigpt.attention import (
    CausalSelfAttention,
    KeyValueCache,
    MultiHeadAttention,
    attention,
    attention_weights,
    causal_mask,
    merge_heads,
    rotary_tables,
    rotate,
    sinusoidal_positions,
    split_heads,
)
from minigpt.config import ModelConfig

ATTENTION_EXAMPLES = [
    "three_token_full",
    "three_token_causal",
    "padding_mask",
    "window_of_two",
    "three_token_unscaled",
    "seed42_full",
    "seed42_causal",
    "cross_attention",
    "equal_scores_causal",
    "extreme_scores",
    "grouped_query",
    "one_key",
    "value_wider",
    "nothing_to_see",
]


def numbers(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def assert_equal(got: Tensor, expected: Any, tolerance: float = 1e-6) -> None:
    wanted = numbers(expected)
    assert got.shape == wanted.shape
    assert ((got - wanted).abs() <= tolerance + tolerance * wanted.abs()).all()


def test_every_worked_example_is_covered(worked_examples: dict[str, Any]) -> None:
    assert [example["name"] for example in worked_examples["attention"]] == ATTENTION_EXAMPLES


@pytest.mark.parametrize("name", ATTENTION_EXAMPLES)
def test_worked_example(name: str, worked_examples: dict[str, Any]) -> None:
    example = next(example for example in worked_examples["attention"] if example["name"] == name)
    query, key, value = (numbers(example[part]) for part in ("query", "key", "value"))
    mask = None if example["mask"] is None else torch.tensor(example["mask"], dtype=torch.bool)
    group = query.shape[-3] // key.shape[-3] if query.ndim > 2 else 1
    if group > 1:
        key, value = key.repeat_interleave(group, -3), value.repeat_interleave(group, -3)
    weights = attention_weights(query, key, mask, scale=None if example["scaled"] else 1.0)
    assert_equal(weights, example["weights"])
    assert_equal(weights @ value, example["output"])
    if example["scaled"]:
        output, same_weights = attention(query, key, value, mask)
        assert_equal(output, example["output"])
        assert torch.equal(weights, same_weights)


@pytest.mark.parametrize("name", ["two_heads_identity", "two_heads_projected"])
def test_multi_head_example(name: str, worked_examples: dict[str, Any]) -> None:
    example = next(example for example in worked_examples["multi_head"] if example["name"] == name)
    x, identity = numbers(example["x"]), torch.eye(4, dtype=torch.float64).tolist()
    module = MultiHeadAttention(4, 2).double()
    with torch.no_grad():
        for linear, matrix in (
            (module.query_linear, "W_Q"),
            (module.key_linear, "W_K"),
            (module.value_linear, "W_V"),
            (module.output_linear, "W_O"),
        ):
            linear.weight.copy_(numbers(example.get(matrix, identity)))
        module.output_linear.bias.copy_(numbers(example.get("b_O", [0.0] * 4)))
    output, weights = module(x, x, x, causal_mask(x.shape[-2], x.shape[-2]))
    assert_equal(weights, example["weights"])
    assert_equal(output, example["output"])


def test_multi_head_equals_torch() -> None:
    torch.manual_seed(0)
    ours, theirs = MultiHeadAttention(12, 3).double(), nn.MultiheadAttention(12, 3, batch_first=True).double()
    with torch.no_grad():
        packed = [ours.query_linear.weight, ours.key_linear.weight, ours.value_linear.weight]
        theirs.in_proj_weight.copy_(torch.cat(packed))
        theirs.in_proj_bias.zero_()
        theirs.out_proj.weight.copy_(ours.output_linear.weight)
        theirs.out_proj.bias.copy_(ours.output_linear.bias)
    query, other = torch.randn(2, 5, 12, dtype=torch.float64), torch.randn(2, 7, 12, dtype=torch.float64)
    mask = torch.rand(5, 7) < 0.7
    mask[:, 0] = True
    got, got_weights = ours(query, other, other, mask)
    want, want_weights = theirs(query, other, other, attn_mask=~mask, average_attn_weights=False)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(got_weights, want_weights)


def test_width_must_be_a_multiple_of_heads() -> None:
    with pytest.raises(ValueError, match="d_model = 10 must be a multiple of n_head = 3"):
        MultiHeadAttention(10, 3)


@pytest.mark.parametrize("n_kv_head", [1, 2, 4])
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("position", ["rotary", "none"])
def test_fused_equals_explicit(n_kv_head: int, qk_norm: bool, position: Any) -> None:
    torch.manual_seed(1)
    config = ModelConfig(n_head=4, n_kv_head=n_kv_head, d_model=32, qk_norm=qk_norm, position=position)
    layer = CausalSelfAttention(config).double()
    x = torch.randn(3, 9, 32, dtype=torch.float64)
    query, key, value = layer.project(x)
    heads, weights = attention(query, layer.share_heads(key), layer.share_heads(value), causal_mask(9, 9))
    torch.testing.assert_close(layer.combine(heads), layer(x))
    torch.testing.assert_close(weights.sum(-1), torch.ones(3, 4, 9, dtype=torch.float64))
    assert (weights.triu(1) == 0).all()


def test_causal_mask_is_aligned_to_the_last_key() -> None:
    assert causal_mask(2, 4).int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]


def test_chunk_behind_a_filled_cache() -> None:
    torch.manual_seed(2)
    layer = CausalSelfAttention(ModelConfig(n_head=2, d_model=16, context_length=8)).double()
    x = torch.randn(1, 8, 16, dtype=torch.float64)
    room = torch.zeros(1, 2, 8, 8, dtype=torch.float64)
    cache = KeyValueCache(room, room.clone())
    pieces = [layer(piece, cache) for piece in x.split([3, 1, 4], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, 1), layer(x))
    with pytest.raises(ValueError, match="9 tokens do not fit in a cache of 8"):
        cache.append(room[:, :, :1], room[:, :, :1])


def test_heads_split_and_merge() -> None:
    x = torch.arange(24.0).reshape(1, 2, 12)
    heads = split_heads(x, 3)
    assert heads.shape == (1, 3, 2, 4)
    assert heads[0, 1, 0].tolist() == [4, 5, 6, 7]
    assert torch.equal(merge_heads(heads), x)


def test_sinusoidal_positions(worked_examples: dict[str, Any]) -> None:
    example = next(part for part in worked_examples["parts"] if part["name"] == "sinusoidal_positions")
    assert_equal(sinusoidal_positions(3, 4).double(), example["value"])


def test_rotation_tells_distance_alone(worked_examples: dict[str, Any]) -> None:
    example = next(part for part in worked_examples["parts"] if part["name"] == "rotary_relative")
    query, key = numbers(example["query"]), numbers(example["key"])
    cos, sin = rotary_tables(64, 4)
    for place in (3, 5, 40):
        turned_query = rotate(query[None], cos[place : place + 1], sin[place : place + 1])
        turned_key = rotate(key[None], cos[place - 3 : place - 2], sin[place - 3 : place - 2])
        assert float((turned_query * turned_key).sum()) == pytest.approx(example["product"][0], rel=1e-5)


def test_kernel_mask_would_be_wrong_for_a_chunk() -> None:
    """The reason for our own mask: the kernel's is aligned to the first key, so one query would see one key."""
    query, key = torch.randn(1, 1, 1, 4), torch.randn(1, 1, 5, 4)
    top_left = F.scaled_dot_product_attention(query, key, key, is_causal=True)
    assert torch.allclose(top_left, key[:, :, :1])
