"""The scripts as they are used, from a text to samples and scores, in any language and locale.

Most calls run the script's file in this process; those that depend on the interpreter run in one of their own.
"""

import hashlib
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tomli_w
from conftest import tiny_tables
from running import EVALUATE, FOREIGN, GENERATE, ROOT, TRAIN, Script, Trained, as_options, command, environment
from tiny_runs import assert_same_bits, rows

from minigpt.checkpoint import find_checkpoint, save_checkpoint
from minigpt.tokenizer import tokenizer_from_dict

COMPARE = ROOT / "scripts" / "compare_attention.py"

# ── the way from text to sample ────────────────────────────────────────────────────────────────────────────────


def test_training_leaves_its_files_and_tells_what_comes_next(trained: Trained) -> None:
    path = trained.path
    names = {entry.name for entry in path.iterdir() if entry.name != ".lock"}
    assert names == {"config.toml", "metrics.jsonl", "samples", "checkpoints", "tensorboard", "attention"}
    steps = [int(file.stem.removeprefix("step-")) for file in sorted((path / "checkpoints").iterdir())]
    assert steps[0] == 0 and steps[-3:] == [20, 30, 40]
    assert [row["step"] for row in rows(path)] == list(range(1, 41))
    assert all(math.isfinite(value) for row in rows(path) for value in row.values())
    assert rows(path)[-1]["val_loss"] < rows(path)[9]["val_loss"] < math.log(28)
    sample = (path / "samples" / "step-00000040.txt").read_text(encoding="utf-8")
    assert sample.startswith("é\n") and 20 < len(sample) <= 2 + 120
    assert list((path / "tensorboard").iterdir())
    assert f"next: python scripts/generate.py {path}\n" in trained.done.stdout
    assert f"tensorboard --logdir {path.parent}\n" in trained.done.stdout
    assert "tokens: char, a vocabulary of 28" in trained.done.stderr, "the plan"
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
    for part in ("'?' (U+003F)", "'Z' (U+005A)", "'ü' (U+00FC)", "--unseen skip", "data.vocab_size", "byte or bpe"):
        assert part in answer.err


def test_unseen_characters_can_be_skipped_or_replaced(trained: Trained, script: Script) -> None:
    known, skipped, replaced = (
        script(GENERATE, trained.path, "--prompt", prompt, "--json", *options).json["samples"]
        for prompt, options in (("a ", ()), ("aZ ü", ("--unseen", "skip")), ("aZ", ("--unseen", "replace")))
    )
    prompt = ("--prompt", "aZ ü", "--unseen", "skip", "--max-new-tokens", 1)
    lost = "2 of 4 characters left out: the tokenizer has never seen them\n"
    told = script(GENERATE, trained.path, *prompt, "--num-samples", 3)
    assert told.err == lost and told.out.splitlines()[1].startswith("a "), "shown as the model got it"
    typed = script(GENERATE, trained.path, "--interactive", "--unseen", "replace", "--max-new-tokens", 1, typed="aZb\n")
    assert typed.out.startswith("a b")
    assert script(EVALUATE, trained.path, "--text", "aZ ü", "--unseen", "skip").err == lost
    assert known == skipped == replaced, "what the model saw, for the replacement a space"
    scores = [
        script(EVALUATE, trained.path, "--text", text, "--json", *options).json["loss"]
        for text, options in (("a b", ()), ("aZ bZ", ("--unseen", "skip")), ("aZb", ("--unseen", "replace")))
    ]
    assert scores[0] == scores[1] == scores[2]
    assert script(EVALUATE, trained.path, "--text", "aZb").code == 2


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


def forged(trained: Trained, folder: Path, weight: float = 0.0, **changed: object) -> Path:
    """A copy of the run's last checkpoint with a right checksum, its header changed, a weight increased."""
    saved = find_checkpoint(trained.path, "last")
    arrays = {f"model.{name}": array for name, array in saved.tensors("model").items()}
    arrays["model.lm_head.weight"][3, 4] += weight
    header = {key: value for key, value in saved.metadata.items() if key != "checksum"} | changed
    path = folder / saved.path.name
    save_checkpoint(path, arrays, header)
    return path


def test_weights_that_are_no_numbers_have_no_score(trained: Trained, script: Script, tmp_path: Path) -> None:
    path = forged(trained, tmp_path, weight=math.nan)
    for words in ((), ("--json",), ("--text", "the boat", "--per-token")):
        answer = script(EVALUATE, path, *words)
        assert (answer.code, answer.out) == (2, "")
        assert answer.err.startswith(f"error: {path}: the loss is not finite")


def test_a_tokenizer_that_is_not_the_models_is_told_with_the_file(
    trained: Trained, script: Script, tmp_path: Path
) -> None:
    own = find_checkpoint(trained.path, "last").tokenizer
    path = forged(trained, tmp_path, tokenizer=own | {"characters": own["characters"][:-5]})
    for words in ((GENERATE, path), (EVALUATE, path, "--text", "a boat", "--per-token")):
        answer = script(*words)
        assert (answer.code, answer.out) == (2, "")
        assert answer.err == f"error: {path}: damaged: its tokenizer has 23 ids, its model 28; use another one\n"


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
    assert forged.out == "steps 20 to 30: trained anew, other bits in 1 tensor, first in model.token_embedding.weight\n"
    assert script(EVALUATE, copy, "--verify", 30, "--json").json == {
        "from": 20, "to": 30, "equal": False, "different": ["model.token_embedding.weight"],
    }  # fmt: skip


def test_a_known_text_can_be_scored_and_looked_at(
    trained: Trained, script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poem = "the clock forgets the wet rope.\n"
    (trained.path.parent.parent / "cache" / "poem.txt").write_text(poem, encoding="utf-8", newline="\n")
    row = {"address": "https://poems.test/poem.txt", "licence": "", "kind": "text", "about": ""}
    row["sha256"] = hashlib.sha256(poem.encode()).hexdigest()
    (tmp_path / "sources.toml").write_text(tomli_w.dumps({"poem": row}), encoding="utf-8")
    monkeypatch.setattr("minigpt.sources.SOURCES_FILE", tmp_path / "sources.toml")
    found = script(EVALUATE, trained.path, "--source", "poem", "--json").json
    assert (found["text"], found["tokens"]) == ("poem", len(poem)), "all of it: <|end|> is in front"
    answer = script(COMPARE, "heads", trained.path, "--source", "poem", "--ref", "previous")
    assert answer.code == 0 and "2 sequences of 16 tokens" in answer.out
    unknown = script(EVALUATE, trained.path, "--source", "poen")
    assert unknown.code == 2 and "no text of that name; did you mean poem?; or see --file" in unknown.err


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
    if tokenizer == "byte":
        assert scored["per_token"][0]["token"] == "bytes:\\x8f"  # the second of 古's three
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
