"""Recurrent language models to hold beside the Transformer. Axis letters: see ``attention.py``; L layers.

torch's own modules do the work: ``rnn``, Elman 1990; ``lstm``, Hochreiter & Schmidhuber 1997; ``gru``, Cho et al. 2014.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minigpt.config import ModelConfig

CELLS = {"rnn": nn.RNN, "lstm": nn.LSTM, "gru": nn.GRU}
State = tuple[Tensor, ...]  # h, and c of an LSTM, (L, B, D) each


class RecurrentState:
    """What a recurrent network keeps of the tokens it has seen: the same few numbers, however many they were."""

    def __init__(self, state: State) -> None:
        self.state, self.length = state, 0

    @property
    def nbytes(self) -> int:
        """Bytes of the state."""
        return sum(part.nbytes for part in self.state)

    def crop(self, length: int) -> None:
        """Forget all, or nothing: a state is of all its tokens and can't be taken apart.

        Raises:
            ValueError: for any other length.
        """
        if length == 0:
            self.state = tuple(torch.zeros_like(part) for part in self.state)
        elif length < self.length:
            raise ValueError(f"a recurrent state of {self.length} tokens can't become one of the first {length}")
        self.length = min(self.length, length)


class RecurrentLM(nn.Module):
    """Recurrent language model: tokens (B, T) → logits (B, T, V); of the configuration it has width, layers, dropout,
    and ``tie_embeddings``."""

    longest = 2**62  # tokens a memory takes: as many as there are

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.config, self.vocab_size, width = config, vocab_size, config.d_model
        self.token_embedding = nn.Embedding(vocab_size, width)
        self.dropout = nn.Dropout(config.dropout)
        between = config.dropout if config.n_layer > 1 else 0.0
        self.recurrent = CELLS[config.kind](width, width, config.n_layer, batch_first=True, dropout=between)
        if not config.tie_embeddings:
            self.lm_head = nn.Linear(width, vocab_size, bias=False)
        self._initialise()

    def forward(self, tokens: Tensor, memory: RecurrentState | None = None) -> Tensor:
        """(B, T) → (B, T, V). With a memory, the tokens follow those it has seen, and it then has seen them too."""
        x_BTD = self.dropout(self.token_embedding(tokens))
        if memory is None:
            x_BTD, _ = self.recurrent(x_BTD)
        else:
            lstm = isinstance(self.recurrent, nn.LSTM)
            x_BTD, state = self.recurrent(x_BTD, memory.state if lstm else memory.state[0])
            memory.state = state if lstm else (state,)
            memory.length += tokens.shape[-1]
        head = self.token_embedding if self.config.tie_embeddings else self.lm_head
        return F.linear(self.dropout(x_BTD), head.weight)

    def new_memory(self, batch_size: int = 1) -> RecurrentState:
        """The state before any token: zeros."""
        shape = (self.config.n_layer, batch_size, self.config.d_model)
        parts = 2 if isinstance(self.recurrent, nn.LSTM) else 1
        return RecurrentState(tuple(self.token_embedding.weight.new_zeros(shape) for _ in range(parts)))

    @property
    def n_parameter(self) -> int:
        """Number of learned numbers."""
        return sum(parameter.numel() for parameter in self.parameters())

    @torch.no_grad()
    def _initialise(self) -> None:
        """Inputs to a layer are about as large as its outputs; recurrent matrices are orthogonal (Saxe et al. 2014).

        Each gate's for itself; an LSTM begins by remembering, its forget gates open (Jozefowicz et al. 2015).
        """
        width = self.config.d_model
        # As the head too, larger ones would make the first logits large.
        nn.init.normal_(self.token_embedding.weight, std=width**-0.5 if self.config.tie_embeddings else 1.0)
        if not self.config.tie_embeddings:
            nn.init.zeros_(self.lm_head.weight)
        for name, parameter in self.recurrent.named_parameters():
            if name.startswith("weight_hh"):
                for gate in parameter.split(width):
                    nn.init.orthogonal_(gate)
            elif name.startswith("weight_ih"):
                nn.init.normal_(parameter, std=width**-0.5)
            else:
                nn.init.zeros_(parameter)
                if self.config.kind == "lstm" and name.startswith("bias_ih"):
                    parameter[width : 2 * width] = 1.0  # gates stand in the order: in, forget, cell, out
