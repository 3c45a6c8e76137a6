"""From a configuration to a trained run: everything is made ready, then ``training.train`` runs in its folder."""

import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from minigpt.advice import Adviser, before_training
from minigpt.assembly import Parts, assembled, is_out_of_memory, restored
from minigpt.checkpoint import (
    Checkpoint,
    checkpoint_path,
    find_checkpoint,
    last,
    list_checkpoints,
    prune,
    save_checkpoint,
)
from minigpt.config import Config, differences, to_toml
from minigpt.distributed import ALONE, World, joined
from minigpt.errors import TrainingStopped, UserError
from minigpt.inspection.film import probe_of
from minigpt.machine import machine_changes, machine_facts
from minigpt.model import GPT
from minigpt.pace import measured_pace
from minigpt.planning import Plan, plan_training
from minigpt.run import RunFolder, as_word, create_run, last_settings, open_run, resume_config
from minigpt.tracking import Tracker
from minigpt.training import NonFiniteError, Progress, Run, next_batch, precision, train, train_step
from minigpt.watching import attention_watcher, sampler, what_is_trained

REHEARSAL_SECONDS = 2.0
SAFE_RATE = {"muon": 0.01, "adamw": 0.001}  # what to try after a loss that is not finite, at most


@dataclass(frozen=True)
class Outcome:
    """What a finished or interrupted training leaves behind."""

    path: Path
    config: Config
    progress: Progress
    leads: bool = True  # whether this process speaks for all that trained
    last_word: str = ""  # what the losses mean, in a sentence


Stop = Callable[[], bool]


def start(
    overrides: Mapping[str, Any],
    *,
    config_path: Path | None = None,
    source_given: bool = False,
    init_from: Path | None = None,
    stop: Stop = lambda: False,
    begun: float | None = None,
) -> Outcome:
    """Start a new run.

    Args:
        overrides: tables of keys that differ from the defaults, the TOML file's and the command line's together.
        config_path: that TOML file, which gives the run its name unless the command line does.
        source_given: whether the command line names a text, which then gives the run its name.
        init_from: run or checkpoint whose weights, tokenizer and settings the run begins with.
        stop: asked before each step.
        begun: the moment of ``time.monotonic`` from which ``train.minutes`` count; None: now.

    Raises:
        UserError: for the user's mistakes, before a folder is made.
        TrainingStopped: for a loss that is not finite or a disk that takes no more.
    """
    with joined() as world:
        plan = planned(overrides, begun=begun, init_from=init_from, world=world)
        overrides = plan.tables if plan else overrides
        with world.leader_first():
            parts = assembled(
                overrides, config_path=config_path, source_given=source_given, init_from=init_from, world=world
            )
            probe_of(parts.config, parts.corpus)  # a mistake in inspect.scores is told before there is a folder
        with create_run(parts.config) if world.leads else nullcontext() as folder:
            if folder:  # one that lost its checkpoints may still hold rows and curves, which are not this run's
                folder.cut_metrics(-1)
                shutil.rmtree(folder.tensorboard, ignore_errors=True)
            if not plan:
                return run_training(parts, folder, Progress(), stop)
            longer = f"--train.minutes {3 * plan.minutes:g}"
            return run_training(parts, folder, Progress(), stop, [plan.pace.told(parts.config)], longer=longer)


def rehearse(
    overrides: Mapping[str, Any],
    *,
    config_path: Path | None = None,
    source_given: bool = False,
    init_from: Path | None = None,
    begun: float | None = None,
) -> list[str]:
    """What ``start`` would train and what it would cost here, measured; nothing is left behind. Raises as it does."""
    plan = planned(overrides, begun=begun, init_from=init_from, world=ALONE)
    parts = assembled(
        plan.tables if plan else overrides, config_path=config_path, source_given=source_given, init_from=init_from
    )
    config, corpus = parts.config, parts.corpus
    pace = plan.pace if plan else measured_pace(config, corpus, seconds=REHEARSAL_SECONDS)
    path = Path(config.run.dir) / config.run.name
    return [*what_is_trained(parts, path), *corpus.notes, *before_training(config, corpus), pace.told(config)]


def planned(overrides: Mapping[str, Any], *, begun: float | None, init_from: Path | None, world: World) -> Plan | None:
    """The plan for ``train.minutes`` where the user has set them."""
    if "minutes" not in overrides.get("train", {}):
        return None
    if world.size > 1:
        raise UserError("train.minutes plans for one process; start one to see its plan, and give that to torchrun")
    return plan_training(dict(overrides), begun=time.monotonic() if begun is None else begun, init_from=init_from)


def resume(path: Path, overrides: Mapping[str, Any], *, stop: Stop = lambda: False) -> Outcome:
    """Go on with a run from its last good checkpoint, exactly as if it had never ended. Raises as ``start`` does."""
    with joined() as world, open_run(path) if world.leads else nullcontext() as folder:
        sentences: list[str] = []
        checkpoint = find_checkpoint(path, "last", verify=True, say=sentences.append)
        settings = last_settings(path, checkpoint.config)
        if "minutes" in overrides.get("train", {}):
            raise UserError(
                f"train.minutes plans a new run; to go on with {path} give its steps, such as --train.max-steps "
                f"{2 * settings.train.max_steps}"
            )
        config, changes = resume_config(settings, overrides)
        if checkpoint.step >= config.train.max_steps:
            raise UserError(
                f"{path}: finished, at step {checkpoint.step} of {config.train.max_steps}; "
                f"to go on give more steps, such as --train.max-steps {2 * checkpoint.step}"
            )
        with world.leader_first():
            parts = restored(checkpoint, config, world)
            probe_of(parts.config, parts.corpus)
        if folder:
            try:
                folder.cut_metrics(checkpoint.step)
            except UserError as error:  # a log is no reason not to train
                sentences.append(f"{error}; rows past step {checkpoint.step} may stand in it twice")
            folder.write_config(parts.config)
        progress = saved_progress(checkpoint)
        if differences(checkpoint.config, parts.config):
            progress.settings_since = checkpoint.step
        sentences += [f"goes on from step {checkpoint.step}", *changes]
        if config.optim.name != checkpoint.config.optim.name:
            sentences.append("weights whose optimizer is another now begin with an empty optimizer state")
        sentences += machine_changes(checkpoint.metadata.get("machine", {}), machine_facts(parts.config, world.size))
        return run_training(parts, folder, progress, stop, sentences)


def verify(path: Path, step: int, say: Callable[[str], None] = lambda sentence: None) -> tuple[int, list[str]]:
    """Train anew from the checkpoint before ``step`` up to it, and compare with the one saved there.

    ``say`` is told what differs from the machine that trained.

    Returns:
        The step it began at, and the names of the tensors whose bits differ.

    Raises:
        UserError: if there is no checkpoint of that step or none before it, or other settings held in between.
    """
    saved = find_checkpoint(path, str(step), verify=True)
    earlier = [checkpoint for checkpoint in list_checkpoints(saved.path.parent)[0] if checkpoint.step < step]
    if not earlier:
        raise UserError(f"{path}: no checkpoint before step {step} to begin at")
    begin, since = last(earlier), saved.metadata.get("settings_since", 0)
    if begin.step < since:
        raise UserError(
            f"{path}: the settings changed at step {since}, and the last checkpoint before step {step} is of step "
            f"{begin.step}: this part can't be trained anew as it was"
        )
    parts = restored(begin, saved.config)
    for sentence in machine_changes(saved.metadata.get("machine", {}), machine_facts(parts.config, parts.world.size)):
        say(sentence)
    run = Run(
        config=parts.config,
        corpus=parts.corpus,
        model=parts.model,
        optimizers=parts.optimizers,
        progress=saved_progress(begin),
        forward=compiled(parts, say) if parts.config.run.compile else None,
    )
    while run.progress.step < step:
        train_step(run)
    expected = {kind: saved.tensors(kind) for kind in ("model", "optimizer")}
    got = {"model": parts.model.state_dict(), "optimizer": parts.optimizers.state()}
    return begin.step, [
        f"{kind}.{name}"
        for kind, tensors in expected.items()
        for name, tensor in tensors.items()
        if tensor.tobytes() != got[kind][name].cpu().numpy().tobytes()
    ]


def compiled(parts: Parts, say: Callable[[str], None]) -> nn.Module:
    """``torch.compile(model)`` if a forward and a backward work with it here, else, said once, the model itself."""
    model, passes = parts.model, parts.world.size * parts.config.train.grad_accumulation
    inputs_BT, _ = next_batch(parts.corpus, parts.config, 0)
    try:
        handle = torch.compile(model)
        with precision(parts.config):  # another dtype would be compiled once more
            logits_BTV = handle(inputs_BT.chunk(passes)[0])
        logits_BTV.sum().backward()
    except Exception as error:  # what a missing compiler raises differs from system to system
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        say(f"torch.compile does not work here ({reason}): training goes on without it")
        return model
    finally:
        model.zero_grad(set_to_none=True)
    assert isinstance(handle, nn.Module)
    return handle


# ── the training itself ────────────────────────────────────────────────────────────────────────────────────────


def run_training(
    parts: Parts,
    folder: RunFolder | None,
    progress: Progress,
    stop: Stop,
    sentences: Sequence[str] = (),
    *,
    longer: str = "",
) -> Outcome:
    """Train what has been made ready, in its folder; ``sentences`` are told first, ``longer`` is what to set for more.

    Without a folder this process does its share of the work for the one that has it.
    """
    run = Run(
        config=parts.config,
        corpus=parts.corpus,
        model=parts.model,
        optimizers=parts.optimizers,
        progress=progress,
        should_stop=stop,
        world=parts.world,
    )
    if folder:
        return run_in_folder(run, parts, folder, sentences, longer=longer)
    if run.config.run.compile:
        run.forward = compiled(parts, lambda _sentence: None)
    return Outcome(Path(run.config.run.dir) / run.config.run.name, run.config, train(run), leads=False)


def run_in_folder(run: Run, parts: Parts, folder: RunFolder, sentences: Sequence[str], *, longer: str) -> Outcome:
    """Train, tell and save."""
    config, corpus, model, optimizers = parts.config, parts.corpus, parts.model, parts.optimizers

    def save(progress: Progress) -> None:
        """All that going on needs, as one file; then those that need not be kept are removed."""
        tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
        tensors |= {f"optimizer.{name}": tensor for name, tensor in optimizers.state().items()}
        arrays = {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()}
        metadata = {
            **asdict(progress),
            "config": config.model_dump(),
            "tokenizer": corpus.tokenizer.to_dict(),
            "corpus": corpus.fingerprint,
            "machine": machine_facts(config, parts.world.size),
        }
        save_checkpoint(checkpoint_path(folder.checkpoints, progress.step), arrays, metadata)
        prune(folder.checkpoints, config.train.keep_last)

    total, text = config.train.max_steps, to_toml(config)
    with Tracker(folder, total_steps=total, start_step=run.progress.step, config_text=text) as tracker:
        advice = before_training(config, corpus)
        for sentence in (*what_is_trained(parts, folder.path), *corpus.notes, *sentences, *advice):
            tracker.say(sentence)
        run.reporter = adviser = Adviser(tracker, config)
        run.save = save
        run.observers = [sampler(parts, tracker)]
        if isinstance(model, GPT):
            run.observers.append(attention_watcher(parts, tracker, folder.attention, run.progress.step))
        run.forward = compiled(parts, tracker.say) if config.run.compile else None
        try:
            progress = train(run)
            stopped = progress.step < total
            last_word = "" if stopped else adviser.last_word(longer or f"--train.max-steps {2 * total}")
            return Outcome(folder.path, config, progress, last_word=last_word)
        except NonFiniteError as error:
            raise TrainingStopped(after_non_finite(error, folder, config)) from None
        except UserError as error:  # a checkpoint could not be written
            raise TrainingStopped(str(error)) from None
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise TrainingStopped(smaller_passes(folder, config)) from None


def saved_progress(checkpoint: Checkpoint) -> Progress:
    """Where the run stood; what was not finite was saved as null."""
    fresh = Progress()
    if missing := {"step", "tokens_seen", "seconds"} - checkpoint.metadata.keys():
        raise UserError(f"{checkpoint.path}: damaged, its header lacks {', '.join(missing)}; use another checkpoint")
    saved = {key: checkpoint.metadata.get(key) for key in asdict(fresh)}
    return Progress(**{key: getattr(fresh, key) if value is None else value for key, value in saved.items()})


# ── when it ends otherwise ─────────────────────────────────────────────────────────────────────────────────────


def after_non_finite(error: NonFiniteError, folder: RunFolder, config: Config) -> str:
    """What happened, what is kept, and what to try."""
    good = find_checkpoint(folder.path, "last", say=lambda _sentence: None)
    return (
        f"{error}; the checkpoint of step {good.step} is kept. Go on from it with a lower learning rate: "
        f"--resume {as_word(folder.path)} --optim.lr {min(config.optim.lr / 3, SAFE_RATE[config.optim.name]):.2g}"
    )


def smaller_passes(folder: RunFolder, config: Config) -> str:
    """The same training in less memory, as exact numbers."""
    batch, passes = config.train.batch_size, config.train.grad_accumulation
    small = [n for n in range(1, math.isqrt(batch) + 1) if batch % n == 0]
    divisors = sorted(n for n in {*small, *(batch // n for n in small)} if n > passes)
    if not divisors:
        return "out of memory with one sequence a pass: choose a smaller model.context_length or model.d_model"
    more = next((n for n in divisors if n >= 4 * passes), divisors[-1])
    return (
        f"out of memory; batch {batch // passes} -> {batch // more} with accumulation {more} gives the same result: "
        f"--resume {as_word(folder.path)} --train.grad-accumulation {more}"
    )
