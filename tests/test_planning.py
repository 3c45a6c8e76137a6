"""A training of so many minutes: what is chosen, on machines whose pace is made up, and one that is truly trained."""

import random
import tomllib
from typing import Any

import pytest
from conftest import ENGLISH, Script, Tables, sentences
from running import TRAIN, as_options
from tiny_runs import assert_same_bits, rows

from minigpt import planning
from minigpt.config import Config, merge, validate
from minigpt.corpus import Corpus
from minigpt.errors import UserError
from minigpt.launch import start
from minigpt.pace import Pace, duration
from minigpt.planning import blocks_size, plan_training, work

FREE = {"run": ["dir", "name"], "data": ["source", "cache_dir"]}  # what a user has to set
VALIDATION = 0.1


class Machine:
    """One that does so many multiplications a second on a thread, and is slowed by each thread beyond its best number.

    It stands in for the clock of ``minigpt.pace``.
    """

    def __init__(self, rate: float, best_threads: int = 2) -> None:
        self.rate, self.best_threads = rate, best_threads

    def update_seconds(self, config: Config, corpus: Corpus) -> float:
        threads = config.run.threads or 1
        speed = min(threads, self.best_threads) / (1 + max(0, threads - self.best_threads))
        tokens = config.train.batch_size * config.model.context_length
        return 0.001 * config.model.n_layer + 6 * tokens * work(config, corpus) / (self.rate * speed)

    def measured_pace(self, config: Config, corpus: Corpus, *, seconds: float) -> Pace:
        return Pace(self.update_seconds(config, corpus), VALIDATION, memory=0)


@pytest.fixture
def asked(tiny: Tables) -> Tables:
    """A user who says what to read and how long."""
    tables: Tables = {section: {key: tiny[section][key] for key in keys} for section, keys in FREE.items()}
    return merge(tables, {"train": {"minutes": 5}, "run": {"device": "cpu", "threads": 1}})


@pytest.fixture
def plan(asked: Tables, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``plan(Machine(1e10), train={"minutes": 1})``: what is planned there, in a moment when the clock stands still."""

    def call(machine: Machine, **tables: dict[str, Any]) -> tuple[Config, Pace]:
        for name in ("update_seconds", "measured_pace"):
            monkeypatch.setattr(planning, name, getattr(machine, name))
        monkeypatch.setattr(planning.time, "monotonic", lambda: 1000.0)
        answer = plan_training(merge(asked, tables), begun=1000.0)
        assert answer
        return validate(answer.tables), answer.pace

    return call


@pytest.mark.parametrize("minutes", [0.5, 5, 60])
@pytest.mark.parametrize("rate", [3e9, 1e11])
def test_the_time_is_filled(plan: Any, minutes: float, rate: float) -> None:
    config, pace = plan(Machine(rate), train={"minutes": minutes})
    assert pace.seconds(config) <= 60 * minutes + VALIDATION
    assert pace.seconds(config.with_values(train={"max_steps": config.train.max_steps + 2})) > 60 * minutes - VALIDATION
    assert config.train.minutes == 0, "the other numbers say it all"
    assert 0.75 < config.train.max_steps / config.train.eval_interval / planning.VALIDATIONS <= 1.01


def test_what_the_clock_has_shown_already_is_taken_off(plan: Any, asked: Tables) -> None:
    plan(Machine(1e10))
    late = plan_training(asked, begun=900.0)
    assert late
    assert late.pace.seconds(validate(late.tables)) == pytest.approx(200, abs=1)
    with pytest.raises(UserError, match=r"have taken 280 s.*give 19 or more"):
        plan_training(asked, begun=720.0)


def test_more_time_or_a_faster_machine_trains_a_larger_network(
    plan: Any, asked: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "PARAMETERS_A_TOKEN", 1e6)  # else so short a text would bound them
    plans = [
        plan(Machine(rate), train={"minutes": minutes})[0]
        for rate, minutes in ((3e8, 1), (3e9, 1), (3e9, 10), (3e10, 30))
    ]
    grown = [blocks_size(config) for config in plans]
    assert grown == sorted(grown) and len(set(grown)) == len(grown)
    assert plans[-1].model.context_length >= plans[0].model.context_length


def test_a_short_text_gets_characters_a_small_network_and_dropout(plan: Any) -> None:
    config, _ = plan(Machine(1e11), train={"minutes": 60})
    assert config.data.tokenizer == "char"
    assert blocks_size(config) <= planning.PARAMETERS_A_TOKEN * 3000
    assert config.model.dropout == 0.4


def test_a_text_that_seldom_has_its_characters_gets_few_and_large_updates(plan: Any, tiny: Tables) -> None:
    chance = random.Random(1)
    with open(tiny["data"]["source"], "w", encoding="utf-8") as file:
        file.write("".join(chr(0x4E00 + chance.randrange(1500)) for _ in range(15_000)))
    often = plan(Machine(1e11), data={"tokenizer": "byte"})[0]
    seldom = plan(Machine(1e11))[0]
    assert (often.optim.adam_lr, seldom.optim.adam_lr) == (0.01, planning.SELDOM_RATE)
    assert seldom.train.max_steps < 2 * planning.KNOWN_BY_HEART * 10**1.5 < often.train.max_steps
    assert seldom.model.dropout < often.model.dropout
    tokens_a_pass = seldom.train.batch_size / seldom.train.grad_accumulation * seldom.model.context_length
    assert seldom.train.grad_accumulation > 1 and tokens_a_pass == planning.PASS_TOKENS, "memory has its limits"
    assert plan(Machine(1e11), train={"batch_size": 7})[0].train.grad_accumulation == 1
    asked = plan(Machine(1e11), optim={"adam_lr": 0.02})[0]
    assert asked.optim.adam_lr == 0.02


def test_settings_of_the_user_are_held_against_what_is_planned(plan: Any) -> None:
    """Not against defaults, which nobody asked for."""
    assert plan(Machine(1e10), train={"grad_accumulation": 3})[0].train.batch_size % 3 == 0
    assert plan(Machine(1e10), model={"n_head": 3})[0].model.d_model in (96, 192, 384)
    assert plan(Machine(1e10), model={"n_kv_head": 3})[0].model.n_head in (3, 6, 12)
    for width, n_head in ((48, 2), (50, 1), (256, 4), (200, 2), (384, 6)):
        model = plan(Machine(1e10), model={"d_model": str(width)})[0].model
        assert (model.d_model, model.n_head) == (width, n_head)
    assert plan(Machine(1e10), optim={"name": "adamw"})[0].optim.lr == 0.002
    assert plan(Machine(1e10), optim={"name": "adamw", "lr": 0.001})[0].optim.lr == 0.001


def test_a_long_text_gets_a_vocabulary_that_grows(plan: Any, tiny: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    text = sentences(ENGLISH, 2000, " ", ".\n")
    with open(tiny["data"]["source"], "w", encoding="utf-8") as file:
        file.write(text)
    assert len(text) < planning.CHARACTERS
    monkeypatch.setattr(planning, "CHARACTERS", 50_000)
    data = plan(Machine(1e10))[0].data
    assert (data.tokenizer, data.vocab_size) == ("bpe", 512)
    monkeypatch.setattr(planning, "text_length", lambda _data: 20_000_000)
    assert planning.chosen_tokenizer(tiny | {"data": {"source": "x"}})["vocab_size"] == 4096


def test_what_the_user_has_set_stays(plan: Any) -> None:
    model = {"d_model": 48, "n_head": 3, "dropout": 0.25, "context_length": 24, "position": "learned"}
    config, pace = plan(
        Machine(1e10),
        model=model,
        train={"batch_size": 6, "grad_accumulation": 3, "eval_interval": 7},
        data={"tokenizer": "byte"},
        optim={"name": "adamw", "lr": 0.001},
    )
    assert {key: getattr(config.model, key) for key in model} == model
    assert (config.train.batch_size, config.train.eval_interval, config.data.tokenizer) == (6, 7, "byte")
    assert pace.seconds(config) == pytest.approx(300, abs=1)
    config, _ = plan(Machine(1e10), train={"grad_accumulation": 4})
    assert config.train.batch_size % 4 == 0
    model = plan(Machine(1e10), model={"n_head": 16})[0].model
    assert model.n_head == 16 and model.d_model % 16 == 0


def test_what_can_not_be_is_told(plan: Any) -> None:
    with pytest.raises(UserError, match=r"train\.minutes and train\.max_steps both"):
        plan(Machine(1e10), train={"max_steps": 10})
    with pytest.raises(UserError, match=r"must be a multiple of model\.n_head = 7"):
        plan(Machine(1e10), model={"n_head": 7})
    with pytest.raises(UserError, match="5000"):
        plan(Machine(1e10), model={"context_length": 5000})


@pytest.mark.parametrize(
    ("cores", "best", "chosen"), [(1, 1, 1), (2, 2, 2), (6, 4, 4), (6, 6, 6), (16, 8, 8), (4, 1, 1)]
)
def test_the_quickest_number_of_threads(
    plan: Any, monkeypatch: pytest.MonkeyPatch, cores: int, best: int, chosen: int
) -> None:
    monkeypatch.setattr(planning, "choose_threads", lambda asked: asked or cores)
    assert plan(Machine(1e10, best), run={"threads": 0})[0].run.threads == chosen
    assert plan(Machine(1e10, best), run={"threads": 1})[0].run.threads == 1


def test_an_apple_gpu_that_is_slower_than_the_processor_is_left_alone(
    plan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mac(Machine):
        def __init__(self, gpu: float) -> None:
            super().__init__(1e10)
            self.gpu = gpu

        def update_seconds(self, config: Config, corpus: Corpus) -> float:
            return super().update_seconds(config, corpus) / (self.gpu if config.run.device == "mps" else 1)

    monkeypatch.setattr(
        planning, "machine_choices", lambda config: {"device": config.run.device.replace("auto", "mps")}
    )
    for gpu, device in ((0.3, "cpu"), (30, "mps")):
        assert plan(Mac(gpu), run={"device": "auto", "threads": 0})[0].run.device == device


def test_a_truly_trained_plan_can_be_repeated_from_its_numbers(
    asked: Tables, tiny: Tables, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan is made on this machine, then cut short, for a test has no minutes."""
    steps = Pace.steps
    monkeypatch.setattr(Pace, "steps", lambda pace, config, seconds: min(24, steps(pace, config, seconds)))
    monkeypatch.setattr(planning, "REHEARSAL_SHARE", 0.0)
    small = {"model": {"n_layer": 1, "d_model": 32}, "train": {"minutes": 1, "batch_size": 8}}
    answer = script(TRAIN, *as_options(merge(asked, small)))
    assert answer.code == 0
    assert "ms an update, measured" in answer.out + answer.err
    assert "--train.minutes 3 goes further" in answer.out
    run = validate(tiny).run
    folder = planning.Path(run.dir) / run.name
    saved = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
    assert (saved["train"]["minutes"], saved["train"]["max_steps"]) == (0, 24)
    again = start(merge(saved, {"run": {"name": "again"}}))
    assert rows(again.path) == rows(folder)
    assert_same_bits(again.path, folder)


def test_a_dry_run_tells_and_leaves_nothing(asked: Tables, script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "REHEARSAL_SHARE", 0.0)
    answer = script(TRAIN, *as_options(asked), "--model.n-layer", 1, "--model.d-model", 16, "--dry-run")
    assert answer.code == 0
    for word in ("parameters", "tokens to train on", "epochs", "ms an update, measured", "until about", "of memory"):
        assert word in answer.out
    assert not planning.Path(asked["run"]["dir"]).exists()


def test_minutes_are_for_new_runs(asked: Tables, script: Script, tiny: Tables) -> None:
    start(tiny)
    folder = planning.Path(tiny["run"]["dir"]) / tiny["run"]["name"]
    answer = script(TRAIN, "--resume", folder, "--train.minutes", 5)
    assert answer.code == 2
    assert "train.minutes plans a new run" in answer.err and "--train.max-steps 40" in answer.err
    assert script(TRAIN, "--resume", folder, "--dry-run").code == 2


@pytest.mark.parametrize(
    ("seconds", "words"), [(3.4, "3 s"), (59.6, "1 min 0 s"), (290, "4 min 50 s"), (3 * 3600 + 299, "3 h 4 min")]
)
def test_durations_in_words(seconds: float, words: str) -> None:
    assert duration(seconds) == words
