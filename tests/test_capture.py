"""Attention weights of a running model: really its own, and gone without a trace."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from minigpt.attention import CausalSelfAttention
from minigpt.config import validate
from minigpt.errors import CheckFailed, UserError
from minigpt.inspection.capture import attention_maps, looking
from minigpt.inspection.heads import Head, parse_head
from minigpt.inspection.picture import attention_grid
from minigpt.model import GPT

CONTEXT, VOCAB, LAYERS, HEADS = 12, 20, 3, 4


def trained_like(**changes: Any) -> GPT:
    """A small model whose weights are all away from zero, in evaluation mode."""
    keys = {"n_layer": LAYERS, "n_head": HEADS, "d_model": 32, "context_length": CONTEXT, **changes}
    torch.manual_seed(7)
    model = GPT(validate({"model": keys}).model, VOCAB)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def text(length: int) -> Tensor:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(length))


def hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) for module in model.modules())


@pytest.mark.parametrize("length", [1, 5, CONTEXT])
@pytest.mark.parametrize(
    "changes",
    [{}, {"n_kv_head": 2}, {"n_kv_head": 1, "position": "learned", "qk_norm": False, "norm": "layernorm"}],
    ids=["modern", "grouped heads", "one key head"],
)
def test_maps_are_distributions_over_the_past(length: int, changes: dict[str, Any]) -> None:
    maps = attention_maps(trained_like(**changes), text(length))
    assert maps.shape == (LAYERS, HEADS, length, length) and maps.dtype == np.float32
    assert np.allclose(maps.sum(axis=-1), 1, atol=1e-6)
    assert (maps[..., *np.triu_indices(length, 1)] == 0).all(), "the future weighs exactly nothing"
    assert (maps[..., *np.tril_indices(length)] > 0).all()
    if length > 1:
        assert np.abs(maps[0] - maps[1]).max() > 1e-3 and np.abs(maps[:, 0] - maps[:, 1]).max() > 1e-3


def test_maps_are_softmax_of_the_scores_by_hand() -> None:
    """One head, one layer, no rotation: the weights written out with NumPy."""
    model = trained_like(n_layer=1, n_head=1, position="none", qk_norm=False, embedding_norm=False)
    tokens = text(6)
    with torch.no_grad():
        x = model.blocks[0].attn_norm(model.token_embedding(tokens)).double().numpy()  # type: ignore[operator, union-attr]
    weights = {name: tensor.double().numpy() for name, tensor in model.state_dict().items()}
    query = x @ weights["blocks.0.attn.query_linear.weight"].T
    key = x @ weights["blocks.0.attn.key_linear.weight"].T
    scores = np.where(np.tri(6, dtype=bool), query @ key.T / np.sqrt(32), -np.inf)
    expected = np.exp(scores - scores.max(axis=-1, keepdims=True))
    expected /= expected.sum(axis=-1, keepdims=True)
    assert np.allclose(attention_maps(model, tokens)[0, 0], expected, atol=1e-5)


@pytest.mark.parametrize("n_kv_head", [4, 2])
def test_looking_changes_no_bit(n_kv_head: int) -> None:
    model, tokens = trained_like(n_kv_head=n_kv_head), text(CONTEXT)[None].repeat(2, 1)
    plain = model(tokens)
    with looking(model) as looks:
        watched = model(tokens)
    assert torch.equal(plain, watched)
    assert [tuple(look.weights.shape) for look in looks] == [(2, HEADS, CONTEXT, CONTEXT)] * LAYERS
    assert all(torch.equal(look.weights @ look.value, look.heads) for look in looks)
    assert torch.equal(plain, model(tokens))
    assert hooks(model) == 0 and len(looks) == LAYERS, "nothing is left behind"


def test_passes_with_a_memory_are_passed_over() -> None:
    """The first, when it is empty, as well as the next; and a pass without one between them is looked at."""
    model, tokens = trained_like(), text(CONTEXT)[None]
    plain, memory = model(tokens), model.new_memory()
    with looking(model, change_heads=lambda _layer, heads: heads * 0) as looks, torch.no_grad():
        first = model(tokens[:, :5], memory)
        assert not looks
        changed = model(tokens)
        assert len(looks) == LAYERS and not torch.allclose(changed, plain)
        rest = model(tokens[:, 5:], memory)
    assert len(looks) == LAYERS
    torch.testing.assert_close(torch.cat([first, rest], dim=1), plain)


def test_hooks_are_gone_after_an_error() -> None:
    model = trained_like().train()
    with pytest.raises(ValueError, match="13 tokens exceed"):
        attention_maps(model, text(CONTEXT + 1))
    assert hooks(model) == 0
    assert model.training, "in the mode it was in"


def test_weights_that_do_not_give_the_output_are_refused() -> None:
    """The check that makes the maps the model's own: attention that does something else is noticed."""
    model = trained_like()
    layer = model.blocks[1].attn
    assert isinstance(layer, CausalSelfAttention)
    combine = layer.combine
    layer.combine = lambda heads: combine(heads * 1.01)  # type: ignore[method-assign]
    with pytest.raises(CheckFailed, match="layer 1: the attention weights give its output only to 0"):
        attention_maps(model, text(5))


@pytest.mark.parametrize(
    ("name", "told"),
    [("blocks.0.attn.value_linear", "the attention of layer 0"), ("blocks.0.mlp.down_linear", "what layer 1 reads")],
)
def test_finite_weights_whose_numbers_overflow_are_told(name: str, told: str) -> None:
    model = trained_like()
    with torch.no_grad():
        model.get_parameter(f"{name}.weight").mul_(1e38)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    with pytest.raises(UserError, match=f"^{told} overflows: training diverged; take an earlier step$"):
        attention_maps(model, text(5))


def test_changed_weights_change_what_follows_and_nothing_before() -> None:
    """Head 2 of layer 1 forced to its own position: its result is its value, layer 0 is as it was, the end is not."""
    model, tokens = trained_like(), text(CONTEXT)[None]
    with looking(model) as plain:
        before = model(tokens)

    def to_itself(layer: int, weights: Tensor) -> Tensor:
        if layer != 1:
            return weights
        changed = weights.clone()
        changed[:, 2] = torch.eye(CONTEXT)
        return changed

    with looking(model, change_weights=to_itself) as forced:
        after = model(tokens)
    assert torch.equal(forced[1].heads[:, 2], forced[1].value[:, 2])
    assert torch.equal(forced[1].heads[:, 3], plain[1].heads[:, 3])
    assert all(torch.equal(one, other) for one, other in zip(forced[0], plain[0], strict=True))
    assert not torch.allclose(forced[2].weights, plain[2].weights)
    assert not torch.allclose(after, before)
    assert torch.equal(model(tokens), before) and hooks(model) == 0


def test_changed_heads_are_what_the_layer_gives() -> None:
    """All heads of the last layer set to zero: only the output bias, here none, is added to the stream."""
    model, tokens = trained_like(), text(CONTEXT)[None]
    with looking(model, change_heads=lambda layer, heads: heads * 0 if layer == LAYERS - 1 else heads) as looks:
        after = model(tokens)
    assert (looks[-1].heads == 0).all()
    layer = model.blocks[LAYERS - 1].attn
    assert isinstance(layer, CausalSelfAttention)
    with torch.no_grad():
        layer.output_linear.weight.zero_()
    torch.testing.assert_close(model(tokens), after)


def test_looking_needs_evaluation_mode() -> None:
    with pytest.raises(ValueError, match="evaluation mode"), looking(trained_like().train()):
        pass


def test_names_of_heads() -> None:
    assert parse_head("L1H2", LAYERS, HEADS) == Head(1, 2) and str(Head(1, 2)) == "L1H2"
    for name in ("L3H0", "L0H4", "H1", "L1H2x", ""):
        with pytest.raises(UserError, match="L0H0 to L2H3"):
            parse_head(name, LAYERS, HEADS)


def test_dropout_is_off_while_looking() -> None:
    model = trained_like(dropout=0.5).train()
    assert np.array_equal(attention_maps(model, text(5)), attention_maps(model, text(5)))
    assert model.training


@pytest.mark.parametrize(("n_token", "cell"), [(1, 96), (10, 100), (96, 96), (256, 256)], ids=["1", "10", "96", "256"])
def test_the_picture_has_a_square_a_head_in_whole_pixels(n_token: int, cell: int) -> None:
    maps = np.tile(np.tri(n_token, dtype=np.float32) / np.arange(1, n_token + 1)[:, None], (2, 3, 1, 1))
    picture = attention_grid(maps.astype(np.float32))
    assert picture.dtype == np.uint8
    assert picture.shape == (2 * (cell + 18), 3 * (cell + 4) + 4, 3)
    pixels = cell // n_token
    for layer in range(2):
        for head in range(3):
            top, left = 14 + layer * (cell + 18), 4 + head * (cell + 4)
            square = picture[top : top + cell, left : left + cell]
            assert (square[:pixels, :pixels] == [8, 48, 107]).all(), "weight 1: dark"
            if n_token > 1:
                assert (square[:pixels, -pixels:] == [247, 251, 255]).all(), "weight 0: light"
                first, last = square[-1, 0], square[-1, -1]
                assert (first == last).all() and (square[:pixels, :pixels] < first).any(), "a row of equal weights"
    gaps = picture[:, :4]
    assert (gaps == 255).all(), "white between the squares"


def test_more_weight_is_never_lighter() -> None:
    weights = np.linspace(0, 1, 11, dtype=np.float32)
    row = attention_grid(np.tile(weights, (1, 1, 11, 1)), least=11)[14 + 5, 4 : 4 + 11].astype(int)
    assert (np.diff(row, axis=0) <= 0).all() and (np.diff(row.sum(axis=-1)) < 0).all()
