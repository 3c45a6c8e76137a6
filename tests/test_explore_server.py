"""explore.py --serve: whom it answers, and whom not."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from typing import Any

import numpy as np
import pytest
from exploring import EXPLORE, IDS, lower_limits, numbers, payload_in, serving
from running import Script, Trained, command, environment

from minigpt import plain
from minigpt.checkpoint import find_checkpoint
from minigpt.explorer.making import Wish, made
from minigpt.explorer.payload import load_model


class Client:
    """Asks a server of this process."""

    def __init__(self, port: int, token: str) -> None:
        self.port, self.token = port, token

    def ask(self, body: object, **headers: str) -> tuple[int, dict[str, Any]]:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        status, answer = self._ask("POST", "/api/trace", content, {"X-Explorer-Token": self.token, **headers})
        return status, json.loads(answer)

    def page(self, **headers: str) -> tuple[int, str]:
        status, answer = self._ask("GET", "/", None, headers)
        return status, answer.decode()

    def _ask(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> tuple[int, bytes]:
        with closing(HTTPConnection("127.0.0.1", self.port, timeout=30)) as connection:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()


@pytest.fixture
def client(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    lower_limits(monkeypatch)
    with serving(made(trained.path, Wish(live=True))) as (service, port):
        yield Client(port, service.token)


def test_the_server_answers_its_own_page(client: Client, trained: Trained) -> None:
    status, text = client.page()
    found = payload_in(text)
    assert status == 200 and "connect-src 'self'" in text
    assert found["server"]["token"] == client.token and found["models"] == found["captured"] == []
    assert found["server"]["models"][0]["sizes"]["context_length"] == 16
    status, entry = client.ask({"ids": IDS.tolist(), "model": 0})
    form = load_model(find_checkpoint(trained.path)).form
    logits = plain.forward(form, IDS)
    assert status == 200 and entry["ids"] == IDS.tolist()
    np.testing.assert_allclose(
        numbers(entry["logits"]["values"], "<f4", *logits.shape), logits, atol=1e-5 * abs(logits).max()
    )


def test_the_server_refuses(client: Client) -> None:
    good = {"ids": [1, 2, 3]}
    cases: list[tuple[int, object, dict[str, str]]] = [
        (403, good, {"Host": "evil.example"}),
        (403, good, {"Host": f"evil.example:{client.port}"}),
        (403, good, {"X-Explorer-Token": ""}),
        (403, good, {"X-Explorer-Token": "ä" + client.token[1:]}),
        (400, b"no JSON", {}),
        (400, b"\xff", {}),
        (400, [1, 2], {}),
        (400, {"ids": "abc"}, {}),
        (400, {"ids": []}, {}),
        (400, {"ids": [1] * 17}, {}),
        (400, {"ids": [True]}, {}),
        (400, {"ids": [-1]}, {}),
        (400, {"ids": [10**30]}, {}),
        (400, {"ids": [1], "model": 7}, {}),
        (413, b" " * 70_000, {}),
    ]
    for status, body, headers in cases:
        found, answer = client.ask(body, **headers)
        assert (found, list(answer)) == (status, ["error"]), (body, headers, answer)
    assert client.page(Host="evil.example")[0] == 403
    assert client.ask(good)[0] == 200


def test_the_server_answers_many_at_once(client: Client) -> None:
    asked = [[1 + i % 20, 2, 3] for i in range(12)]
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda ids: client.ask({"ids": ids}), asked))
    assert [(status, entry["ids"]) for status, entry in answers] == [(200, ids) for ids in asked]
    same = [entry["logits"] for _, entry in answers if entry["ids"] == [1, 2, 3]]
    assert all(logits == same[0] for logits in same)


def test_a_port_in_use_gets_one_sentence(client: Client, trained: Trained, script: Script) -> None:
    answer = script(EXPLORE, trained.path, "--serve", "--port", client.port)
    assert answer.code == 2 and f"--port {client.port}" in answer.err and answer.err.count("\n") == 1


def test_without_the_server_s_packages(trained: Trained, script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "minigpt.explorer.server", raising=False)
    monkeypatch.delattr("minigpt.explorer.server", raising=False)
    answer = script(EXPLORE, trained.path, "--serve")
    assert answer.code == 2 and "pip install starlette uvicorn" in answer.err and answer.err.count("\n") == 1


@pytest.mark.skipif(os.name != "posix", reason="Windows sends no Ctrl-C to another process")
def test_it_ends_in_one_line(trained: Trained) -> None:
    words = command(EXPLORE, trained.path, "--serve", "--port", 0)
    pipe = subprocess.PIPE
    with subprocess.Popen(words, env=environment(), encoding="utf-8", stdout=pipe, stderr=pipe) as process:
        assert process.stdout
        found = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/ \(Ctrl-C ends\)\n", process.stdout.readline())
        assert found
        assert process.stdout.readline() == f"http://127.0.0.1:{found[1]}/v1 for OpenAI's clients, model tiny\n"
        status, text = Client(int(found[1]), "").page()
        assert status == 200 and len(payload_in(text)["models"]) == 2 and "connect-src 'none'" in text
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (0, "the server has ended\n", "")
