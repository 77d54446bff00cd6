"""The live view as a Starlette application: the report, its parts anew when the run has moved on, and events (SSE).

Single process, one event loop; reports are made in a thread. Nothing can be changed through it, and no error reaches a
reader as more than a sentence.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Sequence
from functools import cache
from pathlib import Path
from typing import Final

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from proctor.verify.report.formats import html
from proctor.verify.view.feed import POLL_S, Feed, Reader
from proctor.verify.view.gate import LOOPBACK, App, Gate
from proctor.verify.view.pages import Pages

KEEPALIVE_S: Final = 15.0
RETRY_MS: Final = 2000
_POLICY: Final = (
    "default-src 'none'; style-src 'nonce-{nonce}'; script-src 'nonce-{nonce}'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def application(run: Path, *, hosts: Sequence[str] = (), token: str = "", poll_s: float = POLL_S) -> App:
    """The guarded application of one run.

    Args:
        run: the run directory.
        hosts: names that it is reached by, besides those of the loopback.
        token: that readers must have, "" for none.
        poll_s: seconds between two looks at the log.
    """
    feed, pages = Feed(run), Pages(run)

    async def page(request: Request) -> Response:
        nonce = secrets.token_urlsafe(18)
        frame = html.Frame(nonce, _asset("live.html"), _asset("live.css"), _asset("live.js"))
        text = await run_in_threadpool(pages.page, frame)
        return HTMLResponse(text, headers={"Content-Security-Policy": _POLICY.format(nonce=nonce)})

    async def report(request: Request) -> Response:
        return HTMLResponse(await run_in_threadpool(pages.body))

    async def events(request: Request) -> Response:
        reader = feed.join(_last_id(request))
        if reader is None:
            return PlainTextResponse("Too many readers\n", 503, headers={"Retry-After": "30"})
        return StreamingResponse(_stream(feed, reader), media_type="text/event-stream")

    async def failed(request: Request, error: Exception) -> Response:
        return PlainTextResponse("The view could not answer this; it goes on.\n", 500)

    async def watch() -> None:
        """Follow the log, and say when there is a newer report."""
        every = max(1, round(2.0 / poll_s))
        turn = 0
        while True:
            with contextlib.suppress(OSError):
                feed.poll()
                if feed.readers and turn % every == 0 and await run_in_threadpool(pages.outdated):
                    feed.publish("event: report\ndata: {}\n\n")
            turn += 1
            await asyncio.sleep(poll_s)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        feed.poll()
        task = asyncio.create_task(watch())
        try:
            yield
        finally:
            task.cancel()
            feed.close()

    routes = [Route("/", page), Route("/report", report), Route("/events", events)]
    inner = Starlette(routes=routes, lifespan=lifespan, exception_handlers={500: failed})
    return Gate(inner, [*LOOPBACK, *hosts], token)


async def _stream(feed: Feed, reader: Reader) -> AsyncIterator[str]:
    try:
        yield f"retry: {RETRY_MS}\n\n"
        while True:
            try:
                text = await asyncio.wait_for(reader.queue.get(), KEEPALIVE_S)
            except TimeoutError:
                yield ": still here\n\n"
                continue
            if text is None:
                return
            reader.waiting = max(0, reader.waiting - 1)
            yield text
    finally:
        feed.leave(reader)


def _last_id(request: Request) -> int | None:
    said = request.headers.get("last-event-id") or request.query_params.get("after", "")
    return int(said) if said.isascii() and said.isdigit() and len(said) < 19 else None


@cache
def _asset(name: str) -> str:
    """A file of ours beside this one; nothing of a trace is in it."""
    return Path(__file__).with_name("assets").joinpath(name).read_text(encoding="utf-8")
