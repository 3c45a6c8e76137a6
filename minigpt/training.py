"""The training loop, on one screen, and its parts: a step, an evaluation, what is due when."""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minigpt.config import Config
from minigpt.corpus import Corpus, batch, evaluation_batches
from minigpt.distributed import ALONE, World
from minigpt.optim import Optimizers, learning_rate_factor
from minigpt.scoring import Evaluation

UNCOUNTED = -1  # a target that is nothing to learn
EVALUATION_TOKENS = 8192  # tokens in one pass of an evaluation


@dataclass
class Progress:
    """Where a run stands. With weights, optimizer state and config it is all that going on needs."""

    step: int = 0
    tokens_seen: int = 0
    seconds: float = 0.0
    train_loss: float = math.nan
    val_loss: float = math.nan  # of these very weights; nan where they were not validated
    best_val_loss: float = math.inf
    validations_since_best: int = 0
    settings_since: int = 0  # the step from which the run has been trained with its present settings


class Reporter(Protocol):
    """Where numbers and sentences go (``tracking.Tracker``)."""

    def advance(self, step: int) -> None:
        """So many steps are done."""
        ...

    def log(self, step: int, **numbers: float) -> None:
        """One row of numbers, at most one a step."""
        ...

    def say(self, sentence: str) -> None:
        """One line for the person who watches."""
        ...


class Silence:
    """The reporter that tells nothing."""

    def advance(self, step: int) -> None: ...
    def log(self, step: int, **numbers: float) -> None: ...
    def say(self, sentence: str) -> None: ...


@dataclass(frozen=True)
class Observer:
    """Looks at the model every ``interval`` steps (0: at each validation), and before the first step."""

    interval: int
    look: Callable[[int, nn.Module], None]


@dataclass
class Run:
    """What the loop works on."""

    config: Config
    corpus: Corpus
    model: nn.Module
    optimizers: Optimizers
    reporter: Reporter = field(default_factory=Silence)
    save: Callable[[Progress], None] = lambda progress: None
    progress: Progress = field(default_factory=Progress)
    observers: Sequence[Observer] = ()
    should_stop: Callable[[], bool] = lambda: False
    world: World = ALONE
    forward: Callable[[Tensor], Tensor] | None = None  # a compiled handle on the model, where there is one


class NonFiniteError(ArithmeticError):
    """Loss, gradient or logits are not finite numbers; what was saved before is good."""


def train(run: Run) -> Progress:
    """Train until ``max_steps``, until told to stop, or until validation has stalled; the last state is saved.

    Raises:
        NonFiniteError: at the first loss or gradient that is not finite, before it reaches the weights; and before
            weights that no longer give finite logits are validated, looked at or saved.
    """
    settings, progress = run.config.train, run.progress
    meter = SpeedMeter(progress)
    if progress.step == 0:
        run.save(progress)
        observe(run, due_observers(run, validated=True))
        meter.skip()
    saved_step = progress.step
    while progress.step < settings.max_steps and not run.world.any(run.should_stop()):
        gradient_norm = train_step(run)
        meter.count(progress)
        finished = progress.step == settings.max_steps
        validated = finished or is_due(progress.step, settings.eval_interval)
        saving = finished or (is_due(progress.step, settings.save_interval) if settings.save_interval else validated)
        watching = due_observers(run, validated)
        if validated or saving or watching:
            require_finite(run)
        row = validation_row(run) if validated else {}
        saving = saving or (bool(row) and progress.validations_since_best == 0)  # the best must exist as a file
        if row or finished or is_due(progress.step, settings.log_interval):
            run.reporter.log(progress.step, **row, **step_row(run, gradient_norm, meter.tokens_per_second()))
        else:
            run.reporter.advance(progress.step)
        observe(run, watching)
        if saving:
            run.save(progress)
            saved_step = progress.step
        meter.skip()
        if validated and 0 < settings.early_stop <= progress.validations_since_best:
            run.reporter.say(
                f"stopped at step {progress.step}: no better in {settings.early_stop} validations (train.early_stop)"
            )
            break
    if saved_step != progress.step:
        require_finite(run)
        run.save(progress)
    return progress


def train_step(run: Run) -> float:
    """One update: forward and backward in ``grad_accumulation`` passes, clip, step. Returns the gradient's norm.

    The loss is the sum over all counted targets of the update ÷ their number, so the number of passes and processes
    changes memory and time and not the result. What is random in it depends on seed, step and process alone.
    """
    config, progress, world = run.config, run.progress, run.world
    step, passes = progress.step, config.train.grad_accumulation
    seed_torch(config.run.seed, step, world.rank, config.run.device)
    inputs_BT, targets_BT = next_batch(run.corpus, config, step)
    n_counted = (targets_BT != UNCOUNTED).sum()
    forward = run.model if run.forward is None else run.forward  # a compiled model has no truth value
    loss = torch.zeros((), device=inputs_BT.device)
    shares = world.share(inputs_BT).chunk(passes), world.share(targets_BT).chunk(passes)
    for inputs, targets in zip(*shares, strict=True):
        with precision(config):
            part = loss_sum(forward(inputs), targets) / n_counted
        run.optimizers.backward(part)
        loss += part.detach()
    run.optimizers.set_rate(learning_rate_factor(step, config.train.max_steps, config.optim))
    gradient_norm = run.optimizers.clip(config.optim.grad_clip)
    world.sum(loss)
    if not math.isfinite(loss.item()) or not run.optimizers.can_step(gradient_norm):
        raise NonFiniteError(f"step {step + 1}: loss {loss.item():g}, gradient norm {gradient_norm:g}")
    run.optimizers.step()
    progress.step += 1
    progress.tokens_seen += inputs_BT.numel()
    progress.train_loss, progress.val_loss = loss.item(), math.nan
    return gradient_norm


def seed_torch(seed: int, step: int, rank: int, device: str) -> None:
    """Make what is random in a step a pure function of the three numbers."""
    # Mixed into 32 bits: torch's CPU generator reads no more of a seed.
    mixed = int(np.random.SeedSequence([seed, step, rank] if rank else [seed, step]).generate_state(1)[0])
    if device == "cpu":
        torch.default_generator.manual_seed(mixed)  # torch.manual_seed looks for other devices, 0.4 ms a step
    else:
        torch.manual_seed(mixed)


def loss_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum of −ln p over the counted targets: logits (B, T, V), targets (B, T) → scalar, in nats."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=UNCOUNTED, reduction="sum")


def next_batch(corpus: Corpus, config: Config, step: int) -> tuple[Tensor, Tensor]:
    """The inputs and targets of one update, (B, T) each: a pure function of seed and step."""
    length = min(config.model.context_length, len(corpus.train) - 1)
    draw = partial(batch, seed=config.run.seed, step=step, batch_size=config.train.batch_size, context_length=length)
    if "train" in corpus.targets:
        (inputs, _), (targets, _) = (draw(ids, examples=True) for ids in (corpus.train, corpus.targets["train"]))
    else:
        inputs, targets = draw(corpus.train)
    return torch.from_numpy(inputs).to(config.run.device), torch.from_numpy(targets).to(config.run.device)


def precision(config: Config) -> AbstractContextManager[object]:
    """Autocast to the run's dtype; nothing for float32."""
    if config.run.dtype == "float32":
        return nullcontext()
    return torch.autocast(torch.device(config.run.device).type, getattr(torch, config.run.dtype))


@torch.inference_mode()
def evaluate(
    model: nn.Module,
    tokens: np.ndarray,
    config: Config,
    byte_lengths: np.ndarray,
    *,
    targets: np.ndarray | None = None,
    world: World = ALONE,
) -> Evaluation:
    """Loss over windows of the context length that do not overlap, the short last one included.

    Processes share the batches; their sums are added in the same order whatever their number.

    Args:
        model: (B, T) → (B, T, V).
        tokens: (N,) ids; N − 1 of them are predicted.
        config: context length, device and dtype are read.
        byte_lengths: (V,) bytes of text each id stands for.
        targets: (N,) what is to be answered after each token, −1: nothing; instead of each next token. Then the
            accuracy is told too.
        world: who shares the work.
    """
    length, device, was_training = config.model.context_length, config.run.device, model.training
    model.eval()
    rows = max(1, EVALUATION_TOKENS // length)
    passes = evaluation_batches(tokens, length, rows)
    if targets is not None:
        of_inputs = (windows for windows, _ in evaluation_batches(targets, length, rows))
        passes = ((inputs, answers) for (inputs, _), answers in zip(passes, of_inputs, strict=True))
    sums: list[tuple[float, float]] = []  # of the loss, of what was right
    for number, (inputs, answers) in enumerate(passes):
        sums.append((0.0, 0.0))
        if number % world.size == world.rank:
            answers_BT = torch.from_numpy(answers).to(device)
            with precision(config):
                logits_BTV = model(torch.from_numpy(inputs).to(device))
            right = math.nan if targets is None else (logits_BTV.argmax(dim=-1) == answers_BT).sum().item()
            sums[-1] = loss_sum(logits_BTV, answers_BT).item(), right
    model.train(was_training)
    if world.size > 1:
        sums = world.sum(torch.tensor(sums, dtype=torch.float64)).tolist()
    answered = tokens[1:] if targets is None else targets[:-1][targets[:-1] != UNCOUNTED]
    loss, right = (sum(column) / max(1, len(answered)) for column in zip(*sums, strict=True))
    return Evaluation(loss, len(answered), int(byte_lengths[answered].sum()), right)


def validation_row(run: Run) -> dict[str, float]:
    """Validate, keep count of the best, and give the numbers to log; without a validation text, none."""
    progress, tokens, targets = run.progress, run.corpus.val, run.corpus.targets.get("val")
    if len(tokens) < 2:
        return {}
    most = run.config.train.eval_tokens or len(tokens)
    if targets is not None:  # whole examples: the first tokens of one may have nothing to answer
        most = math.ceil(most / run.config.model.context_length) * run.config.model.context_length
    most += 1
    result = evaluate(
        run.model,
        tokens[:most],
        run.config,
        run.corpus.tokenizer.byte_lengths,
        targets=None if targets is None else targets[:most],
        world=run.world,
    )
    progress.val_loss = result.loss
    if result.loss < progress.best_val_loss:
        progress.best_val_loss, progress.validations_since_best = result.loss, 0
    else:
        progress.validations_since_best += 1
    return {
        **({} if targets is None else {"val_accuracy": result.accuracy}),
        "val_loss": result.loss,
        "val_perplexity": result.perplexity,
        "val_bits_per_byte": result.bits_per_byte,
    }


def step_row(run: Run, gradient_norm: float, tokens_per_second: float) -> dict[str, float]:
    """The numbers of the last update."""
    return {
        "train_loss": run.progress.train_loss,
        "lr": run.optimizers.rate,
        "grad_norm": gradient_norm,
        "tokens_seen": run.progress.tokens_seen,
        "tokens_per_second": tokens_per_second,
        "seconds": run.progress.seconds,
    }


@torch.inference_mode()
def require_finite(run: Run) -> None:
    """Refuse to validate, show or save weights that the last update spoiled: the good checkpoint stays the last.

    They may be finite themselves and still overflow on the way through, so the next batch's first pass is tried.
    """
    inputs_BT, _ = next_batch(run.corpus, run.config, run.progress.step)
    with precision(run.config):
        logits_BTV = run.model(inputs_BT.chunk(run.world.size * run.config.train.grad_accumulation)[0])
    if not torch.isfinite(logits_BTV).all():
        raise NonFiniteError(f"step {run.progress.step}: its update left weights whose logits are not finite")


def due_observers(run: Run, validated: bool) -> list[Observer]:
    """Those who look at the model after this step."""
    step = run.progress.step
    return [o for o in run.observers if (step % o.interval == 0 if o.interval else validated)]


def observe(run: Run, observers: Sequence[Observer]) -> None:
    """Let observers look at the model, in evaluation mode."""
    if not observers:
        return
    run.model.eval()
    for observer in observers:
        observer.look(run.progress.step, run.model)
    run.model.train()


def is_due(step: int, interval: int) -> bool:
    """Whether something done every ``interval`` steps (0: never) is done after this one."""
    return interval > 0 and step % interval == 0


class SpeedMeter:
    """Wall-clock seconds of the run, and tokens a second of training alone since the last reading."""

    def __init__(self, progress: Progress) -> None:
        self.begun = time.perf_counter() - progress.seconds
        self.resumed = time.perf_counter()
        self.tokens, self.training_seconds, self.tokens_before = 0, 0.0, progress.tokens_seen

    def count(self, progress: Progress) -> None:
        """A step has ended."""
        now = time.perf_counter()
        self.training_seconds += now - self.resumed
        self.resumed, progress.seconds = now, now - self.begun
        self.tokens, self.tokens_before = self.tokens + progress.tokens_seen - self.tokens_before, progress.tokens_seen

    def tokens_per_second(self) -> float:
        """Tokens a second since this was last asked."""
        speed = self.tokens / max(self.training_seconds, 1e-9)
        self.tokens, self.training_seconds = 0, 0.0
        return speed

    def skip(self) -> None:
        """What came since the step is not training."""
        self.resumed = time.perf_counter()
