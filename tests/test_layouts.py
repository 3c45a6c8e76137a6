"""The maps that are shown are the plain decoder's, whatever the layout of the network."""

from typing import Any

import numpy as np
import pytest
import torch
from hand_set import SIZE, fresh_config, repeated_text

from minigpt import plain
from minigpt.attention import CausalSelfAttention
from minigpt.inspection.capture import attention_maps, looking
from minigpt.model import GPT
from minigpt.normal_form import Array, NormalForm, from_tensors
from minigpt.sampling import window_start

LAYOUTS = {
    "plain": {"position": "none", "qk_norm": False, "embedding_norm": False},
    "rotary": {"qk_norm": False},
    "rotary and QK-norm": {},
    "grouped heads": {"n_kv_head": 2},
    "one key head": {"n_kv_head": 1, "position": "sinusoidal", "embedding_scale": True},
    "gpt2-like": {"position": "learned", "norm": "layernorm", "norm_weight": True, "bias": "all", "mlp": "gelu"},
}


def shaken(**changes: Any) -> GPT:
    """A network whose weights are all away from their start."""
    torch.manual_seed(3)
    model = GPT(fresh_config(0, **changes).model, SIZE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def plain_maps(form: NormalForm, tokens: Array) -> Array:
    """(layers, H, T, T) by the float64 decoder, written out."""
    norm, length = plain.layer_norm if form.centred else plain.rms_norm, len(tokens)
    x = form.token_table[tokens] + form.position_table[:length]
    if form.embedding_norm:
        x = norm(x) * form.embedding_gain + form.embedding_shift
    maps = []
    for layer in form.per_layer():
        normed = norm(x) * layer.attn_gain + layer.attn_shift
        heads = plain.split_heads(normed @ layer.qkv_weight.T + layer.qkv_bias, form.head_dim)
        query, key, _ = np.split(heads, [form.n_head, form.n_head + form.n_kv_head])
        if form.qk_norm:
            query, key = plain.rms_norm(query), plain.rms_norm(key)
        query, key = (plain.rotate(part, form.cos[:length], form.sin[:length]) for part in (query, key))
        maps.append(plain.attention_weights(query, key[form.key_head], plain.causal_mask(length)))
        x = plain.block(x, layer, form)
    return np.stack(maps)


@pytest.mark.parametrize("changes", LAYOUTS.values(), ids=LAYOUTS)
def test_maps_are_those_of_the_plain_decoder(changes: dict[str, Any]) -> None:
    """In a window that was cropped, too: it is filled anew from position 0."""
    model = shaken(**changes)
    form = from_tensors({name: tensor.numpy() for name, tensor in model.state_dict().items()}, model.config)
    tokens = np.random.default_rng(1).integers(0, SIZE, SIZE + 5)
    start = window_start(len(tokens), SIZE)
    assert start > 0
    for text in (tokens[:SIZE], tokens[start:]):
        assert np.allclose(attention_maps(model, torch.as_tensor(text)), plain_maps(form, text), atol=2e-5)


@pytest.mark.parametrize("changes", [LAYOUTS["rotary and QK-norm"], LAYOUTS["grouped heads"]], ids=["plain", "grouped"])
def test_a_cache_holds_the_keys_that_are_shown(changes: dict[str, Any]) -> None:
    """Fed in pieces with a memory, each layer keeps the keys and values which the map of the whole text comes from."""
    model, tokens = shaken(**changes), torch.as_tensor(repeated_text(12))[None]
    with looking(model) as looks, torch.no_grad():
        model(tokens)
    memory = model.new_memory()
    with torch.no_grad():
        for piece in tokens.split([5, 1, 6], dim=1):
            model(piece, memory)
    layers = [module for module in model.modules() if isinstance(module, CausalSelfAttention)]
    for look, layer, cache in zip(looks, layers, memory.caches, strict=True):
        for shown, kept in ((look.key, cache.keys), (look.value, cache.values)):
            torch.testing.assert_close(layer.share_heads(kept[:, :, :12]), shown, rtol=1e-4, atol=1e-5)
