"""The benchmarks' bookkeeping, with the times made up; and each of them once, on something tiny."""

import importlib.util
import json
import pickle
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from minigpt.cli import parse_options
from minigpt.config import DataConfig
from minigpt.corpus import open_corpus
from minigpt.errors import UserError
from minigpt.studies import benchmark, decoding, measure, peers, whole_runs
from minigpt.studies.measure import Report, Spread, alternate, table, verdict
from minigpt.studies.sweep import Mean

TEXT = "".join(f"{number} green bottles\nhanging on the wall,\n" for number in range(100))

# Stands for a checkout of nanoGPT: the same names and manners, no attention.
STUB = """
from dataclasses import dataclass
import torch
from torch import nn

@dataclass
class GPTConfig:
    block_size: int; vocab_size: int; n_layer: int; n_head: int; n_embd: int; dropout: float; bias: bool

class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        print("talkative")
        self.config, self.read = config, nn.Embedding(config.vocab_size, config.n_embd)
        self.say = nn.Linear(config.n_embd, config.vocab_size, bias=False)

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        return torch.optim.AdamW(self.parameters(), lr=learning_rate, betas=betas, weight_decay=weight_decay)

    def forward(self, idx, targets=None):
        logits = self.say(self.read(idx))
        if targets is None:
            return logits[:, [-1]], None
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def generate(self, idx, max_new_tokens):
        for _ in range(max_new_tokens):
            idx = torch.cat([idx, self(idx)[0].argmax(-1)], dim=1)
        return idx
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "nanogpt"
    folder.mkdir()
    (folder / "model.py").write_text(STUB, encoding="utf-8")
    return folder


@pytest.fixture
def data(tmp_path: Path) -> dict[str, str]:
    """The keys of ``[data]`` for a small text."""
    path = tmp_path / "bottles.txt"
    path.write_text(TEXT, encoding="utf-8")
    return {"source": str(path), "tokenizer": "char", "cache_dir": str(tmp_path / "cache")}


@pytest.fixture
def script() -> ModuleType:
    path = Path(__file__).parent.parent / "scripts" / "benchmark.py"
    spec = importlib.util.spec_from_file_location("benchmark_script", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ── measuring ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_spread_is_median_and_quartiles() -> None:
    assert Spread.of([4.0]) == Spread(4, 4, 4)
    assert Spread.of([5.0, 1, 4, 2, 3]) == Spread(median=3, low=2, high=4)
    # A machine that becomes ten times slower changes no ratio.
    assert Spread.of_ratios([2.0, 20, 200], [4.0, 40, 400]) == Spread(0.5, 0.5, 0.5)


def test_contenders_take_turns_and_the_first_round_does_not_count() -> None:
    calls: list[str] = []
    seconds = alternate({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, repeats=3)
    assert "".join(calls) in ("abbaabba", "baabbaab")
    assert [len(seconds[name]) for name in "ab"] == [3, 3]


def test_table_aligns_the_first_column_left_and_the_rest_right() -> None:
    assert table([["", "ms"], ["minigpt", "4"]]) == ["         ms", "minigpt   4"]


@pytest.mark.parametrize(
    ("shares", "claim", "words"),
    [
        ({"before": 0.01, "during": 0.02}, True, "2 % during"),
        ({"before": 0.01, "during": 0.4}, False, "not a claim: machine was busy (others used 1 % before, 40 % during)"),
        ({"before": 0.5}, False, "50 % before"),
        ({"before": None, "during": None}, True, "could not check"),
    ],
)
def test_a_claim_needs_a_quiet_machine(shares: dict[str, float | None], claim: bool, words: str) -> None:
    quiet, sentence = verdict(shares)
    assert quiet is claim
    assert words in sentence


def test_others_are_all_that_is_not_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = {"now": 100.0, "busy": 50.0, "own": 20.0}
    monkeypatch.setattr(measure.time, "perf_counter", lambda: clock["now"])
    monkeypatch.setattr(measure, "_busy_seconds", lambda: clock["busy"])
    monkeypatch.setattr(measure, "_own_seconds", lambda: clock["own"])
    monkeypatch.setattr(measure, "core_count", lambda: 4)
    watch = measure.OthersWatch()
    clock.update(now=110.0, busy=80.0, own=40.0)  # in 10 s, 4 cores worked 30 s, 20 s of them for this process
    assert watch.share() == pytest.approx(0.25)
    monkeypatch.setattr(measure, "_busy_seconds", lambda: None)
    assert watch.share() is None


# ── peers ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_nanogpt_gets_the_same_text_and_split(data: dict[str, str], tmp_path: Path) -> None:
    corpus = open_corpus(DataConfig(**data), context_length=8, seed=1)  # type: ignore[arg-type]
    vocab_size = peers.write_nanogpt_data(corpus, tmp_path / "theirs")
    characters = sorted(set(TEXT))
    read = [np.fromfile(tmp_path / "theirs" / f"{part}.bin", dtype=np.uint16) for part in ("train", "val")]
    cut = len(TEXT) * 9 // 10
    assert ["".join(characters[i] for i in ids) for ids in read] == [TEXT[:cut], TEXT[cut:]]
    assert pickle.loads((tmp_path / "theirs" / "meta.pkl").read_bytes()) == {"vocab_size": vocab_size}
    assert vocab_size == len(characters)


def test_windows_of_nanogpt_are_followed_by_their_targets(checkout: Path, data: dict[str, str], tmp_path: Path) -> None:
    corpus = open_corpus(DataConfig(**data), context_length=8, seed=1)  # type: ignore[arg-type]
    vocab_size = peers.write_nanogpt_data(corpus, tmp_path)
    shape = decoding.decode_config(decoding.DecodeCase("0.8M", context_length=8, n_stream=1)).model
    training = peers.NanoGptTraining(checkout, tmp_path, shape, vocab_size=vocab_size, batch_size=3)
    inputs, targets = training.next_batch()
    assert inputs.shape == targets.shape == (3, 8)
    assert (inputs[:, 1:] == targets[:, :-1]).all()
    before = peers.nanogpt_loss(training.model, corpus.val)
    for _ in range(30):
        training.step()
    assert peers.nanogpt_loss(training.model, corpus.val) < before - 0.05


# ── the benchmarks themselves ──────────────────────────────────────────────────────────────────────────────────


def test_step_tells_sizes_losses_and_ratios(
    checkout: Path, data: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = {"data": data, "model": {"n_layer": 1, "n_head": 2, "d_model": 16, "context_length": 16}}
    report = benchmark.step(nanogpt=checkout, repeats=2, threads=1, overrides=tiny)
    names = {*benchmark.CONTENDERS, benchmark.PEER}
    numbers = report.numbers
    assert set(numbers["milliseconds"]) == set(numbers["loss"]) == set(numbers["parameters"]) == names
    assert all(len(blocks) == 2 for blocks in numbers["milliseconds"].values())
    assert set(numbers["time_ratio_to_nanogpt"]) == set(benchmark.CONTENDERS)
    vocab_size = len(set(TEXT)) + 1
    assert numbers["parameters"]["minigpt, AdamW"] == 2 * 16 * vocab_size + 12 * 16 * 16
    untrained_loss = np.log(vocab_size)
    assert all(loss < untrained_loss for name, loss in numbers["loss"].items() if name != benchmark.PEER)
    assert max(map(len, report.lines)) <= 80
    whole = numbers["sgemm_flops_a_second"] * np.median(numbers["milliseconds"]["minigpt, AdamW"]) / 1000
    a_token = 12 * 16 * 16 + 16 * vocab_size + 2 * 16 * 16
    assert numbers["share_of_sgemm"]["minigpt, AdamW"] * whole == pytest.approx(6 * 192 * a_token)
    assert capsys.readouterr().out == ""


def test_decode_proves_equal_text_and_says_how_to_bring_a_missing_peer(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "FIRST_TOKEN_RUNS", 1)
    monkeypatch.setattr(decoding, "STEADY", 0)
    cases = [decoding.DecodeCase("0.8M", context_length=8, n_stream=n_stream) for n_stream in (1, 3)]
    report = decoding.decode(cases=cases, nanogpt=checkout, transformers=False, repeats=1, threads=2)
    assert report.holds and report.numbers["greedy_ids_equal"]
    assert [(text["n_stream"], text["tokens"], set(text["seconds"])) for text in report.numbers["texts"]] == [
        (1, 8, {"NumPy", "numba", "nanoGPT"}),
        (1, 32, {"NumPy", "numba", "nanoGPT"}),
        (3, 8, {"numba"}),
        (3, 32, {"numba"}),
    ]
    assert report.numbers["first_token_seconds"][0] > 0
    assert peers.NO_TRANSFORMERS in report.lines
    assert peers.NO_NANOGPT not in report.lines
    assert max(map(len, report.lines)) <= 80


def test_untrained_texts_are_not_one_token_over_and_over() -> None:
    model = decoding.untrained(decoding.DecodeCase("0.8M", context_length=8, n_stream=3), 66)
    for engine in decoding.our_engines(model, threads=2).values():
        texts = decoding.write_many(engine, 40, n_stream=3)
        assert texts == [decoding.write(engine, 40, first) for first in (1, 2, 3)]
        assert all(len(set(text)) > 5 for text in texts)


def test_default_runs_train_as_a_process(data: dict[str, str]) -> None:
    flags = [word for key, value in data.items() for word in (f"--data.{key.replace('_', '-')}", value)]
    tiny = Path(__file__).parent.parent / "configs" / "tiny.toml"
    report = whole_runs.default(repeats=1, flags=[str(tiny), *flags, "--train.max-steps", "2"])
    [seconds], [first_sample] = report.numbers["seconds"], report.numbers["first_sample_seconds"]
    assert 0 < first_sample < seconds
    with pytest.raises(UserError, match=r"train\.py failed: .*data\.source = nowhere"):
        whole_runs.default(repeats=1, flags=["--data.source", "nowhere"])


def test_the_whole_run_is_told_beside_another_program(
    data: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    overrides = {"data": data, "train": {"max_steps": 2}, "model": {"d_model": 16, "n_layer": 1}}

    def half_as_fast(source: str, *, seed: int, threads: int) -> peers.RecipeResult:
        return peers.RecipeResult(seconds=1e3, n_parameter=7, steps=9, loss=2.5)

    monkeypatch.setattr(peers, "x_transformers_recipe", half_as_fast)
    report = whole_runs.train(seeds=2, peers=["x-transformers"], nanogpt=None, threads=1, overrides=overrides)
    ours = report.numbers["minigpt"]
    assert [run["steps"] for run in ours] == [2, 2] and ours[0]["loss"] != ours[1]["loss"]
    assert {run["window"] for run in ours} == {64}
    assert report.numbers["peers"]["x-transformers"]["n_parameter"] == 7
    assert any(line.startswith("mean loss of 2 seeds:") for line in report.lines)
    assert any("minigpt's time / x-transformers's: 0.0" in line for line in report.lines)
    assert Mean.of([1.0, 2.0, 3.0]).error == pytest.approx(1 / 3**0.5)


def test_a_peer_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("some words and some more\n" * 100, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "x_transformers.py").write_text("raise ImportError('no x_transformers here')", encoding="utf-8")
    with pytest.raises(UserError, match=r"no x_transformers here.*pip install x-transformers"):
        peers.x_transformers_recipe(str(text), seed=1, threads=1)


def test_nested_answers_become_rows() -> None:
    assert list(whole_runs.flat({"all": 0.5, "kind": {"pronoun": {"n": 3}}})) == [
        ("all", "0.5000"),
        ("kind.pronoun.n", "3"),
    ]


# ── the script ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("share", "holds", "flags", "code"),
    [
        (0.0, True, [], 0),
        (0.9, True, [], 1),
        (0.9, True, ["--anyway"], 0),
        (0.0, False, ["--anyway"], 1),
        (None, True, [], 0),
    ],
)
def test_exit_code_tells_whether_figures_may_be_claimed(
    script: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    share: float | None,
    holds: bool,
    flags: list[str],
    code: int,
) -> None:
    path = tmp_path / "numbers.json"
    monkeypatch.setattr("sys.argv", ["benchmark.py", "step", "--json", str(path), *flags])
    monkeypatch.setattr(script, "measure", lambda options: Report(["fast"], {"milliseconds": 1.5}, holds))
    monkeypatch.setattr(script, "share_now", lambda: share)
    monkeypatch.setattr(script.OthersWatch, "share", lambda self: share)
    assert script.main() == code
    numbers = json.loads(path.read_text(encoding="utf-8"))
    assert numbers["milliseconds"] == 1.5
    assert numbers["claim"] is (share is None or share < 0.5)
    assert numbers["machine"]["torch"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["step", "--nanogpt", "."], "has no model.py; give a checkout"),
        (["step", "--json", "no/such/folder/numbers.json"], "can't be written"),
        (["step", "--repeats", "0"], "must be at least 1"),
        (["steps"], "invalid choice"),
    ],
)
def test_mistakes_are_told_before_anything_is_measured(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, words: list[str], sentence: str
) -> None:
    monkeypatch.setattr("sys.argv", ["benchmark.py", *words])
    monkeypatch.setattr(script, "share_now", lambda: pytest.fail("measures"))
    with pytest.raises(UserError, match=sentence):
        script.main()


def test_help_shows_every_option(script: ModuleType) -> None:
    text = script.make_parser().format_help()
    options = parse_options(script.make_parser(), ["decode", "--transformers", "--threads", "2"])
    assert (options.what, options.transformers, options.threads) == ("decode", True, 2)
    assert all(f"--{name}" in text for name in ("nanogpt", "transformers", "repeats", "json", "data.source"))
