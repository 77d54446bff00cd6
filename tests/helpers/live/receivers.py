"""Receivers of pages on loopback: a PagerDuty that keeps its documented state machine, a webhook, and a real Alertmanager."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

ROUTING_KEY = "0123456789abcdef0123456789ABCDEF"
ALERTMANAGER = shutil.which("prometheus-alertmanager")

Answer = tuple[int, dict[str, str], bytes]


def free_port() -> int:
    """A TCP port on which nobody listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(done: Callable[[], object], timeout_s: float = 15.0) -> bool:
    """Poll until something is true; whether it became so."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if done():
            return True
        time.sleep(0.02)
    return bool(done())


@dataclass
class Hit:
    """One request."""

    path: str
    headers: dict[str, str]
    raw: bytes

    @property
    def body(self) -> Any:
        return json.loads(self.raw)


class Webhook:
    """An HTTP server that keeps what it gets. `script` holds answers for the next requests; "drop" cuts the connection
    before the request is looked at, "late" after it was taken."""

    def __init__(self, port: int = 0) -> None:
        self.hits: list[Hit] = []
        self.script: list[Answer | str] = []
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                wanted = int(self.headers.get("Content-Length") or 0)
                raw = self.rfile.read(wanted)
                if len(raw) < wanted:  # the client died within its request, which is none then
                    self.close_connection = True
                    return
                with outer._lock:
                    told = outer.script.pop(0) if outer.script else None
                    if told == "drop":
                        self._cut()
                        return
                    hit = Hit(self.path, dict(self.headers), raw)
                    status, headers, content = told if isinstance(told, tuple) else outer.take(hit)
                    if told == "late":
                        self._cut()
                        return
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST

            def _cut(self) -> None:
                self.close_connection = True
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                self.connection.close()

            def log_message(self, *args: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: object, client_address: object) -> None:
                pass

        self._server = Server(("127.0.0.1", port), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def take(self, hit: Hit) -> Answer:
        """Keep a request and answer it."""
        self.hits.append(hit)
        return 200, {}, b"ok"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@dataclass
class Incident:
    """An alert of PagerDuty and what happened to it."""

    key: str
    triggers: int = 1
    acknowledged: bool = False
    resolved: bool = False
    summaries: list[str] = field(default_factory=list)


class PagerDuty(Webhook):
    """Events API v2 as documented: limits are enforced, follow-ups without an open alert are dropped."""

    def __init__(self, port: int = 0) -> None:
        self.incidents: list[Incident] = []
        self.dropped: list[dict[str, Any]] = []
        self.rejected: list[str] = []
        self.changes: list[dict[str, Any]] = []
        super().__init__(port)

    def opened(self, key: str) -> Incident | None:
        return next((i for i in reversed(self.incidents) if i.key == key and not i.resolved), None)

    def take(self, hit: Hit) -> Answer:
        self.hits.append(hit)
        try:
            event = json.loads(hit.raw)
            problem = self._problem(hit, event)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            event, problem = {}, f"invalid: {error!r}"
        if problem:
            self.rejected.append(problem)
            return self._answer(400, {"status": "invalid event", "message": problem})
        if hit.path == "/v2/change/enqueue":
            self.changes.append(event)
            return self._answer(202, {"status": "success"})
        key = event["dedup_key"]
        known = self.opened(key)
        match event["event_action"]:
            case "trigger" if known is None:
                self.incidents.append(Incident(key, summaries=[event["payload"]["summary"]]))
            case "trigger" if known is not None:
                known.triggers += 1
                known.summaries.append(event["payload"]["summary"])
            case "acknowledge" if known is not None:
                known.acknowledged = True
            case "resolve" if known is not None:
                known.resolved = True
            case _:
                self.dropped.append(event)
        return self._answer(202, {"status": "success", "dedup_key": key})

    def _problem(self, hit: Hit, event: dict[str, Any]) -> str:
        if len(hit.raw) > 512_000:
            return "too large"
        if event["routing_key"] != ROUTING_KEY:
            return "invalid routing key"
        if hit.path == "/v2/change/enqueue":
            return "" if event["payload"]["summary"] else "no summary"
        if hit.path != "/v2/enqueue" or event["event_action"] not in ("trigger", "acknowledge", "resolve"):
            return "no such action"
        if not 0 < len(event["dedup_key"]) <= 255:
            return "dedup_key"
        if event["event_action"] != "trigger":
            return ""
        payload = event["payload"]
        if not 0 < len(payload["summary"]) <= 1024 or not payload["source"]:
            return "summary or source"
        if payload["severity"] not in ("critical", "error", "warning", "info"):
            return "severity"
        if not re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z", payload["timestamp"]):
            return "timestamp"
        if any(not link["href"].startswith(("http://", "https://")) for link in event.get("links", [])):
            return "links"
        return ""

    @staticmethod
    def _answer(status: int, content: dict[str, Any]) -> Answer:
        return status, {"Content-Type": "application/json"}, json.dumps(content).encode()


class Alertmanager:
    """The real one, from Debian's `prometheus-alertmanager`, with one webhook receiver."""

    def __init__(
        self, folder: Path, webhook_url: str, group_by: str = "alertname, key", group_wait: str = "100ms", matchers: Sequence[str] = ()
    ) -> None:
        """`matchers`: alerts that go to a receiver that tells nobody."""
        if ALERTMANAGER is None:
            raise RuntimeError("prometheus-alertmanager is not installed")
        self.folder, self.port = folder, free_port()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "alertmanager.yml").write_text(
            f"""
route: {{receiver: hook, group_by: [{group_by}], group_wait: {group_wait}, group_interval: 300ms, repeat_interval: 1h,
  routes: [{", ".join(f"{{receiver: nobody, matchers: ['{m}']}}" for m in matchers)}]}}
receivers:
  - name: nobody
  - name: hook
    webhook_configs: [{{url: '{webhook_url}', send_resolved: true}}]
"""
        )
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, also again after `kill`, with the data it had."""
        assert ALERTMANAGER is not None
        self._process = subprocess.Popen(
            [
                ALERTMANAGER,
                f"--config.file={self.folder / 'alertmanager.yml'}",
                f"--storage.path={self.folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{self.port}",
                "--cluster.listen-address=",
                "--log.level=warn",
            ],
            stdout=subprocess.DEVNULL,
            stderr=(self.folder / "log").open("ab"),
        )
        if not wait_until(self._ready, 30):
            raise RuntimeError(f"Alertmanager does not start: {(self.folder / 'log').read_text()[-500:]}")

    def kill(self) -> None:
        """`kill -9`."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def alerts(self) -> list[dict[str, Any]]:
        """What it holds."""
        with urllib.request.urlopen(f"{self.url}/api/v2/alerts", timeout=5) as answer:
            found: list[dict[str, Any]] = json.load(answer)
        return found

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=1) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False


@contextmanager
def closing(server: Webhook) -> Iterator[Webhook]:
    """Close a receiver at the end."""
    try:
        yield server
    finally:
        server.close()
