"""Who may see the live view: the Host header against DNS rebinding, a token where others can reach the port.

A token in the URL is exchanged for a cookie at once, so that it stays in no history, and is never logged.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, Final
from urllib.parse import parse_qs

Message = MutableMapping[str, Any]  # Any: ASGI
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})
MAX_QUERY: Final = 4096
_HEADERS: Final = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)
_NOTHING: Final = b"default-src 'none'; frame-ancestors 'none'"


class Gate:
    """Wraps an application; refuses what may not pass, and puts the security headers on every answer.

    Args:
        app: what is guarded.
        hosts: names that a request may be for, without port, besides addresses where a token is needed.
        token: "" on a loopback address.
    """

    def __init__(self, app: App, hosts: Iterable[str], token: str = "") -> None:
        self._app, self._token = app, token
        self._hosts = frozenset(h.lower() for h in hosts)
        self._cookie = hmac.new(token.encode(), b"proctor view", hashlib.sha256).hexdigest() if token else ""

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        headers = {k.lower(): v.decode("latin-1") for k, v in scope["headers"]}
        if not self._host_fits(headers.get(b"host", "")):
            await _refuse(send, 421, "This name is not one of the view's: --allow-host NAME")
            return
        if scope["method"] not in ("GET", "HEAD"):
            await _refuse(send, 405, "Only GET")
            return
        if self._token and not self._cookie_fits(headers.get(b"cookie", ""), scope):
            if not self._token_fits(scope):
                await _refuse(send, 403, "A token is needed: open the address that proctor view printed")
                return
            await _exchange(send, scope["path"], self._name(scope), self._cookie)
            return
        await self._app(scope, receive, _guarded(send))

    def _host_fits(self, host: str) -> bool:
        name = _without_port(host).lower()
        if name in self._hosts:
            return True
        if not self._token:
            return False
        try:
            ipaddress.ip_address(name)  # an address cannot be rebound
        except ValueError:
            return False
        return True

    def _token_fits(self, scope: Message) -> bool:
        query = scope.get("query_string", b"")
        if len(query) > MAX_QUERY:
            return False
        given = parse_qs(query.decode("latin-1")).get("token", [""])[0]
        return hmac.compare_digest(given.encode(), self._token.encode())

    def _cookie_fits(self, header: str, scope: Message) -> bool:
        name = self._name(scope)
        for part in header.split(";"):
            key, _, value = part.strip().partition("=")
            if key == name and hmac.compare_digest(value.encode(), self._cookie.encode()):
                return True
        return False

    @staticmethod
    def _name(scope: Message) -> str:
        """Cookies know no ports, so each view has a name of its own."""
        return f"proctor_view_{(scope.get('server') or ('', 0))[1]}"


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if host.count(":") == 1 else host


def _guarded(send: Send) -> Send:
    async def guarded(message: Message) -> None:
        if message["type"] == "http.response.start":
            own = {k.lower() for k, _ in message.get("headers", ())}
            extra = [h for h in (*_HEADERS, (b"content-security-policy", _NOTHING)) if h[0] not in own]
            message["headers"] = [*message.get("headers", ()), *extra]
        await send(message)

    return guarded


async def _refuse(send: Send, status: int, text: str) -> None:
    body = f"{text}\n".encode()
    await _answer(send, status, [(b"content-type", b"text/plain; charset=utf-8")], body)


async def _exchange(send: Send, path: str, name: str, cookie: str) -> None:
    where = path if path.startswith("/") and not path.startswith("//") and path.isascii() and path.isprintable() else "/"
    said = f"{name}={cookie}; Path=/; HttpOnly; SameSite=Strict".encode()
    await _answer(send, 303, [(b"location", where.encode()), (b"set-cookie", said)], b"")


async def _answer(send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    own = [*headers, (b"content-length", str(len(body)).encode())]
    await _guarded(send)({"type": "http.response.start", "status": status, "headers": own})
    await send({"type": "http.response.body", "body": body})
