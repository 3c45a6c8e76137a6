"""OpenAI's completions from explore.py --serve: mistakes, strangers, and what no key is asked for."""

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from asking import GOOD, Api
from exploring import EXPLORE, serving
from hypothesis import given
from hypothesis import strategies as st
from running import Script, Trained

from minigpt.errors import UserError
from minigpt.explorer.making import Made, Wish, made

pytest.importorskip("uvicorn", reason='pip install -e ".[serve]"')

from starlette.requests import Request

from minigpt.explorer.completion_request import WITHOUT, CompletionRequest, order_of, parsed
from minigpt.explorer.guard import Guard, Refused


@pytest.fixture(scope="module")
def found(trained: Trained) -> Made:
    return made(trained.path, Wish())


@pytest.fixture(scope="module")
def api(found: Made) -> Iterator[Api]:
    with serving(found) as (_, port):
        yield Api(port)


BAD: list[tuple[int, object, str]] = [
    (400, b"no JSON", "not JSON"),
    (400, b"\xff\xfe", "not JSON"),
    (400, b"[" * 5000, "not JSON"),
    (400, [1], "JSON object"),
    (400, {"prompt": "a"}, "model: is missing"),
    (404, {**GOOD, "model": "gpt-4"}, "only 'tiny'"),
    (404, {**GOOD, "model": "\ud800"}, "model"),
    (400, {**GOOD, "model": 7}, "model = 7"),
    (400, {**GOOD, "max_tokens": -1}, "max_tokens = -1: must be a whole number from 0"),
    (400, {**GOOD, "max_tokens": "8"}, "max_tokens = '8'"),
    (400, {**GOOD, "max_tokens": True}, "max_tokens = True"),
    (400, {**GOOD, "max_tokens": 1.5}, "max_tokens = 1.5"),
    (400, {**GOOD, "max_tokens": 10**30}, "max_tokens = 1000"),
    (400, {**GOOD, "max_tokens": 40_000, "n": 2}, "prompts x n x max_tokens"),
    (400, {**GOOD, "temperature": -1}, "temperature = -1"),
    (400, {**GOOD, "temperature": float("nan")}, "temperature = nan"),
    (400, b'{"model": "tiny", "temperature": 1e999}', "temperature = inf"),
    (400, {**GOOD, "top_p": 0}, "top_p = 0"),
    (400, {**GOOD, "top_k": -1}, "top_k = -1"),
    (400, {**GOOD, "n": 0}, "n = 0"),
    (400, {**GOOD, "seed": -1}, "seed = -1"),
    (400, {**GOOD, "stop": ["a"] * 17}, "at most 16"),
    (400, {**GOOD, "stop": "a" * 1001}, "at most 1000 characters"),
    (400, {**GOOD, "stop": [1]}, "stop = list"),
    (400, {**GOOD, "stream": "yes"}, "stream = 'yes'"),
    (400, {**GOOD, "stream": True, "logprobs": 1}, "leave out stream"),
    (400, {**GOOD, "stream_options": {"x": 1}}, "stream_options = dict"),
    (400, {**GOOD, "suffix": "end"}, "suffix: there is no such thing here"),
    (400, {**GOOD, "frequency_penalty": 0.5}, "frequency_penalty"),
    (400, {**GOOD, "tempurature": 1}, "did you mean temperature?"),
    (400, {**GOOD, "\ud800": 1}, "unknown"),
    (400, {**GOOD, "prompt": []}, "the list is empty"),
    (400, {**GOOD, "prompt": [1, "a"]}, "prompt = list: must be a text"),
    (400, {**GOOD, "prompt": [True]}, "prompt = list"),
    (400, {**GOOD, "prompt": [[1], "a"]}, "prompt = list"),
    (400, {**GOOD, "prompt": [-1]}, "ids must be whole numbers from 0 to 27"),
    (400, {**GOOD, "prompt": [[1], [28]]}, "ids must be"),
    (400, {**GOOD, "prompt": "☃"}, "never seen"),
    (400, {**GOOD, "prompt": "\ud800"}, "half of a surrogate pair"),
    (400, {**GOOD, "prompt": "the " * 20_000}, "80000 tokens: at most 65536"),
    (413, {**GOOD, "prompt": "the " * 300_000}, "longer than 1048576 bytes"),
]


def test_mistakes_get_one_sentence_in_openai_s_shape(api: Api) -> None:
    for status, body, sentence in BAD:
        for stream in (False, True):
            asked = {"stream": True, **body} if stream and isinstance(body, dict) else body
            found, answer = api.ask(asked)
            assert (found, list(answer)) == (status, ["error"]), (str(body)[:100], answer)
            assert list(answer["error"]) == ["message", "type", "param", "code"]
            assert sentence in answer["error"]["message"] and "\n" not in answer["error"]["message"], answer
    assert api.text()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", -1),
        ("top_p", 2),
        ("top_k", -1),
        ("min_p", 1),
        ("repetition_penalty", 0),
        ("n", 0),
        ("prompt", "☃"),
        ("prompt", "\ud800"),
    ],
)
def test_a_mistake_tells_its_key(api: Api, key: str, value: object) -> None:
    assert api.ask({**GOOD, key: value})[1]["error"]["param"] == key


def test_characters_never_seen_are_told_without_options(api: Api) -> None:
    message = api.ask({**GOOD, "prompt": "☃; x"})[1]["error"]["message"]
    assert message.startswith("prompt: characters that the tokenizer has never seen: ")
    assert "'☃' (U+2603)" in message and "--" not in message


def test_an_empty_stop_is_none(api: Api) -> None:
    assert api.text(stop="") == api.text(stop=[""]) == api.text()
    assert api.text(stop=["", "e"]) == api.text(stop="e")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just("\ud800"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)
KEYS = st.sampled_from([*CompletionRequest.model_fields, *WITHOUT])


@given(content=JSON | st.dictionaries(KEYS, JSON | st.integers(0, 2)), model=st.booleans())
def test_any_json_is_an_order_or_refused(found: Made, content: Any, model: bool) -> None:
    if model and isinstance(content, dict):
        content = {**content, "model": "tiny"}
    try:
        order_of(parsed(json.dumps(content).encode()), found.tokenizer, found.tokenizer.vocab_size)
    except (Refused, UserError) as refused:
        assert str(refused) and len(str(refused)) < 1000


def test_addresses_and_methods_that_are_not_there(api: Api) -> None:
    for method, path, status in (
        ("GET", "/v1/completions", 405),
        ("POST", "/v1/models", 405),
        ("POST", "/v1/chat/completions", 404),
        ("GET", "/v1/models/gpt-4", 404),
    ):
        with closing(api.request(method, path)) as answer:
            assert answer.status == status and json.loads(answer.read())["error"]["message"]


def test_logits_that_are_not_finite(found: Made) -> None:
    head = np.full_like(found.models[0].form.head, np.inf)
    wild = replace(found.models[0], form=replace(found.models[0].form, head=head))
    with serving(replace(found, models=[wild])) as (_, port):
        status, answer = Api(port).ask(GOOD)
    assert status == 400 and "not finite" in answer["error"]["message"]


# ── who is answered ────────────────────────────────────────────────────────────────────────────────────────────


def test_without_a_key_only_this_machine_s_own_names_and_pages(api: Api) -> None:
    own, other = f"http://127.0.0.1:{api.port}", "https://evil.example"
    for headers, status in (
        ({"Host": "evil.example"}, 403),
        ({"Host": f"evil.example:{api.port}"}, 403),
        ({"Origin": other}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": f"http://127.0.0.1:{api.port + 1}"}, 403),
        ({"Origin": own}, 200),
        ({"Host": f"localhost:{api.port}"}, 200),
        ({"Authorization": "Bearer whatever"}, 200),
    ):
        assert api.ask(GOOD, **headers)[0] == status, headers
        with closing(api.request("GET", "/v1/models", headers=headers)) as answer:
            assert answer.status == status, headers


def test_with_a_key_it_is_asked_for(found: Made) -> None:
    with serving(found, key="s3cret") as (_, port):
        api = Api(port)
        for sent, status in (
            ({}, 401),
            ({"Authorization": "Bearer wrong"}, 401),
            ({"Authorization": "s3cret"}, 401),
            ({"Authorization": "Bearer s3crét"}, 401),
            ({"Authorization": "Bearer s3cret"}, 200),
            ({"Authorization": "bearer s3cret"}, 200),
            ({"Authorization": "Bearer S3CRET"}, 401),
            ({"Authorization": "Basic s3cret"}, 401),
            ({"Authorization": "Bearer s3cret", "Host": "my-machine"}, 200),
        ):
            assert api.ask(GOOD, **sent)[0] == status, sent
            with closing(api.request("GET", "/v1/models", headers=sent)) as answer:
                assert answer.status == status, sent
        with closing(api.request("GET", "/", headers={"Host": "my-machine"})) as answer:
            assert answer.status == 403, "the page stays with this machine"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--serve", "--host", "0.0.0.0"], "--host 0.0.0.0: others can reach it, so give --api-key KEY"),
        (["--serve", "--host", ""], "others can reach it"),
        (["--serve", "--api-key", ""], "--api-key: must be"),
        (["--serve", "--api-key", "é"], "--api-key: must be"),
        (["--serve", "--host", "no.such.machine.invalid", "--api-key", "k"], "--host no.such.machine.invalid"),
        (["--export", "page.html", "--host", "0.0.0.0"], "belong to --serve"),
        (["--export", "page.html", "--api-key", "k"], "belong to --serve"),
    ],
)
def test_options_that_are_refused(
    trained: Trained, script: Script, monkeypatch: pytest.MonkeyPatch, words: list[str], sentence: str
) -> None:
    monkeypatch.delenv("MINIGPT_API_KEY", raising=False)
    port = ["--port", 0] if "--serve" in words else []
    answer = script(EXPLORE, trained.path, *words, *port)
    assert answer.code == 2 and sentence in answer.err and answer.err.count("\n") == 1, answer.err


@pytest.mark.parametrize(
    ("client", "host", "shown"),
    [
        ("127.0.0.1", "127.0.0.1:80", True),
        ("192.0.2.1", "192.0.2.1:80", True),  # this machine, at the address that it listens at
        ("192.0.2.7", "192.0.2.1:80", False),
        ("192.0.2.7", "127.0.0.1:80", False),
        ("127.0.0.1", "evil.example:80", False),
        ("no address", "127.0.0.1:80", False),
    ],
)
def test_the_page_is_for_this_machine(client: str, host: str, shown: bool) -> None:
    headers = [(b"host", host.encode())]
    request = Request({"type": "http", "client": (client, 5), "server": ("192.0.2.1", 80), "headers": headers})
    guard = Guard(80, "192.0.2.1", key="k")
    if shown:
        guard.check_page(request)
    else:
        with pytest.raises(Refused, match="for the machine that serves it"):
            guard.check_page(request)
