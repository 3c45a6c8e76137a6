"""A run as Python users load it: the numbers of the scripts, without torch."""

import subprocess
import sys
from dataclasses import asdict

import numpy as np
import pytest
from conftest import Tables
from running import EVALUATE, GENERATE, Script, Trained, environment
from test_recurrent import ADAMW
from tiny_runs import begun, told

import minigpt
from minigpt import engines
from minigpt.checkpoint import find_checkpoint
from minigpt.explorer.capture import capture
from minigpt.normal_form import from_checkpoint
from minigpt.trained import load

TEXT = "the café's sign\nagain"


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ((), {}),
        (("--seed", 7, "--max-new-tokens", 90), {"seed": 7, "max_new_tokens": 90}),
        (("--temperature", 0), {"temperature": 0}),
        (("--top-k", 5, "--top-p", 0.9, "--min-p", 0.01, "--repetition-penalty", 1.2),
         {"top_k": 5, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2}),
        (("--stop", "e", "--stop", "\\n"), {"stop": ["e", "\r\n"]}),
        (("--stop", "the"), {"stop": "the"}),
    ],
)  # fmt: skip
def test_it_writes_what_the_script_writes(trained: Trained, script: Script, words: tuple, options: dict) -> None:
    text = script(GENERATE, trained.path, "--prompt", "the old\\n", "--json", *words).json["samples"][0]["text"]
    run = minigpt.load(trained.path)
    assert run.generate("the old\r\n", **options) == run.generate("the old\n", **options) == text
    assert repr(run) == f"minigpt.load({str(find_checkpoint(trained.path).path)!r})"


def test_the_prompt_may_be_empty(trained: Trained, script: Script) -> None:
    assert load(trained.path, "40").generate() + "\n" == script(GENERATE, trained.path, "--which", "40").out


def test_long_texts_are_written_by_numba_if_it_is_worth_it(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    run = load(trained.path)
    plain = run.generate("the", max_new_tokens=60)
    monkeypatch.setattr(engines, "worth_numba", lambda _model, n_token: n_token > 60)
    monkeypatch.setattr("minigpt.trained.worth_numba", engines.worth_numba)
    compiled = run.generate("the", max_new_tokens=61)
    assert compiled.startswith(plain) and len(run._engines) == 2
    assert run.generate("the", max_new_tokens=60) == plain and len(run._engines) == 2


def test_log_probabilities_are_those_of_the_script(trained: Trained, script: Script) -> None:
    told_by_script = script(EVALUATE, trained.path, "--text", TEXT.replace("\n", "\\n"), "--per-token", "--json").json
    rows = load(trained.path).logprobs(TEXT)
    assert [asdict(row) for row in rows] == told_by_script["per_token"]
    assert "".join(row.token for row in rows) == TEXT[1:] and all(row.log_probability < 0 for row in rows)


def test_attention_is_what_the_page_captures(trained: Trained) -> None:
    run = load(trained.path)
    seen = run.attention("the café's")
    expected = capture(from_checkpoint(run.checkpoint), seen.ids)
    np.testing.assert_array_equal(seen.weights, expected.weights)
    assert seen.weights.shape == (1, 2, 10, 10)
    np.testing.assert_allclose(seen.weights.sum(-1), 1, atol=1e-6)
    assert not np.triu(seen.weights, 1).any()
    assert list(seen.tokens) == list("the café's")


def test_mistakes_are_sentences(trained: Trained) -> None:
    run = load(trained.path)
    assert told(run.attention, "the old miller watches").endswith("has 22 tokens: give at least 1 and at most 16")
    assert told(run.attention, "") == "the text has 0 tokens: give at least 1 and at most 16"
    assert told(run.logprobs, "e") == "the text has 1 token: the first is not predicted; give at least 2"
    assert told(run.generate, "the", top_p=0.0) == "top_p = 0.0: must be above 0 and at most 1"
    assert told(run.generate, "the", seed=-1) == "seed = -1: must be a whole number of at least 0"
    assert "never seen: '猫'" in told(run.logprobs, "the 猫")
    assert len(load(trained.path, unseen="skip").logprobs("the 猫")) == 3
    assert told(load, trained.path / "none").startswith(f"{trained.path / 'none'}: no such run folder")
    with pytest.raises(TypeError):
        run.generate("the", temprature=1.0)  # type: ignore[call-arg]
    with pytest.raises(AttributeError, match="no attribute 'lod'"):
        minigpt.lod  # type: ignore[attr-defined]  # noqa: B018


def test_a_recurrent_run_writes_and_scores(tiny: Tables, script: Script) -> None:
    path = begun(tiny, model={"kind": "gru"}, optim=ADAMW).path
    run, answer = load(path), script(GENERATE, path, "--prompt", "the ", "--json").json
    assert run.generate("the ") == answer["samples"][0]["text"]
    scored = script(EVALUATE, path, "--text", TEXT.replace("\n", "\\n"), "--per-token", "--json").json
    assert [asdict(row) for row in run.logprobs(TEXT)] == scored["per_token"]
    assert told(run.attention, "the").endswith(": a recurrent network (gru) has no attention to look at")


def test_nothing_of_it_loads_torch(trained: Trained) -> None:
    code = """
import sys
import minigpt
assert not {"numpy", "torch", "pydantic"} & set(sys.modules)
run = minigpt.load(sys.argv[1])
run.generate("the", max_new_tokens=5), run.logprobs("the"), run.attention("the")
assert "torch" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(trained.path)], env=environment(), capture_output=True, encoding="utf-8"
    )
    assert done.returncode == 0, done.stderr
