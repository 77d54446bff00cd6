"""A rank of a world, from its fork to its end: what it needs of its process, and the loop in which it serves."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import resource
import signal
import socket
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

REFERENCES: Final = (0, -1)  # sizes that stand for a process without a group
STOPS: Final = (signal.SIGINT, signal.SIGTERM)
MORE_S: Final = 30.0  # that a collective may take beyond a task's time limit: the limit ends it first
MEMORY_BYTES: Final = 6 << 30  # address space a rank may add
_PR_SET_PDEATHSIG: Final = 1


def child(rank: int, size: int, end: socket.socket, others: Iterable[socket.socket], folder: Path, prepare: Callable[[], None] | None, timeout_s: float) -> None:
    """A rank, from its fork to its end; never returns.

    Args:
        rank: of the world.
        size: of the world; one of `REFERENCES` for a process without a group.
        end: of its connection to the process that forked it.
        others: connections that it inherited and closes.
        folder: of the world.
        prepare: called before the first task.
        timeout_s: of a task.
    """
    code = 70
    try:
        for other in others:
            other.close()
        _settle(rank, folder)
        import torch

        from proctor.oracle.fuzz.running import kept
        from proctor.oracle.fuzz.running import rank as ranks

        torch.set_num_threads(1)
        if size not in REFERENCES:
            kept.join(folder / "store", rank, size, timeout_s + MORE_S)
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
            kept.keep_groups()
            kept.keep_shapes()
            if prepare is not None:
                prepare()
        lines = end.makefile("rb")
        ranks.serve(rank, max(1, size), lines.readline, end.sendall)
        code = 0
    except BaseException:  # noqa: BLE001  the log tells; the parent sees that the rank is gone
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


def _settle(rank: int, folder: Path) -> None:
    """What a rank needs of its process: to die with its parent, to ignore Ctrl-C, a limit, a log, a way to be asked."""
    from proctor.oracle.fuzz.running.rank import quiet

    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setpgid(0, 0)  # `end_process` ends what it starts with it
    with suppress(OSError):  # a machine without memory ends a rank, not the campaign
        Path("/proc/self/oom_score_adj").write_text("1000")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    quiet(folder / f"log-{rank}")
    tempfile.tempdir = str(folder)  # what programs save goes with the world
    stack = open(folder / f"stack-{rank}", "w")  # noqa: SIM115  open as long as the rank lives
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
