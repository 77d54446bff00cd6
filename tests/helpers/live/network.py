"""Another host, as far as the network goes: a namespace with a link to it that can be cut."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import pytest

HERE: Final = "10.213.77.1"
THERE: Final = "10.213.77.2"


@contextmanager
def other_host() -> Iterator[str]:
    """Its name, for `ip netns exec` and `link`; skips the test where that is not to be had."""
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2")
    name = f"pr{os.getpid()}"
    try:
        made = [
            _ip("netns", "add", name),
            _ip("link", "add", f"{name}a", "type", "veth", "peer", "name", f"{name}b", "netns", name),
            _ip("addr", "add", f"{HERE}/24", "dev", f"{name}a"),
            _ip("link", "set", f"{name}a", "up"),
            _ip("-n", name, "addr", "add", f"{THERE}/24", "dev", f"{name}b"),
            _ip("-n", name, "link", "set", f"{name}b", "up"),
            _ip("-n", name, "link", "set", "lo", "up"),
        ]
        if any(made):
            pytest.skip("network namespaces are not to be had here")
        yield name
    finally:
        _ip("link", "del", f"{name}a")
        _ip("netns", "del", name)


def link(name: str, *, up: bool) -> None:
    """Cut the link to the host, or mend it."""
    assert _ip("link", "set", f"{name}a", "up" if up else "down") == 0


def _ip(*words: str) -> int:
    return subprocess.run(["ip", *words], check=False, capture_output=True).returncode
