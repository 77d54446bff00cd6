"""Pages that nobody has taken when the job ends: the receiver comes back, or never does, or whoever still tries is ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from benchmarks.faults.outside import LAST, page
from benchmarks.faults.trial import PROCTOR

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "tests"))
from helpers.live.receivers import PagerDuty, free_port

_WAIT_S: Final = 120.0

Then = Callable[[Path, int], None]


def back_after_the_end(meanwhile: Then | None = None, *, deliver_s: int = 100) -> Callable[[Path], Sequence[str]]:
    """The receiver is down until the job has its verdict, and 3 s more.

    Args:
        meanwhile: done with the run and the id of the process that still delivers, before the receiver is back.
        deliver_s: how long that process tries, as `[job]` says.
    """

    def arrange(folder: Path) -> Sequence[str]:
        port = free_port()
        LAST["port"] = port
        run = folder.parent / "place" / "run"

        def come_back() -> None:
            delivering = _delivering(run)
            time.sleep(3.0)
            if meanwhile is not None and delivering:
                meanwhile(run, delivering)
            LAST["pagerduty"] = PagerDuty(port)

        threading.Thread(target=come_back, daemon=True).start()
        return page(folder, port, deliver_s=deliver_s)

    return arrange


def _delivering(run: Path) -> int:
    until = time.monotonic() + 300
    while time.monotonic() < until:
        with contextlib.suppress(OSError, ValueError, KeyError):
            return int(json.loads((run / "verify" / "verdict.json").read_bytes())["delivering"])
        time.sleep(0.1)
    return 0


def hang_up(run: Path, delivering: int) -> None:
    """What a terminal that is closed sends to what runs in it."""
    os.kill(delivering, signal.SIGHUP)


def kill(run: Path, delivering: int) -> None:
    os.kill(delivering, signal.SIGKILL)


def taken(run: Path) -> list[str]:
    """What is wrong with what the receiver got; it is there by now, or comes."""
    until = time.monotonic() + _WAIT_S
    while time.monotonic() < until and not (found := _incidents()):
        time.sleep(0.2)
    if not found:
        return ["the page never arrived"]
    return [f"{n} pages of one incident"] if (n := max(found.count(key) for key in found)) > 1 else []


def taken_by_hand(run: Path) -> list[str]:
    """As `taken`, by the command that is named to people: nobody else delivers any more."""
    config = json.loads((run / "verify" / "watch.json").read_bytes())["page"]
    waits = subprocess.run([*PROCTOR, "page", "status", "--run", str(run)], capture_output=True, text=True, timeout=120, check=False)
    if "waiting" not in waits.stdout:
        return [f"nobody says that a page waits: {waits.stdout[-300:]}"]
    done = subprocess.run([*PROCTOR, "page", "flush", "--run", str(run), "--config", config, "--timeout", "60s"], capture_output=True, text=True, timeout=120, check=False)
    return [*([] if done.returncode == 0 else [f"page flush: {done.returncode} {done.stderr[-300:]}"]), *taken(run)]


def said_to_wait(run: Path) -> list[str]:
    """Nobody tries any more: the log must say which pages wait."""
    text = (run / "verify" / "verifier.log").read_text(errors="replace")
    return [] if "oncall: trigger" in text else [f"nobody says what waits: {text[-300:]}"]


def _incidents() -> list[str]:
    server = LAST.get("pagerduty")
    return [one.key for one in server.incidents] if isinstance(server, PagerDuty) else []


def down_for_good(folder: Path) -> Sequence[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return page(folder, probe.getsockname()[1])
