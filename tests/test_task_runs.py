"""Training on a task: what counts, what is validated, how it is judged, and the links that heads have to find."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Tables
from running import EVALUATE, ROOT, Script
from tiny_runs import after, begun, new_run, rows, told
from torch.nn import functional as F

from minigpt.checkpoint import find_checkpoint
from minigpt.config import TaskConfig, merge, validate
from minigpt.corpora import corpus_of
from minigpt.corpus import batch
from minigpt.inspection.links import link_masses, task_texts
from minigpt.inspection.nulls import fresh_network
from minigpt.inspection.subject import load_subject
from minigpt.launch import resume, start
from minigpt.tasks.synthetic import NONE, TASKS, Examples, Task, examples
from minigpt.training import UNCOUNTED, next_batch, train_step

COMPARE = ROOT / "scripts" / "compare_attention.py"
TASK = {"symbols": 8, "length": 4, "examples": 512, "held_out": 64}


@pytest.fixture
def task(tiny: Tables) -> Tables:
    changes = {
        "data": {"source": "task:copy"},
        "model": {"context_length": 10, "attention_init": "zero", "tie_embeddings": False},
        "train": {"batch_size": 32, "max_steps": 20, "eval_tokens": 0},
        "task": TASK,
    }
    return merge(tiny, changes)


def test_a_batch_is_whole_examples(task: Tables) -> None:
    run = new_run(task)
    seen = set()
    for step in range(16):  # one epoch
        inputs, targets = next_batch(run.corpus, run.config, step)
        assert inputs.shape == targets.shape == (32, 10) and (inputs[:, 0] == 0).all()
        counted = targets != UNCOUNTED
        assert (counted == counted[0]).all() and counted[0].nonzero().flatten().tolist() == [5, 6, 7, 8]
        assert (targets[:, 5:9] == inputs[:, 1:5]).all()
        seen |= {row.numpy().tobytes() for row in inputs}
    all_rows = run.corpus.train[:-1].reshape(-1, 10).astype(np.int64)
    assert seen == {row.tobytes() for row in all_rows}


def test_windows_of_a_text_still_begin_anywhere() -> None:
    tokens = np.arange(100)
    starts = {int(batch(tokens, seed=1, step=s, batch_size=1, context_length=8)[0][0, 0]) % 8 for s in range(200)}
    fixed = {
        int(batch(tokens, seed=1, step=s, batch_size=1, context_length=8, examples=True)[0][0, 0]) for s in range(12)
    }
    assert len(starts) > 4 and fixed == set(range(0, 96, 8))


def test_the_loss_counts_the_answers_alone(task: Tables) -> None:
    run = new_run(task)
    inputs, targets = next_batch(run.corpus, run.config, 0)
    with torch.no_grad():
        logits = run.model(inputs)
    expected = F.cross_entropy(logits[:, 5:9].flatten(0, 1), targets[:, 5:9].flatten())
    train_step(run)
    assert run.progress.train_loss == pytest.approx(expected.item(), rel=1e-6)


def test_a_run_learns_and_is_judged(task: Tables, script: Script) -> None:
    run = start(merge(task, {"train": {"max_steps": 120, "eval_interval": 60}, "optim": {"adam_lr": 0.02}})).path
    validated = [row for row in rows(run) if "val_loss" in row]
    assert validated[-1]["val_accuracy"] > max(0.5, validated[0]["val_accuracy"] - 0.01)
    found = script(EVALUATE, run, "--json").json
    assert found["tokens"] == 64 * 4 and found["loss"] == pytest.approx(validated[-1]["val_loss"], rel=1e-4)
    assert found["accuracy"] == pytest.approx(validated[-1]["val_accuracy"])
    test = script(EVALUATE, run, "--source", "test")
    assert test.code == 0 and "right: " in test.out and "256 tokens in windows of 10" in test.out

    untrained = script(EVALUATE, run, "--which", 0, "--json").json
    assert untrained["accuracy"] < 0.3, "of equal logits one is the answer, not all"
    ablated = script(COMPARE, "ablate", run, "--method", "zero", "--json").json
    assert ablated["loss"] == pytest.approx(found["loss"], abs=0.02), "the answers alone, of whole examples"
    assert max(row["change"]["mean"] for row in ablated["effects"]) > 0.05
    assert "--stride 5: a task's examples" in script(EVALUATE, run, "--stride", 5).err
    assert "--length = 5: a task's examples have 10 tokens" in script(COMPARE, "ablate", run, "--length", 5).err

    links = script(COMPARE, "links", run, "--texts", 5, "--fresh", 1, "--json").json
    assert links["links"] == 20 and {row["kind"] for row in links["masses"]} == {"copy", "overall"}
    other = Path(shutil.copytree(run, run.with_name("other")))
    both = script(COMPARE, "links", run, "--texts", 5, "--seeds", other)
    assert both.code == 0 and str(run) in both.out and str(other) in both.out
    table = script(COMPARE, "links", run, "--texts", 5, "--seeds", run, "--json").json
    assert 0 <= table[str(run)]["right"] <= 1 and 0 < table[str(run)]["mass"] <= 1


def test_validation_takes_whole_examples_and_shows_answers(task: Tables, capfd: pytest.CaptureFixture[str]) -> None:
    run = begun(task, train={"eval_tokens": 3, "max_steps": 2, "eval_interval": 2}).path
    (row,) = (row for row in rows(run) if "val_loss" in row)
    assert row["val_loss"] > 0.5
    said = capfd.readouterr().err
    assert "task:copy: 512 examples to train on, 64 to validate on with 256 answers" in said
    lines = [line for line in said.splitlines() if " answers " in line and "right is" in line]
    assert len(lines) == 2 and all(line.split("|")[0] == line.split()[-1] for line in lines)


def test_links_are_read_where_the_answer_is_due(task: Tables) -> None:
    texts = task_texts(validate(task), 6)
    for text in texts:
        assert [(link.word, link.cause) for link in text.links] == [((6 + n,), (1 + n,)) for n in range(4)]
        assert all(text.tokens[link.word[0]] == text.tokens[link.cause[0]] for link in text.links)
    parity = merge(task, {"data": {"source": "task:parity"}})
    assert told(task_texts, validate(parity), 6).startswith("task:parity: no token alone fixes an answer")


def answer_from(place: Callable[[int], int]) -> Callable[..., Examples]:
    """A task whose answer after token i ≥ 2 is the token at ``place(i)``."""

    def draw(generator: np.random.Generator, count: int, length: int, _options: object) -> Examples:
        tokens = np.concatenate([np.zeros((count, 1), int), 2 + generator.integers(0, 8, (count, length - 1))], axis=1)
        causes = np.array([NONE, NONE, *(place(i) for i in range(2, length))])
        return Examples(tokens, np.where(causes >= 0, tokens[:, causes], NONE), np.tile(causes, (count, 1)))

    return draw


@pytest.mark.parametrize(("name", "place"), [("previous", lambda i: i - 1), ("first", lambda _i: 1)])
def test_what_has_to_be_read_is_what_a_trained_head_reads(
    task: Tables, monkeypatch: pytest.MonkeyPatch, name: str, place: Callable[[int], int]
) -> None:
    monkeypatch.setitem(TASKS, name, Task(TASKS["copy"].alphabet, answer_from(place)))
    changes: dict[str, Any] = {
        "data": {"source": f"task:{name}"},
        "model": {"n_head": 1},
    }  # so that it has to be this one
    changes["train"] = {"max_steps": 300, "eval_interval": 300}
    subject = load_subject(start(merge(task, changes)).path)
    masses = link_masses(subject.model, task_texts(subject.checkpoint.config, 20)).first.mean(axis=0)
    assert rows(Path(task["run"]["dir"]) / "tiny")[-1]["val_accuracy"] > 0.9
    fresh = fresh_network(subject.model.config, subject.model.vocab_size, 2)
    before = link_masses(fresh, task_texts(subject.checkpoint.config, 20)).first.mean(axis=0)
    assert masses.max() > 0.5 > 0.35 > before.max()


def test_resumed_bit_for_bit(task: Tables) -> None:
    whole = begun(task).path
    half = begun(task, after(10), run={"name": "half"}).path
    resume(half, {})
    assert rows(whole)[-1] == rows(half)[-1]
    one, other = (find_checkpoint(run, "last").tensors("model") for run in (whole, half))
    assert all(one[name].tobytes() == other[name].tobytes() for name in one)
    assert "task.symbols: this run has 8, not 9" in told(resume, half, {"task": {"symbols": 9}})


def test_another_seed_is_another_corpus(task: Tables) -> None:
    one, other = (corpus_of(validate(merge(task, {"run": {"seed": seed}}))) for seed in (1, 2))
    assert one.fingerprint != other.fingerprint and not np.array_equal(one.train, other.train)


def test_what_cannot_be_is_told_before_there_is_a_folder(task: Tables) -> None:
    bad: list[tuple[dict[str, Any], str]] = [
        ({"data": {"source": "task:cpoy"}}, "data.source = task:cpoy: no such task; did you mean copy?"),
        ({"data": {"tokenizer": "bpe"}}, "data.source = task:copy: the tokens of a task are single characters"),
        ({"data": {"vocab_size": 300}}, "data.source = task:copy: the tokens of a task are single characters"),
        ({"task": {"length": 5}}, "model.context_length = 10: the task copy needs 12 tokens"),
        ({"task": {"lenght": 5}}, "task.lenght: unknown key; did you mean task.length?"),
        ({"task": {"order": "backwards"}}, "task.order = backwards: must be one of same, reversed, sorted"),
        ({"task": {"examples": 2**31 - 1}}, "task:copy: 2,147,483,647 examples of 10 tokens are too many; 5,000,000"),
        ({"train": {"minutes": 1}}, "train.minutes chooses a network for a text"),
    ]
    for changes, sentence in bad:
        tables = merge(task, changes)
        if "minutes" in changes.get("train", {}):
            tables["train"].pop("max_steps")
        assert told(start, tables).startswith(sentence)
    assert not Path(task["run"]["dir"]).exists()


def test_weights_go_on_with_the_same_symbols_alone(task: Tables) -> None:
    parent = start(merge(task, {"train": {"max_steps": 2}})).path
    same = {"run": {"name": "next"}, "task": {"order": "reversed"}, "train": {"max_steps": 4}}
    assert find_checkpoint(start(same, init_from=parent).path, "last").step == 4
    other = {"run": {"name": "other"}, "task": {"symbols": 9}}
    assert "trained with other symbols" in told(start, other, init_from=parent)


def test_tales_are_a_task_too() -> None:
    assert validate({"data": {"source": "task:tales"}}).data.source == "tales"


def test_an_option_of_another_task_is_told(task: Tables) -> None:
    def notes(source: str, **options: object) -> tuple[str, ...]:
        return corpus_of(validate(merge(task, {"data": {"source": source}, "task": options}))).notes

    assert notes("task:copy", order="reversed") == ()
    assert notes("task:brackets", order="sorted", depth=3) == tuple(
        f"task.{key} changes nothing: the task brackets has no such option" for key in ("order", "symbols", "length")
    )


def test_every_option_of_a_task_changes_its_examples() -> None:
    other = {"order": "sorted", "symbols": 40, "length": 3, "distance": 8, "depth": 2}
    for name, task in TASKS.items():
        usual = examples(name, TaskConfig(), length=24, count=8, seed=1, part="train").tokens
        for key in other:
            changed = TaskConfig.model_validate({key: other[key]})
            drawn = examples(name, changed, length=24, count=8, seed=1, part="train").tokens
            assert np.array_equal(usual, drawn) == (key not in task.options), f"{name}, {key}"
