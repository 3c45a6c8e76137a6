"""What tests of completions share: a server of this process, and who asks it."""

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPResponse
from typing import Any

GOOD = {"model": "tiny", "prompt": "the ", "max_tokens": 8, "seed": 1}


@dataclass(frozen=True)
class Api:
    """Asks a server of this process."""

    port: int

    def ask(self, body: object, **headers: str) -> tuple[int, dict[str, Any]]:
        with closing(self.open(body, **headers)) as answer:
            return answer.status, json.loads(answer.read())

    def open(self, body: object, **headers: str) -> HTTPResponse:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.request("POST", "/v1/completions", content, headers)

    @contextmanager
    def sent(self, body: object) -> Iterator[HTTPConnection]:
        """A request, to be read or not."""
        with closing(HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            connection.request("POST", "/v1/completions", json.dumps(body).encode())
            yield connection

    def request(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> HTTPResponse:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(method, path, body, {"Connection": "close", **(headers or {})})
        return connection.getresponse()

    def text(self, **keys: object) -> str:
        status, answer = self.ask({**GOOD, **keys})
        assert status == 200, answer
        return answer["choices"][0]["text"]
