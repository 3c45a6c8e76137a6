"""A teacher's own file of worked examples, and what ``compare_attention.py examples`` prints."""

import json
import math
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from running import ROOT, Script, command, environment

from minigpt.errors import UserError
from minigpt.inspection.commands.examples import results_of
from minigpt.inspection.worked.cases import Case
from minigpt.inspection.worked.examples import load_examples
from minigpt.inspection.worked.pencil import matrix, pencil

COMPARE = ROOT / "scripts" / "compare_attention.py"
CASES = {case.name: case for case in load_examples().cases()}

# ── the file ───────────────────────────────────────────────────────────────────────────────────────────────────


def one(**changes: Any) -> dict[str, Any]:
    """A file with one small example; a change to None takes a field away."""
    example = {
        "name": "mine", "query": [[1, 0], [0, 1]], "key": [[1, 0], [0, 1]], "value": [[1, 2, 3], [4, 5, 6]],
        "weights": [[0.66976155, 0.33023845], [0.33023845, 0.66976155]],
        "output": [[1.99071535, 2.99071535, 3.99071535], [3.00928465, 4.00928465, 5.00928465]],
    }  # fmt: skip
    example = {field: value for field, value in (example | changes).items() if value is not None}
    return {"attention": [example]}


def written(folder: Path, content: Any) -> Path:
    path = folder / "mine.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


MISTAKES: dict[str, tuple[Any, str]] = {
    "no JSON": ("{", "not a valid JSON file"),
    "no object": ([1], "must be an object with one or more of the lists attention, multi_head, parts, reference_rows"),
    "unknown list": ({"atention": []}, "there is no list atention; did you mean attention?"),
    "empty": ({"parts": []}, "holds no example"),
    "no list": ({"attention": {}}, "attention must be a list of objects"),
    "no name": (one(name=""), "attention example number 0 must be an object with a name"),
    "same name": ({"attention": one()["attention"] * 2}, "two examples are named mine; each needs a name of its own"),
    "missing": (one(key=None), "attention example mine: the field key is missing"),
    "unknown field": (one(ouput=[[1]]), "attention example mine: there is no field ouput; did you mean output?"),
    "ragged": (one(key=[[1, 0], [0]]), "attention example mine, field key: must be finite numbers in rows of one "
               "length, not [[1, 0], [0]]"),
    "text for numbers": (one(key="abc"), 'field key: must be finite numbers in rows of one length, not "abc"'),
    "NaN": (one(value=[[math.nan], [1]]), "field value: must be finite numbers in rows of one length, not [[NaN], "),
    "shape": (one(weights=[[1, 0, 0]] * 2), "field weights: has the shape (2, 3), where (2, 2) is needed"),
    "too few axes": (one(query=[1, 0]), "field query: has the shape (2,), where (T, K) is needed"),
    "other size": (one(key=[[1, 0, 0]] * 2), "field key: has the shape (2, 3), where (2, 2) is needed"),
    "mask": (one(mask=[[2, 0], [1, 1]]), "field mask: must hold 1 where a query may look and 0 where it may not"),
    "mask's shape": (one(mask=[[1, 0, 0]]), "field mask: its shape (1, 3) does not fit (2, 2)"),
    "flag": (one(scaled="no"), 'field scaled: must be true or false, not "no"'),
    "heads": (one(query=[[[1, 0]] * 2] * 3, key=[[[1, 0]] * 2] * 2), "field key: its 2 heads cannot be shared by the "
              "3 of query"),
    "kind": ({"parts": [{"name": "layernorm"}]}, "parts example layernorm, field name: layernorm is no kind of part; "
             "did you mean layer_norm?"),
    "odd rotation": ({"parts": [{"name": "r", "kind": "rotary_relative", "query": [1, 2, 3], "key": [1, 2, 3],
                                 "product": [1, 1, 1]}]}, "field query: rotation needs an even width"),
    "no positions": ({"parts": [{"name": "r", "kind": "rotary_relative", "query": [1, 2], "key": [1, 2],
                                 "positions": [2], "product": [1]}]}, "field positions: they and the distance must be "
                     "whole numbers, none below the distance or above 100000"),
    "heads of a width": ({"multi_head": [{"name": "m", "x": [[1, 2, 3]], "weights": [[[1]], [[1]]]}]},
                         "field weights: 2 heads cannot share a width of 3"),
    "row": ({"reference_rows": [{"name": "r", "tokens": ["a", "b"], "query": "c", "weights": [1, 0]}]},
            "reference_rows example r, field query: c is none of the tokens"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_file_is_one_sentence(mistake: str, tmp_path: Path) -> None:
    content, says = MISTAKES[mistake]
    path = written(tmp_path, content)
    with pytest.raises(UserError) as refusal:
        load_examples(path)
    assert str(refusal.value).startswith(f"{path}: ")
    assert says in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_what_a_file_may_leave_out(tmp_path: Path) -> None:
    head = {"name": "m", "x": [[1, 0], [0, 1]], "weights": [[[1, 0], [0.33023845, 0.66976155]]],
            "output": [[1, 0], [0.33023845, 0.66976155]]}  # fmt: skip
    examples = load_examples(written(tmp_path, {**one(mask=[1, 0]), "multi_head": [head]}))
    (case,), (many,) = examples.attention, examples.multi_head
    assert case.about == ""
    assert case.scaled
    assert list(case.expected()) == ["weights", "output"]
    assert case.mask is not None and case.mask.tolist() == [[True, False]] * 2
    assert many.query_weight.tolist() == [[1, 0], [0, 1]]
    assert many.causal
    assert all(result.holds for result in results_of(many))


# ── the command ────────────────────────────────────────────────────────────────────────────────────────────────


def test_command_shows_a_table(script: Script) -> None:
    answer = script(COMPARE, "examples")
    assert answer.code == 0
    assert max(map(len, answer.out.splitlines())) <= 80
    rows = {line.split()[0]: line.split() for line in answer.out.splitlines() if line}
    assert set(CASES) <= set(rows)
    assert rows["feed_forward_relu"] == ["feed_forward_relu", "0", "0", "-", "-", "-", "0"]
    assert f"{len(CASES)} examples: all " in answer.out


def test_command_prints_steps_for_a_pencil(script: Script) -> None:
    answer = script(COMPARE, "examples", "three_token_causal", "masking", "--steps")
    assert answer.code == 0
    text = answer.out
    for line in (
        "scaled scores = raw scores / sqrt(2) = raw scores / 1.4142",
        "  0.0000  0.7071    -inf",
        "  0.3302  0.6698  0.0000   sum 1.0000",
        "   3.3024   6.6976",
        "     nan     nan     nan   sum nan",
        "  0.3333  0.3333  0.3333   sum 1.0000",
    ):
        assert f"\n{line}\n" in text
    stages = ["\nraw scores", "\nscaled scores", "\nmask:", "\nweights", "\noutput"]
    assert [text.index(stage) for stage in stages] == sorted(text.index(stage) for stage in stages)


@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
def test_steps_fit_the_screen(case: Case) -> None:
    text = pencil(case)
    assert max(map(len, text.splitlines())) <= 80
    assert case.name in text


def test_large_tables_are_cut_in_the_middle() -> None:
    lines = matrix(np.arange(400.0).reshape(20, 20) / 4, row_sums=True).splitlines()
    assert len(lines) == 12
    assert max(map(len, lines)) <= 80
    assert lines[0].split()[:2] == ["0.0000", "0.2500"]
    assert lines[0].split()[-4:] == ["...", "4.7500", "sum", "47.5000"]
    assert lines[-2].strip() == "..."
    assert lines[-1].split()[0] == "95.0000"
    assert matrix(np.array([[1.0, -0.0], [-12, 3]])) == "    1    0\n  -12    3"
    assert max(map(len, matrix(np.full((1, 30), 1e300)).splitlines())) <= 80


def test_command_says_what_is_off(script: Script, tmp_path: Path) -> None:
    content = one(output=[[1.99071535, 2.99071535, 3.99071535], [3.00928465, 4.5, 5.00928465]])
    answer = script(COMPARE, "examples", "--examples", written(tmp_path, content))
    assert answer.code == 1
    assert "mine, first wrong step output" in answer.out
    assert "numpy float64: output[1, 1]: expected 4.5, got 4.0092846" in answer.out
    assert "  3.0093  4.5000  5.0093" in answer.out
    assert "5e-01!" in answer.out
    assert answer.out.splitlines()[-1] == "1 example: 5 of 5 results are off (!)"


def test_command_as_json(script: Script, tmp_path: Path) -> None:
    answer = script(COMPARE, "examples", "nothing_to_see", "--steps", "--json")
    assert answer.code == 0
    (entry,) = answer.json["examples"]
    assert answer.json["holds"]
    assert entry["steps"]["masked_scores"][1] == [None, None]
    assert {result["implementation"]: result.get("why_not") for result in entry["results"]} == {
        "numpy": None, "torch": None, "fused": None, "kernel": "empty row", "cached": "other mask",
    }  # fmt: skip
    answer = script(COMPARE, "examples", "--json", "--examples", written(tmp_path, one(output=[[0, 0, 0]] * 2)))
    assert answer.code == 1
    wrong = answer.json["examples"][0]["results"][0]["first_wrong"]
    assert (wrong["step"], wrong["place"], wrong["expected"]) == ("output", [1, 2], [[0, 0, 0]] * 2)


def test_command_refuses_unknown_names_and_files(script: Script, tmp_path: Path) -> None:
    answer = script(COMPARE, "examples", "three_token_casual")
    assert (answer.code, answer.err) == (
        2, "error: three_token_casual: examples.json has no such example; did you mean three_token_causal?\n"
    )  # fmt: skip
    answer = script(COMPARE, "examples", "--examples", tmp_path / "none.json")
    assert answer.code == 2
    assert "none.json: No such file or directory; give the path of a JSON file of examples" in answer.err


def test_help_needs_no_torch() -> None:
    program = (
        "import sys, minigpt.inspection.commands.examples, minigpt.inspection.commands.scaling; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run(command("-c", program), env=environment(), check=True)
