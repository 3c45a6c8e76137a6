"""What tests of the page share: reading what it carries, and limits of sizes that tiny models reach."""

import base64
import json
import re
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from running import ROOT

from minigpt.explorer import making, payload
from minigpt.explorer.making import Made
from minigpt.normal_form import Array

if TYPE_CHECKING:
    from minigpt.explorer.server import Service

EXPLORE, COMPARE = (ROOT / "scripts" / f"{name}.py" for name in ("explore", "compare_attention"))
IDS = np.array([3, 1, 4, 1, 5, 9, 2, 6])


def numbers(blob: str, dtype: str, *shape: int) -> Array:
    """What the page reads."""
    return np.frombuffer(zlib.decompress(base64.b64decode(blob)), dtype).reshape(shape or -1)


def assert_holds(blob: str, dtype: str, expected: Array) -> None:
    np.testing.assert_array_equal(numbers(blob, dtype, *expected.shape), expected.astype(dtype))


def unpacked(entry: dict[str, Any]) -> dict[str, Array]:
    """The arrays of a model in a payload by name."""
    flat, at, found = numbers(entry["blob"], {"f32": "<f4", "f16": "<f2"}[entry["precision"]]), 0, {}
    for array in entry["arrays"]:
        size = int(np.prod(array["shape"]))
        found[array["name"]] = flat[at : at + size].reshape(array["shape"])
        at += size
    assert at == len(flat)
    return found


def payload_in(page_text: str) -> dict[str, Any]:
    found = re.findall(r'<script type="application/json" id="payload">(.*?)</script>', page_text, re.DOTALL)
    assert len(found) == 1
    return json.loads(found[0])


def lower_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on a model of a few thousand parameters is too large for a page to carry."""
    monkeypatch.setattr(making, "PARAMETERS", 100)
    monkeypatch.setattr(payload, "PARAMETERS", 100)


@contextmanager
def serving(found: Made, key: str | None = None) -> Iterator[tuple["Service", int]]:
    """A server in this process, and its port."""
    pytest.importorskip("uvicorn", reason='pip install -e ".[serve]"')
    from minigpt.explorer import guard, server

    with server.listening(0) as listener:
        port = listener.getsockname()[1]
        service = server.Service(found, guard.Guard(port, key=key))
        running = server.Server(service)
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]})
        thread.start()
        yield service, port
        running.should_exit = True
        thread.join()
