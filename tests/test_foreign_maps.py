"""Attention maps made elsewhere: the same numbers as for one's own, and nothing of a bad file is believed."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hand_set import hand_set_model, repeated_text, save_run
from running import ROOT, Script

from minigpt.errors import UserError
from minigpt.inspection.capture import attention_maps
from minigpt.inspection.maps import read_foreign_maps, read_foreign_tokens
from minigpt.inspection.patterns import parse_reference
from minigpt.tokenizer import END

COMPARE = ROOT / "scripts" / "compare_attention.py"


def written(path: Path, maps: Any) -> Path:
    match path.suffix:
        case ".npy":
            np.save(path, maps)
        case ".pt":
            torch.save(maps, path)
        case _:
            path.write_text(json.dumps(maps), encoding="utf-8")
    return path


def test_foreign_maps_give_the_same_numbers(script: Script, tmp_path: Path) -> None:
    model, tokens = hand_set_model(), np.array([END, *repeated_text(15)])
    maps = attention_maps(model, torch.as_tensor(tokens))
    text = "".join("abcdefghijklmno"[token - 1] for token in tokens[1:])
    own = script(COMPARE, "heads", save_run(model, tmp_path / "run"), "--text", text, "--json").json["heads"]
    tensors = [torch.from_numpy(layer)[None] for layer in maps]  # as transformers gives them
    files = [
        written(tmp_path / "a.npy", maps), written(tmp_path / "b.pt", tensors),
        written(tmp_path / "c.pt", torch.from_numpy(maps)), written(tmp_path / "d.json", maps.tolist()),
    ]  # fmt: skip
    names = written(tmp_path / "tokens.json", ["<|end|>", *text])
    for file in files:
        answer = script(COMPARE, "heads", "--maps", file, "--tokens", names, "--json")
        assert answer.code == 0 and "not known, names rest on total variation alone" in answer.err
        assert answer.json["causal"] is True
        for theirs, ours in zip(answer.json["heads"], own, strict=True):
            assert theirs["name"] == ours["name"] and theirs["mean_distance"] == pytest.approx(ours["mean_distance"])
            for name, values in theirs["references"].items():
                assert values["percentile"] is None
                assert values["mass"] == pytest.approx(ours["references"][name]["mass"], abs=1e-6)


def test_foreign_maps_without_tokens(script: Script, tmp_path: Path) -> None:
    file = written(tmp_path / "a.npy", np.tile(np.eye(5, k=-1) + np.eye(5)[:, :1] * np.eye(5)[0], (1, 2, 1, 1)))
    answer = script(COMPARE, "heads", "--maps", file, "--json")
    assert list(answer.json["references"]) == ["uniform", "previous", "first", "self"], "those that need no tokens"
    assert [head["name"] for head in answer.json["heads"]] == ["previous", "previous"]
    assert "-" in script(COMPARE, "heads", "--maps", file, "--full").out
    for reference in ("induction", "punctuation"):
        refused = script(COMPARE, "heads", "--maps", file, "--ref", reference)
        assert refused.code == 2 and "--tokens FILE" in refused.err


def test_maps_that_see_the_future_are_said_to(script: Script, tmp_path: Path) -> None:
    file = written(tmp_path / "a.npy", np.full((1, 1, 4, 4), 0.25))
    answer = script(COMPARE, "heads", "--maps", file, "--json")
    assert "not causal, rows move information from later tokens too" in answer.err
    assert answer.json["causal"] is False and answer.json["heads"][0]["normalised_entropy"] == pytest.approx(1)


@pytest.mark.parametrize(
    ("maps", "told"),
    [
        (np.ones((2, 3, 3)) / 3, r"has shape \(2, 3, 3\); must be layers x heads x T x T"),
        (np.ones((1, 1, 2, 3)) / 3, "has shape"),
        (np.ones((1, 1, 1, 1)), "T at least 2"),
        (np.ones((0, 1, 2, 2)), "has shape"),
        (np.full((1, 1, 2, 2), np.nan), "L0H0, row 0, key 0 is not a finite number"),
        (np.array([[[[1, 0], [0.5, 0.5]], [[1, 0], [2, -1]]]]), "L0H1, row 1, key 1 is below 0"),
        (np.array([[[[1, 0], [0.6, 0.6]]]]), "L0H0, row 1 sums to 1.2, not 1"),
        (np.array([[[["a", "b"], ["c", "d"]]]]), "not numbers"),
        (np.array([[[[1 + 1j, 0], [0, 1]]]]), "not numbers"),
    ],
)
def test_arrays_that_are_no_maps(tmp_path: Path, maps: np.ndarray, told: str) -> None:
    with pytest.raises(UserError, match=told):
        read_foreign_maps(written(tmp_path / "a.npy", maps))


class Evil:
    """What a pickle could do: run a command."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def test_files_that_execute_something_are_refused(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    np.save(tmp_path / "a.npy", np.array([Evil(mark)], dtype=object), allow_pickle=True)
    torch.save(Evil(mark), tmp_path / "a.pt")
    for name, told in (("a.npy", "not an .npy file of numbers"), ("a.pt", "not a .pt file of tensors alone")):
        with pytest.raises(UserError, match=told):
            read_foreign_maps(tmp_path / name)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.npy", b"", "not an .npy file"),
        ("a.npy", b"nonsense", "not an .npy file"),
        ("a.pt", b"nonsense", "not a .pt file"),
        ("a.json", b"[[", "not a valid JSON file"),
        ("a.json", b"\xff", "not a valid JSON file"),
        ("a.json", b"[" * 100_000, "not a valid JSON file"),
        ("a.json", b"[[1, 0], [1]]", "holds no array of numbers"),
        ("a.json", b"{}", "has shape"),
        ("a.json", b"[[[[1, null], [0, 1]]]]", "not numbers"),
    ],
)
def test_damaged_files(tmp_path: Path, name: str, content: bytes, told: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=told):
        read_foreign_maps(tmp_path / name)


def test_a_file_of_other_things_than_tensors(tmp_path: Path) -> None:
    for content in ({"a": torch.ones(2)}, [torch.ones(2), 3], 5, []):
        with pytest.raises(UserError, match="must hold one tensor, or a list of one tensor a layer"):
            read_foreign_maps(written(tmp_path / "a.pt", content))
    with pytest.raises(UserError, match="holds no array of numbers"):
        read_foreign_maps(written(tmp_path / "a.pt", [torch.ones(1, 2, 2), torch.ones(1, 3, 3)]))


@pytest.mark.parametrize(
    ("tensor", "told"),
    [
        (torch.eye(2).to_sparse(), r"holds a sparse tensor or one without numbers; save maps\.to_dense\(\)"),
        (torch.empty(1, 1, 2, 2, device="meta"), "one without numbers"),
        (torch.eye(2)[None, None] * (1 + 0j), "holds complex64, not numbers"),
        (torch.eye(2, dtype=torch.bool)[None, None], "holds bool, not numbers"),
    ],
)
def test_tensors_that_are_no_dense_numbers(tmp_path: Path, tensor: torch.Tensor, told: str) -> None:
    for content in (tensor, [tensor]):
        with pytest.raises(UserError, match=told):
            read_foreign_maps(written(tmp_path / "a.pt", content))


def test_what_torch_says_of_a_file_is_not_passed_on(tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_bytes(b"nonsense")
    with pytest.raises(UserError) as error:
        read_foreign_maps(tmp_path / "a.pt")
    assert str(error.value).endswith("a.pt: not a .pt file of tensors alone; write them by torch.save")


def test_weights_too_large_for_the_computation_are_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="L0H0, row 1, key 0 is not a finite number"):
        read_foreign_maps(written(tmp_path / "a.npy", np.array([[[[1, 0], [1e300, 0]]]])))


def test_tokens_from_files(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_bytes(b"The\r\n cat\r\n(\r\n cat\r\n")
    tokens = read_foreign_tokens(path, 4)
    assert tokens.ids.tolist() == [0, 1, 2, 1] and tokens.token_bytes(1) == b" cat"
    assert parse_reference("brackets", tokens).pattern(tokens.ids).defined.tolist() == [False, False, True, True]
    numbers = read_foreign_tokens(written(tmp_path / "t.json", [7, 9, 7]), 3)
    assert numbers.ids.tolist() == [0, 1, 0] and not numbers.texts
    with pytest.raises(UserError, match="has 4 tokens, but the maps are of 5"):
        read_foreign_tokens(path, 5)
    for content in ({}, [], [1, "a"], [True, False], "ab", [1.5]):
        with pytest.raises(UserError, match="must be a list of texts or of whole numbers"):
            read_foreign_tokens(written(tmp_path / "t.json", content), 2)
