"""A campaign on a real cluster of two worker processes: pairs of both, a worker that is killed, Ctrl-C, resume."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.fuzzing import TIMEOUT_S, leftovers

distributed = pytest.importorskip("dask.distributed")

PROCTOR = [sys.executable, "-m", "proctor.cli", "oracle", "fuzz"]
SESSION = uuid.uuid4().hex


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FUZZ_SESSION", SESSION)  # workers have it, and what they start
        made = distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None)
    with made:
        yield made


def pieces() -> list[int]:
    """Processes of pieces, and their ranks."""
    found = []
    for pid in leftovers(SESSION):
        try:
            if b"sessions.piece" in Path(f"/proc/{pid}/cmdline").read_bytes() and b"State:\tZ" not in Path(f"/proc/{pid}/status").read_bytes():
                found.append(pid)
        except OSError:
            continue
    return found


def numbers(out: Path) -> list[int]:
    file = out / "journal-0.jsonl"
    return [json.loads(line)["number"] for line in file.read_text().splitlines()] if file.exists() else []


def waited(ready: Any) -> bool:
    end = time.monotonic() + TIMEOUT_S
    while time.monotonic() < end and not ready():
        time.sleep(0.2)
    return bool(ready())


@pytest.mark.slow  # two minutes of CPU
def test_a_campaign_on_a_cluster_outlives_a_worker_and_can_be_resumed(cluster: Any, tmp_path: Path) -> None:
    out, said = tmp_path / "campaign", tmp_path / "said"
    command = [*PROCTOR, "--dask", cluster.scheduler_address, "--budget", "2h", "--pairs", "20", "--rows", "2", "--models", "chain", "--timeout", "120"]
    with said.open("w") as file:
        job = subprocess.Popen([*command, "-o", str(out)], stdout=subprocess.DEVNULL, stderr=file, start_new_session=True)
    assert waited(lambda: len(numbers(out)) >= 2 or job.poll() is not None), said.read_text()
    with distributed.Client(cluster.scheduler_address) as client:
        workers = client.run(os.getpid)
    assert len(workers) == 2
    os.kill(next(iter(workers.values())), signal.SIGKILL)  # a new one is started in its place
    assert waited(lambda: "was lost" in said.read_text() or job.poll() is not None), said.read_text()
    before = len(numbers(out))
    assert waited(lambda: len(numbers(out)) > before or job.poll() is not None), said.read_text()
    job.send_signal(signal.SIGINT)
    assert job.wait(TIMEOUT_S) == 130, said.read_text()
    assert sum("was lost" in line for line in said.read_text().splitlines()) == 1 and f"--resume {out}" in said.read_text()
    assert waited(lambda: not pieces()), pieces()
    done = numbers(out)
    assert len(set(done)) == len(done)

    more = max(done) + 3  # gaps that lost pieces left, and two pairs more
    again = subprocess.run([*PROCTOR, "--resume", str(out), "--dask", cluster.scheduler_address, "--pairs", str(more)], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert again.returncode in (0, 1), again.stderr
    assert sorted(numbers(out)) == list(range(more)), again.stderr
    report = json.loads((out / "report.json").read_text())
    assert report["pairs"] == more and report["verdicts"].get("ok", 0) > 0


def test_bad_addresses_and_options_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from proctor.cli import main
    from proctor.oracle.fuzz.sessions import cluster

    monkeypatch.setattr(cluster, "_CONNECT_S", 1)
    for more, wanted in ((["--dask", "tcp://127.0.0.1:9"], "--dask tcp://127.0.0.1:9"), (["--dask", "x:1", "--workers", "2"], "--workers goes without --dask")):
        assert main(["oracle", "fuzz", *more, "-o", str(tmp_path / "campaign")]) == 2
        (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("proctor:")]
        assert wanted in line
