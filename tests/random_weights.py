"""Checkpoints of untrained networks whose weights are all away from their start, for tests of other formats."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minigpt.checkpoint import Checkpoint, read_checkpoint, save_checkpoint
from minigpt.config import Config, validate
from minigpt.model import GPT
from minigpt.tokenizer import train_tokenizer


def saved(path: Path, config: Config, text: str) -> Checkpoint:
    """A network of a configuration with a tokenizer for the text."""
    tokenizer = train_tokenizer(config.data.tokenizer, [text], 300 if config.data.tokenizer == "bpe" else 0)
    torch.manual_seed(4)
    model = GPT(config.model, tokenizer.vocab_size)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(0.06 * torch.randn_like(parameter) + (parameter.ndim == 1 and name.endswith("weight")))
    arrays = {f"model.{name}": tensor.numpy() for name, tensor in model.state_dict().items()}
    save_checkpoint(path, arrays, {"config": config.model_dump(), "tokenizer": tokenizer.to_dict(), "step": 5})
    return read_checkpoint(path)


def of_model(tokenizer: str, **model: Any) -> Config:
    """A small network of some layout."""
    small = {"n_layer": 2, "n_head": 4, "d_model": 32, "context_length": 16}
    return validate({"data": {"tokenizer": tokenizer}, "model": {**model, **small}})


def assert_close(got: Tensor, expected: Tensor) -> None:
    """Logits, but for rounding."""
    assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()


def same_bits(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two sets of arrays are one."""
    return one.keys() == other.keys() and all(one[name].tobytes() == other[name].tobytes() for name in one)
