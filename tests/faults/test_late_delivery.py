"""What a receiver did not take while the job ran goes out when it is back, and nobody has to do anything."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from helpers.live.receivers import PagerDuty, free_port, wait_until
from helpers.live.watching import PROCTOR, config, environment, pagerduty_at, verdict
from helpers.warm import python

pytest.importorskip("torch")

ACCUMULATES = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(24):
    if step < 12:
        optimizer.zero_grad()
    model(torch.randn(16, 4)).square().mean().backward()
    optimizer.step()
"""


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def watched(folder: Path, port: int, *job: str) -> tuple[Path, str]:
    """Watch a job whose receiver is down until it ends; its run, and what was said."""
    (folder / "train.py").write_text(ACCUMULATES)
    page = config(folder, *job, pagerduty_at(port))
    run = folder / "run"
    command = [*PROCTOR, "watch", "-o", str(run), "--page", str(page), "--fail-on", "never", "--", python(), str(folder / "train.py")]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return run, done.stderr


def test_what_waits_when_the_job_ends_is_delivered_later(tmp_path: Path) -> None:
    port = free_port()
    run, said = watched(tmp_path, port)
    delivering = verdict(run)["delivering"]
    assert delivering and f"process {delivering} tries for another 60 min" in said
    try:
        assert runs(delivering)
        server = PagerDuty(port)
        try:
            assert wait_until(lambda: [i.key for i in server.incidents], 120)
        finally:
            server.close()
        assert wait_until(lambda: not runs(delivering), 120), "it goes on though nothing waits"
    finally:
        if runs(delivering):
            os.kill(delivering, signal.SIGKILL)


@pytest.mark.slow
def test_after_its_limit_it_says_what_waits(tmp_path: Path) -> None:
    run, _ = watched(tmp_path, free_port(), "[job]\ndeliver_s = 2\n")
    delivering = verdict(run)["delivering"]
    assert delivering and wait_until(lambda: not runs(delivering), 120)
    assert "oncall: trigger" in (run / "verify" / "verifier.log").read_text()


@pytest.mark.slow
def test_without_time_for_it_the_command_is_named(tmp_path: Path) -> None:
    run, said = watched(tmp_path, free_port(), "[job]\ndeliver_s = 0\n")
    assert verdict(run)["delivering"] == 0 and "proctor page flush --run" in said
