"""A function in a copy of this process: what it does to models, generators and files' positions stays there.

On a machine without CUDA in use the copy is a fork. The child has one thread, no collectives, and a time after which it is
ended; it hands back bytes. A process that uses CUDA cannot be forked: there the function runs here, within `Kept`, which puts
parameters, buffers, gradients, optimizers and generators back.
"""

from __future__ import annotations

import contextlib
import copy
import os
import random
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch

FAILED: Final = b""
COLLECTIVES: Final = ("all", "_all", "reduce", "_reduce", "broadcast", "gather", "scatter", "send", "recv", "barrier", "monitored_barrier")  # how methods of a process group begin


def can_fork() -> bool:
    """Whether a copy of this process can compute."""
    return os.environ.get("PROCTOR_SELF_FORK", "1") != "0" and hasattr(os, "fork") and not torch.cuda.is_initialized()


def in_copy(function: Callable[[], bytes], timeout_s: float) -> tuple[bytes, str]:
    """Call a function in a fork.

    Args:
        function: gives bytes; it must not return through the program's frames.
        timeout_s: after which the copy is ended.

    Returns:
        what the function gave, and why there is nothing: "" if there is.
    """
    receive, send = os.pipe()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()  # else the copy would write it once more
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(receive)
            quiet()
            made = function()
            with os.fdopen(send, "wb") as pipe:
                pipe.write(made)
            code = 0
        finally:
            os._exit(code)
    os.close(send)
    return _collect(pid, receive, timeout_s)


def quiet() -> None:
    """Make this copy of a process one that computes by itself: one thread, no signals of the program's, nothing on its terminal."""
    torch.set_num_threads(1)
    refuse_collectives()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    if os.environ.get("PROCTOR_DEBUG", "") in ("", "0"):
        os.dup2(null, 2)


def refuse_collectives() -> None:
    """Let collectives raise in this copy of a process: the threads that would carry them are not in it, so each would wait until the copy's time is over."""
    group = getattr(getattr(torch._C, "_distributed_c10d", None), "ProcessGroup", None)
    if group is None or not torch.distributed.is_initialized():
        return

    def refuse(*_: Any, **__: Any) -> Any:
        from proctor.oracle.selfcheck import Unknown

        raise Unknown("it communicates with other ranks, which a copy of the process cannot")

    for name in [n for n, value in vars(group).items() if n.startswith(COLLECTIVES) and callable(value)]:
        setattr(group, name, refuse)


def _collect(pid: int, receive: int, timeout_s: float) -> tuple[bytes, str]:
    until, parts, why = time.monotonic() + timeout_s, [], ""
    try:
        while True:
            left = until - time.monotonic()
            if left <= 0 or not select.select([receive], [], [], left)[0]:
                why = f"it took longer than {timeout_s:.0f} s"
                break
            part = os.read(receive, 1 << 20)
            if not part:
                break
            parts.append(part)
    finally:
        os.close(receive)
    if why:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    try:
        _, status = os.waitpid(pid, 0)
    except ChildProcessError:  # the program reaps all children
        status = 0
    if not why and os.WIFSIGNALED(status):
        why = f"the copy of the process was ended by signal {os.WTERMSIG(status)}"
    elif not why and not parts:
        why = f"the copy of the process ended with code {os.waitstatus_to_exitcode(status)}"
    return b"".join(parts), why


# ---- generators ----------------------------------------------------------------------------------------------------


def random_states() -> list[Any]:
    """States of torch's, numpy's and Python's generators."""
    numpy = sys.modules.get("numpy")
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    legacy = numpy.random.get_state() if numpy is not None else None
    return [torch.get_rng_state(), cuda, legacy, random.getstate()]


def set_random_states(states: Sequence[Any]) -> None:
    """Put such states back."""
    torch.set_rng_state(states[0])
    if states[1] is not None:
        torch.cuda.set_rng_state_all(states[1])
    numpy = sys.modules.get("numpy")
    if states[2] is not None and numpy is not None:
        numpy.random.set_state(states[2])
    if states[3] is not None:
        random.setstate(states[3])


@contextlib.contextmanager
def kept(modules: Sequence[torch.nn.Module], optimizers: Sequence[Any]) -> Iterator[None]:
    """Put back what a check changes in this very process.

    Args:
        modules: whose parameters, buffers, gradients, modes and plain attributes are kept.
        optimizers: whose state is kept.
    """
    draws = random_states()
    parts = [m for root in modules for m in root.modules()]
    plain = [(m, m.training, {k: v for k, v in vars(m).items() if isinstance(v, int | float | str | bool)}) for m in parts]
    held = {id(t): t for m in parts for t in (*m._parameters.values(), *m._buffers.values()) if t is not None}
    values = [(t, t.data, t.data.clone(), t.grad, None if t.grad is None else t.grad.clone()) for t in held.values()]
    states = [(o, copy.deepcopy(o.state_dict())) for o in optimizers]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, data, value, grad, slope in values:
                tensor.data = data
                data.copy_(value)
                tensor.grad = grad
                if grad is not None:
                    grad.copy_(slope)
        for module, training, attributes in plain:
            module.training = training
            vars(module).update(attributes)
        for optimizer, state in states:
            optimizer.load_state_dict(state)
        set_random_states(draws)
