"""OpenAI's ``/v1/completions`` and ``/v1/models``, for a model of this machine.

Beside OpenAI's keys, ``top_k``, ``min_p`` and ``repetition_penalty`` are read, and the answer tells the ``seed``. The
law is that of ``minigpt.sampling``: the seed gives the text that generate.py gives, and without one each answer has its
own. A prompt may be longer than the context, and so may the text, for the window moves on.

Source: https://platform.openai.com/docs/api-reference/completions
"""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterator
from contextlib import aclosing
from dataclasses import asdict
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from minigpt.errors import UserError
from minigpt.explorer.completion_request import CompletionRequest, key_named, order_of, parsed
from minigpt.explorer.guard import HEADERS, Gone, Guard, Refused, Unread, whole_body
from minigpt.explorer.orders import Finished, Order, OrderWriter, Piece
from minigpt.explorer.payload import Model
from minigpt.explorer.token_logprobs import text_offsets
from minigpt.explorer.turns import Turns
from minigpt.tokenizer import Tokenizer

LARGEST_BODY = 1 << 20  # bytes
MOST_SECONDS_TO_TAKE = 60  # that a client may leave a piece of a stream unread, once what lies between is full
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "server_error",
}

Out = TypeVar("Out")


class Completions:
    """One model and those who ask it."""

    def __init__(self, model: Model, tokenizer: Tokenizer, guard: Guard) -> None:
        self.name, self.tokenizer, self.guard = model.checkpoint.config.run.name, tokenizer, guard
        self.writer, self.turns = OrderWriter(model.form, tokenizer), Turns()
        self.created = int(time.time())

    def app(self) -> Starlette:
        """What is found under ``/v1``."""
        routes = [
            Route("/models", self.models),
            Route("/models/{name:path}", self.model),
            Route("/completions", self.complete, methods=["POST"]),
        ]
        return Starlette(routes=routes, exception_handlers={Refused: _refused, HTTPException: _not_found})

    async def models(self, request: Request) -> Response:
        """The list of the one model."""
        self.guard.check_api(request)
        return _json({"object": "list", "data": [self._about()]})

    async def model(self, request: Request) -> Response:
        """The one model."""
        self.guard.check_api(request)
        self._check_model(request.path_params["name"])
        return _json(self._about())

    async def complete(self, request: Request) -> Response:
        """A text or several, at once or as they come."""
        self.guard.check_api(request)
        asked = parsed(await whole_body(request, LARGEST_BODY))
        self._check_model(asked.model)
        answer = Answer(self.name, asked, self.tokenizer)
        work = self.turns.work(self._pieces(answer))
        if not asked.stream:
            return _json(await _unless_gone(request, answer.whole(work)))
        first = await _unless_gone(request, anext(work))  # what is refused is so before an answer has begun
        return _Stream(answer.events(first, work))

    def _pieces(self, answer: "Answer") -> Iterator[Piece]:
        try:
            answer.order = order_of(answer.asked, self.tokenizer, self.writer.form.vocab_size)
            yield from self.writer.pieces(answer.order, lambda: self.turns.inside == 1)
        except UserError as error:
            raise Refused(400, str(error), param=key_named(str(error))) from None

    def _check_model(self, name: str) -> None:
        if name != self.name:
            raise Refused(
                404, f"there is no model {name!r} here, only {self.name!r}", param="model", code="model_not_found"
            )

    def _about(self) -> dict[str, Any]:
        return {"id": self.name, "object": "model", "created": self.created, "owned_by": "minigpt"}


class Answer:
    """What is sent for a request."""

    order: Order  # set when the work begins

    def __init__(self, model: str, asked: CompletionRequest, tokenizer: Tokenizer) -> None:
        self.asked, self.tokenizer = asked, tokenizer
        self.head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    async def whole(self, work: AsyncIterator[list[Piece]]) -> dict[str, Any]:
        """All texts in one object."""
        texts: dict[int, str] = {}
        ends: dict[int, Finished] = {}
        async for pieces in work:
            for piece in pieces:
                texts[piece.number] = texts.get(piece.number, "") + piece.text
                if piece.finished:
                    ends[piece.number] = piece.finished
        choices = [self._choice(number, text, ends[number]) for number, text in sorted(texts.items())]
        return {**self.head, "choices": choices, "usage": self._usage(ends), "seed": self.order.seed}

    async def events(self, first: list[Piece], work: AsyncGenerator[list[Piece], None]) -> AsyncGenerator[str, None]:
        """Server-sent events: a piece each, those of several texts in any order; the end of each text; the end.

        Those of a turn are sent at once: between two turns it is seen whether the client is still there.
        """
        ends: dict[int, Finished] = {}
        async with aclosing(work):
            try:
                pieces = first
                while pieces:
                    ends |= {piece.number: piece.finished for piece in pieces if piece.finished}
                    yield "".join(
                        self._event(choices=[self._choice(piece.number, piece.text, piece.finished)])
                        for piece in pieces
                        if piece.text or piece.finished
                    )
                    pieces = await anext(work, [])
            except Refused as refused:
                yield f"data: {json.dumps(_error(refused))}\n\n"
                return
        if self.asked.stream_options.include_usage:
            yield self._event(choices=[], usage=self._usage(ends))
        yield "data: [DONE]\n\n"

    def _event(self, **parts: object) -> str:
        return f"data: {json.dumps({**self.head, **parts, 'seed': self.order.seed}, ensure_ascii=False)}\n\n"

    def _choice(self, number: int, text: str, finished: Finished | None) -> dict[str, Any]:
        reason = finished.reason if finished else None
        logprobs = self._logprobs(number, text, finished) if finished and finished.logprobs else None
        return {"text": text, "index": number, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, number: int, text: str, finished: Finished) -> dict[str, Any]:
        """As OpenAI has them; of a text that a stop string has cut, those of the tokens that are left."""
        assert finished.logprobs
        prompt = self.order.prompts[number // self.order.n] if self.order.echo else []
        offsets = text_offsets(self.tokenizer, prompt, finished.written)
        left = len(offsets) if not finished.cut else sum(offset < len(text) for offset in offsets)
        entries = {name: values[:left] for name, values in asdict(finished.logprobs).items()}
        return {**entries, "text_offset": offsets[:left]}

    def _usage(self, ends: dict[int, Finished]) -> dict[str, int]:
        prompt, written = sum(map(len, self.order.prompts)), sum(len(end.written) for end in ends.values())
        return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}


class _Stream(StreamingResponse):
    """Closes what it sends when the connection ends, or takes no more, so that the work stops then."""

    def __init__(self, events: AsyncGenerator[str, None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers=HEADERS)
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            try:
                async with asyncio.timeout(MOST_SECONDS_TO_TAKE):
                    await send(message)
            except TimeoutError:
                raise Unread from None

        async with aclosing(self._events):
            await super().__call__(scope, receive, send_in_time)


async def _unless_gone(request: Request, work: Awaitable[Out]) -> Out:
    """What some work gives; it is stopped when who asked for it goes away."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Gone
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


# ── JSON ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _json(content: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    text = json.dumps(content, ensure_ascii=False, allow_nan=False)
    body = text.encode("utf-8", "backslashreplace")  # halves of surrogate pairs, which a request may hold
    return Response(body, status, headers={**HEADERS, **(headers or {})}, media_type="application/json")


def _error(refused: Refused) -> dict[str, Any]:
    kind = TYPES.get(refused.status, "invalid_request_error")
    return {"error": {"message": str(refused), "type": kind, "param": refused.param, "code": refused.code}}


async def _refused(_request: Request, refused: Exception) -> Response:
    assert isinstance(refused, Refused)
    more = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}}
    return _json(_error(refused), refused.status, more.get(refused.status))


async def _not_found(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    sentence = f"{request.method} {request.url.path}: not here; there are GET /v1/models and POST /v1/completions"
    return await _refused(request, Refused(error.status_code, sentence, code="unknown_url"))
