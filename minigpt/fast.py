"""Long texts on a CPU: ``plain``'s decoder compiled by numba (``compiled.py``), about four times as fast.

``PlainEngine``'s memory is shared, and its work where all logits of a text are asked for. numba is optional: whoever
imports this module needs it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from minigpt import compiled
from minigpt.normal_form import Array, Layer, NormalForm
from minigpt.plain import PlainEngine, PlainMemory, rearranged
from minigpt.sampling import Rule, SamplingOptions

LONGEST_CHUNK = 32  # tokens written in one call
CHUNK_WEIGHTS = 32_000_000  # weights read in one call: some milliseconds, so that text comes smoothly


class Outside(NamedTuple):
    """The arrays of the normal form that belong to no block."""

    token_table: Array  # (V, D)
    position_table: Array  # (C, D)
    cos: Array  # (C, K/2)
    sin: Array  # (C, K/2)
    embedding_gain: Array  # (D,)
    embedding_shift: Array  # (D,)
    final_gain: Array  # (D,)
    final_shift: Array  # (D,)
    head: Array  # (V, D)


class Flags(NamedTuple):
    """What the arrays' shapes do not tell."""

    n_head: int
    centred: bool
    embedding_norm: bool
    qk_norm: bool
    activation: int
    softcap: float


class Model(NamedTuple):
    """A whole model."""

    outside: Outside
    layers: Layer  # every array with a leading axis L
    flags: Flags


class Law(NamedTuple):
    """``sampling.Rule`` in types that never change, for another type would be compiled anew."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    seen: Array  # (V,), True: the repetition penalty applies
    banned: Array  # (V,), True: never drawn
    end: int  # −1: none


class FastEngine:
    """Next-token logits of one growing sequence, and several tokens at once (``sampling.WritingEngine``).

    Several threads may use one engine, each with a memory of its own: compiled code lets others run.
    """

    def __init__(self, model: NormalForm) -> None:
        """``model`` in any float type; the weights of its blocks are held twice, in ``PlainEngine`` the other way."""
        model = model.astype(np.float32)
        self._plain = PlainEngine(model)
        layers = [rearranged(layer, model) for layer in model.per_layer()]
        flags = (model.n_head, model.centred, model.embedding_norm, model.qk_norm)
        self._model = Model(
            Outside(*(np.ascontiguousarray(getattr(model, name)) for name in Outside._fields)),
            Layer(*(np.stack(arrays) for arrays in zip(*layers, strict=True))),
            Flags(*flags, compiled.ACTIVATIONS[model.activation], float(model.softcap)),
        )
        self._chunk = max(1, min(LONGEST_CHUNK, CHUNK_WEIGHTS // sum(array.size for array in self._model.layers)))

    def prepare(self) -> None:
        """Compile all there is to compile, or load it where it was kept: seconds, or a quarter of one."""
        rule, uniforms = Rule(SamplingOptions(), set(), (), None), np.random.default_rng(0)
        self.logits([0], self.new_memory())
        self.write(0, self.new_memory(), rule, uniforms=uniforms, most=1)

    @property
    def context_length(self) -> int:
        """Most tokens a memory holds."""
        return self._plain.context_length

    @property
    def vocab_size(self) -> int:
        """Length of the logits."""
        return self._plain.vocab_size

    def new_memory(self) -> PlainMemory:
        """An empty memory."""
        return self._plain.new_memory()

    def logits(self, tokens: Sequence[int] | Array, memory: PlainMemory) -> Array:
        """Logits (V,) of what follows ``tokens``, which follow those in ``memory`` and are added to it."""
        start, ids = memory.length, np.asarray(tokens, np.int64)
        assert 0 < len(ids) <= self.context_length - start, f"{len(ids)} tokens do not fit a memory of {start}"
        logits = compiled.read(self._model, memory.keys, memory.values, ids, start)
        memory.length += len(ids)
        return logits

    def all_logits(self, tokens: Sequence[int] | Array, memory: PlainMemory) -> Array:
        """Logits (T, V) of what follows each of ``tokens``; otherwise as ``logits``."""
        return self._plain.all_logits(tokens, memory)

    def write(
        self, token: int, memory: PlainMemory, rule: Rule, *, uniforms: np.random.Generator, most: int
    ) -> list[int]:
        """The next few ids after ``token``, drawn by ``rule``: one at least, ``most`` at most, the last one unread.

        None at all if the logits are not finite.
        """
        count = min(most, self._chunk, self.context_length - memory.length)
        assert count > 0, f"1 token does not fit a memory of {memory.length}"
        law = self.law(rule, self.vocab_size)
        ids = compiled.write(self._model, memory.keys, memory.values, token, memory.length, law, uniforms.random(count))
        memory.length += len(ids)
        return ids.tolist()

    @staticmethod
    def law(rule: Rule, vocab_size: int) -> Law:
        """The rule as compiled code takes it."""
        options, (seen, banned) = rule.options, np.zeros((2, vocab_size), np.bool_)
        banned[list(rule.banned)] = True
        if options.repetition_penalty != 1:
            seen[list(rule.history)] = True
        return Law(
            float(options.temperature),
            min(options.top_k, vocab_size),
            float(options.top_p),
            float(options.min_p),
            float(options.repetition_penalty),
            seen,
            banned,
            -1 if rule.end is None else rule.end,
        )


def kept_on_disk() -> bool:
    """Whether an earlier process has left the compiled code, as far as can be told without loading it."""
    source, folder = Path(compiled.__file__), compiled.write.stats.cache_path
    left = Path(folder).glob(f"{source.stem}.write-*.nbi") if folder else ()
    return any(file.stat().st_mtime >= source.stat().st_mtime for file in left)
