"""`proctor watch` end to end: a two-rank job, its verifier, real receivers; and a verifier that dies, stops or is flooded."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.live.receivers import (
    ALERTMANAGER,
    Alertmanager,
    PagerDuty,
    Webhook,
    free_port,
    wait_until,
)
from helpers.live.watching import (
    PROCTOR,
    bare,
    config,
    environment,
    losses,
    pagerduty_at,
    verdict,
    verifier_of,
    watch,
)


@pytest.fixture
def hook() -> Iterator[Webhook]:
    server = Webhook()
    yield server
    server.close()


@pytest.mark.skipif(ALERTMANAGER is None, reason="prometheus-alertmanager is not installed")
def test_replicas_that_part_reach_alertmanager_once_and_training_is_untouched(tmp_path: Path, hook: Webhook) -> None:
    arguments = ("--iters", "120", "--part-at", "60", "--pause", "0.03")
    manager = Alertmanager(tmp_path / "am", hook.url)
    page = config(tmp_path, f'[sinks.am]\ntype = "alertmanager"\nurls = ["{manager.url}"]\nresend_s = 1')
    run = tmp_path / "run"
    try:
        process = watch(run, "--page", str(page), "--fail-on", "error", arguments=arguments)
        out, err = process.communicate(timeout=400)
        assert process.returncode == 1, err[-2000:]
        found = verdict(run)
        assert found["worst"] in ("error", "critical") and found["violations"] >= 1
        assert wait_until(lambda: hook.hits, 20), "Alertmanager told nobody"
        time.sleep(2.0)
        alerts = [alert for hit in hook.hits for alert in hit.body["alerts"]]
        assert len({alert["labels"]["key"] for alert in alerts}) == 1
        assert "head.weight" in json.dumps(alerts[0])
        assert not any("rank" in alert["labels"] for alert in alerts)
    finally:
        manager.kill()
    assert losses(out) == bare(*arguments)
    incidents = json.loads((run / "verify" / "incidents.json").read_bytes())["incidents"]
    assert [incident["first_step"] for incident in incidents] == [60]
    assert "head.weight" in (run / "report.html").read_text()


def test_a_page_is_delivered_once_though_receiver_and_verifier_were_down(tmp_path: Path) -> None:
    port = free_port()
    run = tmp_path / "run"
    page = config(tmp_path, pagerduty_at(port))
    hurry = tmp_path / "hurry"
    process = watch(run, "--page", str(page), arguments=("--iters", "500", "--part-at", "20", "--pause", "0.05", "--hurry", str(hurry)))
    incidents = run / "verify" / "incidents.json"
    try:
        assert wait_until(lambda: incidents.exists() and b"firing" in incidents.read_bytes(), 300), "not found live"
        assert process.poll() is None, "found only after the job"
        first = verifier_of(run)
        os.kill(first, signal.SIGKILL)
        assert wait_until(lambda: verifier_of(run) not in (0, first), 120), "not started again"
        hurry.touch()
        out, _ = process.communicate(timeout=400)
        assert process.returncode == 0 and losses(out)
    finally:
        process.kill()
    verdict(run)
    server = PagerDuty(port)
    try:
        command = [*PROCTOR, "page", "flush", "--config", str(page), "--run", str(run)]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=400, check=False)
        assert done.returncode == 0, done.stderr
        assert wait_until(lambda: server.hits, 20)
        triggers = [hit.body for hit in server.hits if hit.body["event_action"] == "trigger"]
        assert len({event["dedup_key"] for event in triggers}) == 1 == len(triggers)
    finally:
        server.close()


@pytest.mark.slow
def test_a_verifier_that_is_stopped_costs_the_job_nothing(tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = ("--iters", "150", "--pause", "0.03")
    process = watch(run, arguments=arguments)
    stopped = 0
    try:
        assert wait_until(lambda: (run / "verify" / "events.jsonl").exists(), 60)
        stopped = verifier_of(run)
        os.kill(stopped, signal.SIGSTOP)
        out, _ = process.communicate(timeout=400)
        assert process.returncode == 0
    finally:
        if stopped:
            os.kill(stopped, signal.SIGCONT)
        process.kill()
    assert losses(out) == bare(*arguments)
    assert verdict(run)["worst"] is None


def test_mistakes_are_told_before_the_job_starts(tmp_path: Path) -> None:
    bad = tmp_path / "page.toml"
    bad.write_text('[sinks.x]\ntype = "pigeon"\n')
    for options in (["--page", str(bad)], ["-i", str(tmp_path / "no.json")], ["--metrics", "x"], ["--listen", "h:1"]):
        command = [*PROCTOR, "watch", "-o", str(tmp_path / "run"), *options, "--", "true"]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=400, check=False)
        assert done.returncode == 2 and done.stderr.startswith("proctor: PR-E") and done.stderr.count("\n") == 1, done.stderr
        assert not (tmp_path / "run").exists()
