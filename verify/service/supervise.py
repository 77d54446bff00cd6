"""A parent that starts the verifier again when it was killed or failed: `proctor verify --keep-alive`.

In: the settings of a watched job. Out: the exit code of the last verifier. A verifier that keeps failing, or that fails after
the job is over, is given up with a sentence.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Final

from proctor.verify.service.processes import Going, say
from proctor.verify.service.settings import Settings

_EXIT_INTERNAL: Final = 101  # of the command line: it failed, and another may not
_RESTARTS: Final = 20  # in a row, each within a minute of the last
_RESTARTS_AFTER: Final = 2  # when the job is over
_HEALTHY_S: Final = 60.0
_PAUSE_S: Final = (0.2, 30.0)  # before the first restart, and at most


def keep_alive(settings: Settings) -> int:
    """Run the verifier as a child, and again when it was killed or failed."""
    command = [sys.executable, "-P", "-m", "proctor.cli", "verify", settings.run]
    going: Callable[[], bool] = Going(settings.pid, settings.started) if settings.pid else lambda: True
    ended: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def end(number: int, _: object) -> None:
        ended.append(number)
        if child is not None:
            child.send_signal(number)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    pause = _PAUSE_S[0]
    failed = after = code = 0
    while not ended:
        begin = time.monotonic()
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        if ended:  # meanwhile
            child.terminate()
        code = child.wait()
        if ended or 0 <= code < _EXIT_INTERNAL:
            break
        healthy = time.monotonic() - begin > _HEALTHY_S
        pause, failed = (_PAUSE_S[0], 1) if healthy else (min(2 * pause, _PAUSE_S[1]), failed + 1)
        after += not going()
        if failed >= _RESTARTS or after > _RESTARTS_AFTER:
            say(f"the verifier ended ({code}) and is not started again  →  proctor verify {settings.run}")
            break
        say(f"the verifier ended ({code}); started again")
        _rest(pause if going() else _PAUSE_S[0], ended)
    return code if code >= 0 else 128 - code


def _rest(pause_s: float, ended: list[int]) -> None:
    until = time.monotonic() + pause_s
    while not ended and time.monotonic() < until:
        time.sleep(0.1)
