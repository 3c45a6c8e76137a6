"""What chance gives: how near the heads of the same network, freshly initialised, are to a reference."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minigpt.checkpoint import versions
from minigpt.config import ModelConfig
from minigpt.console import say
from minigpt.errors import UserError
from minigpt.files import write_whole
from minigpt.inspection.capture import looking
from minigpt.inspection.compare import Floats, Maps, Null, closeness, pooled
from minigpt.inspection.patterns import Pattern, Tokens
from minigpt.model import GPT

FEWEST_HEADS, FEWEST_SEEDS = 100, 4
"""Fresh networks are drawn until both are reached: a 1st percentile of less than a hundred heads says nothing."""

TEXTS_AT_ONCE = 8
NUMBERS_AT_ONCE = 2**24  # of maps: 64 MB


@dataclass(frozen=True)
class FreshNetworks:
    """Networks of one configuration as they are before training, and the texts they read."""

    config: ModelConfig
    vocab_size: int
    run_seed: int  # they take the seeds after it
    tokens: Tokens  # (N, T)

    @property
    def seeds(self) -> range:
        """Enough of them for a 1st percentile."""
        heads = self.config.n_layer * self.config.n_head
        return range(self.run_seed + 1, self.run_seed + 1 + max(FEWEST_SEEDS, -(-FEWEST_HEADS // heads)))

    @property
    def heads(self) -> int:
        """How many all of them have."""
        return len(self.seeds) * self.config.n_layer * self.config.n_head

    def key(self) -> dict[str, Any]:
        """All that their maps depend on, as plain values."""
        return {
            "model": self.config.model_dump(),
            "vocab_size": self.vocab_size,
            "seeds": list(self.seeds),
            "tokens": _digest(self.tokens.astype("<i8")),
            "versions": versions(),
        }

    def nulls(self, references: Sequence[Sequence[Pattern]]) -> list[Null]:
        """For each reference, given as its patterns on each text: how near the fresh heads are."""
        found: list[list[Floats]] = [[] for _ in references]
        for maps in self._maps():
            for distances, patterns in zip(found, references, strict=True):
                of_texts = [closeness(maps[:, text], pattern) for text, pattern in enumerate(patterns)]
                distances.append(pooled(of_texts).total_variation.ravel())
        return [Null(np.sort(np.concatenate(distances))) for distances in found]

    def _maps(self) -> Iterator[Maps]:
        """The maps of all of them, in groups of networks: (networks, N, layers, H, T, T)."""
        n_text, length = self.tokens.shape
        size = n_text * self.config.n_layer * self.config.n_head * length**2
        networks = max(1, NUMBERS_AT_ONCE // size)
        for start in range(0, len(self.seeds), networks):
            group = self.seeds[start : start + networks]
            fresh = [fresh_network(self.config, self.vocab_size, seed) for seed in group]
            yield np.stack([read_maps(network, self.tokens) for network in fresh])


def fresh_network(config: ModelConfig, vocab_size: int, seed: int) -> GPT:
    """A network before training, in evaluation mode; torch's own random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GPT(config, vocab_size).eval()


@torch.inference_mode()
def read_maps(model: GPT, tokens: Tokens) -> Maps:
    """Weights of every head on texts of one length: tokens (N, T) → (N, layers, H, T, T), float32."""
    maps = []
    for start in range(0, len(tokens), TEXTS_AT_ONCE):
        with looking(model) as looks:
            model(torch.as_tensor(tokens[start : start + TEXTS_AT_ONCE], dtype=torch.int64))
        maps.append(torch.stack([look.weights for look in looks], dim=1).numpy())
    return np.concatenate(maps)


def kept_nulls(
    fresh: FreshNetworks, references: Mapping[str, Sequence[Pattern]], folder: Path | None
) -> dict[str, Null]:
    """The null of each reference: read from the folder where it is kept, else computed, and kept there.

    Args:
        fresh: the networks and the texts.
        references: name → its patterns on each text, defined in at least one row.
        folder: made if need be; where there is none, or it can't be written, a sentence on stderr says so.
    """
    key = fresh.key()
    name = f"null-{hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]}.json"
    kept = _read(folder / name, key, fresh.heads) if folder else {}
    digests = {
        reference: _digest(*(pattern.weights for pattern in patterns)) for reference, patterns in references.items()
    }
    missing = [reference for reference, digest in digests.items() if digest not in kept]
    if missing:
        anew = "" if folder else ", anew each time: one checkpoint file has no folder to keep the result in"
        say(f"reading {len(fresh.seeds)} fresh networks of the same configuration{anew}")
        computed = fresh.nulls([references[reference] for reference in missing])
        kept |= {digests[reference]: null for reference, null in zip(missing, computed, strict=True)}
        if folder:
            _write(folder / name, key, kept)
    return {reference: kept[digest] for reference, digest in digests.items()}


# ── the file ───────────────────────────────────────────────────────────────────────────────────────────────────


def _read(path: Path, key: Mapping[str, Any], heads: int) -> dict[str, Null]:
    """Digest of a reference → its null; what is damaged or of something else is as if it were not there."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["depends_on"] != key:
            return {}
        found = {digest: np.array(values, np.float64) for digest, values in content["total_variation"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}
    return {
        digest: Null(values)
        for digest, values in found.items()
        if values.shape == (heads,) and values[0] >= 0 and values[-1] <= 1.001 and (np.diff(values) >= 0).all()
    }


def _write(path: Path, key: Mapping[str, Any], nulls: Mapping[str, Null]) -> None:
    values = {digest: null.total_variation.tolist() for digest, null in nulls.items()}
    try:
        write_whole(path, json.dumps({"depends_on": key, "total_variation": values}).encode())
    except UserError as error:
        say(f"fresh networks will be read anew each time: {error}")


def _digest(*arrays: np.ndarray) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype.str} {array.shape}\n".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
