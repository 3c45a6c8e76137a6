"""Whatever a user gets wrong on a command line: one sentence on stderr, exit code 2, and nothing left behind."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from conftest import Tables
from running import EVALUATE, GENERATE, ROOT, TRAIN, Script, Trained
from tiny_runs import begun

from minigpt.checkpoint import save_checkpoint

COMPARE = ROOT / "scripts" / "compare_attention.py"


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
    ((TRAIN, "--optim.lr", "fast"), "optim.lr = fast: must be a number, at least 0"),
    ((TRAIN, "--optim.lr"), "argument --optim.lr: expected one argument; see --help"),
    (
        (TRAIN, "wrong.toml"),
        "model.dropout = 2.0: must be a number, at least 0 and below 1\nmodel.n_layerz: unknown key; did you",
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
    (own("good.txt", "--data.encoding", "undefined"), "data.encoding = undefined: not a text encoding that Python"),
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
        (("--max-new-tokens", "-1"), "max_new_tokens = -1: must be a whole number of at least 0"),
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
        (("--text", "a"), "--text: 1 token; at least 2 are needed, since the first is not predicted"),
        (("--text", ""), "--text: 0 tokens"),
        (("--text", "Ω"), "'Ω' (U+03A9)"),
        (("--file", "nowhere.txt"), "nowhere.txt: "),
        (("--verify", "5"), "no checkpoint of step 5; there are steps 0, "),
        (("--verify", "0"), "no checkpoint before step 0 to begin at"),
        (("--source", "train"), "--source train: no part of the run's text and no text of that name; known are val, "),
        (("--file", __file__, "--encoding", "ebcdic"), "--encoding = ebcdic: not a text encoding that Python knows"),
        (("--file", __file__, "--encoding", "base64"), "--encoding = base64: not a text encoding"),
        (("--file", __file__, "--encoding", "undefined"), "--encoding = undefined: not a text encoding"),
        (("--text", "a cat", "--encoding", "cp1252"), "--encoding cp1252 is that of --file: give both"),
    ],
)
def test_mistakes_in_scoring(trained: Trained, script: Script, words: tuple[str, str], sentence: str) -> None:
    answer = script(EVALUATE, trained.path, *words)
    assert answer.code == 2
    assert answer.err.startswith("error: ") and sentence in answer.err
    assert answer.out == ""


@pytest.mark.parametrize(
    ("fraction", "reason"),
    [
        (0.0, "the run held no {} part back (data.{}_fraction = 0)"),
        (0.0003, "the run's {} part is too short, it has no two tokens (data.{}_fraction = 0.0003)"),
    ],
)
def test_parts_that_were_not_held_back_are_not_scored(
    tiny: Tables, script: Script, fraction: float, reason: str
) -> None:
    run = begun(tiny, data={"val_fraction": fraction, "test_fraction": fraction}, train={"max_steps": 1})
    for part, name in (("test", "test"), ("val", "validation")):
        answer = script(EVALUATE, run.path, "--source", part)
        assert answer.code == 2 and f"--source {part}: {reason.format(name, part)}\n" in answer.err


def test_a_file_in_another_encoding_is_told_with_the_options_there_are(
    trained: Trained, script: Script, tmp_path: Path
) -> None:
    file = tmp_path / "cp1252.txt"
    file.write_bytes("the café".encode("cp1252"))
    answer = script(EVALUATE, trained.path, "--file", file)
    assert answer.code == 2 and f"{file}: byte 7 (0xe9) is not utf-8 text; name the file's encoding" in answer.err
    assert "outside train.py --encoding" in answer.err and "--data.tokenizer" not in answer.err
    for words in ((EVALUATE, trained.path), (COMPARE, "heads", trained.path, "--ref", "previous")):
        assert script(*words, "--file", file, "--encoding", "cp1252").code == 0
    assert script(EVALUATE, trained.path, "--file", file, "--encoding", "cp1252").code == 0


def test_another_manner_with_unseen_characters_is_no_changed_text(trained: Trained, script: Script) -> None:
    assert script(EVALUATE, trained.path, "--unseen", "skip").err == ""


def test_a_changed_text_is_told_when_scoring(tiny: Tables, script: Script) -> None:
    run = begun(tiny, train={"max_steps": 1})
    source = Path(tiny["data"]["source"])
    source.write_text(source.read_text(encoding="utf-8")[:-40], encoding="utf-8")
    answer = script(EVALUATE, run.path)
    assert (answer.code, answer.err) == (0, f"{source}: the text has changed since the run began\n")


def test_a_damaged_checkpoint_is_told_once_a_command(trained: Trained, script: Script, tmp_path: Path) -> None:
    run = tmp_path / "copy"
    shutil.copytree(trained.path, run, ignore=shutil.ignore_patterns("tensorboard"))
    newest = run / "checkpoints" / "step-00000040.safetensors"
    newest.write_bytes(newest.read_bytes()[:-10])
    goes_on = ("--train.max-steps", 41, "--data.cache-dir", tmp_path / "cache")
    for words in (
        (GENERATE, run),
        (EVALUATE, run, "--which", "last"),
        (COMPARE, "sentences", run, "the boat", "--which", 0, "--which", "best", "--which", "last"),
        (TRAIN, "--resume", run, *goes_on),
    ):
        answer = script(*words)
        assert answer.code == 0, answer.err
        assert answer.err.count(str(newest)) == 1 and answer.err.count("passed over: using step") == 1
