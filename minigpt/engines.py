"""What runs a trained model: NumPy, the same compiled by numba for long texts, or torch."""

import importlib.util
from typing import TYPE_CHECKING

from minigpt.checkpoint import Checkpoint
from minigpt.console import say
from minigpt.errors import UserError
from minigpt.normal_form import NormalForm, from_checkpoint
from minigpt.plain import PlainEngine
from minigpt.sampling import Engine, WritingEngine

if TYPE_CHECKING:
    from minigpt.network import TorchEngine

# What NumPy needs for a token, measured on two cores of an AMD EPYC: so long at least, and so long for each weight.
NUMPY_SECONDS, NUMPY_SECONDS_PER_WEIGHT = 2.4e-4, 2.6e-10
# A text for which it needs longer is worth loading compiled code (0.5 s), or compiling it (12 s).
WORTH_LOADING, WORTH_COMPILING = 1.0, 10.0


def reading_engine(checkpoint: Checkpoint) -> "PlainEngine | TorchEngine":
    """The network in NumPy; a recurrent one in torch, which begins anew after a context as a Transformer does."""
    if checkpoint.config.model.kind == "gpt":
        return PlainEngine(from_checkpoint(checkpoint))
    return _in_torch(checkpoint, "cpu", checkpoint.config.model.context_length)


def writing_engine(
    checkpoint: Checkpoint, n_token: int, *, engine: str = "auto", device: str = "cpu"
) -> Engine | WritingEngine:
    """The one that has so many tokens written soonest, or the one asked for.

    Args:
        engine: auto, numpy, numba or torch.
        device: where torch runs; away from the CPU, and for recurrent networks, it runs what auto means.

    Raises:
        UserError: for an engine that can't run this model there, or is not installed.
    """
    if engine in ("numpy", "numba") and device != "cpu":
        raise UserError(f"--engine {engine} runs on the CPU alone: leave out --device {device}")
    kind = checkpoint.config.model.kind
    if kind != "gpt" and engine in ("numpy", "numba"):
        raise UserError(f"--engine {engine} runs Transformers alone; {kind} takes --engine torch, or none")
    if engine == "torch" or device != "cpu" or kind != "gpt":
        return _in_torch(checkpoint, device)
    model = from_checkpoint(checkpoint)
    if engine == "numba":
        try:
            from minigpt import fast

            return fast.compiled_engine(model)
        except ImportError as error:
            raise UserError(f"--engine numba: {error}; pip install numba, or leave the option out") from None
    if engine == "auto" and worth_numba(model, n_token):
        return soonest_engine(model)
    return PlainEngine(model)


def soonest_engine(model: NormalForm) -> "PlainEngine | WritingEngine":
    """Compiled by numba, if that is installed and works; else NumPy."""
    if importlib.util.find_spec("numba"):
        try:
            from minigpt import fast

            return fast.compiled_engine(model)
        except Exception as error:  # numba does not suit this NumPy, finds the disk full, ...: there is another way
            say(f"numba failed ({error}): NumPy goes on")
    return PlainEngine(model)


def worth_numba(model: NormalForm, n_token: int) -> bool:
    """Whether numba is there and saves more time than it costs to begin with."""
    n_weight = model.head.size + sum(array.size for array in model.layers)
    seconds = n_token * max(NUMPY_SECONDS, NUMPY_SECONDS_PER_WEIGHT * n_weight)
    if seconds < WORTH_LOADING or not importlib.util.find_spec("numba"):
        return False
    from minigpt import fast

    return seconds > WORTH_COMPILING or fast.kept_on_disk()


def _in_torch(checkpoint: Checkpoint, device: str, context_length: int = 0) -> "TorchEngine":
    from minigpt.assembly import load_model
    from minigpt.network import TorchEngine

    return TorchEngine(load_model(checkpoint, device), context_length)
