"""OpenAI's completions from explore.py --serve: what generate.py writes, to many at once, and what is refused."""

import importlib.util
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from http.client import HTTPConnection, HTTPResponse
from typing import Any

import numpy as np
import pytest
from exploring import EXPLORE, serving
from running import GENERATE, Script, Trained

from minigpt import plain
from minigpt.checkpoint import find_checkpoint
from minigpt.explorer.making import Made, Wish, made
from minigpt.explorer.payload import load_model
from minigpt.tokenizer import tokenizer_from_dict

pytest.importorskip("uvicorn", reason='pip install -e ".[serve]"')

from minigpt.explorer import turns
from minigpt.explorer.completions import Completions

ENGINE = "numba" if importlib.util.find_spec("numba") else "numpy"
GOOD = {"model": "tiny", "prompt": "the ", "max_tokens": 8, "seed": 1}


@dataclass(frozen=True)
class Api:
    """Asks a server of this process."""

    port: int
    completions: Completions

    def ask(self, body: object, **headers: str) -> tuple[int, dict[str, Any]]:
        with closing(self.open(body, **headers)) as answer:
            return answer.status, json.loads(answer.read())

    def open(self, body: object, **headers: str) -> HTTPResponse:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.request("POST", "/v1/completions", content, headers)

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


@pytest.fixture(scope="module")
def found(trained: Trained) -> Made:
    return made(trained.path, Wish())


@pytest.fixture(scope="module")
def api(found: Made) -> Iterator[Api]:
    with serving(found) as (service, port):
        yield Api(port, service.completions)


@pytest.fixture
def client(api: Api, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    openai = pytest.importorskip("openai", reason='pip install -e ".[test]"')
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with openai.OpenAI(base_url=f"http://127.0.0.1:{api.port}/v1", api_key="none", max_retries=0) as client:
        yield client


# ── texts ──────────────────────────────────────────────────────────────────────────────────────────────────────


LAWS = [
    {"temperature": 0.8},
    {"temperature": 0},
    {"temperature": 1.3, "top_k": 5, "repetition_penalty": 1.2},
    {"top_p": 0.9, "min_p": 0.02, "stop": ["e", "\n"]},
]


@pytest.mark.parametrize("law", LAWS)
def test_the_text_is_that_of_generate(api: Api, trained: Trained, script: Script, law: dict[str, Any]) -> None:
    words = ["--temperature", law.get("temperature", 1), "--engine", ENGINE]
    for name in ("top_k", "top_p", "min_p", "repetition_penalty"):
        words += [f"--{name}", law[name]] if name in law else []
    words += [word for stop in law.get("stop", []) for word in ("--stop", stop)]
    asked = ("--prompt", "the ", "--max-new-tokens", 40, "--seed", 7, "--num-samples", 3, "--json")
    samples = script(GENERATE, trained.path, *words, *asked).json["samples"]
    status, answer = api.ask({"model": "tiny", "prompt": "the ", "max_tokens": 40, "seed": 7, "n": 3, **law})
    assert status == 200
    assert [choice["text"] for choice in answer["choices"]] == [sample["text"] for sample in samples]
    n_token = sum(len(sample["tokens"]) for sample in samples)
    assert answer["usage"] == {"prompt_tokens": 4, "completion_tokens": n_token, "total_tokens": 4 + n_token}
    assert answer["object"] == "text_completion" and answer["model"] == "tiny" and answer["seed"] == 7
    for choice, sample in zip(answer["choices"], samples, strict=True):
        ended = len(sample["tokens"]) < 40 or (law.get("stop") and not choice["text"].endswith(sample["text"][-1:]))
        assert choice["finish_reason"] == ("stop" if ended else "length")


def test_openai_s_client(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "minigpt"
    asked = {"model": "tiny", "prompt": ["the ", "a "], "max_tokens": 30, "n": 2, "seed": 3, "echo": True}
    whole = client.completions.create(**asked, extra_body={"top_k": 9, "min_p": 0.01, "repetition_penalty": 1.1})
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert [choice.text[:2] for choice in whole.choices] == ["th", "th", "a ", "a "]
    assert whole.choices[0].text != whole.choices[1].text
    texts, reasons, usage = [""] * 4, [""] * 4, None
    with client.completions.create(
        **asked,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"top_k": 9, "min_p": 0.01, "repetition_penalty": 1.1},
    ) as stream:
        for event in stream:
            assert event.object == "text_completion"
            usage = event.usage or usage
            for choice in event.choices:
                texts[choice.index] += choice.text
                reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.text for choice in whole.choices] and usage == whole.usage
    assert reasons == [choice.finish_reason for choice in whole.choices]


def test_openai_s_client_raises_its_own_errors(client: Any) -> None:
    import openai

    with pytest.raises(openai.NotFoundError, match="only 'tiny'") as caught:
        client.completions.create(model="gpt-4", prompt="a")
    assert caught.value.code == "model_not_found" and caught.value.param == "model"
    with pytest.raises(openai.BadRequestError, match="max_tokens = -1"):
        client.completions.create(model="tiny", prompt="a", max_tokens=-1)


def test_a_stream_is_events(api: Api) -> None:
    with closing(api.open({**GOOD, "stream": True})) as answer:
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        *events, last, rest = answer.read().decode().split("\n\n")
    assert last == "data: [DONE]" and rest == ""
    choices = [json.loads(event.removeprefix("data: "))["choices"] for event in events]
    assert len(choices) > 2 and all(len(some) == 1 for some in choices)
    assert "".join(choice["text"] for (choice,) in choices) == api.text()
    assert [choice["finish_reason"] for (choice,) in choices] == [None] * (len(choices) - 1) + ["length"]


def test_prompts_of_every_kind(api: Api, found: Made) -> None:
    ids = found.tokenizer.encode("the ").tolist()
    alone = api.text()
    assert api.text(prompt=ids) == api.text(prompt=[ids]) == api.text(prompt=["the "]) == alone
    assert api.text(prompt="") == api.text(prompt=[0]) == api.text(prompt=None)
    long = "the old miller " * 20
    assert len(api.text(prompt=long)) == 8, "longer than the context: the model sees its end"
    assert api.text(prompt=long, echo=True, max_tokens=0) == long
    assert api.ask({**GOOD, "seed": None})[1]["seed"] != api.ask({**GOOD, "seed": None})[1]["seed"]


def test_log_probabilities_are_the_model_s(api: Api, trained: Trained) -> None:
    checkpoint = find_checkpoint(trained.path)
    tokenizer, form = tokenizer_from_dict(checkpoint.tokenizer), load_model(checkpoint).form
    asked = {**GOOD, "prompt": "é the ", "echo": True, "logprobs": 2}
    choice = api.ask(asked)[1]["choices"][0]
    told = choice["logprobs"]
    ids = tokenizer.encode(choice["text"])
    expected = plain.forward(form, ids[:-1])
    expected = np.log(plain.softmax(expected))
    assert "".join(told["tokens"]) == choice["text"] and told["text_offset"] == list(range(len(ids)))
    assert told["token_logprobs"][0] is None and told["top_logprobs"][0] is None
    right = expected[np.arange(len(ids) - 1), ids[1:]]
    np.testing.assert_allclose(told["token_logprobs"][1:], right, atol=1e-4)
    for place, top in enumerate(told["top_logprobs"][1:]):
        assert 2 <= len(top) <= 3 and told["tokens"][place + 1] in top
        np.testing.assert_allclose(max(top.values()), expected[place].max(), atol=1e-4)
    later = api.ask({**asked, "echo": False})[1]["choices"][0]["logprobs"]
    assert later["tokens"] == told["tokens"][6:] and later["token_logprobs"] == told["token_logprobs"][6:]
    assert later["text_offset"] == list(range(8))


def test_log_probabilities_beyond_the_context_and_before_a_stop(api: Api, trained: Trained) -> None:
    told = api.ask({**GOOD, "max_tokens": 60, "logprobs": 0, "echo": True})[1]["choices"][0]
    entries, n_token = told["logprobs"], len(told["text"])
    assert {len(values) for values in entries.values()} == {n_token} and n_token > 2 * 16
    assert all(value < 0 for value in entries["token_logprobs"][1:])
    checkpoint = find_checkpoint(trained.path)
    ids = tokenizer_from_dict(checkpoint.tokenizer).encode(told["text"])
    logits = plain.forward(load_model(checkpoint).form, ids[9:17])  # where the second window begins: 17 − 16 / 2
    np.testing.assert_allclose(entries["token_logprobs"][17], np.log(plain.softmax(logits))[-1, ids[17]], atol=1e-4)
    stopped = api.ask({**GOOD, "max_tokens": 60, "logprobs": 0, "stop": told["text"][10:14]})[1]["choices"][0]
    assert stopped["text"] == told["text"][4:10] and len(stopped["logprobs"]["tokens"]) == 6


# ── many ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_twenty_at_once_get_what_each_gets_alone(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "TURN_SECONDS", 0)  # a token a turn
    laws = [{"temperature": 0.8}, {"top_k": 3}, {"repetition_penalty": 1.3}, {"top_p": 0.8, "n": 2}]
    asked = [{**GOOD, "prompt": "the ", "max_tokens": 200, "seed": i, **laws[i % 4]} for i in range(20)]
    alone = [api.ask(body)[1]["choices"] for body in asked]
    with ThreadPoolExecutor(20) as pool:
        together = list(pool.map(api.ask, asked))
    assert [answer["choices"] for _, answer in together] == alone
    assert len({choices[0]["text"] for choices in alone}) == 20
    assert api.completions.turns.inside == 0


@pytest.mark.parametrize("stream", [True, False])
def test_a_full_queue_and_clients_that_go_away(api: Api, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    monkeypatch.setattr(turns, "MOST_WAITING", 1)
    most = turns.AT_ONCE + 1
    endless = json.dumps({**GOOD, "max_tokens": 60_000, "repetition_penalty": 1.5, "stream": stream}).encode()
    with ExitStack() as held:
        for _ in range(most):
            connection = held.enter_context(closing(HTTPConnection("127.0.0.1", api.port, timeout=60)))
            connection.request("POST", "/v1/completions", endless)
        wait_until(lambda: api.completions.turns.inside == most)
        status, answer = api.ask(GOOD)
    assert status == 429 and answer["error"]["code"] == "queue_full" and "try again" in answer["error"]["message"]
    wait_until(lambda: api.completions.turns.inside == 0)
    assert api.text()


def wait_until(holds: Callable[[], bool]) -> None:
    for _ in range(3000):
        if holds():
            return
        time.sleep(0.01)
    pytest.fail("it did not come")


# ── refused ────────────────────────────────────────────────────────────────────────────────────────────────────


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
    (400, {**GOOD, "stop": ""}, "stop string is empty"),
    (400, {**GOOD, "stop": ["a"] * 17}, "at most 16"),
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
    assert api.completions.turns.inside == 0 and api.text()


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
    with serving(replace(found, models=[wild])) as (service, port):
        status, answer = Api(port, service.completions).ask(GOOD)
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
    with serving(found, key="s3cret") as (service, port):
        api = Api(port, service.completions)
        for sent, status in (
            ({}, 401),
            ({"Authorization": "Bearer wrong"}, 401),
            ({"Authorization": "s3cret"}, 401),
            ({"Authorization": "Bearer s3crét"}, 401),
            ({"Authorization": "Bearer s3cret"}, 200),
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
