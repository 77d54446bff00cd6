"""One verifier, from its first connection to its verdict: `proctor verify RUN`, also as the child of `supervise`.

In: the settings of a job. Out: the exit code. The process is nicer than the job, and the signals of the job's terminal are
not for it; SIGTERM ends it with a verdict on what it has judged.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path
from typing import Final

from proctor.invariants.wire.frames import Freeze
from proctor.invariants.wire.peer import read_token
from proctor.verify.memory import forgo_pandas
from proctor.verify.service.build import build
from proctor.verify.service.ending import conclude
from proctor.verify.service.processes import say
from proctor.verify.service.settings import Settings
from proctor.verify.transport.inbox import Inbox
from proctor.verify.transport.server import Server

NICE: Final = 10


def serve(settings: Settings, *, keeps_steps: bool) -> int:
    """Judge a job until it is over; the exit code.

    Args:
        settings: of the job.
        keeps_steps: the ranks that its command starts keep their last steps.

    Raises:
        ProctorError: nothing can be judged: an address, a pack or a configuration cannot be used.
    """
    forgo_pandas()
    logging.basicConfig(level=logging.WARNING, format="proctor: %(message)s", stream=sys.stderr)
    os.nice(NICE)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's, meant for the command
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    (settings.folder / "verdict.json").unlink(missing_ok=True)
    inbox = Inbox()
    asked: set[str] = set()
    stopped: list[int] = []
    with Server(settings.listen_to, read_token(Path(settings.token_file)), inbox) as server:

        def freeze(key: str, step: int) -> None:
            if key:
                asked.add(key)
            for process in server.heard_at():
                server.send(process, Freeze(key[:256], max(step, -1)))

        verifier = build(settings, inbox, server, freeze, lambda: bool(stopped))
        signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
        if not settings.pid:
            say(f"listening on {', '.join(server.addresses)}")
        summary = verifier.work()
    if keeps_steps:
        verifier.miss_capsules(asked)
    return conclude(settings, summary, verifier)
