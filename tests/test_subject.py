"""The model that is looked at, and what it is given to read."""

import argparse
from pathlib import Path

import numpy as np
import pytest
from running import ROOT, Script, Trained

from minigpt.cli import parse_options
from minigpt.errors import UserError
from minigpt.inspection.subject import Subject, add_run_arguments, add_text_arguments, load_subject, sequences
from minigpt.tokenizer import END

COMPARE = ROOT / "scripts" / "compare_attention.py"


@pytest.fixture(scope="module")
def subject(trained: Trained) -> Subject:
    return load_subject(trained.path)


def read(subject: Subject, *words: str) -> np.ndarray:
    parser = argparse.ArgumentParser()
    add_run_arguments(parser)
    add_text_arguments(parser)
    options = parse_options(parser, ["run", *words])
    if options.unseen:
        subject = load_subject(subject.checkpoint.path, unseen=options.unseen)
    return sequences(subject, options).tokens


def test_windows_are_spread_evenly_over_a_part(subject: Subject, tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("the grey boat " * 10, encoding="utf-8")
    tokens = subject.tokenizer.encode(file.read_text(encoding="utf-8"))
    found = read(subject, "--file", str(file), "--sequences", "3", "--length", "10")
    assert found.tolist() == [tokens[start : start + 10].tolist() for start in (0, 65, 130)]
    assert read(subject, "--file", str(file), "--sequences", "99").shape == (140 // 16, 16), "no more than there are"
    assert not np.array_equal(read(subject), read(subject, "--source", "test"))


def test_one_text_is_one_sequence(subject: Subject, capsys: pytest.CaptureFixture[str]) -> None:
    text = "the grey boat\nthe grey boat"
    assert read(subject, "--text", text.replace("\n", "\\n"), "--length", "8").tolist() == [
        [END, *subject.tokenizer.encode(text)[:7].tolist()]
    ], "as every document begins"
    assert capsys.readouterr().err == "the text has 28 tokens with its <|end|>: only the first 8 are read\n"


def test_unseen_characters_can_be_left_out(
    subject: Subject, script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    assert read(subject, "--text", "theΩ boat", "--unseen", "skip").tolist() == [
        [END, *subject.tokenizer.encode("the boat").tolist()]
    ]
    assert capsys.readouterr().err == "1 of 9 characters left out: the tokenizer has never seen them\n"
    run, text = subject.checkpoint.path.parent.parent, "theΩ boat"
    for command in (("heads",), ("ablate", "--head", "L0H0"), ("replace", "--all")):
        answer = script(COMPARE, *command, run, "--text", text, "--unseen", "skip")
        assert answer.code == 0 and "1 of 9 characters left out" in answer.err
    refused = script(COMPARE, "sentences", run, text)
    assert refused.code == 2 and "--unseen skip" in refused.err
    answer = script(COMPARE, "sentences", run, text, "--which", 0, "--which", "best", "--unseen", "skip", "--json")
    assert answer.code == 0 and answer.err.count("1 of 9 characters left out") == 1
    assert answer.json["sentences"][0]["words"] == ["<|end|>", "the", "boat"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--length", "17"], "--length = 17: must be at least 2 and at most the context, 16"),
        (["--sequences", "0"], "--sequences = 0: must be at least 1"),
        (["--text", ""], r"--text with <\|end\|> in front: 1 token; at least 2 are needed"),
        (["--file", "nowhere.txt"], "nowhere.txt: cannot be read"),
        (["--text", "a", "--source", "test"], "not allowed with argument"),
    ],
)
def test_mistakes(subject: Subject, words: list[str], told: str) -> None:
    with pytest.raises(UserError, match=told):
        read(subject, *words)
