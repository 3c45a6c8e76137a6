"""OpenAI's completions from explore.py --serve: what generate.py writes, to many at once, and what is refused."""

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPException
from itertools import repeat
from typing import Any

import numpy as np
import pytest
from asking import GOOD, Api
from exploring import EXPLORE, serving
from running import GENERATE, Script, Trained, command, environment

from minigpt import plain
from minigpt.bpe import BYTES, SPLIT_PATTERN
from minigpt.checkpoint import find_checkpoint
from minigpt.explorer.making import Made, Wish, made
from minigpt.explorer.payload import load_model
from minigpt.normal_form import Array
from minigpt.sampling import SamplingOptions
from minigpt.tokenizer import END, BpeTokenizer, CharTokenizer, shown, tokenizer_from_dict, train_tokenizer

pytest.importorskip("uvicorn", reason='pip install -e ".[serve]"')

from minigpt.explorer import completions as completions_file
from minigpt.explorer import turns
from minigpt.explorer.completions import Completions
from minigpt.explorer.orders import Order, OrderWriter, Piece
from minigpt.explorer.server import Service
from minigpt.explorer.token_logprobs import TokenLogprobs, scored, text_offsets

ENGINE = "numba" if importlib.util.find_spec("numba") else "numpy"


@pytest.fixture(scope="module")
def found(trained: Trained) -> Made:
    return made(trained.path, Wish())


@pytest.fixture(scope="module")
def served(found: Made) -> Iterator[tuple[Service, int]]:
    with serving(found) as both:
        yield both


@pytest.fixture(scope="module")
def api(served: tuple[Service, int]) -> Api:
    return Api(served[1])


@pytest.fixture(scope="module")
def completions(served: tuple[Service, int]) -> Completions:
    return served[0].completions


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
    reasons = ["stop" if len(sample["tokens"]) < 40 else "length" for sample in samples]
    assert [choice["finish_reason"] for choice in answer["choices"]] == reasons


def test_without_numba(found: Made, trained: Trained, script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    asked = ("--prompt", "the ", "--max-new-tokens", 40, "--num-samples", 2, "--json")
    samples = script(GENERATE, trained.path, *asked, "--engine", "numpy").json["samples"]
    order = Order([found.tokenizer.encode("the ").tolist()], n=2, max_tokens=40, sampling=SamplingOptions(), seed=0)
    texts = ["", ""]
    for piece in OrderWriter(found.models[0].form, found.tokenizer).pieces(order, lambda: True):
        texts[piece.number] += piece.text
    assert texts == [sample["text"] for sample in samples]


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


def test_tokens_that_are_parts_of_characters() -> None:
    tokenizer = train_tokenizer("byte", [])
    ids = tokenizer.encode("aé").tolist()
    assert [shown(tokenizer, token) for token in ids] == ["a", "bytes:\\xc3", "bytes:\\xa9"]
    assert text_offsets(tokenizer, ids, ids) == [0, 1, 1, 2, 3, 3]
    assert text_offsets(tokenizer, ids[:2], ids[2:]) == [0, 1, 2], "half a character is shown as one"


@dataclass
class Certain:
    """Reads the same logits at every place."""

    row: list[float]
    context_length: int = 8

    def new_memory(self) -> None: ...

    def all_logits(self, tokens: Array, memory: None) -> Array:
        return np.tile(self.row, (len(tokens), 1))


def test_the_likeliest_are_tokens_that_stand_for_something() -> None:
    tokenizer = BpeTokenizer("padded", [*BYTES, None, None], SPLIT_PATTERN)
    row = np.zeros(tokenizer.vocab_size)
    row[[257, 258, END, 98]] = 9, 8, 7, 6
    told = TokenLogprobs()
    list(scored(Certain(row.tolist()), tokenizer, [98, 98, 98], told, 2))
    assert told.tokens == ["a", "a", "a"]
    assert [list(top or ()) for top in told.top_logprobs] == [[], ["<|end|>", "a"], ["<|end|>", "a"]]
    np.testing.assert_allclose(np.diff(list((told.top_logprobs[1] or {}).values())), -1)


def test_of_tokens_with_one_text_the_likelier_is_told() -> None:
    tokenizer = CharTokenizer("a", byte_fallback=True)
    byte, character = 98, 257
    row = np.zeros(tokenizer.vocab_size)
    for likelier, other in ((byte, character), (character, byte)):
        row[[likelier, other]] = 9, 8
        told = TokenLogprobs()
        list(scored(Certain(row.tolist()), tokenizer, [other, other], told, 1))
        top, own = told.top_logprobs[1], told.token_logprobs[1]
        assert top and own is not None and list(top) == ["a"]
        np.testing.assert_allclose(top["a"], own + 1)


def test_a_text_can_be_scored_alone(api: Api) -> None:
    written = api.ask({**GOOD, "echo": True, "logprobs": 1})[1]["choices"][0]
    alone = {**GOOD, "prompt": written["text"], "max_tokens": 0, "echo": True, "logprobs": 1}
    choice = api.ask(alone)[1]["choices"][0]
    assert choice["text"] == written["text"] and choice["logprobs"] == written["logprobs"]


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


def test_twenty_at_once_get_what_each_gets_alone(
    api: Api, completions: Completions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "TURN_SECONDS", 0)  # a token a turn
    laws = [{"temperature": 0.8}, {"top_k": 3}, {"repetition_penalty": 1.3}, {"top_p": 0.8, "n": 2}]
    asked = [{**GOOD, "prompt": "the ", "max_tokens": 200, "seed": i, **laws[i % 4]} for i in range(20)]
    alone = [api.ask(body)[1]["choices"] for body in asked]
    with ThreadPoolExecutor(20) as pool:
        together = list(pool.map(api.ask, asked))
    assert [answer["choices"] for _, answer in together] == alone
    assert len({choices[0]["text"] for choices in alone}) == 20
    assert completions.turns.inside == 0


@pytest.mark.parametrize("stream", [True, False])
def test_a_full_queue(api: Api, completions: Completions, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    most, going_on = 3, threading.Event()
    monkeypatch.setattr(turns, "MOST_INSIDE", most)
    completions.turns._thread.submit(going_on.wait)
    try:
        with ExitStack() as held:
            for _ in range(most):
                held.enter_context(api.sent({**GOOD, "stream": stream}))
            wait_until(lambda: completions.turns.inside == most)
            status, answer = api.ask(GOOD)
        wait_until(lambda: completions.turns.inside == 0)  # who has gone does not wait, though nothing is written
    finally:
        going_on.set()
    assert status == 429 and answer["error"]["code"] == "queue_full" and "try again" in answer["error"]["message"]
    assert api.text()


@pytest.mark.parametrize("stream", [True, False])
def test_the_work_stops_when_the_client_goes_away(
    api: Api, completions: Completions, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr(turns, "TURN_SECONDS", 0)
    written = 0

    def endless(*_: object) -> Iterator[Piece]:
        nonlocal written
        while True:
            written += 1
            yield Piece(0, "and ")

    monkeypatch.setattr(completions.writer, "pieces", endless)
    with api.sent({**GOOD, "stream": stream}):
        wait_until(lambda: written > 1000)
    wait_until(lambda: completions.turns.inside == 0)
    completions.turns._thread.submit(int).result()  # the turn that it was in has ended
    before = written
    time.sleep(0.2)
    assert written == before


def test_a_client_that_reads_no_more_is_cut_off(
    api: Api, completions: Completions, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completions_file, "MOST_SECONDS_TO_TAKE", 0.2)
    monkeypatch.setattr(turns, "TURN_SECONDS", 0)
    monkeypatch.setattr(completions.writer, "pieces", lambda *_: repeat(Piece(0, "and " * 10_000)))
    with api.sent({**GOOD, "stream": True}) as connection:
        wait_until(lambda: completions.turns.inside == 1)
        wait_until(lambda: completions.turns.inside == 0)
        with pytest.raises((OSError, HTTPException)):
            connection.getresponse().read()
    assert not caplog.text


class Endless:
    """Fills orders for more than 100 tokens over and over again, others as they are."""

    def __init__(self, completions: Completions, text: str | None = None) -> None:
        self.pieces, self.text, self.written = completions.writer.pieces, text, 0

    def __call__(self, order: Order, alone: Callable[[], bool]) -> Iterator[Piece]:
        if order.max_tokens <= 100:
            yield from self.pieces(order, alone)
            return
        while True:
            for piece in self.pieces(order, alone):
                self.written += 1
                yield piece if self.text is None else Piece(0, self.text)


@pytest.mark.parametrize("stream", [True, False])
def test_a_short_request_is_answered_while_long_ones_go_on(
    api: Api,
    completions: Completions,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    stream: bool,
) -> None:
    endless = Endless(completions)
    alone = api.text()
    monkeypatch.setattr(completions.writer, "pieces", endless)
    with ExitStack() as held:
        for _ in range(8):
            held.enter_context(read_along(api, {**GOOD, "max_tokens": 200, "stream": stream}))
        wait_until(lambda: completions.turns.inside == 8)
        assert [api.text() for _ in range(3)] == [alone] * 3
        before = endless.written
        wait_until(lambda: endless.written > before)
        assert completions.turns.inside == 8
    wait_until(lambda: completions.turns.inside == 0)
    assert not caplog.text


def test_streams_that_nobody_reads_take_no_turns(
    api: Api, completions: Completions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "TURN_SECONDS", 0)
    endless = Endless(completions, "and " * 100_000)
    monkeypatch.setattr(completions.writer, "pieces", endless)

    def answered_without_them() -> bool:
        before = endless.written
        assert api.text()
        return endless.written == before

    with ExitStack() as held:
        for _ in range(8):
            held.enter_context(api.sent({**GOOD, "max_tokens": 200, "stream": True}))
        wait_until(lambda: completions.turns.inside == 8 and endless.written > 0)
        wait_until(answered_without_them)
        assert completions.turns.inside == 8
    wait_until(lambda: completions.turns.inside == 0)


@pytest.mark.skipif(ENGINE != "numba", reason="NumPy writes one text after the other")
def test_fewer_texts_are_written_side_by_side_in_company(found: Made) -> None:
    writer = OrderWriter(found.models[0].form, found.tokenizer)
    order = Order([found.tokenizer.encode("the ").tolist()], n=12, max_tokens=40, sampling=SamplingOptions(), seed=0)
    for alone, side_by_side in ((True, 12), (False, 4)):
        open_texts, most, n_finished = set[int](), 0, 0
        for piece in writer.pieces(order, lambda alone=alone: alone):
            open_texts.add(piece.number)
            most = max(most, len(open_texts))
            if piece.finished:
                open_texts.remove(piece.number)
                n_finished += 1
        assert (most, n_finished) == (side_by_side, 12)


@pytest.mark.parametrize("path", ["/v1/completions", "/api/trace"])
def test_a_client_that_goes_away_in_its_body_is_no_news(
    found: Made, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    with serving(found) as (service, port):
        with socket.create_connection(("127.0.0.1", port)) as leaving:
            leaving.sendall(half_a_request(path, port, service.token))
        assert Api(port).text()
    assert not caplog.text


@pytest.mark.skipif(os.name != "posix", reason="Windows sends no Ctrl-C to another process")
@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_ends_it_while_texts_are_written(api: Api, trained: Trained, times: int) -> None:
    assert api.text()  # compiled by now
    words = command(EXPLORE, trained.path, "--serve", "--port", 0)
    pipe = subprocess.PIPE
    with (
        subprocess.Popen(words, env=environment(), encoding="utf-8", stdout=pipe, stderr=pipe) as process,
        ExitStack() as held,
    ):
        assert process.stdout
        port = int(process.stdout.readline().split("/")[2].split(":")[1])
        half = held.enter_context(socket.create_connection(("127.0.0.1", port)))
        half.sendall(half_a_request("/v1/completions", port, ""))
        body = {**GOOD, "temperature": 0, "max_tokens": 60_000}
        whole, _unread, stream = (
            held.enter_context(Api(port).sent({**body, "stream": stream})) for stream in (False, True, True)
        )
        answer = stream.getresponse()
        assert answer.read(5) == b"data:"
        process.send_signal(signal.SIGINT)
        if times == 1:
            *_, last, rest = answer.read().decode().split("\n\n")
            assert "server_ending" in last and rest == ""
            refused = whole.getresponse()
            assert refused.status == 503 and json.loads(refused.read())["error"]["code"] == "server_ending"
        else:
            time.sleep(0.3)
            process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "") and out.endswith("the server has ended\n")


def test_a_bug_keeps_its_traceback(
    found: Made, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def faulty(*_: object) -> Iterator[Piece]:
        raise ZeroDivisionError("a bug")

    with serving(found) as (service, port):
        monkeypatch.setattr(service.completions.writer, "pieces", faulty)
        with closing(Api(port).open(GOOD)) as answer:
            assert answer.status == 500
    assert "ZeroDivisionError: a bug" in caplog.text


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not here")
def test_curl(api: Api) -> None:
    words = ["curl", "-sN", f"http://127.0.0.1:{api.port}/v1/completions", "--noproxy", "*"]
    for stream in (False, True):
        body = json.dumps({**GOOD, "stream": stream})
        done = subprocess.run([*words, "-d", body], capture_output=True, encoding="utf-8", check=True)
        if stream:
            assert done.stdout.startswith("data: {") and done.stdout.endswith("}\n\ndata: [DONE]\n\n")
        else:
            assert json.loads(done.stdout)["choices"][0]["text"] == api.text()


@contextmanager
def read_along(api: Api, body: object) -> Iterator[None]:
    """A request whose answer is read as it comes, and which then goes away."""

    def read(connected: socket.socket) -> None:
        with suppress(OSError):
            while connected.recv(1 << 16):
                pass

    with api.sent(body) as connection:
        thread = threading.Thread(target=read, args=[connection.sock])
        thread.start()
        yield
        connection.sock.shutdown(socket.SHUT_RDWR)
        thread.join()


def half_a_request(path: str, port: int, token: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", f"Host: 127.0.0.1:{port}", f"X-Explorer-Token: {token}", "Content-Length: 100"]
    return "\r\n".join([*lines, "", "{"]).encode()


def wait_until(holds: Callable[[], bool]) -> None:
    for _ in range(3000):
        if holds():
            return
        time.sleep(0.01)
    pytest.fail("it did not come")
