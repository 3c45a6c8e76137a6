"""A student's file run in a process of its own: nothing it does gets through but numbers, and each end is one line."""

import json
import re
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from running import ROOT, Answer, Script

from minigpt.errors import UserError
from minigpt.inspection.students.check import check, parse_implementation, parse_names
from minigpt.inspection.worked.examples import load_examples
from minigpt.inspection.worked.printed import require_right

COMPARE = ROOT / "scripts" / "compare_attention.py"

RIGHT = """
import numpy as np

print("noise on stdout \\u00e9", flush=True)

def attention(q, k, v, mask=None):
    scores = q @ np.swapaxes(k, -1, -2) / np.sqrt(k.shape[-1])
    if mask is not None:
        scores = np.where(mask, scores, -1e9)
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True) @ v

def unscaled(q, k, v, mask=None):
    return attention(q * np.sqrt(k.shape[-1]), k, v, mask)
"""

# What happens while the file is read, or while "attention" of it is called, and what is told.
ENDS = {
    "syntax": ("def attention(:", "line 1: SyntaxError: invalid syntax"),
    "import": (
        "x = 1\nimport no_such_module_here",
        "line 2: ModuleNotFoundError: No module named 'no_such_module_here'",
    ),
    "exit": ("raise SystemExit(0)", "called exit() while it was read"),
    "hard exit": ("import os\nos._exit(0)", "ended the process (exit code 0) while reading the file"),
    "exit when called": ("def attention(q, k, v): exit(3)", "called exit(); it must return its result"),
    "input": ("input()", "line 1: EOFError: EOF when reading a line"),
    "not UTF-8": ("x = '\udce9'", "SyntaxError"),
}


@pytest.fixture
def student(tmp_path: Path) -> Path:
    path = tmp_path / "student file.py"
    path.write_text(RIGHT, encoding="utf-8")
    return path


def examined(script: Script, path: Path, name: str, *words: object) -> Answer:
    return script(COMPARE, "examples", "--impl", f"{path}:{name}", *words)


def test_right_code_passes(script: Script, student: Path) -> None:
    answer = examined(script, student, "attention")
    assert (answer.code, answer.err) == (0, "")
    assert "right in every example" in answer.out and "noise" not in answer.out
    assert [path.name for path in student.parent.iterdir()] == [student.name]  # no cache left beside it


def test_mistake_is_told_with_tables_and_as_json(script: Script, student: Path) -> None:
    answer = examined(script, student, "unscaled")
    assert answer.code == 1
    lines = answer.out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "MISTAKE: no sqrt(d)" in " ".join(answer.out.split())
    assert "first step that differs: scaling" in lines
    expected, got = lines.index("expected"), lines.index("got")
    assert lines[expected + 1].split() == ["6.0167", "3.9833"]
    assert lines[got + 1].split() == ["6.3348", "3.6652"]
    told = examined(script, student, "unscaled", "--json").json
    assert {key: told[key] for key in ("correct", "mistake", "step", "example")} == {
        "correct": False, "mistake": "no sqrt(d)", "step": "scaling", "example": "three_token_full",
    }  # fmt: skip
    assert told["expected"][2] == [5.0, 5.0] and told["got"][0][0] == pytest.approx(6.3347819738)
    assert told["implementation"].endswith(":unscaled") and "square root" in told["mend"]


def test_class_of_torch_that_imports_its_neighbour(script: Script, tmp_path: Path) -> None:
    for name in ("student_classes", "student_mistakes", "student_group_mistakes", "student_class_mistakes"):
        (tmp_path / f"{name}.py").write_bytes((ROOT / "tests" / f"{name}.py").read_bytes())
    words = ("--names", "query=query_linear,output=output_linear", "--json")
    answer = examined(script, tmp_path / "student_class_mistakes.py", "MergedWrongly", *words)
    assert answer.code == 1 and answer.json["mistake"] == "heads merged without the transpose"
    assert answer.json["step"] == "merge" and answer.json["example"] == "two_heads_identity"


@pytest.mark.parametrize("how", ENDS)
def test_each_end_is_one_sentence(script: Script, tmp_path: Path, how: str) -> None:
    source, message = ENDS[how]
    path = tmp_path / "student.py"
    path.write_bytes(source.encode("utf-8", "surrogateescape"))
    answer = examined(script, path, "attention", "--json")
    assert answer.code == 1
    assert answer.json["message"].startswith(message) or message in answer.json["message"]
    assert answer.json["correct"] is False and "\n" not in answer.json["message"]


def test_endless_loop_is_stopped(tmp_path: Path) -> None:
    path = tmp_path / "student.py"
    path.write_text("while True: pass\n", encoding="utf-8")
    verdict = check(parse_implementation(f"{path}:attention"), time_limit=1)
    assert not verdict.correct
    assert verdict.message.startswith("did not finish within 1 s, while ")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows knows no groups of processes")
def test_what_the_student_started_is_ended_too(tmp_path: Path) -> None:
    path = tmp_path / "student.py"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (tmp_path / "child.py").write_text(
            f"import socket, time\nhere = socket.create_connection(('127.0.0.1', {port}))\nprint(flush=True)\n"
            "time.sleep(100)\n",
            encoding="utf-8",
        )
        path.write_text(
            "import os, subprocess, sys\n"
            f"child = subprocess.Popen([sys.executable, {str(tmp_path / 'child.py')!r}], stdout=subprocess.PIPE)\n"
            "child.stdout.readline()\nos._exit(7)\n",
            encoding="utf-8",
        )
        verdict = check(parse_implementation(f"{path}:attention"))
        assert verdict.message == "ended the process (exit code 7) while reading the file"
        server.settimeout(30)
        connection, _ = server.accept()
        with connection:
            connection.settimeout(30)
            assert connection.recv(1) == b""  # the other end is gone


def test_answers_that_are_tampered_with_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "student.py"
    for lines in ('["no object"]', '{"series": {"answers": 3}}\n{"done": "function"}', "[" * 100_000, ""):
        path.write_text(
            f"import os, sys\nopen(sys.argv[2], 'w', encoding='utf-8').write({lines!r})\nos._exit(0)\n",
            encoding="utf-8",
        )
        verdict = check(parse_implementation(f"{path}:attention"))
        assert not verdict.correct
        assert verdict.message.startswith(("left no answers", "ended the process (exit code 0)"))


# ── the user's mistakes ────────────────────────────────────────────────────────────────────────────────────────


def test_what_is_not_there_is_the_users_mistake(script: Script, student: Path) -> None:
    for name, message in (("atention", "has no atention; did you mean attention?"), ("np", "is a module")):
        answer = examined(script, student, name)
        assert answer.code == 2 and message in answer.err
    answer = examined(script, student.with_name("other.py"), "attention")
    assert answer.code == 2 and "no such file" in answer.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--time-limit", "0"), "must be above 0"),
        (("--time-limit", "nan"), "must be above 0"),
        (("--names", "query=W q"), "makes no sense"),
        (("--names", "queries=W_q"), "makes no sense"),
        (("--names", "query=W_q"), "student file.py:attention: is a function; --names tells where a class keeps"),
        (("--mask", "causal"), "invalid choice: 'causal'"),
        (("--steps",), "--impl goes with neither"),
        (("three_token_full",), "--impl goes with neither"),
        (("--examples", "none.json"), "none.json"),
    ],
)
def test_options_that_make_no_sense(script: Script, student: Path, words: tuple[str, ...], message: str) -> None:
    answer = examined(script, student, "attention", *words)
    assert answer.code == 2 and message in answer.err


@pytest.mark.parametrize("words", [("--names", "query=W_q"), ("--time-limit", "3"), ("--mask", "bool")])
def test_options_for_ones_own_code_are_refused_without_it(script: Script, words: tuple[str, ...]) -> None:
    answer = script(COMPARE, "examples", *words)
    assert (answer.code, answer.out) == (2, "")
    assert f"{words[0]} goes with --impl" in answer.err


def test_kind_of_mask_and_help(script: Script, student: Path) -> None:
    told = examined(script, student, "attention", "--mask", "additive", "--json")
    assert told.code == 1 and told.json["mistake"] == "mask inverted"  # np.where hides where there is a 0
    assert "minigpt/inspection/examples.json" in script(COMPARE, "examples", "--help").out


def test_form_of_the_options() -> None:
    for text in ("student.py", ":attention", "student.py:", "student.py:not a name"):
        with pytest.raises(UserError, match="must be FILE:NAME"):
            parse_implementation(text)
    assert parse_names("") == {
        "query": "query_linear", "key": "key_linear", "value": "value_linear", "output": "output_linear",
    }  # fmt: skip
    assert parse_names("query=W.q,output=proj.0")["query"] == "W.q"
    assert list(parse_names("bias=b_o,output=W_o")) == ["query", "key", "value", "output", "bias"]
    assert parse_names("qkv=c_attn") == {"qkv": "c_attn", "output": "output_linear"}


def causal_example(**changes: Any) -> dict[str, Any]:
    """Two tokens, the numbers rounded to three places."""
    example = {
        "name": "mine", "query": [[1, 0], [0, 1]], "key": [[1, 0], [0, 1]], "value": [[10, 0], [0, 10]],
        "mask": [[1, 0], [1, 1]], "weights": [[1, 0], [0.33, 0.67]], "output": [[10, 0], [3.302, 6.698]],
    }  # fmt: skip
    return {"attention": [example | changes]}


def test_numbers_rounded_in_a_file_accuse_nobody(script: Script, student: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.json"
    own.write_text(json.dumps(causal_example()), encoding="utf-8")
    assert examined(script, student, "attention", "--examples", own).code == 0
    told = examined(script, student, "unscaled", "--examples", own, "--json")
    assert told.code == 1 and told.json["mistake"] == "no sqrt(d)" and told.json["example"] == "mine"
    assert told.json["expected"][1] == pytest.approx([3.3023845, 6.6976155])  # not as rounded in the file


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("output", [[10, 0], [3.304, 6.698]], "output[1, 0]: 3.304 is wrong, it must be 3.302384507"),
        ("weights", [[1, 0], [0.3, 0.7]], "weights[1, 0]: 0.3 is wrong, it must be 0.3302384507"),
        ("output", [[10, 0], [3.3023847, 6.6976155]], ""),  # off by less than 1e-6
        ("output", [[10, 0], [3.3023945, 6.6976155]], "output[1, 0]: 3.3023945 is wrong"),
    ],
)
def test_wrong_numbers_in_a_file_are_its_own_mistake(tmp_path: Path, field: str, value: Any, says: str) -> None:
    own = tmp_path / "own.json"
    own.write_text(json.dumps(causal_example(**{field: value})), encoding="utf-8")
    if says:
        with pytest.raises(UserError, match=re.escape(f"{own}: example mine, field {field}")) as told:
            require_right(load_examples(own))
        assert says in str(told.value)
    else:
        require_right(load_examples(own))


def test_wrong_file_stops_before_any_code_runs(script: Script, student: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.json"
    own.write_text(json.dumps(causal_example(output=[[10, 0], [6.698, 3.302]])), encoding="utf-8")
    answer = examined(script, student, "attention", "--examples", own)
    assert (answer.code, answer.out) == (2, "") and "field output[1, 0]: 6.698 is wrong" in answer.err
