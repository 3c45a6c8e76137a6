"""The page live, for a model whose weights it cannot carry, and OpenAI's completions under ``/v1``.

The page is for this machine alone: a foreign ``Host`` is refused (so that no name can be pointed here), and what
computes asks for a token that is made anew at each start and stands in the page alone. ``guard.py`` tells who may ask
for completions.
"""

import asyncio
import json
import os
import secrets
import socket
import threading
import webbrowser
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.types import Receive, Scope, Send

from minigpt.errors import UserError
from minigpt.explorer.capture import captured_entry
from minigpt.explorer.completions import Completions
from minigpt.explorer.guard import HEADERS, HOST, Guard, Refused, Unread, address, whole_body
from minigpt.explorer.making import Made
from minigpt.explorer.page import Page
from minigpt.explorer.payload import Model

LARGEST_BODY = 1 << 16  # bytes
SECONDS_TO_END = 1  # that answers may still take after Ctrl-C


class Service:
    """The page and its models; one of its requests at a time is computed."""

    def __init__(self, found: Made, guard: Guard) -> None:
        self.token = secrets.token_urlsafe(32)
        self.models = found.models
        self.guard = guard
        self.completions = Completions(found.models[0], found.tokenizer, guard)
        self.lock = threading.Lock()
        about = [model.about for model in self.models]
        server = None if found.payload["models"] else {"url": "", "token": self.token, "models": about}
        self.page = Page({**found.payload, "captured": [], "server": server}).html()

    def app(self) -> Starlette:
        """All that can be asked for."""
        trace = Route("/api/trace", self.trace, methods=["POST"])
        return Starlette(routes=[Route("/", self.show), trace, Mount("/v1", self.completions.app())])

    async def show(self, request: Request) -> Response:
        """The page."""
        try:
            self.guard.check_page(request)
        except Refused as refused:
            return _refusal(refused)
        return HTMLResponse(self.page, headers=HEADERS)

    async def trace(self, request: Request) -> Response:
        """``{"ids": [...], "model": 0}`` → what ``captured.js`` reads."""
        try:
            self.guard.check_page(request)
            if not secrets.compare_digest(request.headers.get("X-Explorer-Token", "").encode(), self.token.encode()):
                raise Refused(403, "the token is not this server's: reload the page")
            model, ids = self.asked(await whole_body(request, LARGEST_BODY))
            return JSONResponse(await run_in_threadpool(self.compute, model, ids), headers=HEADERS)
        except Refused as refused:
            return _refusal(refused)

    def asked(self, body: bytes) -> tuple[Model, list[int]]:
        """The model and the ids of a request."""
        try:
            content = json.loads(body)
            number, ids = content.get("model", 0), content["ids"]
        except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
            raise Refused(400, 'the request must be JSON, {"ids": [...], "model": 0}') from None
        if type(number) is not int or not 0 <= number < len(self.models):
            raise Refused(400, f"there is no such model; there are {len(self.models)}, counted from 0")
        model = self.models[number]
        most, vocab_size = model.form.context_length, model.form.vocab_size
        if not isinstance(ids, list) or not all(type(token) is int and 0 <= token < vocab_size for token in ids):
            raise Refused(400, f"ids must be whole numbers from 0 to {vocab_size - 1}")
        if not 1 <= len(ids) <= most:
            raise Refused(400, f"the text has {len(ids)} tokens: at least 1 and at most {most} are read")
        return model, ids

    def compute(self, model: Model, ids: list[int]) -> dict[str, Any]:
        """The numbers, one text after the other."""
        with self.lock:
            try:
                return captured_entry(model.form, ids, live=True)
            except UserError as error:
                raise Refused(422, str(error)) from None


def _refusal(refused: Refused) -> Response:
    return JSONResponse({"error": str(refused)}, refused.status, headers=HEADERS)


def listening(port: int, host: str = HOST) -> socket.socket:
    """A socket that, at its usual address, this machine alone reaches; port 0 takes any that is free.

    Raises:
        UserError: if the port is in use or may not be taken, or the address is not this machine's.
    """
    if not 0 <= port < 1 << 16:
        raise UserError(f"--port {port}: must be at least 0 and below {1 << 16}")
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    if os.name == "posix":  # elsewhere it would let another process listen too
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()
    except (OSError, ValueError) as error:
        listener.close()
        where, hint = f"--port {port}", "another, or 0 for any that is free"
        if host != HOST:
            where, hint = f"--host {host} {where}", "an address of this machine, and a port that is free"
        raise UserError(f"{where}: {getattr(error, 'strerror', None) or error}; give {hint}") from None
    return listener


class Server(uvicorn.Server):
    """Ends soon and without a word: who still waits for a text is refused, and who does not read that is cut off."""

    def __init__(self, service: Service) -> None:
        super().__init__(uvicorn.Config(self._answer, interface="asgi3", log_config=None, lifespan="off"))
        self._app, self._turns = service.app(), service.completions.turns

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Uvicorn's, but within SECONDS_TO_END where the writing allows."""
        self._turns.end()
        closing = asyncio.ensure_future(super().shutdown(sockets))
        await asyncio.wait({closing}, timeout=SECONDS_TO_END)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        await closing

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except Unread:
            for connection in list(self.server_state.connections):
                if getattr(connection, "scope", None) is scope:
                    connection.transport.abort()
            await asyncio.sleep(0)  # uvicorn notes that it is lost
        except asyncio.CancelledError:  # what a second Ctrl-C has left when the loop ends
            if not self.should_exit:
                raise


def serve(found: Made, listener: socket.socket, guard: Guard, *, browser: bool = False) -> None:
    """Serve until Ctrl-C; with ``browser`` the page is opened in it."""
    where = address(*listener.getsockname()[:2])
    service = Service(found, guard)
    print(f"{where}/ (Ctrl-C ends)\n{where}/v1 for OpenAI's clients, model {service.completions.name}", flush=True)
    if browser:
        webbrowser.open(f"{where}/")
    try:
        Server(service).run(sockets=[listener])
    except KeyboardInterrupt:
        print("the server has ended")
