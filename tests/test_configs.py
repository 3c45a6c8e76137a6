"""The shipped configurations: each loads, builds its model and takes a step."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Tables
from tiny_runs import new_run

from minigpt.config import DEFAULT_CONFIG, Config, ModelConfig, differences, merge, read_toml, validate
from minigpt.corpus import open_corpus
from minigpt.model import GPT
from minigpt.sources import known_sources
from minigpt.training import train_step

FOLDER = DEFAULT_CONFIG.parent
SHIPPED = sorted(path.stem for path in FOLDER.glob("*.toml"))

LAYOUTS: dict[str, dict[str, Any]] = {
    "tutorial": {
        "position": "sinusoidal", "norm": "layernorm", "norm_weight": True, "embedding_norm": False, "mlp": "relu",
        "embedding_scale": True, "qk_norm": False, "bias": "no_qkv", "tie_embeddings": False, "logit_softcap": 0.0,
    },
    "gpt2": {
        "position": "learned", "norm": "layernorm", "norm_weight": True, "embedding_norm": False, "mlp": "gelu",
        "embedding_scale": False, "qk_norm": False, "bias": "all", "tie_embeddings": True, "logit_softcap": 0.0,
    },
    "llama": {
        "position": "rotary", "norm": "rmsnorm", "norm_weight": True, "embedding_norm": False, "mlp": "swiglu",
        "embedding_scale": False, "qk_norm": False, "bias": "none", "tie_embeddings": False, "logit_softcap": 0.0,
    },
    "modern": {
        "position": "rotary", "norm": "rmsnorm", "norm_weight": False, "embedding_norm": True, "mlp": "relu2",
        "embedding_scale": False, "qk_norm": True, "bias": "none", "tie_embeddings": False, "logit_softcap": 15.0,
    },
}  # fmt: skip
for _layout in LAYOUTS.values():
    _layout["attention_init"] = "zero"
LAYOUTS["default"] = LAYOUTS["modern"] | {"tie_embeddings": True, "logit_softcap": 0.0, "attention_init": "copy"}


def shipped(name: str) -> Config:
    return validate(read_toml(FOLDER / f"{name}.toml"))


def test_what_is_shipped() -> None:
    assert set(SHIPPED) == {
        "tales", "task", "tiny", "speedrun_cpu", "shakespeare_char", "shakespeare_bpe", "tutorial", "gpt2", "llama",
        "gpu_10m",
    }  # fmt: skip


@pytest.mark.parametrize("name", SHIPPED)
def test_one_step_at_batch_one(tiny: Tables, name: str) -> None:
    """On a small text of our own, with a small vocabulary; all else is the file's."""
    data = tiny["data"] | {"tokenizer": shipped(name).data.tokenizer, "vocab_size": 0}
    tables = merge(read_toml(FOLDER / f"{name}.toml"), {"run": tiny["run"], "data": data, "train": {"batch_size": 1}})
    run = new_run(tables)
    assert run.config.model.n_layer == shipped(name).model.n_layer
    before = {key: value.clone() for key, value in run.model.state_dict().items()}
    gradient_norm = train_step(run)
    even = math.log(run.corpus.tokenizer.vocab_size)
    assert run.progress.train_loss == pytest.approx(even, rel=0.1), "an untrained model predicts about evenly"
    assert 0 < gradient_norm < math.inf
    after = run.model.state_dict()
    assert any(not torch.equal(before[key], after[key]) for key in before)
    assert all(value.isfinite().all() for value in after.values())


@pytest.mark.parametrize("name", SHIPPED)
def test_each_has_a_known_text_and_prompts_it_can_encode(name: str, tmp_path: Path) -> None:
    config = shipped(name)
    assert config.data.source in {"tales", "task:induction", *known_sources()}
    text = "ROMEO:\nO, she doth teach the torches to burn bright!\n" * 9
    (tmp_path / "story.txt").write_text(text, encoding="utf-8")
    values = {"source": str(tmp_path / "story.txt"), "vocab_size": 0, "cache_dir": str(tmp_path / "cache")}
    own = config.with_values(data=values).data
    tokenizer = open_corpus(own, context_length=8, seed=1).tokenizer
    assert tokenizer.decode(tokenizer.encode(config.train.sample_prompt).tolist()) == config.train.sample_prompt


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("tutorial", "tutorial"), ("gpt2", "gpt2"), ("llama", "llama"), ("tales", "default"), ("tiny", "default"),
        ("shakespeare_char", "modern"), ("shakespeare_bpe", "modern"), ("gpu_10m", "modern"),
    ],
)  # fmt: skip
def test_layouts(name: str, layout: str) -> None:
    model = shipped(name).model
    assert {key: getattr(model, key) for key in LAYOUTS[layout]} == LAYOUTS[layout]
    assert model.key_value_heads == (2 if name == "llama" else model.n_head)


@pytest.mark.parametrize(
    ("name", "vocab_size", "shape", "parameters"),
    [
        ("shakespeare_char", 66, (4, 4, 128, 64), 803_328),
        ("gpu_10m", 66, (6, 6, 384, 256), 10_667_520),
    ],
)
def test_sizes(name: str, vocab_size: int, shape: tuple[int, int, int, int], parameters: int) -> None:
    model = shipped(name).model
    assert (model.n_layer, model.n_head, model.d_model, model.context_length) == shape
    with torch.device("meta"):
        assert GPT(model, vocab_size).n_parameter == parameters


def test_the_default_run_is_that_of_the_code() -> None:
    """``Config()`` and tales.toml differ at most in what belongs to that text alone."""
    assert set(differences(Config(), shipped("tales"))) == {"data.vocab_size"}
    assert shipped("tales").model == ModelConfig()
