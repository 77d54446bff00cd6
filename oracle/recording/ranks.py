"""Runs a function on ranks of its own: what makes a function a command that can be recorded.

    python -m proctor.oracle.recording.ranks NPROCS PATH/TO/FILE.py::function [JSON]

One rank calls the function in this process, without a process group. More are processes of their own, spawned with the
environment of torchrun, that have a gloo process group when the function is called. The JSON holds `args`, `kwargs`, the
`module` that the function was imported as, and `path`, which goes to the front of `sys.path`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from proctor.errors import UsageError

MODULE: Final = "proctor.oracle.recording.ranks"
POLL_S: Final = 0.02
_HINT: Final = "give a function of a module's top level, with arguments that JSON knows, or a command"


def command_of(function: Callable[..., object], nprocs: int) -> list[str]:
    """The command that calls a function on `nprocs` ranks.

    Args:
        function: at the top level of a file; `functools.partial` adds arguments that JSON can hold.
        nprocs: ranks.

    Raises:
        UsageError: another process could not find the function, or its arguments are more than JSON.
    """
    args: tuple[Any, ...] = ()  # Any: JSON
    kwargs: dict[str, Any] = {}
    while isinstance(function, functools.partial):
        args, kwargs = (*function.args, *args), {**function.keywords, **kwargs}
        function = function.func
    name = getattr(function, "__qualname__", "") or type(function).__name__
    module = sys.modules.get(getattr(function, "__module__", "") or "")
    try:
        file = inspect.getsourcefile(function) or ""
    except TypeError:
        file = ""
    if module is None or not Path(file).is_file() or not name.isidentifier() or getattr(module, name, None) is not function:
        raise UsageError(f"{name}: another process cannot import it", hint=_HINT)
    try:
        more = json.dumps({"args": args, "kwargs": kwargs, "module": module.__name__, "path": sys.path})
    except (TypeError, ValueError) as e:
        raise UsageError(f"{name}: its arguments: {e}", hint=_HINT) from None
    return [sys.executable, "-m", MODULE, str(nprocs), f"{Path(file).resolve()}::{name}", more]


def load(spec: str, module: str, path: Sequence[str]) -> Callable[..., object]:
    """The function of `FILE::name`; by the name of its module where that finds this file, else from the file."""
    file, _, name = spec.rpartition("::")
    sys.path[:0] = [p for p in path if p not in sys.path]
    found = None
    if module != "__main__":
        try:
            found = importlib.import_module(module)
        except ImportError:
            found = None
    if found is None or not os.path.samefile(getattr(found, "__file__", None) or os.devnull, file):
        made = importlib.util.spec_from_file_location(Path(file).stem, file)
        if made is None or made.loader is None:
            raise UsageError(f"{file}: cannot be imported")
        found = importlib.util.module_from_spec(made)
        sys.modules.setdefault(Path(file).stem, found)
        made.loader.exec_module(found)
    function: Callable[..., object] = getattr(found, name)
    return function


def _call(spec: str, more: dict[str, Any]) -> None:
    function = load(spec, str(more.get("module", "")), more.get("path", []))
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        function(*more.get("args", []), **more.get("kwargs", {}))
        return
    import torch.distributed as dist

    dist.init_process_group("gloo")
    function(*more.get("args", []), **more.get("kwargs", {}))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def _spawn(nprocs: int, arguments: Sequence[str]) -> int:
    """Start the ranks; the first that fails ends the others. Returns its exit code."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(nprocs):
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": nprocs, "LOCAL_WORLD_SIZE": nprocs, "MASTER_PORT": port}
        environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", **{k: str(v) for k, v in own.items()}}
        ranks.append(subprocess.Popen([sys.executable, "-m", MODULE, *arguments], env=environment))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        while True:
            codes = [r.poll() for r in ranks]
            failed = next((c for c in codes if c), None)
            if failed is not None or None not in codes:
                return failed or 0
            time.sleep(POLL_S)
    finally:
        for process in ranks:
            if process.poll() is None:
                process.terminate()


def main(arguments: Sequence[str]) -> int:
    """Call the function here, or start the ranks that do."""
    nprocs, spec, more = int(arguments[0]), arguments[1], json.loads(arguments[2]) if len(arguments) > 2 else {}
    if nprocs == 1 or "RANK" in os.environ:
        if nprocs == 1:
            for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
                os.environ.pop(name, None)
        _call(spec, more)
        return 0
    return _spawn(nprocs, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
