"""A two-rank job under watch, and looking at it from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from helpers.live.receivers import ROUTING_KEY, free_port, wait_until
from helpers.ranks import TEARDOWN
from helpers.warm import python

PROGRAM = Path(__file__).parent / "parting.py"
PROCTOR = [sys.executable, "-m", "proctor.cli"]


def environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in {"RANK", "WORLD_SIZE", "LOCAL_RANK", "PROCTOR_RUN"}}
    return {**kept, "OMP_NUM_THREADS": "1"}


def job(*arguments: str, interpreter: str = sys.executable) -> list[str]:
    torchrun = [interpreter, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    return [*torchrun, str(PROGRAM), *arguments]


def watch(run: Path, *options: str, arguments: tuple[str, ...]) -> subprocess.Popen[str]:
    command = [*PROCTOR, "watch", "-o", str(run), *options, "--", *job(*arguments, interpreter=python())]
    return subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def losses(text: str) -> list[float]:
    line = next(x for x in text.splitlines() if x.startswith("RESULT "))
    found: list[float] = json.loads(line.removeprefix("RESULT "))["losses"]
    return found


def bare(*arguments: str) -> list[float]:
    for _ in range(3):
        done = subprocess.run(job(*arguments, interpreter=python()), env=environment(), capture_output=True, text=True, timeout=400, check=False)
        if TEARDOWN not in done.stderr:
            break
    return losses(done.stdout)


def verdict(run: Path, timeout_s: float = 60.0) -> dict[str, Any]:
    path = run / "verify" / "verdict.json"
    assert wait_until(path.exists, timeout_s), "the verifier gave no verdict"
    found: dict[str, Any] = json.loads(path.read_bytes())
    return found


def config(folder: Path, *sinks: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "key").write_text(ROUTING_KEY)
    (folder / "page.toml").write_text("\n".join(sinks))
    return folder / "page.toml"


def pagerduty_at(port: int) -> str:
    return f'[sinks.oncall]\ntype = "pagerduty"\ntier = "all"\nurl = "http://127.0.0.1:{port}"\nrouting_key_file = "key"\n'


def verifier_of(run: Path) -> int:
    """Id of the process that judges, not of the one that keeps it alive; 0 without one."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"verify" in words and str(run).encode() in words and b"--keep-alive" not in words:
                return int(entry.name)
    return 0
