"""Forks a process that has torch loaded into one for each program.

    python server.py SOCKET PROGRAM    # "ready" on stdout; ends when its stdin does

A connection of `client.py` says what to run. The fork takes over its descriptors, folder and environment, acts on PYTHONPATH as an
interpreter does (a `sitecustomize` of Proctor's included), and runs the program as `__main__`. Whose client is gone is ended.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import fcntl
import gc
import importlib
import io
import json
import multiprocessing
import os
import runpy
import select
import signal
import socket
import sys
import threading
import types
from pathlib import Path
from typing import Any

_DESCRIPTORS = 250  # at the most, of one program
_LOADED = (
    "msgspec", "pyarrow", "safetensors.torch", "wrapt", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.run",
    "torch.distributed.tensor.parallel", "torch.multiprocessing",
)  # fmt: skip
_OPTIONS = {"-W": 2, "-X": 2}  # of the interpreter, with what follows them; others stand alone


def _warm() -> None:
    """Load what programs need of libraries; Proctor itself each loads for itself, since it looks at its process when it is loaded."""
    for name in _LOADED:
        importlib.import_module(name)
    del sys.modules["torch.distributed.run"]  # what it needs is there; the module itself is run, as `-m` runs it
    gc.collect()
    gc.freeze()  # memory that forks do not touch is theirs together
    others = set(os.listdir("/proc/self/task")) - {str(os.getpid())}
    threads = {Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in others}
    assert threads <= {"jemalloc_bg_thd"}, threads  # a fork has the thread that forks, and jemalloc starts its own again


def _receive(connection: socket.socket) -> dict[str, Any]:
    size, rights, _, _ = connection.recvmsg(8, socket.CMSG_LEN(_DESCRIPTORS * 4))
    left, data = int.from_bytes(size, "big"), b""
    while len(data) < left:
        data += connection.recv(left - len(data))
    numbers = array.array("i")
    for _, _, given in rights:
        numbers.frombytes(given[: len(given) - len(given) % numbers.itemsize])
    return {**json.loads(data), "given": list(numbers)}


def _take_over(job: dict[str, Any]) -> None:
    """Become the process that the client would have been."""
    high = [fcntl.fcntl(number, fcntl.F_DUPFD, 512) for number in job["given"]]
    os.closerange(3, 512)
    for number, wanted in zip(high, job["held"]):
        os.dup2(number, wanted)
        os.close(number)
    os.setsid()
    os.chdir(job["folder"])
    os.environ.clear()
    os.environ.update(job["environment"])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in job["ignored"] else usual)
    for number, name in ((1, "stdout"), (2, "stderr")):  # anew: a stream keeps whether it can seek, and the server's may be a file where this is a pipe
        held = getattr(sys, name)
        raw = open(number, "wb", closefd=False)  # noqa: SIM115  as long as the process
        stream = io.TextIOWrapper(raw, held.encoding, held.errors, line_buffering=name == "stderr" or raw.isatty())
        stream.mode = "w"
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    import numpy
    import torch._dynamo

    numpy.random.seed()  # that of `random` is drawn anew by Python
    torch._dynamo.config.disable = os.environ.get("TORCHDYNAMO_DISABLE", "0") == "1"  # which it reads when it is imported


def _run(argv: list[str], program: str, paths: list[str]) -> None:
    """Do with arguments as an interpreter does."""
    sys.orig_argv = [program, *argv]
    sys.executable = program
    multiprocessing.set_executable(program)
    multiprocessing.process.ORIGINAL_DIR = os.getcwd()  # type: ignore[attr-defined]
    while argv and argv[0].startswith("-") and argv[0] not in ("-c", "-m", "-"):
        argv = argv[_OPTIONS.get(argv[0], 1) :]
    own = os.environ.get("PYTHONPATH", "")
    sys.path[:] = [*filter(None, own.split(os.pathsep)), *paths]
    sys.modules.pop("sitecustomize", None)
    with contextlib.suppress(ModuleNotFoundError):
        import sitecustomize  # noqa: F401
    kind, rest = argv[0], argv[1:]
    if kind == "-m":
        sys.argv, sys.path[0:0] = rest, [os.getcwd()]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if kind == "-c":
        sys.argv, sys.path[0:0] = ["-c", *rest[1:]], [""]
        code = compile(rest[0], "<string>", "exec")
    else:
        sys.argv, sys.path[0:0] = argv, [os.path.dirname(os.path.realpath(kind))]
        main.__file__ = os.path.abspath(kind)
        with open(kind, "rb") as file:
            code = compile(file.read(), main.__file__, "exec")
    exec(code, vars(main))


def _program(job: dict[str, Any], program: str, paths: list[str]) -> int:
    """Run a program to its end, and what an interpreter does then; gives the exit code."""
    _take_over(job)
    code = 0
    try:
        _run(job["argv"], program, paths)
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else 0 if e.code is None else 1
        if isinstance(e.code, str):
            print(e.code, file=sys.stderr)
    except BaseException as e:  # noqa: BLE001 - said as an interpreter says it, without the lines of this file
        lines = e.__traceback__
        while lines is not None and lines.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
            lines = lines.tb_next
        e = e.with_traceback(lines)
        sys.excepthook(type(e), e, lines)
        code = -signal.SIGINT if isinstance(e, KeyboardInterrupt) else 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    return code


def main() -> None:
    address, program = sys.argv[1:]
    paths = sys.path[1:]  # without this folder
    _warm()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    os.write(1, b"ready\n")
    running: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([0, listener, *running.values()], [], [], 0.02 if running else None)
        for pid in [pid for pid, client in running.items() if client in ready]:  # its client is gone
            os.killpg(pid, signal.SIGKILL)
        while running and (ended := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = ended
            with running.pop(pid) as client, contextlib.suppress(OSError):
                client.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
        if 0 in ready:
            for pid in running:
                os.killpg(pid, signal.SIGKILL)
            return
        if listener in ready:
            connection, _ = listener.accept()
            job = _receive(connection)
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    code = _program(job, program, paths)
                finally:  # to free what the server has loaded costs more than most programs
                    if code < 0:
                        signal.signal(-code, signal.SIG_DFL)
                        os.kill(os.getpid(), -code)
                    os._exit(code & 0xFF)
            connection.sendall(b"%d\n" % pid)
            running[pid] = connection
            for number in job["given"]:
                os.close(number)


if __name__ == "__main__":
    main()
