"""Damaged and hostile files: the next older good one with a sentence, or an error that names the file; nothing runs."""

import json
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Tables
from running import EVALUATE, GENERATE, TRAIN, Script
from tiny_runs import after, begun, told

from minigpt import rows, sources
from minigpt.checkpoint import LONGEST_HEADER, checkpoint_path, find_checkpoint, read_checkpoint, save_checkpoint
from minigpt.config import DataConfig, read_toml, validate
from minigpt.corpus import Corpus, open_corpus
from minigpt.errors import UserError
from minigpt.launch import resume
from minigpt.sources import open_source, read_plays

Record = Callable[[str, object], None]
TEXT = "the old miller counts seven lanterns before dawn.\n" * 30

# ── checkpoints ────────────────────────────────────────────────────────────────────────────────────────────────

METADATA = {"format": 1, "step": 1, "config": {}, "tokenizer": {}}


def safetensors(header: dict[str, Any] | bytes, body: bytes = b"", *, claims: int | None = None) -> bytes:
    """A file of that format, with any header, which may claim to be of any length."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if claims is None else claims).to_bytes(8, "little") + text + body


def header(**changes: Any) -> dict[str, Any]:
    return {"__metadata__": {"minigpt": json.dumps({**METADATA, **changes})}}


def metadata_text(text: str) -> bytes:
    return safetensors({"__metadata__": {"minigpt": text}})


def array(begin: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


BOMBS = {
    "header of gigabytes": safetensors(header(), claims=10**12),
    "header of 2**64 bytes": safetensors(header(), claims=2**64 - 1),
    "header longer than the file": safetensors(header(), claims=10**6),
    "overlapping arrays": safetensors(
        {**header(), "model.a": array(0, 8, [2]), "model.b": array(4, 12, [2])}, bytes(12)
    ),
    "array beyond the file": safetensors({**header(), "model.a": array(0, 4 * 10**9, [10**9])}, bytes(12)),
    "array before the file": safetensors({**header(), "model.a": array(-4, 4, [2])}, bytes(12)),
    "a hole between arrays": safetensors({**header(), "model.a": array(4, 12, [2])}, bytes(12)),
    "more numbers than there are": safetensors({**header(), "model.a": array(0, 0, [2**62, 2**62])}),
    "no number in a huge shape": safetensors({**header(), "model.a": array(0, 0, [0, 2**62])}),
    "a hundred axes": safetensors({**header(), "model.a": array(0, 4, [1] * 100)}, bytes(4)),
    "a type that NumPy lacks": safetensors({**header(), "model.a": array(0, 2, [1], "BF16")}, bytes(2)),
    "an unknown type": safetensors({**header(), "model.a": array(0, 2, [1], "F99")}, bytes(2)),
    "nested 100,000 deep": metadata_text('{"format":' + "[" * 100_000 + "]" * 100_000 + "}"),
    "a header nested 100,000 deep": safetensors(b'{"a":' + b"[" * 100_000),
    "a configuration nested 900 deep": metadata_text(
        json.dumps(METADATA)[:-1] + ',"config":{"run":{"name":' + "[" * 900 + "]" * 900 + "}}}"
    ),
    "NaN in the header": metadata_text(json.dumps(METADATA)[:-1] + ',"val_loss":NaN}'),
    "infinity in the header": metadata_text(json.dumps(METADATA)[:-1] + ',"seconds":1e999}'),
    "a number of 5,000 digits": metadata_text(json.dumps(METADATA)[:-1] + ',"seconds":' + "9" * 5000 + "}"),
    "a negative step": safetensors(header(step=-5)),
    "a step beyond 64 bits": safetensors(header(step=2**64)),
    "a loss of text": safetensors(header(val_loss="low")),
    "a list of versions": safetensors(header(versions=[1])),
    "all zeros": bytes(5000),
    "nothing": b"",
}  # fmt: skip


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_hostile_checkpoint_is_named_and_the_one_before_taken(bomb: str, tmp_path: Path) -> None:
    good, hostile = (checkpoint_path(tmp_path / "checkpoints", step) for step in (3, 7))
    save_checkpoint(good, {"model.w": np.ones(3)}, {"step": 3, "config": {}, "tokenizer": {}})
    hostile.write_bytes(BOMBS[bomb])
    said: list[str] = []
    assert find_checkpoint(tmp_path, "last", verify=True, say=said.append).step == 3
    (sentence,) = said
    assert sentence.startswith(f"{hostile}: ") and sentence.endswith("(passed over: using step 3)")
    assert len(sentence) < 600
    with pytest.raises(UserError, match="step-00000007"):
        read_checkpoint(hostile).tensors("model")


def test_a_header_of_a_hundred_megabytes_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with path.open("wb") as file:
        file.write((100 * 2**20).to_bytes(8, "little"))
        file.truncate(101 * 2**20)
    tracemalloc.start()
    try:
        assert f"its header claims {100 * 2**20:,} bytes" in told(read_checkpoint, path)
        assert tracemalloc.get_traced_memory()[1] < 1e6
    finally:
        tracemalloc.stop()
    assert LONGEST_HEADER < 100 * 2**20


def test_a_zeroed_page_of_a_checkpoint_is_noticed(tmp_path: Path, record_property: Record) -> None:
    path = checkpoint_path(tmp_path, 1)
    save_checkpoint(path, {"model.w": np.arange(5000.0)}, {"step": 1, "config": {}, "tokenizer": {}})
    content = path.read_bytes()
    pages = range(0, len(content) - 4096, 4096)
    for start in pages:
        path.write_bytes(content[:start] + bytes(4096) + content[start + 4096 :])
        assert str(path) in told(read_checkpoint, path, verify=True)
    record_property("tried", len(pages))


def forged(tiny: Tables, change: Callable[[dict[str, np.ndarray], dict[str, Any]], None]) -> Path:
    """A run whose last checkpoint was changed by someone who knows how to make the checksum."""
    run = begun(tiny, stop=after(2))
    saved = find_checkpoint(run.path, "last")
    arrays = {f"{kind}.{n}": a for kind in ("model", "optimizer") for n, a in saved.tensors(kind).items()}
    metadata = {key: value for key, value in saved.metadata.items() if key != "checksum"}
    change(arrays, metadata)
    save_checkpoint(saved.path, arrays, metadata)
    return run.path


def other_tokenizer(_arrays: dict[str, np.ndarray], metadata: dict[str, Any]) -> None:
    metadata["tokenizer"]["characters"] += "Ω"


def other_width(_arrays: dict[str, np.ndarray], metadata: dict[str, Any]) -> None:
    metadata["config"]["model"]["d_model"] = 64


def huge_network(_arrays: dict[str, np.ndarray], metadata: dict[str, Any]) -> None:
    metadata["config"]["model"] |= {"n_layer": 10**9, "d_ff": 10**9}


def fewer_weights(arrays: dict[str, np.ndarray], _metadata: dict[str, Any]) -> None:
    del arrays["model.blocks.0.mlp.up_linear.weight"]


@pytest.mark.parametrize("change", [other_tokenizer, other_width, huge_network, fewer_weights])
def test_what_does_not_fit_itself_is_damaged(tiny: Tables, script: Script, change: Callable[..., None]) -> None:
    run = forged(tiny, change)
    for path, words in ((GENERATE, ("--which", "last")), (EVALUATE, ("--which", "last", "--text", "the clock"))):
        answer = script(path, run, *words)
        assert answer.code == 2 and answer.out == ""
        assert answer.err.startswith("error: ") and "step-00000002.safetensors" in answer.err
    assert script(TRAIN, "--resume", run).code == 2


def test_an_optimizer_state_that_does_not_fit_is_damaged(tiny: Tables) -> None:
    def cut(arrays: dict[str, np.ndarray], _metadata: dict[str, Any]) -> None:
        name = next(name for name in arrays if name.endswith("exp_avg"))
        arrays[name] = arrays[name].ravel()[:-1]

    run = forged(tiny, cut)
    assert "step-00000002.safetensors: damaged, its optimizer's state does not fit its model" in told(resume, run, {})


# ── token files ────────────────────────────────────────────────────────────────────────────────────────────────


def open_text(folder: Path, **options: Any) -> Corpus:
    (folder / "a.txt").write_text(TEXT, encoding="utf-8")
    data = DataConfig(source=str(folder / "a.txt"), cache_dir=str(folder / "cache"), **options)
    return open_corpus(data, context_length=8, seed=1)


@pytest.mark.parametrize("part", ["tokenizer-*.json", "tokens-*/tokens.json", "tokens-*/train.bin"])
def test_a_flipped_bit_in_the_cache_changes_no_id(tmp_path: Path, part: str, record_property: Record) -> None:
    known = open_text(tmp_path, tokenizer="bpe", vocab_size=270)
    ids, fingerprint = known.train.tolist(), known.fingerprint
    del known
    path = next((tmp_path / "cache").glob(part))
    content = path.read_bytes()
    places = range(0, len(content), max(1, len(content) // 40))
    for place in places:
        for bit in (1, 32):  # 32 makes another letter of the same kind, which may be as valid
            path.write_bytes(content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :])
            again = open_text(tmp_path, tokenizer="bpe", vocab_size=270)
            assert (again.train.tolist(), again.fingerprint) == (ids, fingerprint), (place, bit)
    record_property("tried", 2 * len(places))


@pytest.mark.parametrize("content", [b"", bytes(64), b"[" * 100_000, b"\xff\xfe", b"[]", b"{}"])
def test_rubbish_in_the_cache_is_replaced(tmp_path: Path, content: bytes) -> None:
    ids = open_text(tmp_path, tokenizer="char").train.tolist()
    for path in [*(tmp_path / "cache").glob("*.json"), *(tmp_path / "cache").glob("*/*")]:
        path.write_bytes(content)
        assert open_text(tmp_path, tokenizer="char").train.tolist() == ids
    assert not list((tmp_path / "cache").glob("unfinished-*"))


# ── configurations ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("content", [bytes(300), b"a = " + b"[" * 100_000, b"a = " + b"1" * 5000, b"\xff" * 9, b"[run"])
def test_rubbish_for_a_configuration_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.toml"
    path.write_bytes(content)
    assert told(read_toml, path).startswith(f"{path}: not a valid TOML file (")


def test_endless_values_are_shown_by_their_beginning() -> None:
    assert told(validate, {"train": {"max_steps": 10**5000}}).startswith("train.max_steps = a huge int: must be")
    assert len(told(validate, {"run": {"name": ["x"] * 10**5}})) < 200
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert told(validate, {"run": {"name": deep}}) == "run.name = a huge list: must be text"


@pytest.mark.parametrize("content", [b"", b"[run]", bytes(300), b"[" * 100_000])
def test_a_damaged_configuration_in_a_run_harms_nothing(tiny: Tables, content: bytes) -> None:
    run = begun(tiny, stop=after(2))
    (run.path / "config.toml").write_bytes(content)
    assert resume(run.path, {}).progress.step == 20
    assert validate(read_toml(run.path / "config.toml")).train.max_steps == 20


# ── sources ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
def test_an_endless_line_is_refused_in_little_memory(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rows.LONGEST_ROW == 64 * 2**20
    monkeypatch.setattr(rows, "LONGEST_ROW", 2**22)
    with (tmp_path / name).open("wb") as file:
        file.write(b'{"text": "one"}\n')
        for _ in range(24):
            file.write(b"x" * 2**20)
    source = open_source(DataConfig(source=str(tmp_path / name)), tmp_path)
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match=rf"{name}:2: a line of more than 4,194,304 characters"):
            for document in source.documents():
                "".join(document)
        assert tracemalloc.get_traced_memory()[1] < 6 * 2**22
    finally:
        tracemalloc.stop()


def test_an_endless_field_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "LONGEST_ROW", 2**16)
    (tmp_path / "a.csv").write_text('text\n"' + "a line\n" * 20_000, encoding="utf-8")
    source = open_source(DataConfig(source=str(tmp_path / "a.csv")), tmp_path)
    with pytest.raises(UserError, match=r"a\.csv:\d+: not valid CSV \(field larger than field limit"):
        list(source.documents())


def wheel(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(zipfile.ZipInfo(name), content)
    return path


def test_names_in_an_archive_lead_nowhere(tmp_path: Path) -> None:
    names = ["../../up/plays/a.md", "/abs/plays/b.md", "C:\\plays\\plays/../plays/c.md", "x/plays/d.md/"]
    (tmp_path / "deep" / "deeper").mkdir(parents=True)
    path = wheel(tmp_path / "deep" / "deeper" / "x.whl", dict.fromkeys(names, b"**A**\nOne."))
    assert read_plays(path) == ["A:\nOne.\n"] * 3
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["deep", "deeper", "x.whl"]


def test_an_archive_that_swells_is_refused_in_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "LARGEST_WHEEL", 2**20)
    bomb = wheel(tmp_path / "x.whl", {f"x/plays/{i}.md": bytes(2**23) for i in range(3)})
    tracemalloc.start()
    try:
        assert f"{bomb}: unpacks to more than 1,048,576 bytes" in told(read_plays, bomb)
        assert tracemalloc.get_traced_memory()[1] < 2**23
    finally:
        tracemalloc.stop()


def test_a_damaged_archive_is_named(tmp_path: Path, record_property: Record) -> None:
    path = wheel(tmp_path / "x.whl", {"x/plays/a.md": b"**A**\nOne.\n" * 50})
    content, refused = path.read_bytes(), 0
    for place in range(len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
        try:
            read_plays(path)
        except UserError as error:
            refused += str(path) in str(error)
    assert refused > 60, "the others are in dates, names and the like, and change no text"
    path.write_bytes(content[: len(content) // 2])
    assert f"{path}: damaged" in told(read_plays, path)
    record_property("tried", len(content) + 1)
