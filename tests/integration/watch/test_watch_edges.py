"""`proctor watch` where things go wrong: odd programs, signals, a verifier that is gone, other hosts, mistakes of users."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.live.receivers import free_port, wait_until

PROCTOR = [sys.executable, "-m", "proctor.cli"]
PROGRAM = """
import sys, time
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9)
steps, bug, pause, code = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
for step in range(steps):
    x = torch.randn(16, 8)
    if step < bug:
        optimizer.zero_grad()
    nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
    optimizer.step()
    print(step, flush=True)
    time.sleep(pause)
sys.exit(code)
"""
WAITS_FOR_ALL = """
import os
try:
    while True:
        os.wait()
except ChildProcessError:
    print("no child")
os._exit(5)
"""


def environment(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in {"RANK", "WORLD_SIZE", "LOCAL_RANK", "PROCTOR_RUN"}}
    return {**kept, "OMP_NUM_THREADS": "1", **more}


def proctor(*arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    command = [*PROCTOR, *arguments]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=400, check=False, **more)


def training(folder: Path, steps: int, bug: int = 1 << 20, pause: float = 0.0, code: int = 0) -> list[str]:
    script = folder / "train.py"
    script.write_text(PROGRAM)
    return [sys.executable, str(script), str(steps), str(bug), str(pause), str(code)]


def at_work(run: Path) -> dict[int, list[bytes]]:
    """Processes of ours that have to do with a run."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"proctor.cli" in words and str(run).encode() in words:
                found[int(entry.name)] = words
    return found


def verdict(run: Path) -> dict[str, Any]:
    path = run / "verify" / "verdict.json"
    assert wait_until(path.exists, 60), "the verifier gave no verdict"
    found: dict[str, Any] = json.loads(path.read_bytes())
    return found


@pytest.mark.slow
def test_a_program_that_waits_for_all_its_children_does_not_wait_for_us(tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = proctor("watch", "-o", str(run), "--", sys.executable, "-c", WAITS_FOR_ALL)
    assert done.returncode == 5 and done.stdout == "no child\n" and done.stderr == ""
    assert verdict(run)["steps"] == 0
    assert wait_until(lambda: not at_work(run), 30), at_work(run)
    assert "nothing was judged" in (run / "verify" / "verifier.log").read_text()


def test_the_own_code_of_a_command_wins_and_input_reaches_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = proctor("watch", "-o", str(run), "--fail-on", "error", "--", *training(tmp_path, 20, bug=10, code=3))
    assert done.returncode == 3, done.stderr
    assert verdict(run)["worst"] == "error" and "report in" in done.stderr
    again = proctor("watch", "-o", str(run), "--overwrite", "--fail-on", "error", "--", "cat", input="hello")
    assert (again.returncode, again.stdout) == (0, "hello"), "judged by what an earlier run left"
    assert verdict(run)["worst"] is None and not at_work(run)


def test_ctrl_c_ends_the_job_and_then_the_verifier(tmp_path: Path) -> None:
    run = tmp_path / "a folder whose name is much too long for the address of a socket" / ("x" * 80)
    command = [*PROCTOR, "watch", "-o", str(run), "--", *training(tmp_path, 100_000, pause=0.05)]
    job = subprocess.Popen(command, env=environment(), start_new_session=True, stdout=subprocess.DEVNULL)
    try:
        assert wait_until(lambda: b'"step"' in _read(run / "verify" / "events.jsonl"), 60), "not judged live"
        os.killpg(job.pid, signal.SIGINT)
        assert job.wait(20) == -signal.SIGINT
    finally:
        job.kill()
    assert verdict(run)["steps"] > 0
    assert wait_until(lambda: not at_work(run), 30), at_work(run)


def _read(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


@pytest.mark.slow
def test_a_verifier_that_died_with_its_keeper_can_be_started_by_hand(tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = [*PROCTOR, "watch", "-o", str(run), "--", *training(tmp_path, 260, bug=200, pause=0.03)]
    job = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        assert wait_until(lambda: b'"step"' in _read(run / "verify" / "events.jsonl"), 60)
        for pid in sorted(at_work(run)):
            os.kill(pid, signal.SIGKILL)  # the keeper first
        assert wait_until(lambda: not at_work(run), 10)
        (run / "verify" / "incidents.json").write_text("{damaged")
        done = proctor("verify", str(run))
        assert done.returncode == 1, done.stderr
        assert job.wait(60) == 0
    finally:
        job.kill()
    found = verdict(run)
    assert found["worst"] == "error" and found["steps"] == 260
    assert "damaged" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_verifier_on_another_host(tmp_path: Path) -> None:
    port, token, there = free_port(), tmp_path / "token", tmp_path / "there"
    serve = [*PROCTOR, "verify", str(there), "--listen", f"tcp:127.0.0.1:{port}", "--token-file", str(token)]
    verifier = subprocess.Popen(serve, env=environment(), stderr=subprocess.PIPE, text=True)
    try:
        assert wait_until(token.exists, 20)
        assert token.stat().st_mode & 0o777 == 0o600
        job = ["watch", "-o", str(tmp_path / "here"), "--verifier", f"127.0.0.1:{port}", "--token-file", str(token)]
        done = proctor(*job, "--", *training(tmp_path, 40, bug=20, pause=0.05))
        assert done.returncode == 0, done.stderr
        secret = token.read_bytes().strip()
        assert not any(secret in word for words in at_work(there).values() for word in words)
        _, err = verifier.communicate(timeout=400)
    finally:
        verifier.kill()
    assert verifier.returncode == 1 and "[page] PR103" in err, err
    assert verdict(there)["worst"] == "error" and not (there / "procs").exists()


def test_mistakes_are_one_line_and_leave_nothing(tmp_path: Path) -> None:
    run = tmp_path / "run"
    token = tmp_path / "token"
    token.write_text("t" * 40)
    token.chmod(0o600)
    away = ["--verifier", "127.0.0.1:1", "--token-file", str(token)]
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = str(busy.getsockname()[1])
        for words, variables in (
            (["watch", "-o", str(run), "--metrics", port, "--", "true"], {}),
            (["watch", "-o", str(run), "--metrics", "99999", "--", "true"], {}),
            (["watch", "-o", str(run), "--", "true"], {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}),
            (["watch", "-o", str(run), *away, "--fail-on", "error", "--", "true"], {}),
            (["watch", "-o", str(run), "--listen", "127.0.0.1:0", "--token-file", str(run), "--", "true"], {}),
            (["watch", "-o", str(run) + "\udcff", "--", "true"], {}),
            (["watch", "-o", str(token), "--", "true"], {}),
            (["watch", "-o", str(run), "--", "no_such_command"], {}),
            (["verify", str(run)], {}),
            (["verify", str(run), "--listen", "nowhere"], {}),
            (["verify", "--relay", "tcp:127.0.0.1:1"], {}),
        ):
            command = [*PROCTOR, *words]
            done = subprocess.run(command, env=environment(**variables), capture_output=True, text=True, timeout=400, check=False)
            assert done.returncode == 2 and done.stderr.startswith("proctor: PR-E") and done.stderr.count("\n") == 1, (words, done.stderr)
            assert not run.exists(), words


@pytest.mark.slow
def test_ending_the_wait_for_the_verdict_ends_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = [*PROCTOR, "watch", "-o", str(run), "--fail-on", "error", "--", "true"]
    job = subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True)
    assert wait_until(lambda: at_work(run).keys() - {job.pid}, 30)
    time.sleep(0.3)
    begin = time.monotonic()
    job.send_signal(signal.SIGTERM)
    _, err = job.communicate(timeout=10)
    assert job.returncode == 0 and "no verdict" in err and time.monotonic() - begin < 5
    assert wait_until(lambda: not at_work(run), 30), at_work(run)
