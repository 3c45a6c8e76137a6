"""explore.py: the page of a run, what it opens with, and the sentences that mistakes get."""

import base64
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exploring import COMPARE, EXPLORE, lower_limits, numbers, payload_in, unpacked
from running import Answer, Script, Trained, command, environment

from minigpt import plain
from minigpt.checkpoint import find_checkpoint, save_checkpoint
from minigpt.explorer import making, payload
from minigpt.explorer.making import Wish, explore, made
from minigpt.explorer.payload import load_model, spread
from minigpt.tokenizer import tokenizer_from_dict

# ── from a run ─────────────────────────────────────────────────────────────────────────────────────────────────


def exported(script: Script, folder: Path, run: Path, *words: object) -> tuple[Answer, dict[str, Any]]:
    file = folder / "page.html"
    answer = script(EXPLORE, run, "--export", file, *words)
    assert answer.code == 0, answer.err
    return answer, payload_in(file.read_text(encoding="utf-8"))


def test_the_page_of_a_run(trained: Trained, script: Script, tmp_path: Path) -> None:
    answer, found = exported(script, tmp_path, trained.path)
    best = find_checkpoint(trained.path)
    assert re.fullmatch(rf"{tmp_path}/page.html: 0\.\d MB, weights of step {best.step}, step 0\n", answer.out)
    assert [(model["step"], model["precision"]) for model in found["models"]] == [(best.step, "f32"), (0, "f16")]
    np.testing.assert_array_equal(
        unpacked(found["models"][0])["token_table"], best.tensors("model")["token_embedding.weight"]
    )
    assert found["run"] == {
        "name": "tiny",
        "step": best.step,
        "steps": 40,
        "val_loss": best.val_loss,
        "parameters": 14_080,
    }
    assert found["captured"] == [] and found["server"] is None and found["text"]
    tokens = [base64.b64decode(token).decode() for token in found["tokenizer"]["tokens"]]
    assert "".join(tokens) == best.tokenizer["characters"]
    assert set(found["nulls"]["previous"]) == {"heads", "median", "maximum", "first_percentile"}
    assert found["film"]["steps"] == [0, 10, 20, 30, 40]
    assert found["film"]["length"] == 16 and len(found["film"]["text"]) == 16
    frame = numbers(found["film"]["maps"], "u1", 5, 1, 2, 136)[-1]
    kept = np.load(trained.path / "attention" / "step-00000040.npy")
    np.testing.assert_array_equal(frame, kept[..., *np.tril_indices(16)])
    assert [row["head"] for row in found["film"]["heads"][0]] == ["L0H0", "L0H1"]
    assert found["examples"]["attention"][0]["name"] == "three_token_full"


def test_a_notebook_s_page(trained: Trained, script: Script, tmp_path: Path) -> None:
    exported(script, tmp_path, trained.path)
    assert explore(str(trained.path)).html() == (tmp_path / "page.html").read_text(encoding="utf-8")


def test_what_the_page_opens_with(trained: Trained, script: Script, tmp_path: Path) -> None:
    _, found = exported(
        script, tmp_path, trained.path, "--text", "the\\n", "--text", "a", "--view", "compare", "--lang", "ja"
    )
    assert (found["text"], found["texts"], found["view"], found["lang"]) == ("the\n", ["the\n", "a"], "compare", "ja")
    (tmp_path / "some.txt").write_text("a grey heron counts the wet rope", encoding="utf-8")
    answer, found = exported(script, tmp_path, trained.path, "--file", tmp_path / "some.txt", "--f16")
    assert found["text"] == "a grey heron cou" and "cut to its first 16 tokens" in answer.err
    assert {model["precision"] for model in found["models"]} == {"f16"}
    rounded = unpacked(found["models"][0])["token_table"]
    own = find_checkpoint(trained.path).tensors("model")["token_embedding.weight"]
    np.testing.assert_array_equal(rounded, own.astype("f2"))


def test_a_run_without_its_text_opens_without_one(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = moved(trained, tmp_path, data={"source": str(tmp_path / "gone.txt"), "cache_dir": str(tmp_path)})
    found = made(checkpoint, Wish()).payload
    assert found["text"] == "" and found["nulls"] is None and len(found["models"]) == 1 and found["film"] is None
    assert "gone.txt" in capsys.readouterr().err


def moved(trained: Trained, folder: Path, **sections: dict[str, Any]) -> Path:
    """The best checkpoint as a file of its own, some settings changed."""
    best, path = find_checkpoint(trained.path), folder / "alone.safetensors"
    config = best.config.with_values(**sections).model_dump()
    tensors = {f"model.{name}": tensor for name, tensor in best.tensors("model").items()}
    save_checkpoint(path, tensors, {**best.metadata, "config": config})
    return path


def test_step_0_is_left_out_of_a_large_page(
    trained: Trained, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(making, "PAGE_BYTES", 200_000)
    assert len(made(trained.path, Wish()).payload["models"]) == 1
    assert "left out" in capsys.readouterr().err


def test_another_model_beside_it(trained: Trained, script: Script, tmp_path: Path) -> None:
    other = trained.path / "checkpoints" / "step-00000020.safetensors"
    _, found = exported(script, tmp_path, trained.path, "--compare", other)
    assert [model["name"] for model in found["models"]][1] == "step 20"
    _, found = exported(script, tmp_path, trained.path, "--compare", moved(trained, tmp_path))
    assert found["models"][1]["name"].startswith(f"{tmp_path}/alone.safetensors, step ")
    best = find_checkpoint(trained.path)
    foreign = tmp_path / "foreign.safetensors"
    characters = best.tokenizer["characters"][:-1] + "☃"
    metadata = {**best.metadata, "tokenizer": {**best.tokenizer, "characters": characters}}
    save_checkpoint(foreign, {f"model.{name}": tensor for name, tensor in best.tensors("model").items()}, metadata)
    answer = script(EXPLORE, trained.path, "--export", tmp_path / "no.html", "--compare", foreign)
    assert answer.code == 2 and "another tokenizer" in answer.err and answer.err.count("\n") == 1


def test_a_larger_model_s_texts(
    trained: Trained, script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lower_limits(monkeypatch)
    answer, found = exported(script, tmp_path, trained.path, "--text", "the old miller paints", "--text", "a")
    assert "14,080 parameters, of which a page carries at most 100: this one shows 2 texts" in answer.err
    assert "cut to its first 16 tokens" in answer.err and answer.out.endswith("captured texts\n")
    assert found["models"] == [] and [entry["text"] for entry in found["captured"]] == ["the old miller p", "a"]
    checkpoint = find_checkpoint(trained.path)
    model = load_model(checkpoint)
    logits = plain.forward(model.form, found["captured"][0]["ids"])
    kept = numbers(found["captured"][0]["logits"]["values"], "<f4", *logits.shape)
    np.testing.assert_array_equal(kept, logits.astype("f4"))
    assert tokenizer_from_dict(checkpoint.tokenizer).decode(found["captured"][0]["ids"]) == "the old miller p"
    answer = script(EXPLORE, trained.path, "--export", tmp_path / "no.html", "--f16")
    assert answer.code == 2 and "--f16" in answer.err


def test_a_long_film_is_thinned_evenly(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, said = tokenizer_from_dict(find_checkpoint(trained.path).tokenizer), list[str]()
    whole = payload.film_entry(trained.path, tokenizer, said.append)
    assert whole and whole["left_out"] == 0 and not said
    monkeypatch.setattr(payload, "FILM_BYTES", len(whole["maps"]) - 1)
    thinned = payload.film_entry(trained.path, tokenizer, said.append)
    assert thinned and thinned["steps"] in ([0, 10, 30, 40], [0, 20, 40], [0, 40])
    assert thinned["left_out"] == 5 - len(thinned["steps"]) and len(said) == 1
    monkeypatch.setattr(payload, "FILM_BYTES", 1)
    last = payload.film_entry(trained.path, tokenizer, said.append)
    assert last and last["steps"] == [40] and len(last["heads"]) == 1
    assert spread(range(0, 1000, 10), 10) == [0, 110, 220, 330, 440, 550, 660, 770, 880, 990]


@pytest.mark.parametrize(
    ("words", "view", "texts"),
    [
        (["heads", "RUN", "--text", "the old"], "look", ["the old"]),
        (["sentences", "RUN", "the old", "a grey"], "compare", ["the old", "a grey"]),
        (["film", "RUN"], "film", None),
    ],
)
def test_the_page_of_what_is_compared(
    trained: Trained,
    script: Script,
    tmp_path: Path,
    words: list[str],
    view: str,
    texts: list[str] | None,
) -> None:
    file = tmp_path / "page.html"
    answer = script(COMPARE, *(trained.path if word == "RUN" else word for word in words), "--html", file)
    assert answer.code == 0 and f"{file}: 0." in answer.err, answer.err
    found = payload_in(file.read_text(encoding="utf-8"))
    assert found["view"] == view and found["texts"] == (texts or found["texts"])


def test_sentences_of_two_checkpoints(trained: Trained, script: Script, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    answer = script(COMPARE, "sentences", trained.path, "the", "--which", 0, "--which", 20, "--html", file)
    assert answer.code == 0, answer.err
    assert [model["step"] for model in payload_in(file.read_text(encoding="utf-8"))["models"]] == [20, 0]


def test_the_film_as_a_table(trained: Trained, script: Script) -> None:
    answer = script(COMPARE, "film", trained.path)
    title, head, *rows = answer.out.splitlines()
    assert (
        answer.code == 0
        and "5 frames of 16 tokens" in title
        and head.split() == ["head", "reference", *["0", "10", "20", "30", "40"]]
    )
    assert [row.split()[0] for row in rows] == ["L0H0", "L0H1"]
    assert all(0 <= float(cell) <= 1 for row in rows for cell in row.split()[2:])
    found = script(COMPARE, "film", trained.path, "--json").json
    assert found["steps"] == [0, 10, 20, 30, 40] and len(found["rows"]) == 10
    answer = script(COMPARE, "film", trained.path / "samples")
    assert answer.code == 2 and answer.err.count("\n") == 1


# ── mistakes ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["RUN"], "--export FILE writes it"),
        (["RUN", "--export", "x.html", "--serve"], "give one of them"),
        (["--export", "x.html"], "or --demo"),
        (["RUN", "--demo", "--export", "x.html"], "and not both"),
        (["RUN", "--export", "x.html", "--open"], "belong to --serve"),
        (["RUN", "--export", "x.html", "--text", "a", "--file", "b"], "give one of them"),
        (["--demo", "--export", "x.html", "--which", "last"], "trains its own model"),
        (["RUN", "--export", "no/where/x.html"], "can't be written"),
        (["RUN", "--export", "x.html", "--view", "films"], "films"),
        (["RUN", "--export", "x.html", "--text", ""], "no token"),
        (["RUN", "--export", "x.html", "--text", "☃"], "--unseen"),
        (["nowhere", "--export", "x.html"], "nowhere"),
        (["RUN", "--serve", "--port", "70000"], "--port 70000"),
    ],
)
def test_mistakes_get_one_sentence(
    trained: Trained, script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = script(EXPLORE, *(trained.path if word == "RUN" else word for word in words))
    assert answer.code == 2 and answer.out == ""
    assert answer.err.startswith("error: ") and answer.err.count("\n") == 1 and sentence in answer.err


def test_a_recurrent_run_gets_one_sentence(trained: Trained, script: Script, tmp_path: Path) -> None:
    checkpoint = moved(trained, tmp_path, model={"kind": "lstm"}, optim={"name": "adamw"})
    answer = script(EXPLORE, checkpoint, "--export", tmp_path / "page.html")
    assert answer.code == 2 and "recurrent" in answer.err and answer.err.count("\n") == 1


def test_weights_that_fit_nowhere(trained: Trained, script: Script, tmp_path: Path) -> None:
    best = find_checkpoint(trained.path)
    tensors = {f"model.{name}": tensor.copy() for name, tensor in best.tensors("model").items()}
    for value, words, hint in ((1e6, ["--f16"], "leave out --f16"), (np.nan, [], "take an earlier step")):
        tensors["model.token_embedding.weight"][0, 0] = value
        save_checkpoint(tmp_path / "wild.safetensors", tensors, best.metadata)
        answer = script(EXPLORE, tmp_path / "wild.safetensors", "--export", tmp_path / "page.html", *words)
        assert answer.code == 2 and hint in answer.err and answer.err.count("\n") == 1


def test_exporting_needs_no_torch(trained: Trained, tmp_path: Path) -> None:
    code = (
        f"import runpy, sys\ntry: runpy.run_path({str(EXPLORE)!r}, run_name='__main__')\n"
        "except SystemExit as leaving: sys.exit(leaving.code or 77 * ('torch' in sys.modules))"
    )
    words = command("-c", code, trained.path, "--export", tmp_path / "page.html")
    done = subprocess.run(words, env=environment(), capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
