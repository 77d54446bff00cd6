from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest


class Site:
    """A view that is being served on the loopback."""

    def __init__(self, port: int) -> None:
        self.port = port

    def get(self, path: str = "/", method: str = "GET", **headers: str) -> tuple[int, dict[str, str], str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        connection.request(method, path, headers={k.replace("_", "-"): v for k, v in headers.items()})
        answer = connection.getresponse()
        found = answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read().decode()
        connection.close()
        return found

    @contextlib.contextmanager
    def events(self, path: str = "/events", **headers: str) -> Iterator[Callable[[int], list[tuple[str, str, str]]]]:
        """Server-sent events as (id, event, data); the function that is given reads the next n of them."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        connection.request("GET", path, headers={k.replace("_", "-"): v for k, v in headers.items()})
        answer = connection.getresponse()
        assert answer.status == 200

        def take(count: int) -> list[tuple[str, str, str]]:
            found: list[tuple[str, str, str]] = []
            fields: dict[str, str] = {}
            while len(found) < count:
                line = answer.readline().decode()
                assert line, "the connection ended"
                name, _, value = line.rstrip("\n").partition(": ")
                if line == "\n":
                    if "event" in fields:
                        found.append((fields.get("id", ""), fields["event"], fields["data"]))
                    fields = {}
                else:
                    fields[name] = value
            return found

        try:
            yield take
        finally:
            connection.close()
            answer.close()


@pytest.fixture
def serve() -> Iterator[Callable[..., Site]]:
    """Serve a run directory; everything is stopped at the end."""
    uvicorn = pytest.importorskip("uvicorn", reason="the live view needs uvicorn")
    pytest.importorskip("starlette", reason="the live view needs starlette")
    from proctor.verify.view.app import application

    running = []

    def start(run, **options) -> Site:
        listener = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(application(run, poll_s=0.02, **options), log_level="critical", lifespan="on", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        running.append((server, thread))
        until = time.monotonic() + 20
        while not server.started and time.monotonic() < until:
            time.sleep(0.01)
        return Site(listener.getsockname()[1])

    yield start
    for server, _ in running:
        server.should_exit = True
    for _, thread in running:
        thread.join(10)
