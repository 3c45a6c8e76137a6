"""Whom the server answers: this machine's own page, and under ``/v1`` whoever has the key.

A page of another site can't reach it: what is not bound to this machine alone asks for a key; without one, a foreign
``Host`` (a name that was pointed here) and a foreign ``Origin`` (a browser that shows another site) are refused.
"""

import ipaddress
import secrets

from starlette.requests import ClientDisconnect, Request

from minigpt.errors import UserError

HOST = "127.0.0.1"
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
}


class Refused(Exception):
    """A request that is not answered: its status, a sentence, and the words by which programs know what it is."""

    def __init__(self, status: int, sentence: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(sentence)
        self.status, self.param, self.code = status, param, code


class Gone(Refused):
    """The client has gone away: nobody reads an answer."""

    def __init__(self) -> None:
        super().__init__(499, "the client is gone")


class Unread(Exception):
    """The client has left what it is sent unread for too long: its connection is to be cut off."""


class Guard:
    """What a request must have to be answered."""

    def __init__(self, port: int, host: str = HOST, key: str | None = None) -> None:
        """``key``: None where none is asked for.

        Raises:
            UserError: if others could reach the server and no key is set, or the key could not be sent.
        """
        if key is None and not is_loopback(host):
            raise UserError(
                f"--host {host}: others can reach it, so give --api-key KEY or set MINIGPT_API_KEY to a key that they "
                "must send"
            )
        if key is not None and not (key and key.isascii() and key.isprintable() and " " not in key):
            raise UserError("--api-key: must be letters, digits and signs of ASCII without a space, at least one")
        self.hosts = {f"{HOST}:{port}", f"localhost:{port}", address(host, port).removeprefix("http://")}
        self.key = key

    def check_page(self, request: Request) -> None:
        """Refuse what comes from elsewhere, or was sent to another name than this machine's own."""
        client, server = request.client, request.scope["server"]
        here = client is not None and (is_loopback(client.host) or client.host == server[0])
        if not here or not self._named_rightly(request):
            raise Refused(403, "this page is for the machine that serves it, at the address that is printed there")

    def check_api(self, request: Request) -> None:
        """Refuse what has not the key, where there is one; else what another site or name has sent."""
        if self.key is not None:
            scheme, _, sent = request.headers.get("Authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not secrets.compare_digest(sent.encode(), self.key.encode()):
                raise Refused(
                    401, "the key is missing or wrong: send Authorization: Bearer KEY", code="invalid_api_key"
                )
            return
        if not self._named_rightly(request):
            raise Refused(403, "this server answers to 127.0.0.1 alone", code="foreign_host")
        origin = request.headers.get("Origin")
        if origin is not None and origin.removeprefix("http://") not in self.hosts:
            raise Refused(403, "pages of other sites are not answered", code="foreign_origin")

    def _named_rightly(self, request: Request) -> bool:
        return request.headers.get("Host", "") in self.hosts


async def whole_body(request: Request, most: int) -> bytes:
    """The request's body, as long as it is short: ``most`` bytes."""
    body = b""
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > most:
                raise Refused(413, f"the request is longer than {most} bytes", code="request_too_large")
    except ClientDisconnect:
        raise Gone from None
    return body


def is_loopback(host: str) -> bool:
    """Whether an address to listen at, or to be asked from, is of this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def address(host: str, port: int) -> str:
    """``http://127.0.0.1:8765``; for all addresses of the machine, the one that it has for itself."""
    try:
        anywhere = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        anywhere = False
    name = HOST if anywhere else f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}"
