"""A job goes on, bit for bit, while the network to its verifier is cut and while everybody's clock jumps."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest
from helpers.live.network import THERE, link, other_host
from helpers.live.receivers import PagerDuty, free_port, wait_until
from helpers.live.watching import PROCTOR, bare, config, environment, job, losses, pagerduty_at, verdict
from helpers.system.clock import CC, Clock

DAY_S = 86400


def steps_in(run: Path) -> bytes:
    events = run / "verify" / "events.jsonl"
    return events.read_bytes() if events.exists() else b""


@pytest.mark.slow
def test_a_job_goes_on_while_its_verifier_cannot_be_reached(tmp_path: Path) -> None:
    arguments = ("--iters", "200", "--part-at", "150", "--pause", "0.03")
    there, token = tmp_path / "there", tmp_path / "token"
    with other_host() as name:
        serve = [*PROCTOR, "verify", str(there), "--listen", f"tcp:{THERE}:7077", "--token-file", str(token)]
        verifier = subprocess.Popen(["ip", "netns", "exec", name, *serve], env=environment(), stderr=subprocess.PIPE, text=True)
        try:
            assert wait_until(token.exists, 30)
            command = [*PROCTOR, "watch", "-o", str(tmp_path / "here"), "--verifier", f"{THERE}:7077", "--token-file", str(token)]
            process = subprocess.Popen([*command, "--", *job(*arguments)], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            assert wait_until(lambda: b'"step"' in steps_in(there), 60), "nothing was judged"
            link(name, up=False)
            time.sleep(3.0)
            assert process.poll() is None
            link(name, up=True)
            out, err = process.communicate(timeout=400)
            assert process.returncode == 0, err[-2000:]
            _, said = verifier.communicate(timeout=400)
        finally:
            verifier.kill()
    assert losses(out) == bare(*arguments)
    found = verdict(there)
    assert found["worst"] in ("error", "critical"), said[-2000:]
    assert found["steps"] == 200


@pytest.mark.slow
@pytest.mark.skipif(CC is None, reason="no C compiler")
def test_clocks_that_jump_change_neither_training_nor_pages(tmp_path: Path) -> None:
    arguments = ("--iters", "260", "--part-at", "160", "--pause", "0.03")
    run, port, clock = tmp_path / "run", free_port(), Clock(tmp_path)
    server = PagerDuty(port)
    page = config(tmp_path, pagerduty_at(port))
    command = [*PROCTOR, "watch", "-o", str(run), "--page", str(page), "--", *job(*arguments)]
    process = subprocess.Popen(command, env={**environment(), **clock.environment}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert wait_until(lambda: b'"step"' in steps_in(run), 60), "nothing was judged"
        for ahead in (DAY_S, -2 * DAY_S, 90 * DAY_S, -3600):
            clock.jump(ahead)
            time.sleep(1.0)
        out, err = process.communicate(timeout=400)
        assert process.returncode == 0, err[-2000:]
        assert verdict(run)["steps"] == 260
        assert wait_until(lambda: any(hit.body["event_action"] == "trigger" for hit in server.hits), 20), err[-2000:]
        time.sleep(1.0)
        triggers = [hit.body["dedup_key"] for hit in server.hits if hit.body["event_action"] == "trigger"]
    finally:
        process.kill()
        server.close()
    assert losses(out) == bare(*arguments)
    assert len(triggers) == 1
    assert "Traceback" not in err
