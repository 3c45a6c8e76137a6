"""The networks there are, as everything else takes them: one type, and one engine for the sampler."""

from typing import Any

import numpy as np
import torch

from minigpt.config import ModelConfig
from minigpt.model import GPT
from minigpt.recurrent import RecurrentLM

Network = GPT | RecurrentLM


def new_network(config: ModelConfig, vocab_size: int) -> Network:
    """A network of ``config.kind`` with the first weights that torch's seed gives."""
    return GPT(config, vocab_size) if config.kind == "gpt" else RecurrentLM(config, vocab_size)


class TorchEngine:
    """A network as the sampler sees it (``sampling.Engine``), and a reader of windows (``scoring.Reader``)."""

    def __init__(self, network: Network, context_length: int = 0) -> None:
        """``context_length``: after so many tokens an empty memory begins anew; 0: when the memory is full."""
        self.network, self.vocab_size = network, network.vocab_size
        self.context_length = context_length or network.longest

    def new_memory(self) -> Any:
        """An empty memory."""
        return self.network.new_memory()

    def logits(self, tokens: np.ndarray, memory: Any) -> np.ndarray:
        """Feed (T,) tokens; logits (V,) of the token to come."""
        return self.all_logits(tokens, memory)[-1]

    @torch.inference_mode()
    def all_logits(self, tokens: np.ndarray, memory: Any) -> np.ndarray:
        """Feed (T,) tokens; logits (T, V) of what follows each."""
        device = self.network.token_embedding.weight.device
        tokens_BT = torch.as_tensor(np.asarray(tokens, dtype=np.int64), device=device)[None]
        return self.network(tokens_BT, memory)[0].float().cpu().numpy()
