"""The decoder: causality, cache, layouts, and a first step whose numbers are known."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from minigpt.attention import attention_weights, causal_mask
from minigpt.config import ModelConfig, validate
from minigpt.model import GPT, Block
from minigpt.network import TorchEngine
from minigpt.normal_form import from_tensors
from minigpt.plain import PlainEngine, forward
from minigpt.sampling import SamplingOptions, generate

LAYOUTS: dict[str, dict[str, Any]] = {
    "default": {},
    "modern": {"attention_init": "zero", "tie_embeddings": False, "logit_softcap": 15},
    "tutorial": {
        "position": "sinusoidal", "norm": "layernorm", "norm_weight": True, "embedding_norm": False, "mlp": "relu",
        "embedding_scale": True, "qk_norm": False, "bias": "no_qkv", "attention_init": "zero", "tie_embeddings": False,
        "logit_softcap": 0,
    },
    "gpt2": {
        "position": "learned", "norm": "layernorm", "norm_weight": True, "embedding_norm": False, "mlp": "gelu",
        "qk_norm": False, "bias": "all", "attention_init": "zero", "tie_embeddings": True, "logit_softcap": 0,
    },
    "llama": {
        "norm_weight": True, "embedding_norm": False, "mlp": "swiglu", "n_kv_head": 2, "qk_norm": False,
        "attention_init": "zero", "tie_embeddings": False, "logit_softcap": 0,
    },
    "no positions": {"position": "none", "tie_embeddings": False, "logit_softcap": 15},
}  # fmt: skip
VOCAB = 20


def small_config(layout: str = "default", **changes: Any) -> ModelConfig:
    return validate({"model": {"d_model": 32, "n_layer": 2, "context_length": 8, **LAYOUTS[layout], **changes}}).model


def small_model(layout: str = "default", **changes: Any) -> GPT:
    """A float64 model in evaluation mode whose weights are all away from zero."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)  # tables of positions too are made in it
    model = GPT(small_config(layout, **changes), VOCAB).eval()
    torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def tokens(*shape: int) -> Tensor:
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_causal_by_gradient(layout: str) -> None:
    """The logits at place t move with the embeddings up to t, and with none after it."""
    model, places, here = small_model(layout), 8, 4
    embedded: list[Tensor] = []

    def keep(_module: Any, _inputs: Any, output: Tensor) -> None:
        output.retain_grad()
        embedded.append(output)

    model.token_embedding.register_forward_hook(keep)
    model(tokens(1, places))[0, here].square().sum().backward()
    assert embedded[0].grad is not None
    reach = embedded[0].grad[0].abs().amax(-1)
    assert (reach[here + 1 :] == 0).all()
    assert (reach[: here + 1] > 0).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pieces", [[8], [1] * 8, [5, 1, 1, 1], [3, 4], [2, 5, 1]])
def test_cached_equals_full(layout: str, pieces: list[int]) -> None:
    model, sequence = small_model(layout), tokens(2, sum(pieces))
    memory = model.new_memory(batch_size=2)
    got = torch.cat([model(piece, memory) for piece in sequence.split(pieces, dim=1)], dim=1)
    torch.testing.assert_close(got, model(sequence))
    assert memory.length == sum(pieces)


def test_cropped_memory_goes_on_as_if_the_rest_had_never_been() -> None:
    model, sequence = small_model(), tokens(1, 8)
    memory = model.new_memory()
    model(sequence[:, :6], memory)
    memory.crop(3)
    torch.testing.assert_close(model(sequence[:, 3:5], memory), model(sequence[:, :5])[:, 3:])
    assert memory.nbytes == 2 * 2 * 4 * 8 * 8 * 8  # keys and values, layers, heads, places, head size, float64


def test_more_than_the_context_is_refused() -> None:
    model = small_model()
    with pytest.raises(ValueError, match="9 tokens exceed the context of 8"):
        model(tokens(1, 9))
    memory = model.new_memory()
    model(tokens(1, 8), memory)
    with pytest.raises(ValueError, match="9 tokens exceed"):
        model(tokens(1, 1), memory)


def test_engine_gives_the_last_tokens_logits() -> None:
    model, sequence = small_model(), tokens(1, 5)
    engine = TorchEngine(model)
    memory = engine.new_memory()
    engine.logits(sequence[0, :3].numpy(), memory)
    got = engine.logits(sequence[0, 3:].numpy(), memory)
    torch.testing.assert_close(torch.from_numpy(got).double(), model(sequence)[0, -1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", ["modern", "tutorial", "llama", "no positions"])
def test_untrained_model_predicts_evenly(layout: str) -> None:
    """The head starts at zero: every token is as likely as any other."""
    logits = GPT(small_config(layout), VOCAB)(tokens(2, 8))
    assert (logits == 0).all()


def test_untrained_tied_model_predicts_almost_evenly() -> None:
    """The head can't start at zero: it is the embedding. It starts small."""
    torch.manual_seed(0)
    sequence, vocab_size = torch.randint(2000, (4, 129)), 2000
    logits = GPT(ModelConfig(), vocab_size)(sequence[:, :-1])
    assert logits.std().item() == pytest.approx(0.5, abs=0.05)
    loss = F.cross_entropy(logits.flatten(0, 1), sequence[:, 1:].flatten()).item()
    assert math.log(vocab_size) < loss < math.log(vocab_size) + 0.3


@pytest.mark.parametrize("n_kv_head", [4, 2, 1])
def test_heads_start_by_copying(n_kv_head: int) -> None:
    """W_O = W_Vᵀ, head by head: what is attended to comes back as it was, as far as the head can hold it."""
    torch.manual_seed(0)
    config = small_config(n_kv_head=n_kv_head)
    x_BTD, head_dim, group = torch.randn(2, 8, 32), 8, 4 // n_kv_head
    for block in GPT(config, VOCAB).blocks:
        assert isinstance(block, Block)
        attn, expected_BTD = block.attn, torch.zeros(2, 8, 32)
        query, key, _ = attn.project(x_BTD)
        for head in range(4):
            shared = head // group
            value_KD = attn.value_linear.weight[shared * head_dim : (shared + 1) * head_dim]
            output_DK = attn.output_linear.weight[:, head * head_dim : (head + 1) * head_dim]
            assert torch.equal(output_DK, value_KD.T) and value_KD.std() > 0
            weights_BTS = attention_weights(query[:, head], key[:, shared], causal_mask(8, 8))
            expected_BTD += weights_BTS @ x_BTD @ value_KD.T @ value_KD
        torch.testing.assert_close(attn(x_BTD), expected_BTD, rtol=1e-4, atol=1e-5)


def test_heads_may_start_by_adding_nothing() -> None:
    for block in GPT(small_config(attention_init="zero"), VOCAB).blocks:
        assert isinstance(block, Block)
        assert (block.attn(torch.randn(2, 8, 32)) == 0).all()
        assert block.attn.value_linear.weight.std() > 0


def test_dropout_is_off_when_evaluating() -> None:
    model = small_model(dropout=0.5)
    assert torch.equal(model(tokens(1, 8)), model(tokens(1, 8)))
    model.train()
    assert not torch.equal(model(tokens(1, 8)), model(tokens(1, 8)))


@pytest.mark.parametrize(("tied", "tables"), [(False, {"token_embedding", "lm_head"}), (True, {"token_embedding"})])
def test_parameter_count(tied: bool, tables: set[str]) -> None:
    model = GPT(validate({"model": {"n_layer": 4, "context_length": 64, "tie_embeddings": tied}}).model, 66)
    assert model.n_parameter == 4 * 12 * 128**2 + len(tables) * 66 * 128
    assert {name.split(".")[0] for name, _ in model.named_parameters()} == {"blocks", *tables}


def test_logits_stay_inside_the_cap() -> None:
    model = small_model("modern", logit_softcap=3.0)
    with torch.no_grad():
        model.lm_head.weight.mul_(100)
    largest = model(tokens(1, 8)).abs().max().item()
    assert math.isclose(largest, 3.0, rel_tol=1e-3)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_the_numpy_decoder(layout: str) -> None:
    """Two implementations that share no code agree to 1e-10 in float64."""
    model, sequence = small_model(layout), tokens(1, 8)
    weights = {name: value.numpy() for name, value in model.state_dict().items()}
    written_out = forward(from_tensors(weights, model.config), sequence[0].numpy())
    torch.testing.assert_close(model(sequence)[0].detach(), torch.from_numpy(written_out), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_engines_write_the_same(layout: str) -> None:
    model = small_model(layout).float()
    weights = {name: value.numpy() for name, value in model.state_dict().items()}
    engines = [TorchEngine(model), PlainEngine(from_tensors(weights, model.config, np.float32))]
    for temperature in (0.0, 1.0):
        options = SamplingOptions(temperature=temperature)
        texts = [list(generate(engine, [1, 2], max_new_tokens=30, options=options, seed=5)) for engine in engines]
        assert texts[0] == texts[1]
