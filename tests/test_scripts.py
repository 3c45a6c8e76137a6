"""The scripts as they are used: from a text to samples and scores, their mistakes and signals.

Most calls run the script's file in this process; those that depend on the interpreter or on signals run in their own.
"""

import io
import json
import math
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from conftest import Tables, tiny_tables
from tiny_runs import assert_same_bits, begun, rows

from minigpt.checkpoint import find_checkpoint, save_checkpoint
from minigpt.tokenizer import tokenizer_from_dict

ROOT = Path(__file__).resolve().parent.parent
TRAIN, GENERATE, EVALUATE = (ROOT / "scripts" / f"{name}.py" for name in ("train", "generate", "evaluate"))
FOREIGN = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@dataclass(frozen=True)
class Answer:
    """How a script ended, and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict:
        return json.loads(self.out)


Script = Callable[..., Answer]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Script:
    """``script(GENERATE, run, "--json", typed="...")``: run it here."""

    def call(path: Path, *words: object, typed: str = "") -> Answer:
        monkeypatch.setattr(sys, "argv", [str(path), *map(str, words)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        capsys.readouterr()
        with pytest.raises(SystemExit) as leaving:
            runpy.run_path(str(path), run_name="__main__")
        written = capsys.readouterr()
        assert isinstance(leaving.value.code, int)
        return Answer(leaving.value.code, written.out, written.err)

    return call


def command(*words: object, python: tuple[str, ...] = ()) -> list[str]:
    return [sys.executable, *python, *map(str, words)]


def environment(**variables: str) -> dict[str, str]:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("LC_", "PYTHON"))}
    return {**inherited, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8", **variables}


def as_options(tables: Tables) -> list[str]:
    return [
        word
        for section, keys in tables.items()
        for key, value in keys.items()
        for word in (f"--{section}.{key.replace('_', '-')}", str(value))
    ]


@dataclass(frozen=True)
class Trained:
    """One run made by ``train.py`` in a process of its own, and the options it was made with."""

    path: Path
    options: list[str]
    text: Path
    done: subprocess.CompletedProcess[str]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, english: str) -> Trained:
    folder = tmp_path_factory.mktemp("trained")
    tables = tiny_tables(folder, english)
    tables["model"]["dropout"] = 0.1
    tables["data"]["test_fraction"] = 0.1
    tables["train"] |= {"max_steps": 40, "sample_prompt": "é\\n"}
    options = as_options(tables)
    done = subprocess.run(
        command(TRAIN, *options), env=environment(), capture_output=True, encoding="utf-8", check=False, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    return Trained(folder / "runs" / "tiny", options, folder / "story.txt", done)


# ── the way from text to sample ────────────────────────────────────────────────────────────────────────────────


def test_training_leaves_its_files_and_tells_what_comes_next(trained: Trained) -> None:
    path = trained.path
    names = {entry.name for entry in path.iterdir() if entry.name != ".lock"}
    assert names == {"config.toml", "metrics.jsonl", "samples", "checkpoints", "tensorboard"}
    steps = [int(file.stem.removeprefix("step-")) for file in sorted((path / "checkpoints").iterdir())]
    assert steps[0] == 0 and steps[-3:] == [20, 30, 40]
    assert [row["step"] for row in rows(path)] == list(range(1, 41))
    assert all(math.isfinite(value) for row in rows(path) for value in row.values())
    assert rows(path)[-1]["val_loss"] < rows(path)[9]["val_loss"] < math.log(28)
    sample = (path / "samples" / "step-00000040.txt").read_text(encoding="utf-8")
    assert sample.startswith("é\n") and 20 < len(sample) <= 2 + 120
    assert list((path / "tensorboard").iterdir())
    assert f"next: python scripts/generate.py {path}   or   tensorboard --logdir {path.parent}" in trained.done.stdout
    assert "28 (char)" in trained.done.stderr, "the plan"
    assert "step 40/40" in trained.done.stderr, "plain lines where there is no terminal"
    assert str(path.parent.parent) in str(trained.text)
    assert sorted(entry.name for entry in path.parent.parent.iterdir()) == ["cache", "runs", "story.txt"]


def test_samples(trained: Trained, script: Script) -> None:
    answer = script(GENERATE, trained.path, "--prompt", "the ", "--max-new-tokens", 40, "--num-samples", 2, "--json")
    assert answer.code == 0
    found = answer.json
    assert (found["run"], found["prompt"]) == (str(trained.path), "the ")
    assert found["step"] == find_checkpoint(trained.path, "best").step
    assert [sample["seed"] for sample in found["samples"]] == [0, 1]
    assert all(1 <= len(sample["tokens"]) <= 40 for sample in found["samples"]), "the end of a text may be drawn"
    tokenizer = tokenizer_from_dict(find_checkpoint(trained.path).tokenizer)
    first, second = (sample["text"] for sample in found["samples"])
    assert first != second
    assert first == tokenizer.decode(found["samples"][0]["tokens"])

    text = script(GENERATE, trained.path, "--prompt", "the ", "--max-new-tokens", 40, "--num-samples", 2)
    assert text.out == f"── sample 1 of 2 ──\nthe {first}\n── sample 2 of 2 ──\nthe {second}\n"
    seeded = script(GENERATE, trained.path, "--prompt", "the ", "--max-new-tokens", 40, "--seed", 1)
    assert seeded.out == f"the {second}\n"


def test_greedy_needs_no_seed(trained: Trained, script: Script) -> None:
    greedy = ("--prompt", "a", "--temperature", 0, "--max-new-tokens", 30)
    one, other = (script(GENERATE, trained.path, *greedy, "--seed", seed) for seed in (1, 2))
    assert one == other
    assert len(one.out) == 1 + 30 + 1


def test_a_stop_string_ends_the_text_before_it(trained: Trained, script: Script) -> None:
    free = script(GENERATE, trained.path, "--json").json["samples"][0]["text"]
    assert "e" in free and "\n" in free
    for typed, stop in (("e", "e"), ("\\n", "\n"), (free[10:13], free[10:13])):
        answer = script(GENERATE, trained.path, "--json", "--stop", "never", "--stop", typed)
        assert answer.json["samples"][0]["text"] == free[: free.index(stop)]


def test_a_prompt_longer_than_the_context_is_kept_whole(trained: Trained, script: Script) -> None:
    prompt = "the clock counts every window again. " * 2
    answer = script(GENERATE, trained.path, "--prompt", prompt, "--max-new-tokens", 50)
    assert answer.out.startswith(prompt) and len(answer.out) == len(prompt) + 50 + 1
    assert answer.err == "the prompt has 74 tokens: the model sees the last 16 at most\n"


def test_unseen_characters_are_named_before_anything_is_written(trained: Trained, script: Script) -> None:
    answer = script(GENERATE, trained.path, "--prompt", "Zü?")
    assert (answer.code, answer.out) == (2, "")
    for part in ("'?' (U+003F)", "'Z' (U+005A)", "'ü' (U+00FC)", "leave them out", "data.vocab_size", "byte or bpe"):
        assert part in answer.err


def test_a_conversation(trained: Trained, script: Script) -> None:
    """A line, a text; a line that can't be gone on from is told and the next one is asked for."""
    options = ("--interactive", "--max-new-tokens", 12, "--temperature", 0)
    answer = script(GENERATE, trained.path, *options, typed="a grey\nZ\nthe\\n\n")
    assert answer.code == 0
    single = [script(GENERATE, trained.path, *options[1:], "--prompt", prompt).out for prompt in ("a grey", "the\\n")]
    assert answer.out == "".join(single)
    assert "'Z' (U+005A)" in answer.err
    assert answer.err.count("> ") == 4


# ── scores ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_score_of_the_validation_part_is_the_one_of_training(trained: Trained, script: Script) -> None:
    answer = script(EVALUATE, trained.path, "--json")
    best = find_checkpoint(trained.path, "best")
    found = answer.json
    assert (answer.code, answer.err) == (0, "")
    assert (found["step"], found["window"]) == (best.step, 16)
    assert found["loss"] == pytest.approx(best.val_loss, rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(best.val_loss), rel=1e-5)
    logged = next(row for row in rows(trained.path) if row["step"] == best.step)
    assert found["bits_per_byte"] == pytest.approx(logged["val_bits_per_byte"], rel=1e-5)
    written = script(EVALUATE, trained.path).out
    assert f"loss {found['loss']:.4f}   perplexity {found['perplexity']:.3f}" in written
    assert f"{found['tokens']:,} tokens in windows of 16" in written
    test = script(EVALUATE, trained.path, "--source", "test", "--json").json
    assert test["tokens"] == pytest.approx(found["tokens"], abs=1) and test["loss"] != found["loss"]


def test_a_text_and_the_same_in_a_file_score_the_same(trained: Trained, script: Script, tmp_path: Path) -> None:
    text = "the café's sign\nagain"
    file = tmp_path / "other.txt"
    file.write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    typed = script(EVALUATE, trained.path, "--text", text.replace("\n", "\\n"), "--json", "--per-token").json
    read = script(EVALUATE, trained.path, "--file", file, "--json", "--per-token").json
    assert typed["per_token"] == read["per_token"]
    tokens = typed["per_token"]
    assert "".join(row["token"] for row in tokens) == text[1:]
    assert typed["loss"] == pytest.approx(-np.mean([row["log_probability"] for row in tokens]))
    assert all(1 <= row["rank"] <= 28 and row["log_probability"] < 0 for row in tokens)
    assert typed["bits_per_byte"] == pytest.approx(typed["loss"] * len(tokens) / math.log(2) / (len(tokens) + 1))
    table = script(EVALUATE, trained.path, "--file", file, "--per-token").out.splitlines()
    assert table[0].split() == ["token", "ln", "p", "rank"]
    assert table[1].split() == ["'h'", f"{tokens[0]['log_probability']:.3f}", str(tokens[0]["rank"])]


def test_a_replay_says_whether_the_bits_agree(trained: Trained, script: Script, tmp_path: Path) -> None:
    honest = script(EVALUATE, trained.path, "--verify", 40)
    assert (honest.code, honest.err) == (0, "")
    assert honest.out == "steps 30 to 40: trained anew, every bit of weights and optimizer is the same\n"
    copy = tmp_path / "copy"
    (copy / "checkpoints").mkdir(parents=True)
    for step in (20, 30):
        saved = find_checkpoint(trained.path, str(step))
        arrays = {f"{kind}.{n}": array for kind in ("model", "optimizer") for n, array in saved.tensors(kind).items()}
        if step == 30:
            arrays["model.token_embedding.weight"][3, 4] += 1e-7
        header = {key: value for key, value in saved.metadata.items() if key != "checksum"}
        save_checkpoint(copy / "checkpoints" / saved.path.name, arrays, header)
    forged = script(EVALUATE, copy, "--verify", 30)
    assert forged.code == 1
    assert forged.out == "steps 20 to 30: 1 tensors differ, the first is model.token_embedding.weight\n"
    assert script(EVALUATE, copy, "--verify", 30, "--json").json == {
        "from": 20, "to": 30, "equal": False, "different": ["model.token_embedding.weight"],
    }  # fmt: skip


# ── mistakes ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with texts that can't be trained on and runs that can't be read."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.txt").write_text("seven lanterns near the mill " * 40, encoding="utf-8")
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "blank.txt").write_text(" \n" * 50, encoding="utf-8")
    (tmp_path / "one.txt").write_text("x", encoding="utf-8")
    (tmp_path / "short.txt").write_text("seven lanterns near the mill. ", encoding="utf-8")
    (tmp_path / "cp1252.txt").write_bytes("the ferryman’s ".encode("cp1252") * 20)
    (tmp_path / "no_text").mkdir()
    (tmp_path / "wrong.toml").write_text("[model]\nn_layerz = 3\ndropout = 2.0\n", encoding="utf-8")
    (tmp_path / "broken.toml").write_text("[model\n", encoding="utf-8")
    damaged = tmp_path / "damaged" / "checkpoints"
    damaged.mkdir(parents=True)
    (damaged / "step-00000005.safetensors").write_bytes(b"half")
    header = {"step": 3, "config": {}, "tokenizer": {}}
    for name, changed in (("newer", {"format": 2}), ("keys", {"config": {"model": {"n_experts": 8}}})):
        path = tmp_path / name / "checkpoints" / "step-00000003.safetensors"
        save_checkpoint(path, {"model.w": np.zeros(1)}, {**header, **changed})
    return tmp_path


def own(source: str, *words: str) -> tuple[object, ...]:
    return (TRAIN, "--data.source", source, "--data.cache-dir", "cache", "--run.threads", "1", *words)


MISTAKES: list[tuple[tuple[object, ...], str]] = [
    ((TRAIN, "--model.n-layerz", "3"), "--model.n-layerz: unknown option; did you mean --model.n-layer?"),
    ((TRAIN, "--optim.lr", "fast"), "optim.lr = fast: must be at least 0"),
    ((TRAIN, "--optim.lr"), "argument --optim.lr: expected one argument; see --help"),
    (
        (TRAIN, "wrong.toml"),
        "model.dropout = 2.0: must be at least 0 and below 1\nmodel.n_layerz: unknown key; did you",
    ),
    ((TRAIN, "broken.toml"), "broken.toml: not a valid TOML file"),
    ((TRAIN, "nowhere.toml"), "nowhere.toml: No such file or directory; give the path of a TOML file"),
    ((TRAIN, "--resume", "a", "--init-from", "b"), "--resume goes on with a run, --init-from begins a new one"),
    ((TRAIN, "wrong.toml", "--resume", "a"), "wrong.toml: --resume and --init-from bring their own settings"),
    ((TRAIN, "--resume", "nowhere"), "nowhere: not a run's folder"),
    ((TRAIN, "--resume", "no_text"), "no_text: not a run's folder"),
    ((TRAIN, "--resume", "damaged"), "damaged: no checkpoint can be read"),
    ((TRAIN, "--resume", "keys"), "its configuration, of minigpt"),
    ((TRAIN, "--init-from", "newer"), "has format 2, this minigpt reads format 1; use the one that wrote it"),
    (own("nowhere.txt"), "nowhere.txt"),
    (own("no_text"), "no_text"),
    (own("empty.txt"), "empty.txt: there is no text in it; training needs at least 143 characters"),
    (own("blank.txt", "--data.tokenizer", "byte"), "blank.txt: there is no text in it"),
    (own("one.txt", "--data.tokenizer", "char"), "one.txt: its training part has"),
    (own("one.txt", "--data.tokenizer", "bpe", "--data.vocab-size", "1000"), "one.txt: its training part has"),
    (own("short.txt", "--data.tokenizer", "char"), "the largest context that works is 27 (--model.context-length 27)"),
    (own("cp1252.txt"), "cp1252.txt"),
    (own("good.txt", "--run.name", "a/b"), "run.name = a/b: must be a folder name that every system allows, as a_b"),
    (own("good.txt", "--run.dir", "good.txt"), "can't make the run's folder"),
    (own("good.txt", "--data.tokenizer", "chars"), "chars"),
    ((GENERATE, "nowhere"), "nowhere: no such run folder or checkpoint file; runs here: damaged"),
    ((GENERATE, "no_text"), "no_text: not a run folder (it has no checkpoints); no_text holds no runs"),
    ((GENERATE, "good.txt"), "good.txt: damaged or not a checkpoint"),
    ((GENERATE, "damaged"), "damaged: no checkpoint can be read"),
    ((GENERATE, "newer"), "has format 2, this minigpt reads format 1; use the one that wrote it"),
    ((GENERATE, "keys"), "model.n_experts: unknown key"),
    ((GENERATE,), "the following arguments are required: run; see --help"),
    ((EVALUATE, "nowhere"), "nowhere: no such run folder or checkpoint file"),
    ((EVALUATE, "damaged", "--verify", "5"), "step-00000005.safetensors: damaged"),
    ((EVALUATE, "newer", "--text", "a", "--file", "b"), "argument --file: not allowed with argument --text"),
]


@pytest.mark.parametrize(
    ("words", "sentence"), MISTAKES, ids=[" ".join(map(str, words[1:])) or "nothing" for words, _ in MISTAKES]
)
def test_a_mistake_is_one_sentence_and_leaves_nothing(
    place: Path, script: Script, words: tuple[object, ...], sentence: str
) -> None:
    before = sorted(place.rglob("*"))
    answer = script(*words)
    assert answer.code == 2
    assert answer.err.startswith("error: ") and sentence in answer.err
    assert "Traceback" not in answer.err and answer.out == ""
    left = [path for path in sorted(place.rglob("*")) if path not in before and "cache" not in path.parts]
    assert [path for path in left if path.name != ".lock"] == []


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--which", "7"), "no checkpoint of step 7; there are steps 0, "),
        (("--which", "newest"), "checkpoint 'newest': must be best, last, or the number of a step"),
        (("--temperature", "-1"), "temperature = -1.0: must be a number of at least 0"),
        (("--temperature", "nan"), "temperature = nan: must be"),
        (("--temperature", "hot"), "argument --temperature: invalid float value: 'hot'"),
        (("--top-p", "0"), "top_p = 0.0: must be above 0"),
        (("--max-new-tokens", "-1"), "--max-new-tokens = -1: must be at least 0"),
        (("--num-samples", "0"), "--num-samples = 0: must be at least 1"),
        (("--seed", "-1"), "seed = -1: must be"),
        (("--stop", ""), "a stop string is empty"),
        (("--tempratur", "1"), "--tempratur: unknown option; did you mean --temperature?"),
        (("--device", "gpu"), "run.device = gpu: must be auto, cpu, mps, cuda"),
    ],
)
def test_mistakes_in_sampling(trained: Trained, script: Script, words: tuple[str, str], sentence: str) -> None:
    answer = script(GENERATE, trained.path, *words)
    assert answer.code == 2
    assert answer.err.startswith("error: ") and sentence in answer.err
    assert answer.out == ""


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--text", "a"), "--text: 1 tokens; at least 2 are needed, since the first is not predicted"),
        (("--text", ""), "--text: 0 tokens"),
        (("--text", "Ω"), "'Ω' (U+03A9)"),
        (("--file", "nowhere.txt"), "nowhere.txt: "),
        (("--verify", "5"), "no checkpoint of step 5; there are steps 0, "),
        (("--verify", "0"), "no checkpoint before step 0 to begin at"),
        (("--source", "train"), "argument --source: invalid choice: 'train'"),
    ],
)
def test_mistakes_in_scoring(trained: Trained, script: Script, words: tuple[str, str], sentence: str) -> None:
    answer = script(EVALUATE, trained.path, *words)
    assert answer.code == 2
    assert answer.err.startswith("error: ") and sentence in answer.err
    assert answer.out == ""


def test_parts_that_were_not_held_back_are_not_scored(tiny: Tables, script: Script) -> None:
    run = begun(tiny, data={"val_fraction": 0.0}, train={"max_steps": 1})
    for part, key in (("test", "test_fraction"), ("val", "val_fraction")):
        answer = script(EVALUATE, run.path, "--source", part)
        assert answer.code == 2 and f"data.{key} = 0" in answer.err


def test_a_changed_text_is_told_when_scoring(tiny: Tables, script: Script) -> None:
    run = begun(tiny, train={"max_steps": 1})
    source = Path(tiny["data"]["source"])
    source.write_text(source.read_text(encoding="utf-8")[:-40], encoding="utf-8")
    answer = script(EVALUATE, run.path)
    assert (answer.code, answer.err) == (0, f"{source}: the text has changed since the run began\n")


# ── other languages and other machines' settings ───────────────────────────────────────────────────────────────


@pytest.mark.parametrize("tokenizer", ["char", "bpe", "byte"])
def test_a_japanese_text_goes_through_everything(tmp_path: Path, japanese: str, script: Script, tokenizer: str) -> None:
    tables = tiny_tables(tmp_path, japanese)
    options = as_options(tables | {"train": tables["train"] | {"sample_prompt": "白い鳥は"}})
    name = "昔話"
    answer = script(TRAIN, *options, "--run.name", name, "--data.tokenizer", tokenizer)
    assert answer.code == 0
    run = tmp_path / "runs" / name
    assert (run / "samples" / "step-00000020.txt").read_text(encoding="utf-8").startswith("白い鳥は")
    answer = script(GENERATE, run, "--prompt", "隣の犬は", "--max-new-tokens", 30, "--stop", "。")
    assert answer.out.startswith("隣の犬は") and "。" not in answer.out
    scored = script(EVALUATE, run, "--text", "古い時計は静かに", "--per-token", "--json").json
    assert scored["tokens"] == len(scored["per_token"]) >= 5
    if tokenizer == "char":
        assert "".join(row["token"] for row in scored["per_token"]) == "い時計は静かに"
    assert script(EVALUATE, run, "--json").json["loss"] == pytest.approx(find_checkpoint(run).val_loss, rel=1e-5)


def test_a_foreign_locale_trains_the_same_bits(trained: Trained, tmp_path: Path) -> None:
    """Where Python takes texts for ASCII unless told otherwise; and none of our files leaves it untold."""
    options = [*trained.options, "--run.dir", tmp_path, "--data.cache-dir", tmp_path / "cache"]
    strict = ("-X", "warn_default_encoding", "-W", "always::EncodingWarning")
    variables = environment(**FOREIGN)
    del variables["PYTHONIOENCODING"]
    done = subprocess.run(
        command(TRAIN, *options, python=strict), env=variables, capture_output=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    assert_same_bits(trained.path, tmp_path / "tiny")
    assert b"\\xe9" in done.stderr and "é".encode() not in done.stderr, "the console can't show it"
    sampled = subprocess.run(
        command(GENERATE, tmp_path / "tiny", "--prompt", "café", "--max-new-tokens", "5", python=strict),
        env=variables,
        capture_output=True,
        check=False,
    )
    assert sampled.returncode == 0 and sampled.stdout.startswith(rb"caf\xe9")
    scored = subprocess.run(
        command(EVALUATE, tmp_path / "tiny", "--text", "café", "--per-token", python=strict),
        env=variables,
        capture_output=True,
        check=False,
    )
    assert scored.returncode == 0 and rb"'\xe9'" in scored.stdout
    for line in (done.stderr + sampled.stderr + scored.stderr).decode(errors="replace").splitlines():
        assert not ("EncodingWarning" in line and line.startswith(str(ROOT))), line


WITHOUT_TORCH = """
import importlib, runpy, sys
for name in "minigpt config errors cli tokenizer bpe sources split corpus normal_form plain sampling scoring".split():
    importlib.import_module(f"minigpt.{name}" if name != "minigpt" else name)
    assert "torch" not in sys.modules, name
for name in ("checkpoint", "run", "tracking", "tasks"):
    importlib.import_module(f"minigpt.{name}")
    assert "torch" not in sys.modules, name
root, run = sys.argv[1:]
for script, words in (("generate", ["--max-new-tokens", "9"]), ("evaluate", []), ("train", ["--optim.lr", "x"])):
    sys.argv = [script, *([run] if script != "train" else []), *words]
    try:
        runpy.run_path(f"{root}/scripts/{script}.py", run_name="__main__")
    except SystemExit as leaving:
        assert leaving.code == (2 if script == "train" else 0), script
    assert "torch" not in sys.modules, script
"""


def test_half_of_the_house_never_loads_torch(trained: Trained) -> None:
    """Sampling, scoring and a mistake in the configuration answer at once."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, str(ROOT), str(trained.path)],
        env=environment(),
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="a closed pipe is another error there")
def test_a_reader_who_has_had_enough_is_no_error(trained: Trained) -> None:
    process = subprocess.Popen(
        command(GENERATE, trained.path, "--max-new-tokens", 3000, "--num-samples", 20),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout and process.stderr
    assert process.stdout.read(10)
    process.stdout.close()
    complaints = process.stderr.read()
    process.stderr.close()
    assert (process.wait(60), complaints) == (0, b"")


# ── signals ────────────────────────────────────────────────────────────────────────────────────────────────────


def interrupted(words: list[str], number: int, folder: Path, at: str) -> Answer:
    """Start training, and send the signal when ``at`` is told."""
    log = folder / "stderr.txt"
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            command(TRAIN, *words), env=environment(), stdout=subprocess.PIPE, stderr=stderr, cwd=folder
        )
        try:
            deadline = time.monotonic() + 60
            while at not in log.read_text(encoding="utf-8") and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.02)
            process.send_signal(number)
            out, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    return Answer(process.returncode, out.decode(), log.read_text(encoding="utf-8"))


@pytest.mark.skipif(sys.platform == "win32", reason="a signal can't be sent to one process there")
def test_signals_save_and_say_how_to_go_on(tiny: Tables, tmp_path: Path) -> None:
    """Ctrl-C in a new run, then a request to end in the resumed one; what they leave is an uncut run's."""
    tiny["train"] |= {"max_steps": 100_000, "eval_interval": 0}
    tiny["optim"] = {"schedule": "constant"}
    run = tmp_path / "runs" / "tiny"
    answer = interrupted(as_options(tiny), signal.SIGINT, tmp_path, "step 5/")
    assert answer.code == 130, answer.err
    first = find_checkpoint(run, "last", verify=True).step
    assert 5 <= first < 100_000
    assert f"interrupted and saved; go on with: python scripts/train.py --resume {run}\n" in answer.out
    answer = interrupted(["--resume", str(run)], signal.SIGTERM, tmp_path, f"step {first + 2}/")
    assert answer.code == 143, answer.err
    last = find_checkpoint(run, "last", verify=True)
    assert last.step >= first + 2
    assert [row["step"] for row in rows(run)] == list(range(1, last.step + 1))
    whole = begun(tiny, run={"name": "whole"}, train={"max_steps": last.step})
    for name, array in find_checkpoint(whole.path, "last").tensors("model").items():
        assert np.array_equal(array, last.tensors("model")[name]), name


TWICE = """
import signal
from minigpt.cli import StopSignal
with StopSignal() as stop:
    signal.raise_signal(signal.SIGINT)
    print(stop(), stop.exit_code, flush=True)
    signal.raise_signal(signal.SIGTERM)
    print("still here", flush=True)
"""


def test_the_second_signal_ends_at_once() -> None:
    done = subprocess.run(
        [sys.executable, "-c", TWICE], env=environment(), capture_output=True, encoding="utf-8", check=False
    )
    assert done.returncode == 128 + signal.SIGTERM
    assert done.stdout == "True 130\n"
