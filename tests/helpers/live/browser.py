"""A headless Chromium, for tests of pages; over its debugging protocol (RFC 6455, one message a frame)."""

from __future__ import annotations

import base64
import json
import os
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


class Page:
    """One tab."""

    def __init__(self, address: str) -> None:
        parts = urlsplit(address)
        self._socket = socket.create_connection((parts.hostname, parts.port or 80), 300)
        key = base64.b64encode(os.urandom(16)).decode()
        self._socket.sendall(
            f"GET {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        self._file = self._socket.makefile("rb")
        while self._file.readline().strip():
            pass
        self._asked = 0

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command; its result."""
        self._asked += 1
        data = json.dumps({"id": self._asked, "method": method, "params": params}).encode()
        mask = b"\0\0\0\0"
        size = bytes([0x80 | len(data)]) if len(data) < 126 else bytes([0x80 | 126]) + len(data).to_bytes(2, "big")
        self._socket.sendall(b"\x81" + size + mask + data)
        while True:
            answer: dict[str, Any] = json.loads(self._message())
            if answer.get("id") == self._asked:
                result: dict[str, Any] = answer.get("result", {})
                return result

    def ask(self, expression: str) -> Any:
        """The value of an expression of JavaScript."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def until(self, expression: str, timeout_s: float = 300.0) -> bool:
        """Whether an expression became true."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            if self.ask(expression):
                return True
            time.sleep(0.1)
        return False

    def picture(self, path: Path) -> None:
        """A PNG of what is seen."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def _message(self) -> bytes:
        whole = b""
        while True:
            head = self._file.read(2)
            size = head[1] & 127
            if size > 125:
                size = int.from_bytes(self._file.read(2 if size == 126 else 8), "big")
            whole += self._file.read(size)
            if head[0] & 0x80:
                return whole


@contextmanager
def browsing(folder: Path, address: str, width: int = 1200, height: int = 900) -> Iterator[Page]:
    """A tab that shows an address."""
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", f"--user-data-dir={folder}"]
    process = subprocess.Popen([*command, "about:blank"], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    try:
        assert process.stderr is not None
        said = next(line for line in process.stderr if "DevTools listening on" in line)
        port = urlsplit(said.split()[-1]).port
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json", timeout=300) as answer:
            page = Page(next(one["webSocketDebuggerUrl"] for one in json.load(answer) if one["type"] == "page"))
        page.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        page.call("Page.navigate", url=address)
        yield page
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
