"""One HTTPS request: no redirects, bounded answers, errors that say whether to try again and give nothing away.

Sinks, the heartbeat and the page configuration call it, in a sender's thread. In: a URL that may be a secret, bytes, and the sink's `HttpConfig`. Out: a `Reply`, or
`DeliveryError` with `retry`, `unsure` and `retry_after_s`; no error text holds the URL or a header.
"""

from __future__ import annotations

import email.utils
import errno
import functools
import http.client
import ipaddress
import socket
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Mapping
from typing import IO, Any, Final

import msgspec

from proctor import __version__
from proctor.errors import DeliveryError
from proctor.verify.sinks import SinkConfig
from proctor.verify.wording import clean

_MOST_BYTES: Final = 64 * 1024  # of an answer
_SHOWN: Final = 160  # characters of an answer that an error quotes
_LONGEST_WAIT_S: Final = 3600.0  # longer wishes of a receiver are not granted
_REJECTED: Final = frozenset({400, 413, 414, 415, 422, 431})  # the request itself: sending it again cannot help
_NOT_TAKEN: Final = frozenset(
    {errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EADDRNOTAVAIL, errno.EHOSTDOWN}
)


class HttpConfig(SinkConfig, frozen=True, kw_only=True):
    """Keys of every sink that speaks HTTP.

    Args:
        allow_http: also without TLS to other hosts than this one.
        ca_file: certificates to trust instead of the system's, PEM.
    """

    allow_http: bool = False
    ca_file: str = ""


class Reply(msgspec.Struct, frozen=True):
    """An answer: status, and the beginning of its text."""

    status: int
    text: str


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any) -> None:  # Any: urllib's own signature
        return None


def check_url(url: str, allow_http: bool) -> str:
    """The URL, if it may be used. Raises `ValueError` that does not show it: webhook addresses are secrets."""
    try:
        parts = urllib.parse.urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        raise ValueError("is not a URL") from None
    if parts.scheme not in ("http", "https") or not host:
        raise ValueError("is not an http(s) URL")
    if any(ord(c) <= 32 or ord(c) > 126 for c in url):
        raise ValueError("has characters that a URL cannot have")
    if parts.username is not None or parts.password is not None:
        raise ValueError("holds a user name or password: give them by `username` and `password_env` or `password_file`")
    if parts.scheme == "http" and not allow_http and not is_loopback(host):
        raise ValueError("is not https: use https, or write allow_http = true to send in the clear")
    return url


def is_loopback(host: str) -> bool:
    """Whether a host name is this machine's own."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def post(
    url: str,
    content: bytes | None,
    config: HttpConfig,
    *,
    content_type: str = "application/json",
    headers: Mapping[str, str] | None = None,
    secrets: Iterable[str] = (),
) -> Reply:
    """Send one request and take the answer if it is 2xx.

    Args:
        url: checked here once more, since one from a secret may have changed.
        content: what is posted; None sends a GET.
        config: TLS and patience.
        content_type: of the content.
        headers: more of them.
        secrets: what an error must not quote, although the receiver may echo it.

    Raises:
        DeliveryError: there was no answer, or another one.
    """
    try:
        check_url(url, config.allow_http)
    except ValueError as error:
        raise DeliveryError(f"the address {error}", hint="proctor page test") from None
    host = urllib.parse.urlsplit(url).hostname or ""
    sent = {"Content-Type": content_type, "User-Agent": f"proctor/{__version__}", **(headers or {})}
    request = urllib.request.Request(url, data=content, headers=sent, method="GET" if content is None else "POST")
    hidden = [url, urllib.parse.urlsplit(url).path, *secrets]
    try:
        with _opener(config.ca_file, is_loopback(host)).open(request, timeout=config.timeout_s) as answer:
            return Reply(answer.status, _quote(_read(answer, config.timeout_s), hidden))
    except urllib.error.HTTPError as error:
        with error:
            raise _refusal(error.code, error.headers.get("Retry-After", ""), _quote(_read(error, config.timeout_s), hidden), host) from None
    except urllib.error.URLError as error:
        raise _no_answer(error.reason, host, sending=True) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise _no_answer(error, host, sending=False) from None


def fetch(url: str, config: HttpConfig, *, headers: Mapping[str, str] | None = None, limit: int = 1 << 22) -> str | None:
    """What lies at an address, or `None` where that cannot be had: for what is good to know and not needed.

    Args:
        url: asked with GET.
        config: TLS and patience.
        headers: of the request.
        limit: bytes that are read, at most.
    """
    try:
        check_url(url, config.allow_http)
        request = urllib.request.Request(url, headers={"User-Agent": f"proctor/{__version__}", **(headers or {})})
        opener = _opener(config.ca_file, is_loopback(urllib.parse.urlsplit(url).hostname or ""))
        with opener.open(request, timeout=config.timeout_s) as answer:
            return str(answer.read(limit).decode(errors="replace"))
    except (OSError, http.client.HTTPException, ValueError, DeliveryError):
        return None


@functools.lru_cache(maxsize=32)
def _opener(ca_file: str, direct: bool) -> urllib.request.OpenerDirector:
    try:
        context = ssl.create_default_context(cafile=ca_file or None)
    except (OSError, ssl.SSLError) as error:
        raise DeliveryError(f"ca_file cannot be used: {getattr(error, 'strerror', '') or 'not PEM'}") from None
    handlers: list[urllib.request.BaseHandler] = [urllib.request.HTTPSHandler(context=context), _NoRedirects()]
    if direct:
        handlers.append(urllib.request.ProxyHandler({}))  # a proxy cannot reach our loopback
    return urllib.request.build_opener(*handlers)


def _read(answer: IO[bytes] | http.client.HTTPResponse, patience_s: float) -> bytes:
    """The beginning of an answer; what arrives too late or breaks off does not undo its status."""
    end = time.monotonic() + patience_s
    got = b""
    try:
        while len(got) < _MOST_BYTES and time.monotonic() < end:
            chunk = answer.read1(4096) if hasattr(answer, "read1") else answer.read(4096)
            if not chunk:
                break
            got += chunk
    except (OSError, http.client.HTTPException, ValueError):
        pass
    return got[:_MOST_BYTES]


def _quote(raw: bytes, hidden: Iterable[str]) -> str:
    text = raw.decode(errors="replace")
    for secret in hidden:
        if len(secret) > 3:
            text = text.replace(secret, "***")
    return clean(text, _SHOWN).strip()


def _refusal(status: int, retry_after: str, text: str, host: str) -> DeliveryError:
    quoted = f": {text}" if text else ""
    if 300 <= status < 400:
        return DeliveryError(f"{host} answered {status} with a redirect, which is not followed", hint="name the final address")
    if status in _REJECTED:
        return DeliveryError(f"{host} rejected it with {status}{quoted}", retry=False)
    if status in (401, 403, 404, 407, 410):
        return DeliveryError(f"{host} answered {status}{quoted}", hint="are address and secret right?")
    busy = status in (408, 425, 429, 503)
    return DeliveryError(
        f"{host} answered {status}{quoted}", unsure=not busy and status >= 500, retry_after_s=_seconds(retry_after)
    )


def _seconds(value: str) -> float | None:
    """Of Retry-After, which holds seconds or a date (RFC 9110 §10.2.3)."""
    value = value.strip()
    if not value:
        return None
    if value.isascii() and value.isdigit():
        return min(float(value[:9]), _LONGEST_WAIT_S)
    try:
        wait = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
    except (ValueError, TypeError, OverflowError):
        return None
    return min(max(wait, 0.0), _LONGEST_WAIT_S)


def _no_answer(reason: object, host: str, *, sending: bool) -> DeliveryError:
    if isinstance(reason, ssl.SSLCertVerificationError):
        why, unsure = f"its certificate is not trusted ({clean(reason.verify_message, 80)})", False
    elif isinstance(reason, socket.gaierror):
        why, unsure = "its name cannot be resolved", False
    elif isinstance(reason, TimeoutError):
        why, unsure = "it did not answer in time", not sending
    elif isinstance(reason, OSError):
        why, unsure = clean(reason.strerror or type(reason).__name__, 80), reason.errno not in _NOT_TAKEN
    else:
        why, unsure = clean(type(reason).__name__, 80), True
    return DeliveryError(f"{host} cannot be reached: {why}", unsure=unsure)
