"""Heads replaced and taken out: what changes is what must, by networks set by hand, and nothing else."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hand_set import SIZE, hand_set_model, repeated_text, save_run
from hypothesis import given, settings
from hypothesis import strategies as st
from running import ROOT, Script
from torch import Tensor

from minigpt.attention import CausalSelfAttention
from minigpt.config import validate
from minigpt.errors import UserError
from minigpt.inspection import intervene
from minigpt.inspection.capture import looking
from minigpt.inspection.heads import Head
from minigpt.inspection.intervene import (
    Method,
    ablate,
    bootstrap,
    closeness_to,
    derangement,
    forced_by,
    heads_of,
    losses_under,
    pair_excess,
    sequence_losses,
    substitutes,
)
from minigpt.inspection.patterns import parse_reference
from minigpt.model import GPT

COMPARE = ROOT / "scripts" / "compare_attention.py"
CONTEXT, VOCAB = 12, 20
METHODS: tuple[Method, ...] = ("zero", "mean", "resample")


def random_model(**changes: Any) -> GPT:
    """Two layers of four heads whose weights are all away from zero."""
    keys = {"n_layer": 2, "n_head": 4, "d_model": 32, "context_length": CONTEXT, **changes}
    torch.manual_seed(3)
    model = GPT(validate({"model": keys}).model, VOCAB)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def random_tokens(count: int = 5, length: int = CONTEXT) -> np.ndarray:
    return np.random.default_rng(1).integers(VOCAB, size=(count, length))


def repeated_texts(count: int = 6) -> np.ndarray:
    return np.stack([repeated_text(seed=seed) for seed in range(count)])


def layer_of(model: GPT, number: int) -> CausalSelfAttention:
    layer = model.blocks[number].attn
    assert isinstance(layer, CausalSelfAttention)
    return layer


def columns(model: GPT, head: Head) -> Tensor:
    """The output projection's columns that read a head: (D, K)."""
    size = model.config.head_dim
    return layer_of(model, head.layer).output_linear.weight[:, head.head * size : (head.head + 1) * size]


# ── the loss ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_loss_is_the_mean_over_the_next_tokens_of_each_sequence() -> None:
    model, tokens = random_model(), random_tokens()
    with torch.inference_mode():
        logits = model(torch.from_numpy(tokens)).double().numpy()
    log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    expected = [-np.mean([log_p[n, t, tokens[n, t + 1]] for t in range(CONTEXT - 1)]) for n in range(len(tokens))]
    np.testing.assert_allclose(sequence_losses(model, tokens), expected, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_the_number_of_passes_changes_nothing(method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sequence gets its own replacement, wherever passes are cut."""
    model, tokens, reference = random_model(n_kv_head=2), random_tokens(), parse_reference("induction", None)
    groups = [(Head(0, 1), Head(1, 2))]

    def measure() -> list[np.ndarray]:
        forced = losses_under(model, tokens, [(Head(1, 1), reference)])
        return [*ablate(model, tokens, groups, method=method).values(), *forced.values()]

    together = measure()
    monkeypatch.setattr(intervene, "PASS_TOKENS", 2 * CONTEXT)
    np.testing.assert_allclose(measure(), together, atol=1e-5)


# ── replaced by a reference ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("changes", [{}, {"n_kv_head": 2}], ids=["plain", "grouped heads"])
def test_a_heads_own_pattern_changes_nothing(changes: dict[str, Any]) -> None:
    model, tokens = random_model(**changes), random_tokens()
    with looking(model) as looks:
        model(torch.from_numpy(tokens))
    before = sequence_losses(model, tokens)
    for head in heads_of(model):
        weights = looks[head.layer].weights[:, head.head]
        forced = sequence_losses(model, tokens, attention={head: lambda part, own, weights=weights: weights[part]})
        np.testing.assert_allclose(forced, before, atol=1e-6)


def test_rows_without_a_reference_stay_the_heads_own() -> None:
    tokens = np.array([[1, 2, 3, 1, 2], [4, 4, 5, 6, 7]])
    own = torch.rand(2, 5, 5)
    forced = forced_by(parse_reference("induction", None), tokens)(slice(0, 2), own)
    expected = own.clone()
    expected[0, 3] = torch.tensor([0.0, 1, 0, 0, 0])
    expected[0, 4] = torch.tensor([0.0, 0, 1, 0, 0])
    expected[1, 1] = torch.tensor([0.0, 1, 0, 0, 0])
    assert torch.equal(forced, expected)


def test_closeness_beside_use_in_a_network_set_by_hand() -> None:
    """The previous head feeds the induction head; a uniform head that nobody reads is far from all and of no use."""
    model, tokens = hand_set_model(), repeated_texts()
    references = [parse_reference(name, None) for name in ("previous", "induction", "first")]
    near = closeness_to(model, tokens, references)
    before = sequence_losses(model, tokens)
    losses = losses_under(model, tokens, [(head, ref) for head in heads_of(model) for ref in references])
    use = {(str(head), name): (loss - before).mean() for (head, name), loss in losses.items()}
    assert near["previous"].total_variation[0, 0] < 0.01 and abs(use["L0H0", "previous"]) < 0.01
    assert near["induction"].total_variation[1, 0] < 0.01 and abs(use["L1H0", "induction"]) < 0.01
    assert use["L0H0", "first"] > 1 and use["L1H0", "first"] > 1 and use["L1H0", "previous"] > 1
    assert near["previous"].total_variation[1, 2] > 0.5 and abs(use["L1H2", "previous"]) < 1e-6


# ── taken out ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_zero_takes_a_heads_contribution_away() -> None:
    tokens = random_tokens()
    for head in (Head(0, 2), Head(1, 0)):
        model = random_model(bias="all")
        (loss,) = ablate(model, tokens, [(head,)], method="zero").values()
        before = sequence_losses(model, tokens)
        with torch.no_grad():
            columns(model, head).zero_()
        np.testing.assert_allclose(sequence_losses(model, tokens), loss, atol=1e-6)
        assert np.abs(loss - before).max() > 1e-3


@pytest.mark.parametrize("method", METHODS)
def test_a_head_that_nobody_reads_may_give_what_it_will(method: Method) -> None:
    model, tokens, head = random_model(), random_tokens(), Head(0, 3)
    with torch.no_grad():
        columns(model, head).zero_()
    losses = ablate(model, tokens, [(head,), (Head(0, 2),)], method=method)
    np.testing.assert_allclose(losses[head,], sequence_losses(model, tokens), atol=1e-6)
    assert np.abs(losses[Head(0, 2),] - losses[head,]).max() > 1e-3


def test_what_is_given_instead() -> None:
    model, tokens, part = random_model(), random_tokens(), slice(1, 4)
    with looking(model) as looks:
        model(torch.from_numpy(tokens))
    results = {head: looks[head.layer].heads[:, head.head] for head in heads_of(model)}
    given = {method: substitutes(model, tokens, method, seed=5) for method in METHODS}
    donors = derangement(len(tokens), 5)
    for head, own in results.items():
        assert given["zero"][head](part, own[part]).abs().max() == 0
        mean = given["mean"][head](part, own[part])
        assert mean.shape == own[part].shape and (mean == mean[0, 0]).all()
        torch.testing.assert_close(mean[0, 0], own.mean(dim=(0, 1)))
        assert torch.equal(given["resample"][head](part, own[part]), own[donors][part])


@given(st.integers(2, 40), st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_everyone_gets_another(count: int, seed: int) -> None:
    order = derangement(count, seed)
    assert sorted(order) == list(range(count)) and (order != np.arange(count)).all()


@pytest.mark.parametrize(("method", "most"), [("zero", 0.01), ("mean", 0.01), ("resample", 0.5)])
def test_two_heads_that_stand_in_for_each_other(method: Method, most: float) -> None:
    """Two previous-token heads of half the strength: neither matters alone, both together carry the induction.

    But another sequence's previous tokens are as strong as what is left, so that a resample confuses.
    """
    twice = hand_set_model((("previous", "previous", "uniform", "self"), ("induction", "first", "uniform", "first")))
    with torch.no_grad():
        layer_of(twice, 0).output_linear.weight.mul_(0.5)
        twice.lm_head.weight.mul_(0.3)  # a shorter stream is a surer one, which costs where there is nothing to know
    tokens, first, second, idle = repeated_texts(), Head(0, 0), Head(0, 1), Head(0, 3)
    before = sequence_losses(twice, tokens)
    groups = [(first,), (second,), (idle,), (first, second), (first, idle)]
    changes = {group: loss - before for group, loss in ablate(twice, tokens, groups, method=method, seed=1).items()}
    excess = pair_excess(changes)
    assert list(excess) == [(first, second), (first, idle)]
    assert max(changes[first,].mean(), changes[second,].mean()) < most and changes[first, second].mean() > 1
    assert excess[first, second].min() > 0
    np.testing.assert_allclose(excess[first, idle], 0, atol=1e-5)
    np.testing.assert_allclose(
        excess[first, second], changes[first, second] - changes[first,] - changes[second,], atol=1e-12
    )


def test_a_resample_needs_another_sequence() -> None:
    with pytest.raises(UserError, match="read at least 2"):
        ablate(random_model(), random_tokens(1), [(Head(0, 0),)], method="resample")


# ── how sure ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    chance = np.random.default_rng(0)
    hits = []
    for seed in range(300):
        interval = bootstrap(chance.exponential(size=32), seed=seed)
        assert interval.low < interval.mean < interval.high
        hits.append(interval.low <= 1 <= interval.high)
    assert 0.88 < np.mean(hits) < 0.97, "percentile intervals of 32 skewed values fall a little short of 0.95"


def test_intervals_without_spread_and_without_a_second_sequence() -> None:
    assert bootstrap([0.25] * 8) == (0.25, 0.25, 0.25)
    alone = bootstrap([0.25])
    assert alone.mean == 0.25 and math.isnan(alone.low) and math.isnan(alone.high)
    assert math.isnan(bootstrap([1, 1.1, 1.2, 0.9]).low) and bootstrap([1, 1.1, 1.2, 0.9, 1]).low > 0.9
    assert alone.to_dict() == {"mean": 0.25, "low": None, "high": None}
    values = np.random.default_rng(0).normal(size=20)
    assert bootstrap(values, seed=1) == bootstrap(values, seed=1) != bootstrap(values, seed=2)


# ── the commands ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def hand_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of a network set by hand, with a text of 8 windows, each a row of letters said twice, beside it."""
    folder = save_run(hand_set_model(), tmp_path_factory.mktemp("hand") / "run")
    text = "".join("?abcdefghijklmno"[token] for row in repeated_texts(8) for token in row)
    (folder.parent / "text.txt").write_text(text, encoding="utf-8")
    return folder


def ask(script: Script, run: Path, name: str, *words: object) -> Any:
    text = ("--file", run.parent / "text.txt", "--length", SIZE)
    return script(COMPARE, name, run, *text, *words)


def test_replace_tells_closeness_beside_use(script: Script, hand_set: Path) -> None:
    answer = ask(script, hand_set, "replace", "--all", "--json")
    assert answer.code == 0 and (answer.json["sequences"], answer.json["length"]) == (8, SIZE)
    effects = {(row["head"], row["reference"]): row for row in answer.json["effects"]}
    assert len(effects) == 8 * 5
    assert effects["L0H0", "previous"]["total_variation"] < 0.01
    assert abs(effects["L0H0", "previous"]["change"]["mean"]) < 0.01
    low, high = (effects["L1H0", "first"]["change"][end] for end in ("low", "high"))
    assert 1 < low <= effects["L1H0", "first"]["change"]["mean"] <= high
    table = ask(script, hand_set, "replace", "--all")
    lines = table.out.splitlines()
    assert table.code == 0 and max(map(len, lines)) <= 80
    (row,) = [line.split() for line in lines if line.startswith("L1H0")]
    tv, change = row[1::2], row[2::2]
    assert float(tv[4]) < 0.01 and change[0].endswith("*") and float(change[0].rstrip("*")) > 1
    assert "large TV, small change: the head does not matter here" in lines


@pytest.mark.parametrize(("sequences", "enough"), [(2, False), (4, False), (5, True)])
def test_too_few_sequences_get_no_star(script: Script, hand_set: Path, sequences: int, enough: bool) -> None:
    told = "fewer than 5 sequences do not tell how sure a change is; read more for intervals"
    for words in (("replace", "--all"), ("replace", "--head", "L1H0"), ("ablate",)):
        answer = ask(script, hand_set, *words, "--sequences", sequences)
        lines = answer.out.splitlines()
        assert answer.code == 0 and (told in lines) != enough and max(map(len, lines)) <= 80
        assert ("*" in answer.out or "[" in answer.out) == enough
    effects = ask(script, hand_set, "replace", "--all", "--json", "--sequences", sequences).json["effects"]
    assert {row["change"]["low"] is not None for row in effects} == {enough}


def test_replace_one_head(script: Script, hand_set: Path) -> None:
    answer = ask(
        script, hand_set, "replace", "--head", "L0H0", "--head", "L0H0", "--ref", "window:2", "--ref", "brackets"
    )
    assert answer.code == 0 and max(map(len, answer.out.splitlines())) <= 80
    rows = [line for line in answer.out.splitlines() if line.startswith("L0H0")]
    assert len(rows) == 2 and "100%" in rows[0] and "0.500" in rows[0]
    assert rows[1].endswith("is not defined anywhere in this text")


def test_ablate_each_and_pairs(script: Script, hand_set: Path) -> None:
    answer = ask(script, hand_set, "ablate", "--pairs", "--method", "resample", "--json")
    assert answer.code == 0 and answer.json["method"] == "resample"
    effects = {tuple(row["heads"]): row for row in answer.json["effects"]}
    assert len(effects) == 8 + 28 and "excess" not in effects["L0H0",]
    assert effects["L0H0",]["change"]["low"] > 1 and abs(effects["L1H2",]["change"]["mean"]) < 1e-6
    assert effects["L0H0", "L1H0"]["excess"]["mean"] < 0, "one chain: what is broken once can't be broken twice"
    table = ask(script, hand_set, "ablate", "--pairs")
    assert max(map(len, table.out.splitlines())) <= 80
    assert "method mean: a head taken out gives its mean over sequences and positions" in table.out
    assert "... and 8 more; --json has all" in table.out


def test_ablate_all_but_some(script: Script, hand_set: Path) -> None:
    kept = ask(script, hand_set, "ablate", "--all-but", "L0H0", "--all-but", "L1H0", "--json").json["effects"]
    assert len(kept) == 1 and len(kept[0]["heads"]) == 6 and abs(kept[0]["change"]["mean"]) < 1e-6
    lost = ask(script, hand_set, "ablate", "--all-but", "L0H0")
    assert lost.code == 0
    assert "all but L0H0:  -" in lost.out, "without an induction head, it no longer errs with confidence at first"


def test_one_text_has_no_interval(script: Script, hand_set: Path) -> None:
    answer = script(COMPARE, "ablate", hand_set, "--head", "L0H0", "--text", "abcdabcd")
    assert answer.code == 0 and "(too few sequences)" in answer.out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("replace", "--ref", "first"), "one of the arguments --head --all is required"),
        (("replace", "--head", "L2H0"), "L2H0: no such head; this model has L0H0 to L1H3"),
        (("replace", "--all", "--ref", "previus"), "previus: no such reference; did you mean previous?"),
        (("ablate", "--method", "median"), "invalid choice: 'median'"),
        (("ablate", "--head", "L0H0", "--pairs"), "--pairs: name at least two heads, or none for all"),
        (("ablate", "--all-but", "L0H0", "--pairs"), "--pairs: not with --all-but"),
        (("ablate", "--method", "resample", "--sequences", "1"), "resample takes results from another sequence"),
    ],
)
def test_mistakes(script: Script, hand_set: Path, words: tuple[str, ...], told: str) -> None:
    answer = ask(script, hand_set, *words)
    assert answer.code == 2 and told in answer.err and answer.out == ""
