"""The training loop: it learns, its first numbers are known, and it does what is due when it is due."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import MakeRun
from torch import Tensor, nn

from minigpt import training
from minigpt.training import (
    NonFiniteError,
    Observer,
    Progress,
    Run,
    SpeedMeter,
    evaluate,
    next_batch,
    train,
    train_step,
)

NUMBERS = {"train_loss", "lr", "grad_norm", "tokens_seen", "tokens_per_second", "seconds"}
VALIDATION = {"val_loss", "val_perplexity", "val_bits_per_byte"}


class Notes:
    """A reporter that remembers."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, float]] = {}
        self.advanced: list[int] = []
        self.said: list[str] = []

    def advance(self, step: int) -> None:
        self.advanced.append(step)

    def log(self, step: int, **numbers: float) -> None:
        assert step not in self.rows, "one row a step"
        self.rows[step] = numbers

    def say(self, sentence: str) -> None:
        self.said.append(sentence)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# ── learning ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("tied", "off_even"), [(False, 1e-6), (True, 0.5)], ids=["untied", "tied"])
@pytest.mark.parametrize(
    "optim", [{"name": "muon", "lr": 0.02, "adam_lr": 0.02}, {"name": "adamw", "lr": 0.01}], ids=["muon", "adamw"]
)
def test_one_batch_is_learned_by_heart(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, optim: dict[str, Any], tied: bool, off_even: float
) -> None:
    """From about even predictions: an untied head starts at zero, a tied one near it."""
    run = make_run(optim=optim, model={"tie_embeddings": tied}, train={"max_steps": 100, "eval_interval": 0})
    fixed = next_batch(run.corpus, run.config, 0)
    monkeypatch.setattr("minigpt.training.next_batch", lambda *_: fixed)
    train_step(run)
    assert run.progress.train_loss == pytest.approx(math.log(run.corpus.tokenizer.vocab_size), abs=off_even)
    train(run)
    assert run.progress.train_loss < 0.05


ZEROS = {"attention_init": "zero", "tie_embeddings": False, "logit_softcap": 15.0}  # what starts at zero, and a cap
GOLDEN = {
    ("muon", "default"): [(3.6660092, 1.5614527), (3.5567918, 1.6775866), (3.5619369, 1.4049937)],
    ("adamw", "default"): [(3.6660092, 1.5614527), (3.4113650, 1.4431709), (3.2969751, 1.1457964)],
    ("muon", "zeros"): [(3.3322041, 0.7891371), (3.3094435, 0.8725680), (3.2794080, 0.8299671)],
    ("adamw", "zeros"): [(3.3322041, 0.7891371), (3.2956238, 0.8813208), (3.2165833, 0.8900598)],
}


@pytest.mark.parametrize(("name", "start"), GOLDEN)
def test_the_first_steps_have_known_numbers(make_run: MakeRun, name: str, start: str) -> None:
    model = {"dropout": 0.1, **(ZEROS if start == "zeros" else {})}
    run = make_run(optim={"name": name, "lr": 0.01, "ns_steps": 5}, model=model, train={"grad_accumulation": 2})
    got, known = [], GOLDEN[name, start]
    for _ in known:
        gradient_norm = train_step(run)
        got.append((run.progress.train_loss, gradient_norm))
    assert np.allclose(got, known, rtol=1e-5, atol=1e-5), (
        f"(loss, gradient norm) of the first steps are {got} and were {known}: data order, initial weights, "
        "dropout, model, loss or optimizer has changed, and runs begun before can't be continued bit for bit. If that "
        "is meant, put the new numbers into GOLDEN and say so in the commit. If not: the first loss, from zeros, is "
        "ln of the vocabulary; the first norm depends on data, weights, dropout and model; the rest also on the "
        "optimizer."
    )


def test_dropout_is_another_with_another_seed(make_run: MakeRun) -> None:
    """Same weights, same batch, same step: what the seed alone changes."""
    losses = []
    for seed in (1, 2):
        run = make_run(model={"dropout": 0.5})
        batch = training.next_batch(run.corpus, run.config, 0)
        run.config = run.config.with_values(run={"seed": seed})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(training, "next_batch", lambda tokens, config, step, batch=batch: batch)
            train_step(run)
        losses.append(run.progress.train_loss)
    assert losses[0] != losses[1]


# ── when something is due ──────────────────────────────────────────────────────────────────────────────────────


def watched(run: Run, looks: list[tuple[int, bool]], interval: int = 0) -> Run:
    run.reporter = Notes()
    run.observers = [Observer(interval, lambda step, model: looks.append((step, model.training)))]
    return run


@pytest.mark.parametrize(
    ("train_keys", "logged", "validated", "saved"),
    [
        ({"log_interval": 3, "eval_interval": 4}, [3, 4, 6, 8, 9, 10], [4, 8, 10], [0, 4, 8, 10]),
        ({"log_interval": 5, "eval_interval": 0}, [5, 10], [10], [0, 10]),
        ({"log_interval": 99, "eval_interval": 99, "save_interval": 3}, [10], [10], [0, 3, 6, 9, 10]),
        ({"log_interval": 99, "eval_interval": 4, "save_interval": 3}, [4, 8, 10], [4, 8, 10], [0, 3, 4, 6, 8, 9, 10]),
        ({"log_interval": 99, "eval_interval": 5, "save_interval": 99}, [5, 10], [5, 10], [0, 5, 10]),
    ],
)
def test_intervals(
    make_run: MakeRun, train_keys: dict[str, int], logged: list[int], validated: list[int], saved: list[int]
) -> None:
    looks: list[tuple[int, bool]] = []
    run, saves = watched(make_run(train={**train_keys, "max_steps": 10}), looks), []
    run.save = lambda progress: saves.append((progress.step, math.isfinite(progress.val_loss)))
    train(run)
    assert isinstance(run.reporter, Notes)
    rows = run.reporter.rows
    assert list(rows) == logged
    assert sorted([*run.reporter.advanced, *logged]) == list(range(1, 11)), "the bar hears of each step once"
    assert [step for step, row in rows.items() if "val_loss" in row] == validated
    assert saves == [(step, step in validated) for step in saved], "a validation loss belongs to its own step alone"
    assert looks == [(step, False) for step in [0, *validated]]
    for step, row in rows.items():
        assert row.keys() == (NUMBERS | VALIDATION if step in validated else NUMBERS)
        assert row["tokens_seen"] == step * 4 * 16
        assert all(math.isfinite(value) for value in row.values())
        assert row["tokens_per_second"] > 0
    assert rows[10]["lr"] == pytest.approx(run.config.optim.lr / 10)
    assert rows[10]["val_perplexity"] == pytest.approx(math.exp(rows[10]["val_loss"]))


def test_an_observer_has_its_own_interval(make_run: MakeRun) -> None:
    looks: list[tuple[int, bool]] = []
    train(watched(make_run(train={"max_steps": 10}), looks, interval=4))
    assert looks == [(0, False), (4, False), (8, False)]


def test_without_a_validation_part_there_is_nothing_to_validate(make_run: MakeRun) -> None:
    looks: list[tuple[int, bool]] = []
    run = watched(make_run(data={"val_fraction": 0.0}, train={"max_steps": 3, "eval_interval": 1}), looks)
    progress = train(run)
    assert isinstance(run.reporter, Notes)
    assert all(row.keys() == NUMBERS for row in run.reporter.rows.values())
    assert math.isnan(progress.val_loss) and progress.best_val_loss == math.inf


def test_validation_reads_a_fixed_beginning_of_a_long_part(make_run: MakeRun) -> None:
    run = make_run(train={"max_steps": 1, "eval_tokens": 40})
    run.reporter = notes = Notes()
    train(run)
    part = evaluate(run.model, run.corpus.val[:41], run.config, run.corpus.tokenizer.byte_lengths)
    assert part.n_token == 40
    assert notes.rows[1]["val_loss"] == part.loss


def test_early_stop(make_run: MakeRun) -> None:
    """With no learning no validation is better than the first: two more, and it ends, saved."""
    run, saves = make_run(optim={"lr": 0.0, "adam_lr": 0.0}, train={"eval_interval": 3, "early_stop": 2}), []
    run.reporter, run.save = Notes(), lambda progress: saves.append(progress.step)
    progress = train(run)
    assert progress.step == 9
    assert saves == [0, 3, 6, 9]
    assert run.reporter.said == ["stopped at step 9: no better in 2 validations (train.early_stop)"]


def test_a_stop_ends_after_the_step_and_saves_once(make_run: MakeRun) -> None:
    run, saves = make_run(), []
    run.save = lambda progress: saves.append(progress.step)
    run.should_stop = lambda: run.progress.step == 13
    assert train(run).step == 13
    assert saves == [0, 10, 13]


def test_a_stop_before_the_first_step_saves_the_beginning(make_run: MakeRun) -> None:
    run, saves = make_run(), []
    run.save, run.should_stop = lambda progress: saves.append(progress.step), lambda: True
    assert train(run).step == 0
    assert saves == [0]


# ── numbers that are none ──────────────────────────────────────────────────────────────────────────────────────


def test_a_loss_that_is_no_number_stops_before_the_weights_change(make_run: MakeRun) -> None:
    run = make_run()
    for _ in range(5):
        train_step(run)
    embedding = run.model.get_parameter("token_embedding.weight")
    with torch.no_grad():
        embedding[:, 0] = math.nan
    before, state = weights(run.model), {k: v.clone() for k, v in run.optimizers.state().items()}
    with pytest.raises(NonFiniteError, match="step 6: loss nan"):
        train_step(run)
    assert run.progress.step == 5
    assert all(np.array_equal(before[n], t, equal_nan=True) for n, t in weights(run.model).items())
    assert equal(state, run.optimizers.state())


def test_a_gradient_that_is_no_number_stops_before_the_weights_change(make_run: MakeRun) -> None:
    run = make_run()
    train_step(run)
    before = weights(run.model)
    run.model.get_parameter("token_embedding.weight").register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(NonFiniteError, match=r"step 2: loss \d.*, gradient norm (inf|nan)"):
        train_step(run)
    assert equal(before, weights(run.model))


@pytest.mark.parametrize("interval", ["eval_interval", "save_interval"])
def test_spoiled_weights_are_neither_shown_nor_saved(make_run: MakeRun, interval: str) -> None:
    """Loss and gradient of a step are those before its update; what the update spoils is noticed all the same."""
    run, saves = make_run(train={"eval_interval": 0, interval: 4}), []
    run.reporter, run.save = Notes(), lambda progress: saves.append(progress.step)
    update = run.optimizers.step

    def spoil() -> None:
        update()
        if run.progress.step == 7:  # the eighth update
            with torch.no_grad():
                run.model.get_parameter("token_embedding.weight")[3] = math.inf

    run.optimizers.step = spoil
    with pytest.raises(NonFiniteError, match="step 8: its update left weights whose logits are not finite"):
        train(run)
    assert saves == [0, 4]
    assert max(run.reporter.rows) == 7


def test_a_wild_learning_rate_ends_in_a_stop(make_run: MakeRun) -> None:
    run = make_run(
        model={"tie_embeddings": False, "logit_softcap": 0.0, "qk_norm": False, "embedding_norm": False},
        optim={"name": "adamw", "lr": 1e25, "grad_clip": 0.0},
    )
    with pytest.raises(NonFiniteError, match="step"):
        train(run)


# ── speed ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_speed_counts_the_time_of_steps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    progress = Progress(step=7, tokens_seen=5000, seconds=30.0)
    meter = SpeedMeter(progress)
    for seconds in (2.0, 3.0):
        now += seconds
        progress.tokens_seen += 1000
        meter.count(progress)
    assert meter.tokens_per_second() == pytest.approx(400)
    assert progress.seconds == pytest.approx(35), "a resumed run's clock goes on"
    now += 50.0  # a validation
    meter.skip()
    now += 4.0
    progress.tokens_seen += 1000
    meter.count(progress)
    assert meter.tokens_per_second() == pytest.approx(250)
    assert progress.seconds == pytest.approx(89)


def test_logged_speed_leaves_out_all_but_the_steps(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that moves 2 s in an update and 100 s in each look at the model and each checkpoint."""
    run, now = make_run(train={"max_steps": 6, "eval_interval": 3}), 0.0
    update = run.optimizers.step

    def pass_time(seconds: float) -> None:
        nonlocal now
        now += seconds

    def slow_update() -> None:
        update()
        pass_time(2)

    monkeypatch.setattr("time.perf_counter", lambda: now)
    monkeypatch.setattr(run.optimizers, "step", slow_update)
    run.observers = [Observer(0, lambda _step, _model: pass_time(100))]
    run.save = lambda _progress: pass_time(100)
    run.reporter = notes = Notes()
    train(run)
    assert [row["tokens_per_second"] for row in notes.rows.values()] == [4 * 16 / 2] * 6
    assert [row["seconds"] for row in notes.rows.values()] == [202, 204, 206, 408, 410, 412]
