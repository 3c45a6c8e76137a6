"""Recurrent networks: the same interface as the Transformer's, and the formulas written out."""

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Tables
from running import EVALUATE, GENERATE, ROOT, Script
from tiny_runs import after, begun, told

from minigpt.checkpoint import find_checkpoint
from minigpt.config import ModelConfig, merge, validate
from minigpt.launch import resume
from minigpt.network import TorchEngine, new_network
from minigpt.recurrent import CELLS, RecurrentLM
from minigpt.sampling import SamplingOptions, generate

COMPARE = ROOT / "scripts" / "compare_attention.py"
ADAMW = {"name": "adamw", "lr": 0.003}


def network(kind: str, **keys: object) -> RecurrentLM:
    torch.manual_seed(1)
    values = {"kind": kind, "n_layer": 2, "d_model": 12, "tie_embeddings": False, **keys}
    found = new_network(ModelConfig.model_validate(values), 11)
    assert isinstance(found, RecurrentLM)
    with torch.no_grad():
        for parameter in found.parameters():
            if parameter.abs().max() == 0:
                parameter.normal_(std=0.3)
    return found.eval()


@pytest.mark.parametrize("kind", CELLS)
def test_a_memory_gives_what_the_whole_text_gives(kind: str) -> None:
    model, tokens_BT = network(kind), torch.randint(0, 11, (2, 9), generator=torch.Generator().manual_seed(3))
    memory = model.new_memory(2)
    size = memory.nbytes
    parts = [model(tokens_BT[:, a:b], memory) for a, b in ((0, 1), (1, 5), (5, 9))]
    torch.testing.assert_close(torch.cat(parts, dim=1), model(tokens_BT), atol=1e-6, rtol=1e-5)
    assert memory.length == 9 and memory.nbytes == size, "however many tokens it has seen"
    with pytest.raises(ValueError, match="recurrent state of 9 tokens"):
        memory.crop(4)
    memory.crop(0)
    assert memory.length == 0
    torch.testing.assert_close(model(tokens_BT, memory), model(tokens_BT), atol=1e-6, rtol=1e-5)


def test_a_text_goes_on_past_the_context() -> None:
    model = network("gru", context_length=4)
    engine, options = TorchEngine(model), SamplingOptions(temperature=0)
    ids = list(generate(engine, [3], max_new_tokens=12, options=options, end=None))
    whole = [3]
    for _ in range(12):
        whole.append(int(model(torch.tensor([whole]))[0, -1].argmax()))
    assert ids == whole[1:], "no window is cut: the state holds what was"


def test_only_the_past_is_seen() -> None:
    model, tokens = network("lstm"), torch.randint(0, 11, (1, 8), generator=torch.Generator().manual_seed(4))
    other = tokens.clone()
    other[0, 5] = (other[0, 5] + 1) % 11
    difference = (model(tokens) - model(other)).abs().amax(-1)[0]
    assert (difference[:5] == 0).all() and (difference[5:] > 0).all()


@pytest.mark.parametrize("kind", CELLS)
def test_it_trains_and_is_resumed_bit_for_bit(tiny: Tables, kind: str) -> None:
    changes = merge(tiny, {"model": {"kind": kind, "n_layer": 2, "dropout": 0.1}, "optim": ADAMW})
    whole = begun(changes)
    losses = [find_checkpoint(whole.path, str(step)).val_loss for step in (10, 20)]
    assert losses[1] < losses[0]
    half = begun(changes, after(10), run={"name": "half"})
    resume(half.path, {})
    assert find_checkpoint(half.path, "last").step == 20
    for kind_of in ("model", "optimizer"):
        one, other = (find_checkpoint(run.path, "last").tensors(kind_of) for run in (whole, half))
        assert all(one[name].tobytes() == other[name].tobytes() for name in one | other)


def test_the_scripts_take_it(tiny: Tables, script: Script) -> None:
    run = begun(tiny, model={"kind": "lstm"}, optim=ADAMW).path
    assert not (run / "attention").exists()
    text = script(GENERATE, run, "--prompt", "the ", "--max-new-tokens", "40", "--seed", "3")
    assert text.code == 0 and len(text.out) > 20
    for engine in ("numpy", "numba"):
        refused = script(GENERATE, run, "--engine", engine)
        assert refused.code == 2 and refused.err == (
            f"error: --engine {engine} runs Transformers alone; lstm takes --engine torch, or none\n"
        )
    scored = script(EVALUATE, run, "--json").json
    logged = find_checkpoint(run, "best").val_loss
    assert scored["loss"] == pytest.approx(logged, rel=1e-5), "the same windows as in training"
    looked = script(COMPARE, "heads", run)
    assert looked.code == 2 and looked.err.endswith(
        "a recurrent network (model.kind = lstm) has no attention to look at\n"
    )
    assert len(looked.err.splitlines()) == 1


def test_a_damaged_one_is_told(tiny: Tables) -> None:
    run = begun(tiny, model={"kind": "gru"}, optim=ADAMW, train={"max_steps": 2}).path
    from minigpt.assembly import load_model
    from minigpt.checkpoint import save_checkpoint

    saved = find_checkpoint(run, "last")
    tensors = {f"model.{name}": np.array(t) for name, t in saved.tensors("model").items()}
    lost = tensors.pop("model.recurrent.bias_hh_l0")
    path = Path(run) / "checkpoints" / "step-00000003.safetensors"
    save_checkpoint(path, tensors, {**saved.metadata, "step": 3})
    sentence = told(load_model, find_checkpoint(path), "cpu")
    assert (
        sentence
        == f"{path}: damaged: its tensor recurrent.bias_hh_l0 does not fit its configuration; use another checkpoint"
    )
    save_checkpoint(path, {**tensors, "model.recurrent.bias_hh_l0": lost[1:]}, {**saved.metadata, "step": 3})
    assert "its tensor recurrent.bias_hh_l0 does not fit" in told(load_model, find_checkpoint(path), "cpu")


def test_muon_is_for_blocks() -> None:
    sentence = told(validate, {"model": {"kind": "rnn"}})
    assert sentence.startswith("optim.name = muon: ") and "--optim.name adamw --optim.lr 0.003" in sentence


def test_first_weights() -> None:
    torch.manual_seed(1)
    model = new_network(ModelConfig(kind="lstm", n_layer=1, d_model=16, tie_embeddings=False), 7)
    weights = dict(model.named_parameters())
    for gate in weights["recurrent.weight_hh_l0"].split(16):
        torch.testing.assert_close(gate @ gate.T, torch.eye(16), atol=1e-5, rtol=0)
    bias = weights["recurrent.bias_ih_l0"]
    assert (bias[16:32] == 1).all() and bias.sum() == 16 and (weights["recurrent.bias_hh_l0"] == 0).all()
    assert (model(torch.tensor([[1, 2, 3]])) == 0).all(), "the head starts at zero"
