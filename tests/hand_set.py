"""Networks whose weights are set by hand, so that each head *is* a known pattern, and the loss depends on one.

The stream has four parts of K numbers, one-hot each: the token, its place, the token before it (written by layer 0),
and the token the network expects next (written by layer 1). Every row has the same length, so that the norm before a
layer is one known factor. The feed-forward adds nothing.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minigpt.checkpoint import checkpoint_path, save_checkpoint
from minigpt.config import Config, validate
from minigpt.model import GPT, Block
from minigpt.tokenizer import CharTokenizer, Tokenizer

HEADS = (("previous", "first", "uniform", "self"), ("induction", "previous", "uniform", "first"))
"""What each head is, layer by layer."""

SIZE = 16  # K: ids, places, and size of a head
SHARPNESS = 25.0  # by how much the score of the key that is meant exceeds the others: e^-25 of the weight strays
CONFIDENCE = 10.0  # logit of the expected token, when all weight is on it
TOKEN, PLACE, BEFORE, NEXT = (slice(part * SIZE, (part + 1) * SIZE) for part in range(4))


def hand_set_config() -> Config:
    """Two layers, four heads; learned places, no bias, no norm with weights."""
    return validate(
        {
            "run": {"name": "hand-set", "device": "cpu"},
            "data": {"source": "tales", "tokenizer": "char"},
            "model": {
                "n_layer": 2, "n_head": 4, "n_kv_head": 4, "d_model": 4 * SIZE, "d_ff": 4, "context_length": SIZE,
                "position": "learned", "norm": "rmsnorm", "embedding_norm": False, "qk_norm": False, "bias": "none",
                "tie_embeddings": False, "mlp": "relu2",
            },
        }
    )  # fmt: skip


@torch.no_grad()
def hand_set_model(heads: tuple[tuple[str, ...], ...] = HEADS) -> GPT:
    """The network in evaluation mode. It repeats: after a token seen before, it expects what followed then."""
    model = GPT(hand_set_config().model, SIZE)
    for parameter in model.parameters():
        parameter.zero_()
    one_hot = torch.eye(SIZE)
    model.token_embedding.weight[:, TOKEN] = one_hot
    model.position_embedding.weight[:, PLACE] = one_hot
    for number, names in enumerate(heads):
        block = model.blocks[number]
        assert isinstance(block, Block)
        # Layer 0 reads token and place, layer 1 also the token before: so many ones among D numbers.
        factor = (model.config.d_model / (2 + number)) ** 0.5
        for head, name in enumerate(names):
            rows = slice(head * SIZE, (head + 1) * SIZE)
            query, key = query_and_key(name)
            block.attn.query_linear.weight[rows] = query * (SHARPNESS * SIZE**0.5 / factor)
            block.attn.key_linear.weight[rows] = key / factor
            block.attn.value_linear.weight[rows, TOKEN] = one_hot / factor
            if name == ("previous", "induction")[number]:
                block.attn.output_linear.weight[(BEFORE, NEXT)[number], rows] = one_hot
    # The last norm sees one part more, the expected token.
    model.lm_head.weight[:, NEXT] = one_hot * (CONFIDENCE * (4 / model.config.d_model) ** 0.5)
    return model.eval()


def query_and_key(name: str) -> tuple[Tensor, Tensor]:
    """Matrices (K, D) from the stream to queries and keys whose product is 1 for the keys that are meant, else ≤ 0."""
    query, key, one_hot = torch.zeros(SIZE, 4 * SIZE), torch.zeros(SIZE, 4 * SIZE), torch.eye(SIZE)
    match name:
        case "previous":
            query[:, PLACE], key[:, PLACE] = one_hot.roll(-1, 0), one_hot
            query[-1] = 0  # place 0 has none before it
        case "first":
            query[0, PLACE], key[0, PLACE] = 1, one_hot[0]
        case "self":
            query[:, PLACE], key[:, PLACE] = one_hot, one_hot
        case "induction":
            query[:, TOKEN], key[:, BEFORE] = one_hot, one_hot
            key[:, PLACE] = -one_hot[0]  # place 0 has its own token in the part for the one before
        case _:
            assert name == "uniform", name
    return query, key


def repeated_text(length: int = SIZE, seed: int = 0) -> np.ndarray:
    """Tokens (T,): a row of different ones, in a seeded order, said twice."""
    half = 1 + np.random.default_rng(seed).permutation(SIZE - 1)[: -(-length // 2)]
    return np.concatenate([half, half])[:length]


def save_run(model: GPT, folder: Path, config: Config | None = None, tokenizer: Tokenizer | None = None) -> Path:
    """A run's folder with this model as its only checkpoint; its tokenizer knows the letters a to o as ids 1 to 15."""
    config = config or hand_set_config()
    assert config.model == model.config
    tensors = {f"model.{name}": tensor.numpy() for name, tensor in model.state_dict().items()}
    tokenizer = tokenizer or CharTokenizer("abcdefghijklmno", byte_fallback=False)
    metadata = {"step": 0, "config": config.model_dump(), "tokenizer": tokenizer.to_dict(), "val_loss": 1.0}
    save_checkpoint(checkpoint_path(folder / "checkpoints", 0), tensors, metadata)
    return folder


def fresh_config(seed: int, **changes: Any) -> Config:
    """A small network of another configuration, for the same tokens."""
    model = {"n_layer": 2, "n_head": 4, "d_model": 32, "context_length": SIZE, **changes}
    return validate({"run": {"name": "fresh", "seed": seed}, "model": model})
