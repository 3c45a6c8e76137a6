"""The page live, for a model whose weights it cannot carry: served to this machine alone.

A page of another site can't reach it: only 127.0.0.1 listens, a foreign ``Host`` is refused (so that no name can be
pointed here), and what computes asks for a token that is made anew at each start and stands in the page alone.
"""

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
from starlette.routing import Route

from minigpt.errors import UserError
from minigpt.explorer.capture import captured_entry
from minigpt.explorer.making import Made
from minigpt.explorer.page import Page
from minigpt.explorer.payload import Model

HOST = "127.0.0.1"
LARGEST_BODY = 1 << 16  # bytes
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
}


class Refused(Exception):
    """A request that is not answered, with its status and a sentence."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class Service:
    """The page and its models; one request at a time is computed."""

    def __init__(self, found: Made, port: int) -> None:
        self.token = secrets.token_urlsafe(32)
        self.models = found.models
        self.hosts = {f"{HOST}:{port}", f"localhost:{port}"}
        self.lock = threading.Lock()
        about = [model.about for model in self.models]
        server = None if found.payload["models"] else {"url": "", "token": self.token, "models": about}
        self.page = Page({**found.payload, "captured": [], "server": server}).html()

    def app(self) -> Starlette:
        """The two things that can be asked for."""
        return Starlette(routes=[Route("/", self.show), Route("/api/trace", self.trace, methods=["POST"])])

    async def show(self, request: Request) -> Response:
        """The page."""
        try:
            self.check_host(request)
        except Refused as refused:
            return _refusal(refused)
        return HTMLResponse(self.page, headers=HEADERS)

    async def trace(self, request: Request) -> Response:
        """``{"ids": [...], "model": 0}`` → what ``captured.js`` reads."""
        try:
            self.check_host(request)
            if not secrets.compare_digest(request.headers.get("X-Explorer-Token", "").encode(), self.token.encode()):
                raise Refused(403, "the token is not this server's: reload the page")
            model, ids = self.asked(await _body(request))
            return JSONResponse(await run_in_threadpool(self.compute, model, ids), headers=HEADERS)
        except Refused as refused:
            return _refusal(refused)

    def check_host(self, request: Request) -> None:
        """Refuse what was sent to another name than this machine's own."""
        if request.headers.get("Host", "") not in self.hosts:
            raise Refused(403, "this server answers to 127.0.0.1 alone")

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


async def _body(request: Request) -> bytes:
    """The request's body, as long as it is short."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > LARGEST_BODY:
            raise Refused(413, f"the request is longer than {LARGEST_BODY} bytes")
    return body


def _refusal(refused: Refused) -> Response:
    return JSONResponse({"error": str(refused)}, refused.status, headers=HEADERS)


def listening(port: int) -> socket.socket:
    """A socket that this machine alone reaches; port 0 takes any that is free.

    Raises:
        UserError: if the port is in use or may not be taken.
    """
    if not 0 <= port < 1 << 16:
        raise UserError(f"--port {port}: must be at least 0 and below {1 << 16}")
    listener = socket.socket()
    if os.name == "posix":  # elsewhere it would let another process listen too
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise UserError(f"--port {port}: {error.strerror or error}; give another, or 0 for any that is free") from None
    return listener


def serve(found: Made, listener: socket.socket, *, browser: bool = False) -> None:
    """Serve until Ctrl-C; with ``browser`` the page is opened in it."""
    port = listener.getsockname()[1]
    address = f"http://{HOST}:{port}/"
    app = Service(found, port).app()
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off"))
    print(f"{address} (Ctrl-C ends)", flush=True)
    if browser:
        webbrowser.open(address)
    try:
        server.run(sockets=[listener])
    except KeyboardInterrupt:
        print("the server has ended")
