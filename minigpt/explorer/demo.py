"""A page without a run: a small model is trained on the tales first, in less than a minute on two cores."""

from tempfile import TemporaryDirectory

from minigpt.config import DEFAULT_CONFIG, merge, read_toml
from minigpt.explorer.making import Made, Wish, made
from minigpt.launch import start

SETTINGS = {
    "run": {"name": "demo", "device": "cpu"},
    "data": {"vocab_size": 1024},
    "model": {"d_model": 64, "context_length": 64},
    "train": {"max_steps": 600, "eval_interval": 60, "eval_tokens": 5_000, "keep_last": 1},
}


def demo(wish: Wish) -> Made:
    """The page of a model trained here and now, in a folder that is then removed. Raises as ``made`` does."""
    with TemporaryDirectory() as folder:
        tables = merge(merge(read_toml(DEFAULT_CONFIG), SETTINGS), {"run": {"dir": folder}})
        return made(start(tables).path, wish)
