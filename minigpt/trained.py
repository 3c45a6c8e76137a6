"""A trained model as Python users take it: ``minigpt.load("runs/bard")``, then text, log-probabilities, attention.

Numbers are those that the scripts tell: of ``generate.py``, of ``evaluate.py --text``, of the explorer's page. A
Transformer runs in NumPy, so that nothing here loads torch; a recurrent network runs in torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, get_args

import numpy as np

from minigpt.checkpoint import Checkpoint, find_checkpoint
from minigpt.console import counted, say
from minigpt.engines import reading_engine, worth_numba, writing_engine
from minigpt.errors import UserError
from minigpt.explorer.capture import capture
from minigpt.normal_form import NormalForm, from_checkpoint
from minigpt.reading import normalise_newlines
from minigpt.sampling import Engine, SamplingOptions, WritingEngine
from minigpt.scoring import TokenScore, score
from minigpt.tokenizer import Tokenizer, shown, tokenizer_from_dict
from minigpt.unseen import encoded
from minigpt.writing import Writer

if TYPE_CHECKING:
    from minigpt.network import TorchEngine
    from minigpt.plain import PlainEngine

Array = np.ndarray[Any, np.dtype[Any]]
Unseen = Literal["stop", "skip", "replace"]


class Sampling(TypedDict, total=False):
    """How a token is chosen; what is left out is as in ``sampling.SamplingOptions``."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float


@dataclass(frozen=True)
class Attention:
    """What every head gave to every token of a text. Axes: L layers, H heads, T tokens."""

    tokens: Sequence[str]  # (T,): the text of each
    ids: Array  # (T,)
    weights: Array  # (L, H, T, T): row t is what token t gave to those up to itself, and adds up to 1


class TrainedModel:
    """A checkpoint, with its tokenizer; weights are read when first needed."""

    def __init__(self, checkpoint: Checkpoint, tokenizer: Tokenizer) -> None:
        self.checkpoint, self.tokenizer = checkpoint, tokenizer
        self._engines: dict[bool, Engine | WritingEngine] = {}  # by whether it is one for long texts

    def __repr__(self) -> str:
        return f"minigpt.load({str(self.checkpoint.path)!r})"

    def generate(
        self,
        prompt: str = "",
        *,
        max_new_tokens: int = 200,
        seed: int = 0,
        stop: Sequence[str] = (),
        **sampling: Unpack[Sampling],
    ) -> str:
        """The text that goes on from the prompt, without it; as ``generate.py`` writes it with the same options.

        Args:
            prompt: any text; an empty one begins a document.
            max_new_tokens: how many at most; the end of a document ends the text sooner.
            seed: same seed, same text on the same engine; for several texts take seed, seed + 1, ...
            stop: strings before the first of which the text ends.
            sampling: temperature, top_k, top_p, min_p, repetition_penalty.

        Raises:
            UserError: for numbers out of range, and a prompt or a model that can't be used.
        """
        stops = [stop] if isinstance(stop, str) else list(stop)
        writer = Writer(
            self.tokenizer, SamplingOptions(**sampling), max_new_tokens, list(map(normalise_newlines, stops)), seed
        )
        writer.engine = self._writing_engine(max_new_tokens)
        return "".join(writer.write(normalise_newlines(prompt)).pieces)

    def logprobs(self, text: str) -> list[TokenScore]:
        """ln p and rank of each token of the text but the first, as ``evaluate.py --text TEXT --per-token`` tells them.

        Raises:
            UserError: for less than two tokens, and text that the tokenizer can't read.
        """
        ids = self._ids(text)
        if len(ids) < 2:
            raise UserError(f"the text has {counted(len(ids), 'token')}: the first is not predicted; give at least 2")
        scores = score(self._reader, ids)
        if not np.isfinite(scores.log_probability).all():
            raise UserError(f"{self.checkpoint.path}: its numbers are not finite: take an earlier step")
        return scores.listed(self.tokenizer)

    def attention(self, text: str) -> Attention:
        """The weights of all heads on the text, as the explorer's page shows them.

        Raises:
            UserError: for a recurrent network, and for a text of no token or of more than the model sees at once.
        """
        kind, ids = self.checkpoint.config.model.kind, self._ids(text)
        if kind != "gpt":
            raise UserError(f"{self.checkpoint.path}: a recurrent network ({kind}) has no attention to look at")
        if not 1 <= len(ids) <= self._form.context_length:
            most = self._form.context_length
            raise UserError(f"the text has {counted(len(ids), 'token')}: give at least 1 and at most {most:,}")
        captured = capture(self._form, ids)
        return Attention([shown(self.tokenizer, token) for token in ids.tolist()], captured.ids, captured.weights)

    @cached_property
    def _form(self) -> NormalForm:
        return from_checkpoint(self.checkpoint)

    @cached_property
    def _reader(self) -> "PlainEngine | TorchEngine":
        return reading_engine(self.checkpoint)

    def _writing_engine(self, n_token: int) -> Engine | WritingEngine:
        long = self.checkpoint.config.model.kind == "gpt" and worth_numba(self._form, n_token)
        if long not in self._engines:
            self._engines[long] = writing_engine(self.checkpoint, n_token)
        return self._engines[long]

    def _ids(self, text: str) -> Array:
        return encoded(self.tokenizer, normalise_newlines(text), say)


def load(run: str | Path, which: str | int = "best", *, unseen: Unseen | None = None) -> TrainedModel:
    """A run's folder or one checkpoint file, ready to write and to be looked into.

    Args:
        run: its path.
        which: best, last, or a step.
        unseen: stop, skip or replace characters that the tokenizer has never seen; None: as in the run.

    Raises:
        UserError: saying what there is instead.
    """
    if unseen not in (None, *get_args(Unseen)):
        raise UserError(f"unseen = {unseen!r}: must be one of {', '.join(get_args(Unseen))}")
    checkpoint = find_checkpoint(run, str(which))
    return TrainedModel(checkpoint, tokenizer_from_dict(checkpoint.tokenizer, unseen=unseen))
