"""The table of recurrent networks against the Transformer: what is counted is right, what is learned is judged."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from running import ROOT, Script
from tiny_runs import told

from minigpt.checkpoint import find_checkpoint
from minigpt.model import GPT
from minigpt.recurrent import RecurrentLM
from minigpt.signals import StopSignal
from minigpt.studies import compare_learning
from minigpt.studies.compare_learning import Lesson, cell_of, learned, task, text
from minigpt.studies.compare_structure import (
    PARAMETERS,
    Extent,
    begun,
    by_distance,
    change_by_order,
    gradients,
    n_parameter,
    position,
    shape,
    steps,
    tokens_of,
)
from minigpt.studies.sweep import Cell, Result
from minigpt.studies.written_out import counted, explicit_attention, logits

COMPARE = ROOT / "scripts" / "compare_recurrent.py"
KINDS = ("gpt", "rnn", "lstm", "gru")


@pytest.fixture
def extent(tmp_path: Path) -> Extent:
    cache = str(tmp_path / "cache")
    return Extent(kinds=KINDS, quick=True, seeds=1, text="tales", cache_dir=cache, threads=1, folder=tmp_path / "runs")


@pytest.mark.parametrize("kind", KINDS)
def test_all_have_as_many_parameters(kind: str) -> None:
    assert n_parameter(shape(kind)) == begun(shape(kind)).n_parameter == pytest.approx(PARAMETERS, rel=0.04)


@pytest.mark.parametrize("kind", KINDS)
def test_written_out_is_the_module(kind: str) -> None:
    network, tokens_BT = begun(shape(kind)), tokens_of(12, 3)
    with torch.no_grad():
        torch.testing.assert_close(logits(network, tokens_BT), network(tokens_BT), atol=1e-6, rtol=1e-5)


def test_a_chain_grows_with_the_text_or_does_not(extent: Extent) -> None:
    chains = steps(replace(extent, kinds=("gpt", "lstm"))).numbers["chains"]
    assert chains["gpt"] == [13, 13, 13], "six products a block, one after the other, and the head"
    assert chains["lstm"] == [T + 2 for T in (64, 128, 256)], "T of one layer, one of the other, and the head"


def test_operations_are_those_of_the_matrices() -> None:
    network, length = begun(shape("rnn")), 10
    assert isinstance(network, RecurrentLM)
    matrices = sum(p.numel() for name, p in network.named_parameters() if p.ndim == 2 and "embedding" not in name)
    assert counted(network, tokens_of(length)).operations == 2 * matrices * length
    network = begun(shape("gpt"))
    matrices = sum(p.numel() for name, p in network.named_parameters() if p.ndim == 2 and "embedding" not in name)
    attention = 2 * 2 * 2 * length * length * 64  # layers, products, multiply and add
    assert counted(network, tokens_of(length)).operations == 2 * matrices * length + attention


def test_gradients_vanish_and_explode_with_the_scale(extent: Extent) -> None:
    found = gradients(extent).numbers
    small, large = found["rnn, matrices x 0.7"], found["rnn, matrices x 1.4"]
    assert small[-1] < 1e-6 * small[0] and large[-1] > 10 * large[0]
    assert min(found["gpt"]) > 0.1 * max(found["gpt"])


def test_a_gradient_by_hand() -> None:
    network = begun(shape("rnn", n_layer=1, d_model=8))
    tokens_BT = tokens_of(5, 8)
    for distance, expected in zip((1, 3), by_distance(network, 5, (1, 3)), strict=True):
        embedded = network.token_embedding(tokens_BT).detach().requires_grad_()
        x, _ = network.recurrent(embedded)  # type: ignore[operator]
        (x[:, -1] @ network.lm_head.weight[0]).sum().backward()
        assert embedded.grad is not None
        norms = embedded.grad[:, -1 - distance].norm(dim=-1)
        assert expected == pytest.approx(norms.log().mean().exp().item(), rel=1e-4)


def test_order_is_told_from_the_second_layer_on_by_the_mask_alone(extent: Extent) -> None:
    found = position(extent).numbers
    assert found["gpt, 1 layer, causal mask"][0] < 1e-6 < 0.01 < found["gpt, 2 layers, causal mask"][0]
    assert found["gpt, 1 layer, no mask"][0] < 1e-6 and found["gpt, 2 layers, no mask"][0] < 1e-6
    assert all(min(values[1:]) > 1e-3 for name, values in found.items() if name.startswith("gpt"))
    assert all(found[kind][0] > 1e-3 for kind in KINDS[1:])


def test_without_a_mask_what_comes_later_is_seen() -> None:
    network = begun(shape("gpt", n_layer=1))
    assert isinstance(network, GPT)
    tokens = tokens_of(6)
    other = tokens.clone()
    other[0, 5] = (other[0, 5] + 1) % 64
    with torch.no_grad():
        with explicit_attention(network, masked=False):
            assert (network(tokens)[0, 0] - network(other)[0, 0]).abs().max() > 1e-4
        assert torch.equal(network(tokens)[0, :5], network(other)[0, :5]), "and everything is as before"
        assert change_by_order(network) > 0


@pytest.mark.parametrize("kind", ["gpt", "lstm"])
def test_a_lesson_is_learned_with_the_kind_s_own_optimizer(extent: Extent, kind: str) -> None:
    lesson = task("brackets", 9, 150)
    result = learned(extent, lesson, cell_of(lesson, kind, 0.01 if kind == "lstm" else 0.03))
    config = find_checkpoint(Path(result.run), "last").config
    assert config.optim.name == ("muon" if kind == "gpt" else "adamw")
    assert (result.kind, config.model.kind) == (kind, kind)
    assert result.steps == 150 and result.accuracy > 0.7


def test_what_is_trained_is_not_trained_again(extent: Extent, monkeypatch: pytest.MonkeyPatch) -> None:
    lesson = task("copy", 12, 3, length=4)
    first = learned(extent, lesson, cell_of(lesson, "gpt", 0.01))
    monkeypatch.setattr("minigpt.launch.start", lambda *_words, **_options: pytest.fail("trained once more"))
    assert learned(extent, lesson, cell_of(lesson, "gpt", 0.01)) == first


def test_losses_by_place_are_parts_of_the_whole(extent: Extent) -> None:
    lesson = text("tales", 2)
    result = learned(extent, lesson, cell_of(lesson, "gru", 0.003))
    losses = compare_learning.loss_by_place(Path(result.run))
    whole = np.average(losses, weights=[end - first for first, end in compare_learning.PLACES])
    assert whole == pytest.approx(result.loss, rel=0.02)


@pytest.fixture
def short_lessons(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two steps each; the kinds that were trained, as they come."""
    real, trained = compare_learning.learned, []

    def short(extent: Extent, lesson: Lesson, cell: Cell) -> Result:
        result = real(extent, lesson, replace(cell, settings=cell.settings | {"train.max_steps": "2"}))
        trained.append(result.kind)
        return result

    monkeypatch.setattr(compare_learning, "learned", short)
    return trained


def test_the_command(script: Script, tmp_path: Path, short_lessons: list[str], extent: Extent) -> None:
    numbers = tmp_path / "all.json"
    words = ["--quick", "--threads", 1, "--text", "tales", "--cache-dir", tmp_path / "cache", "--json", numbers]
    rows = ["long-range", "parity", "language", "position"]
    answer = script(COMPARE, *words, "--run.dir", tmp_path / "runs", "--rows", *rows)
    assert answer.code == 0, answer.err
    assert all(len(line) <= 80 for line in answer.out.splitlines())
    found = json.loads(numbers.read_text(encoding="utf-8"))
    assert list(found["rows"]) == ["long-range", "position", "parity", "language"] and found["kinds"] == ["gpt", "lstm"]
    named = {f"{lesson}, {kind}" for lesson in ("recall", "copy") for kind in ("gpt", "lstm")}
    assert set(found["rows"]["long-range"]["accuracy"]) == named
    assert set(found["rows"]["language"]) == {"tales, gpt", "tales, lstm"} and found["rates"]["gpt"] == 0.03
    assert len(short_lessons) == compare_learning.trainings(replace(extent, kinds=("gpt", "lstm")), rows)


def test_an_interrupted_comparison_goes_on(
    script: Script, tmp_path: Path, short_lessons: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--quick", "--threads", 1, "--text", "tales", "--cache-dir", tmp_path / "cache"]
    words += ["--run.dir", tmp_path / "runs", "--run.name", "mine", "--rows", "parity"]
    with monkeypatch.context() as patch:
        patch.setattr(StopSignal, "__call__", lambda self: len(short_lessons) >= 2)
        patch.setattr(StopSignal, "exit_code", 130)
        answer = script(COMPARE, *words)
    assert answer.code == 130 and "parity" not in answer.out
    assert f"interrupted: what is trained is kept in {tmp_path / 'runs' / 'mine'}" in answer.err
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*.safetensors")}
    assert script(COMPARE, *words).code == 0
    assert before and all(path.stat().st_mtime_ns == when for path, when in before.items())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--rows", "step"], "--rows step: there is none; did you mean steps?; known are steps, operations"),
        (["--kinds", "ltsm"], "--kinds ltsm: there is none; did you mean lstm?; known are gpt, rnn, lstm, gru"),
        (["--seeds", "0"], "--seeds 0: must be at least 1"),
        (["--json", "no/such/file"], "--json no/such/file: can't be written"),
    ],
)
def test_mistakes(script: Script, words: list[str], sentence: str) -> None:
    answer = script(COMPARE, *words)
    assert answer.code == 2 and answer.err.startswith(f"error: {sentence}")


def test_a_task_that_does_not_fit_is_told(extent: Extent) -> None:
    lesson = task("recall", 9, 1, length=4)
    assert "the task recall needs 18 tokens" in told(learned, extent, lesson, cell_of(lesson, "gpt", 0.01))
