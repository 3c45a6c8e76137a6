"""Shared by all tests: worked numbers, small texts, and the settings of runs that take a second."""

import io
import json
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from running import TRAIN, Answer, Script, Trained, as_options, command, environment

signal.signal(
    signal.SIGINT, signal.default_int_handler
)  # begun in the background, all that tests start would ignore it

if "PYTEST_XDIST_WORKER" in os.environ:  # threads that wait for each other wait long where more of them run than cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")

Tables = dict[str, dict[str, Any]]

ENGLISH = (
    ("the old miller", "a grey heron", "our neighbour", "the ferryman", "my youngest aunt", "the clock"),
    ("watches", "forgets", "carries", "paints", "counts", "mends"),
    ("seven lanterns", "the wet rope", "a basket of plums", "every window", "the café's sign", "her blue kite"),
    ("before dawn", "without a word", "near the mill", "for nobody", "again", "till it rains"),
)
JAPANESE = (
    ("古い時計は", "隣の犬は", "若い船頭は", "白い鳥は", "わたしの叔母は"),
    ("静かに", "朝早く", "雨の中で", "何も言わずに", "ゆっくり"),
    ("青い傘を", "七つの灯りを", "濡れた縄を", "小さな橋を", "梅の籠を"),
    ("運んだ。", "数えた。", "忘れた。", "描いた。", "待っていた。"),
)


@pytest.fixture(autouse=True)
def denormal_numbers() -> Iterator[None]:
    """Training tells the processor to take denormal numbers for zero; other tests draw such numbers."""
    yield
    if torch := sys.modules.get("torch"):
        torch.set_flush_denormal(False)


LOOPBACK = ("127.0.0.1", "::1", "localhost", "")


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are looked up and sockets connected on this machine alone."""

    def here(call: Callable[..., Any], host: Callable[..., object]) -> Callable[..., Any]:
        def checked(*words: Any, **named: Any) -> Any:
            if host(*words) not in LOOPBACK:
                raise PermissionError(f"{host(*words)}: tests use no network")
            return call(*words, **named)

        return checked

    def of_address(_socket: socket.socket, address: Any) -> object:
        return address[0] if isinstance(address, tuple) else ""  # else a path, of a socket of the file system

    monkeypatch.setattr(socket, "getaddrinfo", here(socket.getaddrinfo, lambda host, *_: host or ""))
    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, here(getattr(socket.socket, name), of_address))


@pytest.fixture(scope="session")
def worked_examples() -> dict[str, Any]:
    """Hand-checkable numbers for attention and its companions, 10 decimal places."""
    return json.loads((resources.files("minigpt.inspection") / "examples.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def english() -> str:
    """About 3,000 characters of sentences; not all of them ASCII."""
    return sentences(ENGLISH, 60, " ", ".\n")


@pytest.fixture(scope="session")
def japanese() -> str:
    """About 1,500 characters without a space, 3 bytes each."""
    return sentences(JAPANESE, 80, "", "\n")


def sentences(columns: tuple[tuple[str, ...], ...], count: int, space: str, end: str) -> str:
    """A seeded text: each sentence takes one phrase of each column."""
    chance = random.Random(5)
    return "".join(space.join(column[int(chance.random() * len(column))] for column in columns) + end
                   for _ in range(count))  # fmt: skip


@pytest.fixture
def transformers() -> Any:
    """The library, of the extra [interop]."""
    return pytest.importorskip("transformers", reason='transformers is not installed: pip install "minigpt[interop]"')


@pytest.fixture
def tiny(tmp_path: Path, english: str) -> Tables:
    """Tables of a run on ``english`` that takes a second; all its files are in the test's own folder."""
    return tiny_tables(tmp_path, english)


@pytest.fixture
def make_run(tiny: Tables) -> Callable[..., Any]:
    """``make_run(train={"max_steps": 5})``: see ``tiny_runs.new_run``."""
    from tiny_runs import new_run  # here: it loads torch

    return partial(new_run, tiny)


def tiny_tables(folder: Path, text: str) -> Tables:
    """Write the text to a file in the folder and give the settings of a tiny run on it."""
    source = folder / "story.txt"
    source.write_text(text, encoding="utf-8", newline="\n")
    return {
        "run": {"dir": str(folder / "runs"), "name": "tiny", "threads": 1, "device": "cpu"},
        "data": {"source": str(source), "tokenizer": "char", "cache_dir": str(folder / "cache")},
        "model": {"n_layer": 1, "n_head": 2, "d_model": 32, "context_length": 16},
        "train": {"batch_size": 4, "max_steps": 20, "eval_interval": 10, "log_interval": 1},
    }


# ── scripts ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Script:
    """``script(GENERATE, run, "--json", typed="...")``: run it here."""

    def call(path: Path, *words: object, typed: str = "") -> Answer:
        monkeypatch.setattr(sys, "argv", [str(path), *map(str, words)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        capsys.readouterr()
        with pytest.raises(SystemExit) as leaving:
            runpy.run_path(str(path), run_name="__main__")
        written = capsys.readouterr()
        assert isinstance(leaving.value.code, int)
        return Answer(leaving.value.code, written.out, written.err)

    return call


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, english: str) -> Trained:
    folder = tmp_path_factory.mktemp("trained")
    tables = tiny_tables(folder, english)
    tables["model"] |= {"dropout": 0.1, "tie_embeddings": False}  # after 40 steps a tied one still ends texts at once
    tables["data"]["test_fraction"] = 0.1
    tables["train"] |= {"max_steps": 40, "sample_prompt": "é\\n"}
    options = as_options(tables)
    done = subprocess.run(
        command(TRAIN, *options), env=environment(), capture_output=True, encoding="utf-8", check=False, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    return Trained(folder / "runs" / "tiny", options, folder / "story.txt", done)
