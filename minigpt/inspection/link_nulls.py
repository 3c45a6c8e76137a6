"""What chance gives along links: how much the heads of fresh networks move, kept with the run."""

import hashlib
import io
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from minigpt.checkpoint import versions
from minigpt.console import counted, say
from minigpt.errors import UserError
from minigpt.files import write_whole
from minigpt.inspection.compare import Floats
from minigpt.inspection.links import LinkedText, link_masses
from minigpt.inspection.nulls import fresh_network
from minigpt.inspection.subject import Subject


def fresh_masses(subject: Subject, texts: Sequence[LinkedText], count: int, folder: Path | None) -> Floats:
    """``Masses.first`` of networks like the subject's, with first weights of other seeds: (networks, N, L, H).

    Args:
        subject: whose configuration they have.
        texts: with N links, as the subject reads them.
        count: how many networks, 0 also.
        folder: where the result is kept; None keeps nothing.
    """
    config = subject.model.config
    first = subject.checkpoint.config.run.seed + 1
    seeds = range(first, first + count)
    shape = count, sum(len(text.links) for text in texts), config.n_layer, config.n_head
    if not count or not texts:
        return np.empty(shape)
    key = {
        "model": config.model_dump(),
        "vocab_size": subject.model.vocab_size,
        "seeds": list(seeds),
        "texts": [(text.tokens.tolist(), [(link.word, link.cause) for link in text.links]) for text in texts],
        "versions": versions(),
    }
    name = f"links-{hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]}.npy"
    kept = _read(folder / name, shape) if folder else None
    if kept is not None:
        return kept
    say(f"reading {counted(count, 'fresh network')} of the same configuration")
    networks = (fresh_network(config, subject.model.vocab_size, seed) for seed in seeds)
    found = np.stack([link_masses(network, texts).first for network in networks])
    if folder:
        _write(folder / name, found)
    return found


def _read(path: Path, shape: tuple[int, ...]) -> Floats | None:
    """None if the file is not there, or damaged."""
    try:
        found = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    whole = found.shape == shape and found.dtype == np.float64 and (found >= 0).all() and (found <= 1.001).all()
    return found if whole else None


def _write(path: Path, masses: Floats) -> None:
    content = io.BytesIO()
    np.save(content, masses)
    try:
        write_whole(path, content.getvalue())
    except UserError as error:
        say(f"fresh networks will be read anew each time: {error}")
