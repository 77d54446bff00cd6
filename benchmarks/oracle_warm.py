"""Recordings for the oracle's benchmarks from forks of one process that has torch loaded: a run takes 0.3 s, not 4 s.

The ranks of a program are forked, each begins to record as the injected hook would make it (`oracle/collect`) and runs
the script as `__main__` under the variables of torchrun. Everything else is the Recorder of `proctor oracle record`.

    python benchmarks/oracle_warm.py        # the warm process: a JSON object a line on stdin, an exit code a line on stdout
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import queue
import runpy
import socket
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec

from proctor.oracle.collect.config import CollectConfig
from proctor.oracle.recording.record import Recorder
from proctor.oracle.recording.running import LOG


class Warm:
    """Some warm processes; a run takes a free one.

    Args:
        count: of processes.
        load: further modules that they import before they are forked.

    Attributes:
        cpu_s: CPU seconds of the runs of each recording so far.
    """

    def __init__(self, count: int = 2, load: Sequence[str] = ()) -> None:
        self.cpu_s: Counter[Path] = Counter()
        self._all = [
            subprocess.Popen(
                [sys.executable, "-W", "ignore", __file__, *load],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"},
            )
            for _ in range(count)
        ]
        self._free: queue.Queue[subprocess.Popen[str]] = queue.Queue()
        for process in self._all:
            self._free.put(process)

    def run(self, command: Sequence[str], world: int, activation: Path | None, log: Path) -> int:
        """Run a script on so many ranks, with what an injected hook reads, or as it is; its exit code."""
        process = self._free.get()
        try:
            assert process.stdin is not None and process.stdout is not None
            job = {"argv": list(command), "world": world, "activation": str(activation or ""), "log": str(log)}
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
            code, cpu_s = (process.stdout.readline() or "1 0").split()
            self.cpu_s[log.parents[min(2, len(log.parents) - 1)]] += float(cpu_s)  # DIR/runs/RUN/output.log
            return int(code)
        finally:
            self._free.put(process)

    def close(self) -> None:
        for process in self._all:
            assert process.stdin is not None
            process.stdin.close()
            process.wait()


class WarmRecorder(Recorder):
    """Records a script and its arguments, without the interpreter.

    Args:
        warm: where it runs.
        world: ranks.

    The others are those of `Recorder`.
    """

    def __init__(self, warm: Warm, world: int, out: Path, command: Sequence[str], **more: Any) -> None:
        super().__init__(out, command, overwrite=True, **more)
        self.warm, self.ranks = warm, world

    def _run(self, config: CollectConfig, folder: Path) -> int | None:
        activation = folder / "activation.json"
        activation.write_bytes(msgspec.json.encode(config))
        return self.warm.run(self.command, self.ranks, activation, folder / LOG)


def _rank(rank: int, job: Mapping[str, Any], port: int, output: IO[str]) -> int:
    world: int = job["world"]
    if world > 1:
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
        )
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    from proctor.oracle.collect import install_from

    if job["activation"]:
        install_from(job["activation"])
    sys.argv = list(job["argv"])
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    code = 0
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else 0 if e.code is None else 1
        if isinstance(e.code, str):
            print(e.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 - a fork ends here, whatever happens
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()  # the collector closes its files
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _job(job: Mapping[str, Any]) -> tuple[int, float]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    with open(job["log"], "a") as output:
        for rank in range(job["world"]):
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    code = _rank(rank, job, port, output)
                finally:
                    os._exit(code)
            children.append(child)
        ended = [os.wait4(child, 0)[1:] for child in children]
    codes = [os.waitstatus_to_exitcode(status) for status, _ in ended]
    return next((c for c in codes if c), 0), sum(usage.ru_utime + usage.ru_stime for _, usage in ended)


LOADED = (
    "torch", "torch._decomp.decompositions_for_rng", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.optim",
    "torch.distributed.pipelining", "torch.distributed.tensor.parallel", "torch.multiprocessing", "safetensors.torch", "numpy.random",
    "proctor.instrument.observe.mesh", "proctor.oracle.collect.collector", "proctor.oracle.frameworks",
)  # fmt: skip


def _serve() -> None:
    for name in (*LOADED, *sys.argv[1:]):
        importlib.import_module(name)
    import torch

    torch.set_num_threads(1)
    sys.argv = [""]
    for line in sys.stdin:
        print(*_job(json.loads(line)), flush=True)


if __name__ == "__main__":
    _serve()
