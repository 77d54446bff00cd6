"""Runs programs in forks of one process that has imported torch: an import costs more than most of these programs.

    python benchmarks/forks.py START    # a file of Python that defines begin(torch): the start-up hook of its programs

One job a line of JSON on stdin: script, arguments, folder, log, environment, path, ranks, timeout_s, memory_mib, activation, collect. The answer
is one line: the first exit code of a rank that is not 0, 124 at the time limit. A fork does what a process of its own does at the end of
`import torch`: the start-up hook acts, then Proctor attaches by the activation file that `proctor record` would leave, or collects by that
of `proctor oracle record`. Started by `Forks`, which campaigns call (`mutants/programs.py`, `wild/attempt.py`, `wild_oracle.py`).
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_GRACE_S = 5.0  # for ranks that wait for one that has failed


class Forks:
    """The process whose forks run the programs.

    Args:
        start: file of the start-up hook.
        environment: of the process, and of all programs.
        timeout_s: for one program.
        memory_mib: address space of each process of a program.
    """

    def __init__(self, start: Path, environment: Mapping[str, str], *, timeout_s: float, memory_mib: int) -> None:
        self._limits = {"timeout_s": timeout_s, "memory_mib": memory_mib}
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(start)], env=dict(environment), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answer()

    def run(
        self, script: str, arguments: Sequence[str], folder: Path, log: Path, environment: Mapping[str, str], *,
        ranks: int = 1, path: Sequence[str] = (), record: Path | None = None, collect: Path | None = None, timeout_s: float | None = None,
    ) -> int:
        """Run a program; gives its exit code.

        Args:
            folder: where it runs.
            log: for what it says.
            environment: besides that of the process.
            path: put behind the script's folder on `sys.path`.
            record: the run directory to record into.
            collect: what an oracle's recorder left for the hook.
            timeout_s: instead of that of all programs.
        """
        log.unlink(missing_ok=True)
        job = {
            **self._limits, "script": script, "arguments": list(arguments), "folder": str(folder), "log": str(log), "path": list(path),
            "environment": dict(environment), "ranks": ranks, "activation": str(_activation(script, arguments, record)) if record else "",
            "collect": str(collect or ""),
        }  # fmt: skip
        if timeout_s is not None:
            job["timeout_s"] = timeout_s
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return int(self._answer())

    def close(self) -> None:
        """End the process."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(30)

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the process whose forks run the programs has ended")
        return line.strip()


def _activation(script: str, arguments: Sequence[str], run: Path) -> Path:
    """Make a run directory as `proctor record` does; gives the file that tells the start-up hook to record."""
    from proctor.instrument.config import RecordConfig
    from proctor.instrument.record.rundir import create_run, write_boot

    create_run(run, ["python", script, *arguments], overwrite=True, sampling={"every": 1, "warmup": 10})
    return write_boot(run, RecordConfig(run=str(run.resolve()))) / "activation.json"


def main() -> None:
    import numpy  # noqa: F401 - warm
    import torch
    import torch._dynamo
    import torch.distributed.optim

    import proctor.instrument.attach

    begin = _start_hook(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        children = []
        port = _port()
        if job["collect"]:
            importlib.import_module("proctor.oracle.collect.collector")  # warm
        for rank in range(job["ranks"]):
            pid = os.fork()
            if pid == 0:
                _enter(job, rank, port)
                begin(torch)
                if job["activation"]:
                    proctor.instrument.attach.install_from(job["activation"])
                if job["collect"]:
                    from proctor.oracle.collect import install_from

                    install_from(job["collect"])
                _run(job["script"])
                return
            children.append(pid)
        print(_wait(children, job["timeout_s"]), file=answers, flush=True)


def _start_hook(path: str) -> Any:
    """`begin` of the hook, which is called as the hook of a process of its own is, so that nobody takes it for a program's code."""
    spec = importlib.util.spec_from_file_location("sitecustomize", path)
    assert spec is not None and spec.loader is not None
    sys.path.insert(0, str(Path(path).parent))  # what lies beside it is found, as it is beside a hook of Python's own
    sys.modules["sitecustomize"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.begin


def _enter(job: dict[str, Any], rank: int, port: int) -> None:
    """Become a process of this job."""
    os.setpgid(0, 0)
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    limit = job["memory_mib"] << 20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    os.environ.update(job["environment"])
    if job["ranks"] > 1:
        world = str(job["ranks"])
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=world, LOCAL_WORLD_SIZE=world, GROUP_RANK="0",
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="none", TORCHELASTIC_RESTART_COUNT="0",
        )
    os.chdir(job["folder"])
    sys.path[0:1] = [job["folder"], *job["path"]]
    sys.argv = [job["script"], *job["arguments"]]


def _run(script: str) -> None:
    """Run a script as `python script` does."""
    main_module = types.ModuleType("__main__")
    main_module.__file__ = os.path.abspath(script)
    sys.modules["__main__"] = main_module
    with open(script) as file:
        code = compile(file.read(), main_module.__file__, "exec")
    exec(code, vars(main_module))


def _wait(children: list[int], timeout_s: float) -> int:
    """The first exit code that is not 0; what runs too long is ended with 124, and so are ranks that wait for one that failed."""
    until = time.monotonic() + timeout_s
    worst = 0
    left = set(children)
    while left:
        for pid in list(left):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                left.discard(pid)
                worst = worst or abs(os.waitstatus_to_exitcode(status))
                if worst:
                    until = min(until, time.monotonic() + _GRACE_S)
        if left and time.monotonic() > until:
            worst = worst or 124
            for pid in left:
                with contextlib.suppress(ProcessLookupError):  # with what it has started
                    os.killpg(pid, signal.SIGKILL)
            until = time.monotonic() + 60
        time.sleep(0.05)
    return worst


def _port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


if __name__ == "__main__":
    main()
