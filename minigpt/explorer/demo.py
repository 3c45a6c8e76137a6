"""A page without a run: a small model is trained on the tales first, in less than a minute."""

from tempfile import TemporaryDirectory

from minigpt.config import merge
from minigpt.explorer.making import Made, Wish, made
from minigpt.launch import start

SETTINGS = {
    "run": {"name": "demo", "device": "cpu"},
    "data": {"vocab_size": 1024},
    "model": {"n_layer": 2, "n_head": 4, "d_model": 64, "context_length": 64},
    "train": {"minutes": 0.6, "keep_last": 1, "sample_interval": 1_000_000},
}


def demo(wish: Wish) -> Made:
    """The page of a model trained here and now, in a folder that is then removed. Raises as ``made`` does."""
    with TemporaryDirectory() as folder:
        return made(start(merge(SETTINGS, {"run": {"dir": folder}})).path, wish)
