"""``compare_attention.py heads``: named heads, what is told of them, and chance."""

import csv
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hand_set import HEADS, SIZE, fresh_config, hand_set_model, repeated_text, save_run
from running import ROOT, Script, Trained

from minigpt.inspection.capture import attention_maps, looking
from minigpt.inspection.compare import Closeness, Description, Null, closeness
from minigpt.inspection.head_report import HeadReport
from minigpt.inspection.heads import Head
from minigpt.inspection.nulls import FreshNetworks, kept_nulls
from minigpt.inspection.patterns import parse_reference
from minigpt.inspection.subject import load_subject, repeated
from minigpt.model import GPT

COMPARE = ROOT / "scripts" / "compare_attention.py"
TEXT = "cgkamfbcgkamfbc"  # 16 tokens, with <|end|> in front
NAMES = [name for layer in HEADS for name in layer]


@pytest.fixture(scope="module")
def hand_set_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_run(hand_set_model(), tmp_path_factory.mktemp("hand-set") / "run")


# ── the proof ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_heads_set_by_hand_are_named(script: Script, hand_set_run: Path) -> None:
    answer = script(COMPARE, "heads", hand_set_run, "--text", TEXT, "--json")
    assert answer.code == 0, answer.err
    heads = answer.json["heads"]
    assert [head["head"] for head in heads] == [f"L{layer}H{head}" for layer in range(2) for head in range(4)]
    assert [head["name"] for head in heads] == [head["nearest"] for head in heads] == NAMES
    for head in heads:
        values = head["references"][head["name"]]
        assert values["total_variation"] < 0.01 and values["jensen_shannon"] < 0.01 and abs(values["kl"]) < 0.01
        assert values["mass"] > 0.99 and values["argmax"] == 1
        if head["name"] == "uniform":
            assert values["lift"] is None and head["normalised_entropy"] == pytest.approx(1, abs=1e-5)
        else:
            assert values["lift"] > 0.99 and values["percentile"] == 0, "no fresh head is as near"
    assert answer.json["references"]["induction"]["coverage"] == pytest.approx(8 / 15)


def test_the_network_set_by_hand_uses_its_heads() -> None:
    """It expects what followed a token before; without the previous head below, or the induction head, it can't."""
    model, tokens = hand_set_model(), torch.as_tensor(repeated_text())

    def loss_of_second_half(broken: tuple[int, int] | None) -> float:
        def silence(layer: int, heads: torch.Tensor) -> torch.Tensor:
            if broken is None or layer != broken[0]:
                return heads
            return torch.cat(
                [heads[:, : broken[1]], 0 * heads[:, broken[1] : broken[1] + 1], heads[:, broken[1] + 1 :]], 1
            )

        with torch.no_grad(), looking(model, change_heads=silence):
            logits = model(tokens[None])[0]
        return torch.nn.functional.cross_entropy(logits[SIZE // 2 : -1], tokens[SIZE // 2 + 1 :]).item()

    assert loss_of_second_half(None) < 0.01
    assert all((loss_of_second_half(head) > 1) == (head in ((0, 0), (1, 0))) for head in np.ndindex(2, 4))


@pytest.mark.parametrize("changes", [{}, {"qk_norm": False, "position": "learned"}, {"n_kv_head": 1, "n_layer": 1}])
def test_fresh_networks_are_uniform_or_none(script: Script, tmp_path: Path, changes: dict[str, Any]) -> None:
    for seed in range(3):
        run = fresh_run(tmp_path / str(seed), seed, **changes)
        answer = script(COMPARE, "heads", run, "--text", TEXT, "--json", *("--ref=uniform", "--ref=previous"),
                        *("--ref=first", "--ref=self", "--ref=duplicate", "--ref=induction"))  # fmt: skip
        assert {head["name"] for head in answer.json["heads"]} <= {"uniform", "none"}, answer.out
        assert all(head["nearest"] for head in answer.json["heads"])


def fresh_run(folder: Path, seed: int, **changes: Any) -> Path:
    """A run's folder with an untrained network."""
    config = fresh_config(seed, **changes)
    torch.manual_seed(seed)
    return save_run(GPT(config.model, SIZE), folder, config)


@pytest.mark.parametrize(
    ("previous", "uniform", "fresh", "name", "nearest"),
    [
        (0.30, 0.60, 0.40, "previous", "previous"),
        (0.30, 0.60, 0.20, "none", "previous"),  # chance is as near
        (0.51, 0.60, 0.90, "none", "previous"),
        (0.60, 0.10, 0.05, "uniform", "uniform"),  # fresh heads are uniform: chance is not asked
        (0.60, 0.11, 0.90, "none", "uniform"),
        (0.30, np.nan, 0.40, "previous", "previous"),
        (np.nan, np.nan, 0.40, "none", ""),
    ],
)
def test_what_a_head_is_named_after(previous: float, uniform: float, fresh: float, name: str, nearest: str) -> None:
    references = {
        reference: Closeness(*[np.array([[value]])] * 5, uniform_mass=0.1, rows=10, all_rows=10)
        for reference, value in (("previous", previous), ("uniform", uniform))
    }
    nulls = {reference: Null(np.full(100, fresh)) for reference in references}
    description = Description(*[np.zeros((1, 1))] * 5)
    report = HeadReport(references, nulls, description, about={}, heads=[Head(0, 0)], title="")
    assert (report.name(Head(0, 0)), report.nearest(Head(0, 0))) == (name, nearest)


# ── what is told ───────────────────────────────────────────────────────────────────────────────────────────────


def test_the_table_fits_a_terminal(script: Script, hand_set_run: Path) -> None:
    answer = script(COMPARE, "heads", hand_set_run, "--text", TEXT, "--full", "--ref", "previous", "--ref", "window:16")
    assert max(map(len, answer.out.splitlines()[1:])) <= 80
    read, overview, previous, window, legend = answer.out.split("\n\n")
    assert read.splitlines() == [
        f"{hand_set_run}, step 0: 1 sequence of 16 tokens, <|end|> in front",
        "coverage (rows where it is defined): previous 100%, window:16 100%",
    ]
    assert [line.split()[0] for line in overview.splitlines()] == ["head", *(f"L{i}H{j}" for i, j in np.ndindex(2, 4))]
    first = overview.splitlines()[1].split()
    assert first[:5] == ["L0H0", "previous", "0.00", "1.00", "1.00"] and first[-1] == "-", (
        "one text: no positional share"
    )
    assert "L1H0 none (window:16)" in overview
    assert previous.startswith("previous: defined in 15 of 15 rows") and "before training: median" in previous
    assert window.startswith("window:16") and legend.startswith("TV:")


def test_a_csv_row_for_each_head_and_reference(script: Script, hand_set_run: Path, tmp_path: Path) -> None:
    words = ("heads", hand_set_run, "--text", TEXT, "--ref", "previous", "--ref", "uniform", "--ref", "previous")
    answer = script(COMPARE, *words, "--csv", tmp_path / "out.csv", "--json")
    with (tmp_path / "out.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["head"], row["reference"]) for row in rows[:3]] == [
        ("L0H0", "previous"), ("L0H0", "uniform"), ("L0H1", "previous"),
    ] and len(rows) == 16  # fmt: skip
    for row in rows:
        head = next(head for head in answer.json["heads"] if head["head"] == row["head"])
        for name, value in head["references"][row["reference"]].items():
            assert (float(row[name]) if row[name] else None) == value
        assert row["name"] == head["name"] and float(row["mean_distance"]) == head["mean_distance"]


def test_a_head_can_be_judged(script: Script, hand_set_run: Path) -> None:
    words = ("heads", hand_set_run, "--text", TEXT, "--head", "L0H0", "--max-tv", "0.2", "--ref")
    good = script(COMPARE, *words, "previous")
    assert (good.code, good.out, good.err) == (0, "L0H0: total variation 0.0000 from previous, at most 0.2\n", "")
    bad = script(COMPARE, *words, "first")
    assert bad.code == 1 and bad.out == "" and bad.err == "L0H0: total variation 0.9333 from first, above 0.2\n"
    told = script(COMPARE, *words, "first", "--json")
    assert told.code == 1 and told.json["holds"] is False and told.json["total_variation"] == pytest.approx(14 / 15)
    nowhere = script(COMPARE, "heads", hand_set_run, "--text", "abc", *words[4:], "induction")
    assert nowhere.code == 2 and "is defined in no row of what was read" in nowhere.err


def test_one_head_alone(script: Script, hand_set_run: Path) -> None:
    answer = script(COMPARE, "heads", hand_set_run, "--text", TEXT, "--head", "L1H0", "--json")
    assert [(head["head"], head["name"]) for head in answer.json["heads"]] == [("L1H0", "induction")]


def test_the_head_of_induction_comes_first(script: Script, hand_set_run: Path) -> None:
    """On random tokens read twice, where nothing but induction helps."""
    words = (COMPARE, "heads", hand_set_run, "--repeated", "7", "--ref", "induction", "--nearest-first")
    heads = script(*words, "--json").json["heads"]
    assert (heads[0]["head"], heads[0]["name"]) == ("L1H0", "induction")
    distances = [head["references"]["induction"]["total_variation"] for head in heads]
    assert distances == sorted(distances) and distances[0] < 1e-3 < 0.5 < distances[1]
    shown = script(*words).out.splitlines()
    assert "8 sequences of 15 tokens, <|end|> in front of 7 random ones twice" in shown[0]
    assert next(line for line in shown if line.startswith("L")).startswith("L1H0 induction")


def test_random_tokens_twice(hand_set_run: Path) -> None:
    found = repeated(load_subject(hand_set_run), 7, 3)
    assert found.shape == (3, 15) and not found[:, 0].any()
    assert (found[:, 1:8] == found[:, 8:]).all() and found[:, 1:].min() >= 1
    assert all(len(set(row)) == 8 for row in found.tolist()) and len({tuple(row) for row in found.tolist()}) == 3


def test_windows_of_a_trained_run(script: Script, trained: Trained, tmp_path: Path) -> None:
    """Several texts, references that need the tokens' text, and one that is nowhere defined."""
    run = tmp_path / "run"
    shutil.copytree(trained.path, run)
    pairs = tmp_path / "mine.json"
    pairs.write_text("[[9, 0], [12, 3, 2.5]]", encoding="utf-8")
    references = ("punctuation", "brackets", "duplicate", str(pairs), "window:4")
    words = [word for name in references for word in ("--ref", name)]
    answer = script(COMPARE, "heads", run, "--json", *words)
    assert answer.code == 0, answer.err
    told = answer.json
    assert (told["texts"], told["length"]) == (8, 16)
    assert "brackets: is defined in no row" in answer.err
    assert told["references"][str(pairs)]["coverage"] == pytest.approx(2 / 15)
    assert told["references"]["brackets"]["coverage"] == 0 < told["references"]["punctuation"]["coverage"] < 1
    for head in told["heads"]:
        assert head["references"]["brackets"]["total_variation"] is None
        assert 1 / 8 <= head["positional_share"] <= 1
        assert 0 <= head["references"]["window:4"]["percentile"] <= 100
    table = script(COMPARE, "heads", run, *words, "--ref", "uniform", "--full").out
    assert f"{run}, step {told['step']}: 8 sequences of 16 tokens" in table.splitlines()
    assert max(map(len, table.splitlines()[1:])) <= 80 and f"...{str(pairs)[-37:]}: defined in" in table


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "give a run, or maps by --maps FILE, and not both"),
        (["RUN", "--maps", "a.npy"], "not both"),
        (["RUN", "--tokens", "a.txt"], "--tokens: belongs to --maps"),
        (["--maps", "a.npy", "--text", "a"], "--maps: these are maps of a text already"),
        (["--maps", "a.txt"], "a.txt: maps are read from .npy, .pt, .json files"),
        (["--maps", "nowhere.npy"], "nowhere.npy: cannot be read"),
        (["RUN", "--max-tv", "0.1"], "--max-tv: name the head and one reference"),
        (["RUN", "--max-tv", "2", "--head", "L0H0", "--ref", "self"], "--max-tv = 2.0: must be at least 0"),
        (["RUN", "--text", TEXT, "--head", "L2H0"], "L2H0: no such head; this model has L0H0 to L1H3"),
        (["RUN", "--csv", "FOLDER"], ": is a folder; name a file in it"),
        (["RUN", "--csv", "FOLDER/nowhere/a.csv"], "nowhere; make it first"),
        (["RUN", "--text", TEXT, "--ref", "slef"], "slef: no such reference; did you mean self?"),
    ],
)
def test_mistakes(script: Script, hand_set_run: Path, words: list[str], told: str) -> None:
    places = {"RUN": str(hand_set_run), "FOLDER": str(hand_set_run.parent)}
    answer = script(COMPARE, "heads", *(re.sub("^(RUN|FOLDER)", lambda name: places[name[0]], word) for word in words))
    assert not (hand_set_run.parent / "nowhere").exists()
    assert answer.code == 2 and answer.out == "" and told in answer.err and len(answer.err.splitlines()) == 1


# ── chance ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_null_is_kept_with_the_run(script: Script, tmp_path: Path) -> None:
    run = save_run(hand_set_model(), tmp_path / "run")
    words = ("heads", run, "--text", TEXT, "--json", "--ref", "previous", "--ref")
    first = script(COMPARE, *words, "first")
    (file,) = (run / "attention").glob("null-*.json")
    assert "fresh networks" in first.err
    again = script(COMPARE, *words, "first")
    assert again.out == first.out and again.err == "" and first.json["references"]["first"]["null_heads"] == 104
    more = script(COMPARE, *words, "self")
    assert "fresh networks" in more.err, "computed for the new reference, and kept beside the others"
    assert len(json.loads(file.read_text(encoding="utf-8"))["total_variation"]) == 3
    other = script(COMPARE, "heads", run, "--text", TEXT[::-1], "--json")
    assert "fresh networks" in other.err and len(list((run / "attention").glob("null-*.json"))) == 2
    file.write_text("{damaged", encoding="utf-8")
    assert script(COMPARE, *words, "first").out == first.out


@pytest.mark.parametrize("damaged", [[], None, [0.9] * 50 + [0.1] * 54, [float("nan")] * 104])
def test_a_damaged_null_is_computed_anew(script: Script, tmp_path: Path, damaged: object) -> None:
    run = save_run(hand_set_model(), tmp_path / "run")
    words = ("heads", run, "--text", TEXT, "--json", "--ref", "previous", "--ref", "first")
    whole = script(COMPARE, *words)
    (file,) = (run / "attention").glob("null-*.json")
    content = json.loads(file.read_text(encoding="utf-8"))
    first, *_ = content["total_variation"]
    content["total_variation"][first] = damaged
    file.write_text(json.dumps(content), encoding="utf-8")
    again = script(COMPARE, *words)
    assert again.out == whole.out and "fresh networks" in again.err
    assert len(json.loads(file.read_text(encoding="utf-8"))["total_variation"][first]) == 104


def test_the_null_is_computed_anew_where_it_can_not_be_kept(script: Script, tmp_path: Path) -> None:
    run = save_run(hand_set_model(), tmp_path / "run")
    kept = script(COMPARE, "heads", run, "--text", TEXT, "--json")
    (checkpoint,) = (run / "checkpoints").iterdir()
    before = sorted(tmp_path.rglob("*"))
    alone = script(COMPARE, "heads", checkpoint, "--text", TEXT, "--json")
    assert "one checkpoint file has no folder" in alone.err and alone.json["heads"] == kept.json["heads"]
    assert sorted(tmp_path.rglob("*")) == before
    shutil.rmtree(run / "attention")
    (run / "attention").write_text("in the way", encoding="utf-8")
    refused = script(COMPARE, "heads", run, "--text", TEXT, "--json")
    assert "will be read anew each time: could not write" in refused.err
    assert refused.json["heads"] == kept.json["heads"]


def test_the_null_is_of_fresh_networks_on_the_same_texts(tmp_path: Path) -> None:
    """One of them, made here, is in it; and the state of torch's generator is not touched."""
    config, tokens = fresh_config(4), repeated_text()[None]
    fresh = FreshNetworks(config.model, SIZE, config.run.seed, tokens)
    pattern = parse_reference("previous", None).pattern(tokens[0])
    before = torch.get_rng_state()
    null = kept_nulls(fresh, {"previous": [pattern]}, tmp_path)["previous"]
    assert torch.equal(torch.get_rng_state(), before)
    assert list(fresh.seeds) == list(range(5, 18)) and null.total_variation.shape == (104,)
    torch.manual_seed(17)  # the last of them
    one = closeness(attention_maps(GPT(config.model, SIZE), torch.as_tensor(tokens[0])), pattern).total_variation
    assert all(np.isclose(null.total_variation, value, atol=1e-6).any() for value in one.ravel())
