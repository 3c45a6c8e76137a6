"""The film of a run's attention: true frames, each once however a run was stopped, and never the end of a training."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Tables
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_runs import after, begun, new_run, told

from minigpt.assembly import load_model
from minigpt.checkpoint import find_checkpoint
from minigpt.config import merge
from minigpt.errors import UserError
from minigpt.inspection import film
from minigpt.inspection.capture import attention_maps
from minigpt.inspection.compare import closeness, describe
from minigpt.inspection.film import Film, Row, add_frame, begin_film, frame_rows, probe_of, read_film, strongest
from minigpt.inspection.patterns import parse_reference
from minigpt.launch import resume

HEADS = ["L0H0", "L0H1"]
DEFAULT = ["previous", "first", "self", "uniform", "induction"]


def places(film: Film) -> list[tuple[int, str]]:
    return [(row["step"], row["head"]) for row in film.rows]


def triangle(size: int, n_head: int = 2) -> np.ndarray:
    """Uniform attention of one layer: (1, H, T, T)."""
    maps = np.tri(size, dtype=np.float32) / np.arange(1, size + 1, dtype=np.float32)[:, None]
    return np.tile(maps, (1, n_head, 1, 1))


def some_rows(step: int) -> list[Row]:
    return [{"step": step, "head": head, "total_variation": {"first": 0.5}} for head in HEADS]


PROBE = {"tokens": [1, 2, 3], "texts": ["a", "b", "c"], "note": ""}


# ── a run's film ───────────────────────────────────────────────────────────────────────────────────────────────


def test_every_evaluation_is_a_frame_of_the_models_own_attention(tiny: Tables) -> None:
    outcome = begun(tiny)
    shown = read_film(outcome.path)
    assert shown.steps == [0, 10, 20] and places(shown) == [(step, head) for step in shown.steps for head in HEADS]
    corpus = new_run(tiny).corpus
    assert shown.tokens == corpus.val[:16].tolist() and "".join(shown.texts) == corpus.tokenizer.decode(shown.tokens)
    for step in (0, 20):
        model = load_model(find_checkpoint(outcome.path, str(step)), "cpu")
        maps = attention_maps(model, torch.tensor(shown.tokens))
        frame = shown.maps(step)
        assert frame.dtype == np.uint8 and frame.shape == (1, 2, 16, 16)
        assert np.abs(frame / 255 - maps).max() < 0.5 / 255 + 1e-6
        assert (frame[..., *np.triu_indices(16, 1)] == 0).all(), "the future weighs exactly nothing"
        described, rows = describe(maps[None]), [row for row in shown.rows if row["step"] == step]
        for name in DEFAULT:
            pattern = parse_reference(name, None).pattern(np.array(shown.tokens))
            expected = closeness(maps, pattern).total_variation[0]
            assert [row["total_variation"][name] for row in rows] == pytest.approx(list(expected), abs=1e-5)
        assert [row["normalised_entropy"] for row in rows] == pytest.approx(
            list(described.normalised_entropy[0]), abs=1e-5
        )


def test_tensorboard_has_one_grid_and_three_heads_as_text(tiny: Tables) -> None:
    outcome = begun(tiny, model={"n_head": 4})
    board = EventAccumulator(str(outcome.path / "tensorboard")).Reload()
    assert board.Tags()["images"] == ["attention"]
    assert [tag for tag in board.Tags()["tensors"] if tag.startswith("attention")] == ["attention/text_summary"]
    text = board.Tensors("attention/text_summary")[-1].tensor_proto.string_val[0].decode()
    assert len(text.splitlines()) == 1 + 3 and text.split()[:3] == ["head", "elsewhere", "than"]


def test_a_stopped_and_resumed_run_has_the_same_film(tiny: Tables) -> None:
    """What came after the checkpoint is cut: whole frames, rows, and a row written half."""
    whole = read_film(begun(tiny, run={"name": "whole"}).path)
    path = begun(tiny, stop=after(12), run={"name": "stopped"}).path
    checkpoint = find_checkpoint(path, "last")
    assert checkpoint.step == 12
    checkpoint.path.unlink()  # as if killed before it was saved
    folder = path / "attention"
    add_frame(folder, 12, triangle(16), some_rows(12))
    with (folder / "rows.jsonl").open("ab") as file:
        file.write(b'{"step": 13, "he')
    assert read_film(path).steps == [0, 10, 12], "also of a run that was killed"
    resume(path, {})
    resumed = read_film(path)
    assert resumed.steps == whole.steps and resumed.rows == whole.rows
    assert all(np.array_equal(resumed.maps(step), whole.maps(step)) for step in whole.steps)


def test_a_run_resumed_from_its_start_has_every_frame_once(tiny: Tables) -> None:
    path = begun(tiny, stop=after(0)).path
    assert read_film(path).steps == [0]
    resume(path, {})
    assert places(read_film(path)) == [(step, head) for step in (0, 10, 20) for head in HEADS]


def test_another_text_begins_another_film(tiny: Tables) -> None:
    path = begun(tiny).path
    before = read_film(path)
    resume(path, {"inspect": {"text": "the clock"}, "train": {"max_steps": 30}})
    assert read_film(path).steps == [30] and "".join(read_film(path).texts) == "the clock"
    (path / "attention").rename(path / "new")
    (path / "attention.old-1").rename(path / "attention")
    assert read_film(path).rows == before.rows


# ── nothing of it ends a training ──────────────────────────────────────────────────────────────────────────────


def test_a_place_that_cannot_be_written(tiny: Tables, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "runs" / "tiny"
    (run / "checkpoints").mkdir(parents=True)
    (run / "attention").write_text("in the way", encoding="utf-8")
    assert begun(tiny).progress.step == 20
    said = [line for line in capsys.readouterr().err.splitlines() if "goes on without it" in line.lower()]
    assert len(said) == 1 and said[0].startswith("could not write attention (")
    assert (run / "attention").read_text(encoding="utf-8") == "in the way"


def test_a_full_disk(tiny: Tables, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def write_whole(path: Path, content: bytes) -> None:
        if path.suffix == ".npy":
            raise UserError(f"could not write {path.name} (No space left on device): is the disk full?")
        path.write_bytes(content)

    monkeypatch.setattr(film, "write_whole", write_whole)
    assert begun(tiny).progress.step == 20
    said = [line for line in capsys.readouterr().err.splitlines() if "goes on without it" in line.lower()]
    reason = "could not write step-00000000.npy (No space left on device): is the disk full?"
    assert said == [f"{reason} (training goes on without it)"]


# ── what is looked at ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("scores", "told_words"),
    [
        ("previous, frist", "inspect.scores: frist: no such reference; did you mean first?"),
        ("window:0", "inspect.scores: window:0: the width of a window"),
    ],
)
def test_a_wrong_reference_is_told_before_there_is_a_folder(
    tiny: Tables, tmp_path: Path, scores: str, told_words: str
) -> None:
    assert told(begun, tiny, inspect={"scores": scores}).startswith(told_words)
    assert not (tmp_path / "runs").exists()


def test_a_matrix_must_fit_the_text(tiny: Tables, tmp_path: Path) -> None:
    file = tmp_path / "matrix.json"
    file.write_text("[[1, 0], [0, 1]]", encoding="utf-8")
    assert "is 2 x 2, but 16 tokens are read" in told(begun, tiny, inspect={"scores": str(file)})
    probe = probe_of(new_run(tiny, inspect={"scores": str(file), "text": "an"}).config, new_run(tiny).corpus)
    assert list(probe.patterns) == [str(file)]


def test_without_references_there_are_still_frames(tiny: Tables) -> None:
    path = begun(tiny, inspect={"scores": "", "interval": 5}).path
    shown = read_film(path)
    assert shown.steps == [0, 5, 10, 15, 20] and all(row["total_variation"] == {} for row in shown.rows)
    assert not strongest(shown.rows)


def test_a_long_text_is_cut_and_it_is_said(tiny: Tables, capsys: pytest.CaptureFixture[str]) -> None:
    path = begun(tiny, inspect={"text": "the ferryman paints the clock"}, train={"max_steps": 1}).path
    note = "inspect.text has 29 tokens: attention is drawn for the first 16"
    assert read_film(path).note == note and capsys.readouterr().err.count(note) == 1
    assert read_film(path).maps(0).shape == (1, 2, 16, 16)


def test_a_context_longer_than_the_maps(tiny: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(film, "LONGEST", 8)
    run = new_run(tiny)
    probe = probe_of(run.config, run.corpus)
    assert len(probe.tokens) == 8 and probe.note == "the context has 16 tokens: attention is drawn for texts of 8"


def test_one_token_and_half_characters(tiny: Tables) -> None:
    path = begun(tiny, inspect={"text": "a"}, train={"max_steps": 1}).path
    shown = read_film(path)
    assert (shown.maps(1) == 255).all() and shown.maps(1).shape == (1, 2, 1, 1)
    assert [list(row.items()) for row in shown.rows][-1] == [
        ("step", 1), ("head", "L0H1"), ("total_variation", dict.fromkeys(DEFAULT)),
    ]  # fmt: skip
    bytewise = {"data": {"tokenizer": "byte"}, "inspect": {"text": "née"}, "train": {"max_steps": 1}}
    path = begun(merge(tiny, bytewise), run={"name": "bytes"}).path
    assert read_film(path).texts == ["n", "\ufffd", "\ufffd", "e"], "as many as there are tokens"


# ── the parts ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_frames_come_back_and_are_cut(tmp_path: Path) -> None:
    folder = tmp_path / "attention"
    begin_film(folder, PROBE, 0)
    for step in (0, 5, 10):
        add_frame(folder, step, triangle(3), some_rows(step))
    shown = read_film(tmp_path)
    assert (shown.tokens, shown.texts, shown.steps) == ([1, 2, 3], ["a", "b", "c"], [0, 5, 10])
    assert shown.maps(5)[0, 1].tolist() == [[255, 0, 0], [128, 128, 0], [85, 85, 85]]
    assert json.loads((folder / "rows.jsonl").read_text(encoding="utf-8").splitlines()[0]) == some_rows(0)[0]
    begin_film(folder, PROBE, 5)
    assert read_film(tmp_path).steps == [0, 5] and places(read_film(tmp_path))[-1] == (5, "L0H1")
    begin_film(folder, PROBE, 0)
    assert sorted(path.name for path in folder.iterdir()) == ["probe.json", "rows.jsonl"]
    assert "holds no film of attention" in told(read_film, tmp_path)


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY", b"\x80\x04K\x01."], ids=["empty", "cut", "pickle"])
def test_a_damaged_frame_is_told(tmp_path: Path, content: bytes) -> None:
    folder = tmp_path / "attention"
    begin_film(folder, PROBE, 0)
    add_frame(folder, 0, triangle(3), some_rows(0))
    (folder / "step-00000005.npy").write_bytes(content)
    add_frame(folder, 10, triangle(4), [])
    shown = read_film(tmp_path)
    assert shown.maps(0).shape == (1, 2, 3, 3)
    assert "step-00000005.npy: cannot be read" in told(shown.maps, 5)
    assert "step-00000010.npy: holds no maps of 3 tokens" in told(shown.maps, 10)
    assert "cannot be read" in told(shown.maps, 15)


def test_no_film(tmp_path: Path) -> None:
    assert told(read_film, tmp_path / "nothing").startswith(f"{tmp_path / 'nothing'}: holds no film of attention")


def test_the_nearest_reference_names_a_head_but_uniform_does_not(tiny: Tables) -> None:
    run = new_run(tiny, model={"n_head": 4})
    probe = probe_of(run.config, run.corpus)
    maps = triangle(16, n_head=4)
    maps[0, 1] = np.eye(16)
    maps[0, 2] = 0.5 * np.eye(16) + 0.5 * np.eye(16)[0]
    maps[0, 3] = 0.8 * np.eye(16) + 0.2 * maps[0, 0]
    rows = frame_rows(7, maps, probe)
    assert rows[0]["total_variation"]["uniform"] == 0 and rows[0]["normalised_entropy"] == 1
    lines = strongest(rows).splitlines()[1:]
    assert lines[0].split() == ["L0H1", "0.00", "self"]
    assert lines[1].split()[::2] == ["L0H3", "self"] and lines[2].split()[:2] == ["L0H2", "0.50"]
