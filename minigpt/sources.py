"""Where text comes from: a source's name, a file, a folder or a glob → documents, as streams of clean text.

Whatever it was stored as, text leaves here decoded, without a byte order mark, and with ``\\n`` as its only line end.
"""

import glob
import hashlib
import http.client
import json
import os
import re
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from minigpt.config import DataConfig, nearest, read_toml
from minigpt.errors import UserError
from minigpt.reading import encoding_name, is_raw, normalise_newlines, raw_note, read_text, unreadable
from minigpt.rows import csv_rows, json_rows
from minigpt.shipped import HOME

SOURCES_FILE = HOME / "data" / "sources.toml"
SUFFIXES = (".txt", ".md", ".jsonl", ".csv")  # what is read in a folder; a file named on its own may have any suffix
CHUNK = 1 << 20  # bytes
DOWNLOAD_SECONDS = 30.0  # without a byte; pip: in all, times ten
LARGEST_WHEEL = 1 << 28  # bytes that a wheel of plays may unpack to

Document = Iterable[str]
"""One text in chunks of any length. Read it once, before the next one is asked for."""


@dataclass(frozen=True)
class Source:
    """Text to train on. ``documents()`` reads it anew; ``identity`` changes when any of its text does.

    ``notes`` are sentences to say before training starts.
    """

    name: str
    documents: Callable[[], Iterator[Document]]
    identity: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class KnownSource:
    """A row of data/sources.toml. ``kind``: text (one document) or plays (a wheel that holds plays in Markdown)."""

    address: str
    sha256: str
    licence: str
    kind: str
    about: str


def open_source(data: DataConfig, downloads: Path) -> Source:
    """The text that ``data.source`` names. A known source is downloaded into the folder ``downloads`` once.

    Raises:
        UserError: if there is no such source or encoding, or it cannot be read.
    """
    encoding_name(data.encoding)
    if not data.source:
        raise UserError(
            "data.source is empty: weights from elsewhere bring no text: name one, by "
            "--data.source to train, by --file or --text elsewhere"
        )
    if data.source == "tales":
        from minigpt.tasks import tales

        told = cache(tales.corpus)  # a second and more, spared where the token files are there already
        return Source(data.source, lambda: ([text] for text in told()), f"tales {tales.CORPUS_SHA256}")
    known = known_sources()
    if data.source not in known:
        return _from_files(_find_files(data.source, [*known, "tales"]), data)
    row = known[data.source]
    path = fetch(data.source, row.address, row.sha256, downloads)
    if row.kind == "plays":
        return _from_texts(data.source, read_plays(path))
    return _from_files([path], data.model_copy(update={"encoding": "utf-8"}))


def known_sources() -> dict[str, KnownSource]:
    """The rows of data/sources.toml; none where the package was installed without its data folder."""
    if not SOURCES_FILE.is_file():
        return {}
    try:
        return {name: KnownSource(**row) for name, row in read_toml(SOURCES_FILE).items()}
    except TypeError as error:
        raise UserError(f"{SOURCES_FILE}: a row lacks a field or has one too many ({error})") from None


# ── known sources ──────────────────────────────────────────────────────────────────────────────────────────────


def fetch(name: str, address: str, sha256: str, folder: Path) -> Path:
    """The file of that address and checksum in ``folder``, downloaded unless it is there already.

    ``pypi:PACKAGE==VERSION`` addresses a wheel on the Python package index, which is never installed or run.

    Raises:
        UserError: if the download fails or brings something else; nothing of it is kept.
    """
    target = folder / (f"{name}.whl" if address.startswith("pypi:") else f"{name}{Path(address).suffix}")
    if target.is_file() and _sha256(target) == sha256:
        return target
    hint = "check the network, or give the path of a copy as --data.source"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="download-", dir=folder) as scratch:
            downloaded = (_download_wheel if address.startswith("pypi:") else _download)(address, Path(scratch))
            if _sha256(downloaded) != sha256:
                raise UserError(f"{name}: what came from {address} is not the expected file (SHA-256 differs); {hint}")
            os.replace(downloaded, target)
    except (OSError, http.client.HTTPException, subprocess.SubprocessError) as error:
        raise UserError(f"{name}: could not be downloaded from {address} ({_reason(error)}); {hint}") from None
    return target


def read_plays(wheel: Path) -> list[str]:
    """The plays in a wheel, by file name, each reduced by ``plain_play``.

    Raises:
        UserError: if it is damaged, or unpacks to more than ``LARGEST_WHEEL`` bytes.
    """
    room, plays = LARGEST_WHEEL, []
    try:
        with zipfile.ZipFile(wheel) as archive:
            for member in sorted(name for name in archive.namelist() if "/plays/" in name and name.endswith(".md")):
                with archive.open(member) as file:  # read, never unpacked: a member's name leads nowhere
                    content = file.read(room + 1)
                room -= len(content)  # what comes out counts; what the archive says of itself may be wrong
                if room < 0:
                    raise UserError(f"{wheel}: unpacks to more than {LARGEST_WHEEL:,} bytes; this is no wheel of plays")
                plays.append(plain_play(content.decode("utf-8")))
    except UserError:
        raise
    except (zipfile.BadZipFile, zlib.error, OSError, EOFError, RuntimeError, ValueError) as error:
        raise UserError(f"{wheel}: damaged or not a wheel of plays ({error}); remove it") from None
    return plays


def plain_play(markdown: str) -> str:
    """A play without markup: headings and directions (in emphasis or brackets) go, ``**NAME**`` becomes ``NAME:``."""
    gone = "\0"
    text = re.sub(r"^#.*$", "", markdown, flags=re.MULTILINE)
    text = re.sub(r"\*\*(.+?)\*\*", r"\1:", text)
    text = re.sub(r"[*_]*\\?\[[^\]_]*[\]_*]+", gone, text)  # _\[Aside]_ and, where the first mark is missing, [Aside]_
    text = re.sub(r"([*_])(?:[^*_\n]|\n(?!\s*\n))+\1", gone, text)  # _Enter HAMLET_, over lines but not empty ones
    text = re.sub(r"^ *\0 *\n", "", text, flags=re.MULTILINE)  # a line that was nothing but a direction
    text = re.sub(r"[*_\\\0]| +$", "", text, flags=re.MULTILINE)  # escapes, marks that close nothing, spaces at the end
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def _download(address: str, folder: Path) -> Path:
    path = folder / "file"
    with urllib.request.urlopen(address, timeout=DOWNLOAD_SECONDS) as response, path.open("wb") as file:
        while block := response.read(CHUNK):
            file.write(block)
    return path


def _download_wheel(address: str, folder: Path) -> Path:
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:", f"--dest={folder}"]
    command = [sys.executable, "-m", "pip", "download", *options, address.removeprefix("pypi:")]
    subprocess.run(command, check=True, capture_output=True, timeout=10 * DOWNLOAD_SECONDS)
    return next(folder.glob("*.whl"))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        return (error.stderr.decode("utf-8", errors="replace").strip().splitlines() or ["pip failed"])[-1]
    return str(error) or type(error).__name__


# ── a user's own files ─────────────────────────────────────────────────────────────────────────────────────────


def _from_texts(name: str, texts: list[str]) -> Source:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(hashlib.sha256(text.encode("utf-8")).digest())
    return Source(name, lambda: ([text] for text in texts), digest.hexdigest())


def _from_files(paths: list[Path], data: DataConfig) -> Source:
    digest = hashlib.sha256(json.dumps([data.encoding, data.text_field]).encode("utf-8"))
    for path in paths:
        try:
            digest.update(f"{path.suffix.lower()} {_sha256(path)}".encode())
        except OSError as error:
            raise unreadable(path, error) from None
    raw = {path: is_raw(path, data) for path in paths}
    notes = [raw_note([path for path in paths if raw[path]])] if any(raw.values()) else []

    def documents() -> Iterator[Document]:
        for path in paths:
            yield from _documents_in(path, data, raw=raw[path])

    return Source(data.source, documents, digest.hexdigest(), tuple(notes))


def _find_files(source: str, known: list[str]) -> list[Path]:
    path = Path(os.path.expanduser(source))  # unlike the method of Path it lets a stranger's ~ be
    try:
        if path.is_file():
            return [path]
        if path.is_dir() and source:
            found = [p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file()]
            runs = {p.parent for p in path.rglob("config.toml") if (p.parent / "checkpoints").is_dir()}
            files = [
                p
                for p in found
                if not any(part.startswith(".") for part in p.relative_to(path).parts) and runs.isdisjoint(p.parents)
            ]
            if not files:
                raise UserError(f"{source}: no text in this folder; it needs files that end in {', '.join(SUFFIXES)}")
        else:
            files = [p for p in map(Path, glob.glob(str(path), recursive=True)) if p.is_file()]
    except OSError as error:
        raise unreadable(source, error) from None
    if not files:
        raise UserError(
            f"data.source = {source}: no such file or folder, and no source of that name{nearest(source, known)}"
        )
    return sorted(files, key=lambda p: p.as_posix())


def _documents_in(path: Path, data: DataConfig, *, raw: bool) -> Iterator[Document]:
    text = read_text(path, data.encoding, raw=raw)
    rows = {".jsonl": json_rows, ".csv": csv_rows}.get(path.suffix.lower())
    if rows:
        yield from ([normalise_newlines(row)] for row in rows(path, text, data.text_field))
    else:
        yield text
