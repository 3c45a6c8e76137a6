"""Making ready what training works on: configuration, text, model and optimizer.

Everything a user can get wrong is found here, before a folder is made.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from minigpt.checkpoint import Checkpoint, find_checkpoint
from minigpt.config import Config, differences, merge, validate
from minigpt.corpora import corpus_of
from minigpt.corpus import Corpus
from minigpt.distributed import ALONE, World, check_divisible
from minigpt.errors import UserError
from minigpt.machine import machine_choices, needs_loss_scaler, prepare_machine
from minigpt.network import Network, new_network
from minigpt.normal_form import from_checkpoint
from minigpt.optim import Optimizers
from minigpt.run import run_name
from minigpt.tokenizer import Tokenizer, tokenizer_from_dict


@dataclass(frozen=True)
class Parts:
    """What training works on, made ready."""

    config: Config
    corpus: Corpus
    model: Network
    optimizers: Optimizers
    world: World = ALONE


def assembled(
    overrides: Mapping[str, Any],
    *,
    config_path: Path | None,
    source_given: bool,
    init_from: Path | None,
    world: World = ALONE,
) -> Parts:
    """The parts of a new run, with every derived value in their configuration; arguments as ``launch.start``'s.

    Raises:
        UserError: for whatever the user can mend.
    """
    parent = find_checkpoint(init_from, "best") if init_from else None
    asked = initial_config(parent, overrides)
    tokenizer = tokenizer_from_dict(parent.tokenizer, unseen=asked.data.unseen) if parent else None
    corpus = corpus_of(asked, tokenizer)
    named_after = Path(f"{parent.config.run.name}-next.toml") if parent else config_path
    config = resolved(asked, corpus, run_name(asked, named_after, source_given))
    check_texts(config, corpus.tokenizer)
    check_divisible(config.train.batch_size, config.train.grad_accumulation, world.size)
    prepare_machine(config)
    model = build_model(config, corpus.tokenizer.vocab_size, parent)
    return Parts(config, corpus, model, build_optimizers(model, config, world), world)


def restored(checkpoint: Checkpoint, config: Config, world: World = ALONE) -> Parts:
    """Text, model and optimizer as they were when the checkpoint was saved.

    Raises:
        UserError: if the text has changed since.
    """
    if str(world.size) != checkpoint.metadata.get("machine", {}).get("processes", "1"):
        config = config.with_values(run={"threads": 0})  # the cores are shared otherwise now
    config = config.with_values(run=machine_choices(config))
    tokenizer = tokenizer_from_dict(checkpoint.tokenizer)
    try:
        corpus = corpus_of(config, tokenizer)
    except UserError as error:
        raise UserError(f"{config.data.source}: can't be read as it was when the run began: {error}") from None
    if corpus.fingerprint != checkpoint.metadata.get("corpus"):
        raise UserError(
            f"{config.data.source}: the text has changed since the run began; to train on with another text, "
            f"start a new run with --init-from {checkpoint.path}"
        )
    check_texts(config, corpus.tokenizer)
    check_divisible(config.train.batch_size, config.train.grad_accumulation, world.size)
    prepare_machine(config)
    model = build_model(config, corpus.tokenizer.vocab_size, checkpoint)
    optimizers = build_optimizers(model, config, world)
    try:
        optimizers.load_state(torch_tensors(checkpoint.tensors("optimizer")))
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"{checkpoint.path}: damaged, its optimizer's state does not fit its model ({reason})"
        ) from None
    return Parts(config, corpus, model, optimizers, world)


# ── configuration ──────────────────────────────────────────────────────────────────────────────────────────────


def initial_config(parent: Checkpoint | None, overrides: Mapping[str, Any]) -> Config:
    """The asked configuration; with a parent, its own under the overrides, which may not change what it is.

    Raises:
        UserError: for a wrong value, or an override that the parent's weights or tokenizer can't follow.
    """
    if parent is None:
        return validate(overrides)
    inherited = merge(
        parent.config.model_dump(), {"run": {"name": "", "overwrite": False, "device": "auto", "threads": 0}}
    )
    config = validate(merge(inherited, overrides))
    fixed = {
        key: pair
        for key, pair in differences(parent.config, config).items()
        if (key.startswith("model.") and key != "model.dropout") or key in ("data.tokenizer", "data.vocab_size")
    }
    if fixed:
        raise UserError(
            "\n".join(
                f"{key}: {parent.path} has {old!r}, not {new!r}, and its weights can't change it"
                for key, (old, new) in fixed.items()
            )
        )
    return config


def resolved(config: Config, corpus: Corpus, name: str) -> Config:
    """The configuration with every derived value filled in, as it is saved with the run."""
    model = {"n_kv_head": config.model.key_value_heads, "d_ff": config.model.feed_forward_width}
    # For characters 0 means "each one a token", which no number says.
    data = {} if config.data.tokenizer == "char" else {"vocab_size": corpus.tokenizer.vocab_size}
    return config.with_values(run={"name": name, **machine_choices(config)}, model=model, data=data)


def check_texts(config: Config, tokenizer: Tokenizer) -> None:
    """Refuse texts of the configuration that the tokenizer has no tokens for."""
    for key, text in (("train.sample_prompt", config.train.sample_prompt), ("inspect.text", config.inspect.text)):
        try:
            tokenizer.encode(text)
        except UserError as error:
            raise UserError(f"{key}: {error}") from None


# ── model and optimizer ────────────────────────────────────────────────────────────────────────────────────────


def build_model(config: Config, vocab_size: int, checkpoint: Checkpoint | None = None) -> Network:
    """The network on its device, with a checkpoint's weights or those that the seed gives.

    Raises:
        UserError: if there is no memory for it, or the checkpoint's weights are not its own.
    """
    torch.manual_seed(config.run.seed)
    try:
        if checkpoint and config.model.kind == "gpt":
            from_checkpoint(checkpoint)  # refuses what does not fit itself before memory is laid out for it
        model = new_network(config.model, vocab_size)
        if checkpoint:
            weights = torch_tensors(checkpoint.tensors("model"))
            check_weights(checkpoint.path, weights, model)
            model.load_state_dict(weights)
        return model.to(config.run.device)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(
            "the network does not fit in this machine's memory: choose a smaller model.d_model or model.n_layer"
        ) from None


def check_weights(path: Path, weights: Mapping[str, Tensor], model: nn.Module) -> None:
    """Refuse a checkpoint whose tensors are not those of the network that it describes."""
    expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
    for name in sorted(expected.keys() | weights.keys()):
        if name not in weights or name not in expected or weights[name].shape != expected[name]:
            raise UserError(
                f"{path}: damaged: its tensor {name} does not fit its configuration; use another checkpoint"
            )


def is_out_of_memory(error: RuntimeError | MemoryError) -> bool:
    """Whether there is not enough memory; of torch's errors only CUDA's has a class of its own."""
    words = ("DefaultCPUAllocator", "can't allocate memory", "out of memory", "Storage size calculation overflowed")
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(word in str(error) for word in words)


def load_model(checkpoint: Checkpoint, device: str = "auto") -> Network:
    """A saved network in evaluation mode.

    Raises:
        UserError: if the device is not there, or a weight is no finite number.
    """
    config = checkpoint.config.with_values(run={"device": device, "dtype": "float32"})
    config = config.with_values(run=machine_choices(config))
    vocab_size = len(checkpoint.tensors("model").get("token_embedding.weight", ()))
    model = build_model(config, vocab_size, checkpoint).eval()
    if not all(parameter.isfinite().all() for parameter in model.parameters()):
        raise UserError(f"{checkpoint.path}: its weights are not finite: its training diverged; take an earlier step")
    return model


def build_optimizers(model: nn.Module, config: Config, world: World = ALONE) -> Optimizers:
    """The optimizers of ``config.optim``, with loss scaling where the arithmetic needs it."""
    scaling = needs_loss_scaler(config.run.device, config.run.dtype)
    return Optimizers(model, config.optim, loss_scaling=scaling, world=world)


def torch_tensors(arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """NumPy → torch, sharing memory."""
    return {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}
