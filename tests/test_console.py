"""What a person sees on a terminal: no control characters, lines that fit whatever their script, words in number."""

import unicodedata
from pathlib import Path

import pytest
from conftest import Tables
from hypothesis import example, given, settings
from hypothesis import strategies as st
from running import EVALUATE, GENERATE, ROOT, TRAIN, Script
from tiny_runs import begun

from minigpt.console import columns, counted, visible, wrapped
from minigpt.watching import amount_of_text


def width(row: str) -> int:
    return sum(map(columns, row))


def test_control_characters_are_written_out() -> None:
    assert visible("a\x1b[2Jb\r\x07\x7f\x9b\0\tc\n") == "a\\x1b[2Jb\\x0d\\x07\\x7f\\x9b\\x00\tc\n"
    assert visible("é中😀\u200d\ufffd") == "é中😀\u200d\ufffd"
    every = "".join(map(chr, range(0x3000)))
    assert {c for c in visible(every) if unicodedata.category(c) == "Cc"} == {"\n", "\t"}


def test_wide_and_narrow_lines_fit() -> None:
    assert wrapped("春の朝、小さな駅で猫が", 10) == "春の朝、小\nさな駅で猫\nが"
    assert wrapped("the grey boat goes", 9) == "the grey\nboat goes"
    assert wrapped("the grey boat", 8) == "the grey\nboat", "a word may end where the line does"
    assert wrapped("  x" + "y" * 12, 8) == "  xyyyyy\nyyyyyyy", "a word too long for a line is cut"
    assert wrapped("駅へ the boat", 8) == "駅へ the\nboat"
    assert wrapped("e\u0301" * 8 + "\n\nb", 8) == "e\u0301" * 8 + "\n\nb", "accents take no place"


@settings(max_examples=100, deadline=None)
@given(text=st.text(alphabet="ab \n春、e\u0301\t", max_size=60), limit=st.integers(2, 12))
@example(text="", limit=2)
def test_nothing_but_blanks_is_lost(text: str, limit: int) -> None:
    rows = wrapped(text, limit).split("\n")
    assert all(width(row) <= limit for row in rows)
    assert "".join("".join(rows).split()) == "".join(text.split())


def test_numbers_and_their_nouns() -> None:
    assert [counted(n, "step") for n in (0, 1, 2, 1300)] == ["0 steps", "1 step", "2 steps", "1,300 steps"]
    assert [counted(n, "story", "stories") for n in (1, 2)] == ["1 story", "2 stories"]
    assert [amount_of_text(n) for n in (0.000851, 0.085, 0.99, 0.996, 1.0, 1.26, 20.4, 1300.0)] == [
        "0.085 % of an epoch", "8.5 % of an epoch", "99 % of an epoch", "1 epoch", "1 epoch", "1.3 epochs",
        "20 epochs", "1,300 epochs",
    ]  # fmt: skip


@pytest.mark.parametrize("tokenizer", ["char", "byte"])
def test_samples_of_a_run_fit_the_console(
    tiny: Tables, japanese: str, capfd: pytest.CaptureFixture[str], tokenizer: str
) -> None:
    Path(tiny["data"]["source"]).write_text(japanese.replace("\n", "\x1b"), encoding="utf-8")
    begun(tiny, data={"tokenizer": tokenizer}, train={"max_steps": 2, "eval_interval": 1})
    said = capfd.readouterr().err
    sample = said.partition("── step 2 writes ──\n")[2].partition("\n\n")[0]
    assert sample and all(width(row) <= 78 for row in sample.split("\n"))
    assert "1 layer, 2 heads" in said and "2 steps of 4 x 16 tokens (" in said and " % of an epoch), cpu" in said
    assert {c for c in said if unicodedata.category(c) == "Cc"} == {"\n"}


def test_a_terminal_gets_no_control_characters_and_a_pipe_all(
    tiny: Tables, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path(tiny["data"]["source"]).write_text("a\x1b[2J" * 40, encoding="utf-8")
    run = begun(tiny, train={"max_steps": 1}).path
    words = (GENERATE, run, "--prompt", "a\x1b[", "--max-new-tokens", "40")
    piped = script(*words).out
    assert piped.startswith("a\x1b[")
    monkeypatch.setattr("_pytest.capture.CaptureIO.isatty", lambda _stream: True, raising=False)
    assert script(*words).out == visible(piped)


COMPARE = ROOT / "scripts" / "compare_attention.py"
PARTS = ("examples", "scaling", "heads", "replace", "ablate", "links", "sentences")
SCRIPTS = [(TRAIN,), (GENERATE,), (EVALUATE,), (COMPARE,), *((COMPARE, part) for part in PARTS)]


@pytest.mark.parametrize("words", SCRIPTS, ids=lambda words: Path(words[-1]).stem)
def test_help_fits_80_columns(script: Script, monkeypatch: pytest.MonkeyPatch, words: tuple[Path | str, ...]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    answer = script(*words, "--help")
    assert answer.code == 0
    assert [line for line in answer.out.splitlines() if len(line) > 80] == []
