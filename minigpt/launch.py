"""From a configuration to a trained run: text, model and folder are made ready, then ``training.train`` runs.

Everything a user can get wrong is found before a folder is made.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from minigpt.checkpoint import (
    Checkpoint,
    checkpoint_path,
    find_checkpoint,
    last,
    list_checkpoints,
    prune,
    save_checkpoint,
)
from minigpt.config import Config, differences, merge, to_toml, validate
from minigpt.corpus import Corpus, open_corpus
from minigpt.errors import TrainingStopped, UserError
from minigpt.inspection.capture import LONGEST, attention_grid, attention_maps
from minigpt.model import GPT, TorchEngine
from minigpt.optim import Optimizers
from minigpt.run import (
    RunFolder,
    choose_device,
    choose_dtype,
    choose_threads,
    create_run,
    machine,
    machine_changes,
    needs_loss_scaler,
    open_run,
    resume_config,
    run_name,
)
from minigpt.sampling import SamplingOptions, generate
from minigpt.tokenizer import END, tokenizer_from_dict
from minigpt.tracking import Tracker
from minigpt.training import NonFiniteError, Observer, Progress, Run, next_batch, train, train_step

SAMPLE_TOKENS = 120


@dataclass(frozen=True)
class Outcome:
    """What a finished or interrupted training leaves behind."""

    path: Path
    config: Config
    progress: Progress


Stop = Callable[[], bool]


def start(
    overrides: Mapping[str, Any],
    *,
    config_path: Path | None = None,
    init_from: Path | None = None,
    stop: Stop = lambda: False,
) -> Outcome:
    """Start a new run.

    Args:
        overrides: tables of keys that differ from the defaults, the TOML file's and the command line's together.
        config_path: that TOML file, which may give the run its name.
        init_from: run or checkpoint whose weights, tokenizer and settings the run begins with.
        stop: asked before each step.

    Raises:
        UserError: for the user's mistakes, before a folder is made.
        TrainingStopped: for a loss that is not finite or a disk that takes no more.
    """
    parent = find_checkpoint(init_from, "best") if init_from else None
    config = initial_config(parent, overrides)
    tokenizer = tokenizer_from_dict(parent.tokenizer) if parent else None
    corpus = open_corpus(
        config.data, context_length=config.model.context_length, seed=config.run.seed, tokenizer=tokenizer
    )
    name = run_name(config, config_path, "source" in overrides.get("data", {}))
    config = resolved(config, corpus, name)
    prepare_machine(config)
    model = build_model(config, corpus.tokenizer.vocab_size, parent)
    parts = Parts(config, corpus, model, build_optimizers(model, config))
    with create_run(config) as folder:
        return run_training(parts, folder, Progress(), stop)


def resume(path: Path, overrides: Mapping[str, Any], *, stop: Stop = lambda: False) -> Outcome:
    """Go on with a run from its last good checkpoint, exactly as if it had never ended. Raises as ``start`` does."""
    with open_run(path) as folder:
        sentences: list[str] = []
        checkpoint = find_checkpoint(path, "last", verify=True, say=sentences.append)
        config, changes = resume_config(checkpoint.config, overrides)
        if checkpoint.step >= config.train.max_steps:
            raise UserError(
                f"{path}: finished, at step {checkpoint.step} of {config.train.max_steps}; "
                f"to go on give more steps, such as --train.max-steps {2 * checkpoint.step}"
            )
        parts = restored(checkpoint, config)
        folder.cut_metrics(checkpoint.step)
        folder.write_config(parts.config)
        sentences += changes + machine_changes(checkpoint.metadata["machine"], machine_facts(parts.config))
        return run_training(parts, folder, saved_progress(checkpoint), stop, sentences)


def verify(path: Path, step: int) -> tuple[int, list[str]]:
    """Train anew from the checkpoint before ``step`` up to it, and compare with the one saved there.

    Returns:
        The step it began at, and the names of the tensors whose bits differ.

    Raises:
        UserError: if there is no checkpoint of that step or none before it.
    """
    saved = find_checkpoint(path, str(step), verify=True)
    earlier = [checkpoint for checkpoint in list_checkpoints(saved.path.parent)[0] if checkpoint.step < step]
    if not earlier:
        raise UserError(f"{path}: no checkpoint before step {step} to begin at")
    begin = last(earlier)
    parts = restored(begin, saved.config)
    run = Run(
        config=parts.config,
        corpus=parts.corpus,
        model=parts.model,
        optimizers=parts.optimizers,
        progress=saved_progress(begin),
    )
    while run.progress.step < step:
        train_step(run)
    expected = {kind: saved.tensors(kind) for kind in ("model", "optimizer")}
    got = {"model": parts.model.state_dict(), "optimizer": parts.optimizers.state()}
    return begin.step, [
        f"{kind}.{name}"
        for kind, tensors in expected.items()
        for name, tensor in tensors.items()
        if not np.array_equal(tensor, got[kind][name].cpu().numpy())
    ]


@dataclass(frozen=True)
class Parts:
    """What training works on, made ready."""

    config: Config
    corpus: Corpus
    model: GPT
    optimizers: Optimizers


def restored(checkpoint: Checkpoint, config: Config) -> Parts:
    """Text, model and optimizer as they were when the checkpoint was saved.

    Raises:
        UserError: if the text has changed since.
    """
    config = config.with_values(run=machine_choices(config))
    corpus = open_corpus(
        config.data,
        context_length=config.model.context_length,
        seed=config.run.seed,
        tokenizer=tokenizer_from_dict(checkpoint.tokenizer),
    )
    if corpus.fingerprint != checkpoint.metadata["corpus"]:
        raise UserError(
            f"{config.data.source}: the text has changed since the run began; to train on with another text, "
            f"start a new run with --init-from {checkpoint.path}"
        )
    prepare_machine(config)
    model = build_model(config, corpus.tokenizer.vocab_size, checkpoint)
    optimizers = build_optimizers(model, config)
    optimizers.load_state(torch_tensors(checkpoint.tensors("optimizer")))
    return Parts(config, corpus, model, optimizers)


# ── configuration ──────────────────────────────────────────────────────────────────────────────────────────────


def initial_config(parent: Checkpoint | None, overrides: Mapping[str, Any]) -> Config:
    """The asked configuration; with a parent, its own under the overrides, which may not change what it is.

    Raises:
        UserError: for a wrong value, or an override that the parent's weights or tokenizer can't follow.
    """
    if parent is None:
        return validate(overrides)
    inherited = merge(parent.config.model_dump(), {"run": {"name": "", "overwrite": False}})
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


def machine_choices(config: Config) -> dict[str, object]:
    """Device, dtype and threads in place of ``auto`` and 0."""
    cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = choose_device(config.run.device, cuda=cuda, mps=torch.backends.mps.is_available())
    bf16 = device.startswith("cuda") and torch.cuda.is_bf16_supported()
    return {
        "device": device,
        "dtype": choose_dtype(config.run.dtype, device, bf16=bf16),
        "threads": choose_threads(config.run.threads),
    }


def resolved(config: Config, corpus: Corpus, name: str) -> Config:
    """The configuration with every derived value filled in, as it is saved with the run."""
    model = {"n_kv_head": config.model.key_value_heads, "d_ff": config.model.feed_forward_width}
    # For characters 0 means "each one a token", which no number says.
    data = {} if config.data.tokenizer == "char" else {"vocab_size": corpus.tokenizer.vocab_size}
    return config.with_values(run={"name": name, **machine_choices(config)}, model=model, data=data)


def machine_facts(config: Config) -> dict[str, str]:
    """What besides seed and data decides the exact bits."""
    return machine(device=config.run.device, threads=config.run.threads)


def prepare_machine(config: Config) -> None:
    """Threads, and no arithmetic on denormal numbers, which slows training many times over."""
    torch.set_flush_denormal(True)
    torch.set_num_threads(config.run.threads)


# ── model and optimizer ────────────────────────────────────────────────────────────────────────────────────────


def build_model(config: Config, vocab_size: int, checkpoint: Checkpoint | None = None) -> GPT:
    """The network on its device, with a checkpoint's weights or those that the seed gives."""
    torch.manual_seed(config.run.seed)
    model = GPT(config.model, vocab_size)
    if checkpoint:
        model.load_state_dict(torch_tensors(checkpoint.tensors("model")))
    return model.to(config.run.device)


def load_model(checkpoint: Checkpoint, device: str = "auto") -> GPT:
    """A saved network in evaluation mode.

    Raises:
        UserError: if the device is not there.
    """
    config = checkpoint.config.with_values(run={"device": device, "dtype": "float32"})
    config = config.with_values(run=machine_choices(config))
    vocab_size = len(checkpoint.tensors("model")["token_embedding.weight"])
    return build_model(config, vocab_size, checkpoint).eval()


def build_optimizers(model: nn.Module, config: Config) -> Optimizers:
    """The optimizers of ``config.optim``, with loss scaling where the arithmetic needs it."""
    return Optimizers(model, config.optim, loss_scaling=needs_loss_scaler(config.run.device, config.run.dtype))


def torch_tensors(arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """NumPy → torch, sharing memory."""
    return {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}


def compiled(model: nn.Module, corpus: Corpus, config: Config, say: Callable[[str], None]) -> nn.Module:
    """``torch.compile(model)`` if a forward and a backward work with it here, else, said once, the model itself."""
    inputs_BT, _ = next_batch(corpus.train, config, 0)
    try:
        handle = torch.compile(model)
        handle(inputs_BT[: len(inputs_BT) // config.train.grad_accumulation]).sum().backward()
    except Exception as error:  # what a missing compiler raises differs from system to system
        say(f"torch.compile does not work here ({str(error).splitlines()[0]}): training goes on without it")
        return model
    finally:
        model.zero_grad(set_to_none=True)
    assert isinstance(handle, nn.Module)
    return handle


# ── the training itself ────────────────────────────────────────────────────────────────────────────────────────


def run_training(
    parts: Parts, folder: RunFolder, progress: Progress, stop: Stop, sentences: Sequence[str] = ()
) -> Outcome:
    """Train what has been made ready, in its folder; ``sentences`` are told first."""
    config, corpus, model, optimizers = parts.config, parts.corpus, parts.model, parts.optimizers

    def save(progress: Progress) -> None:
        tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
        tensors |= {f"optimizer.{name}": tensor for name, tensor in optimizers.state().items()}
        arrays = {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()}
        metadata = {
            **asdict(progress),
            "config": config.model_dump(),
            "tokenizer": corpus.tokenizer.to_dict(),
            "corpus": corpus.fingerprint,
            "machine": machine_facts(config),
        }
        save_checkpoint(checkpoint_path(folder.checkpoints, progress.step), arrays, metadata)
        prune(folder.checkpoints, config.train.keep_last)

    total, text = config.train.max_steps, to_toml(config)
    with Tracker(folder, total_steps=total, start_step=progress.step, config_text=text) as tracker:
        for sentence in (*plan(parts, folder.path), *corpus.notes, *sentences):
            tracker.say(sentence)
        run = Run(
            config=config,
            corpus=corpus,
            model=model,
            optimizers=optimizers,
            reporter=tracker,
            save=save,
            progress=progress,
            observers=[sampler(config, corpus, tracker), attention_watcher(config, corpus, tracker)],
            should_stop=stop,
            forward=compiled(model, corpus, config, tracker.say) if config.run.compile else None,
        )
        try:
            return Outcome(folder.path, config, train(run))
        except NonFiniteError as error:
            raise TrainingStopped(after_non_finite(error, folder, config)) from None
        except UserError as error:
            raise TrainingStopped(str(error)) from None
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise UserError(smaller_passes(config)) from None


def saved_progress(checkpoint: Checkpoint) -> Progress:
    """Where the run stood; what was not finite was saved as null."""
    fresh = Progress()
    saved = {key: checkpoint.metadata[key] for key in asdict(fresh)}
    return Progress(**{key: getattr(fresh, key) if value is None else value for key, value in saved.items()})


def plan(parts: Parts, path: Path) -> list[str]:
    """What is about to be trained, on what, where."""
    config, corpus, model = parts.config, parts.corpus, parts.model
    shape, settings = config.model, config.train
    epochs = settings.max_steps * settings.batch_size * shape.context_length / max(1, len(corpus.train))
    return [
        f"{path}: {shape.n_layer} layers, {shape.n_head} heads, {shape.d_model} wide, context {shape.context_length}: "
        f"{model.n_parameter:,} parameters",
        f"text {config.data.source}: {len(corpus.train):,} tokens to train on, {len(corpus.val):,} to validate, "
        f"vocabulary of {corpus.tokenizer.vocab_size:,} ({corpus.tokenizer.name})",
        f"{settings.max_steps:,} steps of {settings.batch_size} x {shape.context_length} tokens ({epochs:.2g} epochs), "
        f"{config.run.device}, {config.run.dtype}, threads {config.run.threads}",
    ]


def sampler(config: Config, corpus: Corpus, tracker: Tracker) -> Observer:
    """Writes a few words now and then: to the console, TensorBoard and ``samples/``."""
    tokenizer = corpus.tokenizer
    prompt = [END] if not config.train.sample_prompt else tokenizer.encode(config.train.sample_prompt).tolist()

    def look(step: int, model: nn.Module) -> None:
        if step == 0:
            return
        assert isinstance(model, GPT)
        ids = generate(
            TorchEngine(model),
            prompt,
            max_new_tokens=SAMPLE_TOKENS,
            options=SamplingOptions(),
            seed=config.run.seed,
            banned=tokenizer.undefined_ids,
        )
        text = config.train.sample_prompt + tokenizer.decode(list(ids))
        tracker.text("sample", text, step)
        tracker.say(f"\n── step {step} writes ──\n{text.strip()}\n")

    return Observer(config.train.sample_interval, look)


def attention_watcher(config: Config, corpus: Corpus, tracker: Tracker) -> Observer:
    """Draws every head's attention on one text: one picture in TensorBoard."""
    length = min(config.model.context_length, LONGEST)
    if config.inspect.text:
        ids = corpus.tokenizer.encode(config.inspect.text)
    else:
        ids = corpus.val if len(corpus.val) else corpus.train
    tokens = torch.from_numpy(np.array(ids[:length], dtype=np.int64)).to(config.run.device)

    def look(step: int, model: nn.Module) -> None:
        tracker.image("attention", attention_grid(attention_maps(model, tokens)), step)

    return Observer(config.inspect.interval, look)


# ── when it ends otherwise ─────────────────────────────────────────────────────────────────────────────────────


def after_non_finite(error: NonFiniteError, folder: RunFolder, config: Config) -> str:
    """What happened, what is kept, and what to try."""
    good = find_checkpoint(folder.path, "last", say=lambda _sentence: None)
    return (
        f"{error}; the checkpoint of step {good.step} is kept. Lower the learning rate: "
        f"--resume {folder.path} --optim.lr {config.optim.lr / 3:.2g}"
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch could not get memory; on a CPU that is a plain RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def smaller_passes(config: Config) -> str:
    """The same training in less memory, as exact numbers."""
    batch, passes = config.train.batch_size, config.train.grad_accumulation
    divisors = [n for n in range(passes + 1, batch + 1) if batch % n == 0]
    if not divisors:
        return "out of memory with one sequence a pass: choose a smaller model.context_length or model.d_model"
    more = next((n for n in divisors if n >= 4 * passes), divisors[-1])
    return (
        f"out of memory: passes of {batch // passes} sequences are too large; "
        f"--train.grad-accumulation {more} makes them {batch // more}, with the same result"
    )
