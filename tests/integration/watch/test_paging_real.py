"""Paging with real servers and real crashes: Alertmanager from Debian, receivers that are down, processes that are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.live.pages import notice
from helpers.live.receivers import (
    ALERTMANAGER,
    ROUTING_KEY,
    Alertmanager,
    PagerDuty,
    Webhook,
    free_port,
    wait_until,
)

from proctor.cli import main
from proctor.invariants.invariant import Severity
from proctor.verify.paging import Pager, read_config

needs_alertmanager = pytest.mark.skipif(ALERTMANAGER is None, reason="prometheus-alertmanager is not installed")

CHILD = """
    import os, random, signal, sys, time
    sys.path.insert(0, {tests!r})
    from helpers.live.pages import notice
    from proctor.verify.paging import Pager, read_config

    def verifier(key="proctor:job:r1:dp"):
        pager = Pager(read_config({config!r}), {outbox!r})
        pager.start()
        pager.notify(notice(key))
        print("queued", flush=True)
        time.sleep(30)
"""


@pytest.fixture
def hook() -> Iterator[Webhook]:
    server = Webhook()
    yield server
    server.close()


def child(tmp_path: Path, rest: str) -> subprocess.Popen[str]:
    """A verifier in a process of its own."""
    tests = str(Path(__file__).parents[2])
    places = {"tests": tests, "config": str(tmp_path / "page.toml"), "outbox": str(tmp_path / "run" / "outbox.db")}
    program = textwrap.dedent(CHILD.format(**places)) + textwrap.dedent(rest)
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)


def write_config(tmp_path: Path, *sinks: str) -> Path:
    (tmp_path / "key").write_text(ROUTING_KEY)
    (tmp_path / "page.toml").write_text("\n".join(sinks))
    return tmp_path / "page.toml"


def pagerduty_at(port: int) -> str:
    return f'[sinks.oncall]\ntype = "pagerduty"\nurl = "http://127.0.0.1:{port}"\nrouting_key_file = "key"\ntimeout_s = 2'


@needs_alertmanager
def test_a_test_stays_until_alertmanager_has_told_people(
    tmp_path: Path, hook: Webhook, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    am = Alertmanager(tmp_path / "am", hook.url, group_wait="2s", matchers=['tier="ticket"'])
    config = write_config(tmp_path, f'[sinks.am]\ntype = "alertmanager"\nurls = ["{am.url}"]')
    try:
        assert main(["page", "test", "--config", str(config)]) == 0
        assert "receiver hook told after" in " ".join(capsys.readouterr().out.split())
        assert next(a["status"] for hit in hook.hits for a in hit.body["alerts"]) == "firing"
        told = len(hook.hits)
        body = {"matchers": [{"name": "alertname", "value": ".+", "isRegex": True}], "startsAt": "2020-01-01T00:00:00Z",
                "endsAt": "2099-01-01T00:00:00Z", "createdBy": "x", "comment": "x"}  # fmt: skip
        request = urllib.request.Request(f"{am.url}/api/v2/silences", json.dumps(body).encode(), {"Content-Type": "application/json"})
        urllib.request.urlopen(request, timeout=10).close()
        assert main(["page", "test", "--config", str(config)]) == 1
        assert "holds it back, so nobody is told" in " ".join(capsys.readouterr().out.split())
        assert not any(a["status"] == "firing" for hit in hook.hits[told:] for a in hit.body["alerts"])
    finally:
        am.kill()


@needs_alertmanager
def test_a_test_that_nobody_is_told_of_fails(tmp_path: Path, hook: Webhook, capsys: pytest.CaptureFixture[str]) -> None:
    am = Alertmanager(tmp_path / "am", hook.url, matchers=['tier="page"'])
    config = write_config(tmp_path, f'[sinks.am]\ntype = "alertmanager"\nurls = ["{am.url}"]')
    try:
        assert main(["page", "test", "--config", str(config)]) == 1
        assert "receiver 'nobody', which tells nobody" in " ".join(capsys.readouterr().out.split())
    finally:
        am.kill()


@needs_alertmanager
def test_alertmanager_is_told_again_and_notifies_once_until_it_is_over(tmp_path: Path, hook: Webhook) -> None:
    am = Alertmanager(tmp_path / "am", hook.url)
    config = write_config(tmp_path, f'[sinks.am]\ntype = "alertmanager"\nurls = ["{am.url}"]\nresend_s = 1')
    pager = Pager(read_config(config), tmp_path / "run" / "outbox.db")
    pager.start()
    try:
        now = time.time()
        for rank in range(64):
            pager.notify(notice(began=now, at=now, details={"ranks": f"0-{rank}"}))
        assert wait_until(lambda: hook.hits)
        time.sleep(2.5)  # two re-sends
        assert [h.body["status"] for h in hook.hits] == ["firing"]
        (alert,) = hook.hits[0].body["alerts"]
        assert alert["labels"]["key"] == "proctor:job:r1:dp" and "ranks" not in alert["labels"]
        pager.notify(notice(began=now, at=now, severity=Severity.CRITICAL, title="worse"))
        assert wait_until(lambda: any(a["labels"]["severity"] == "critical" for a in am.alerts()))
        pager.notify(notice("proctor:job:r1:dp", "resolve"))
        assert wait_until(lambda: hook.hits[-1].body["status"] == "resolved")
        assert not am.alerts()
    finally:
        pager.close(2)
        am.kill()


@needs_alertmanager
def test_a_killed_alertmanager_learns_of_the_incident_again(tmp_path: Path, hook: Webhook) -> None:
    """Without a new notice; it may notify once more (it forgot that it did), with the same labels and key."""
    am = Alertmanager(tmp_path / "am", hook.url)
    config = write_config(tmp_path, f'[sinks.am]\ntype = "alertmanager"\nurls = ["{am.url}"]\nresend_s = 1\nlabels = {{team = "ml"}}')
    pager = Pager(read_config(config), tmp_path / "run" / "outbox.db")
    pager.start()
    try:
        pager.notify(notice(began=time.time(), at=time.time()))
        assert wait_until(lambda: hook.hits)
        am.kill()
        time.sleep(1.2)
        am.start()
        assert wait_until(am.alerts, 20), "the sender tells it what fires"
        time.sleep(1.5)
        prints = {a["fingerprint"] for h in hook.hits for a in h.body["alerts"]}
        assert len(prints) == 1 and len(hook.hits) <= 2
    finally:
        pager.close(2)
        am.kill()


def test_a_receiver_that_is_down_for_the_whole_job_is_told_exactly_once_after_a_killed_verifier_restarts(tmp_path: Path) -> None:
    port = free_port()
    write_config(tmp_path, pagerduty_at(port))
    first = child(tmp_path, "verifier()")
    assert first.stdout is not None and first.stdout.readline() == "queued\n"
    time.sleep(0.3)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    first.stdout.close()
    server = PagerDuty(port)
    second = child(tmp_path, "verifier()")
    try:
        assert wait_until(lambda: server.incidents, 20)
        time.sleep(0.5)
        assert [(i.key, i.triggers) for i in server.incidents] == [("proctor:job:r1:dp", 1)]
        assert not server.rejected
    finally:
        second.kill()
        second.wait()
        assert second.stdout is not None
        second.stdout.close()
        server.close()


def test_killed_at_any_moment_every_page_is_one_incident_and_one_event(tmp_path: Path, hook: Webhook) -> None:
    """The crash between a receiver's answer and our mark is unavoidable: it repeats the same key and the same event id."""
    port, rounds = free_port(), 60
    sinks = pagerduty_at(port), f'[sinks.hook]\ntype = "cloudevents"\nurl = "{hook.url}"'
    write_config(tmp_path, *sinks, "[budget]\npages_per_hour = 1000")
    server = PagerDuty(port)
    killer = child(
        tmp_path,
        f"""
        random.seed(7)
        for n in range({rounds}):
            pid = os.fork()
            if pid == 0:
                verifier(f"k:{{n}}")
            time.sleep(0.02 + random.random() * 0.1)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        print("survived", flush=True)
        verifier("k:last")
        """,
    )
    try:
        assert killer.stdout is not None
        queued = 0
        for line in killer.stdout:
            queued += line == "queued\n"
            if line == "survived\n":
                break
        assert killer.stdout.readline() == "queued\n"
        assert wait_until(lambda: {"k:last"} <= {i.key for i in server.incidents} and len(hook.hits) >= queued, 40)
        time.sleep(0.5)
        told = [i.key for i in server.incidents]
        assert queued + 1 <= len(told) == len(set(told)), "none is lost that was queued, none is opened twice"
        assert sum(i.triggers for i in server.incidents) <= len(told) * 1.2
        ids: dict[str, set[str]] = {}
        for hit in hook.hits:
            ids.setdefault(hit.body["subject"], set()).add(hit.body["id"])
        assert set(ids) == set(told) and all(len(found) == 1 for found in ids.values())
        assert not server.rejected
    finally:
        killer.kill()
        killer.wait()
        assert killer.stdout is not None
        killer.stdout.close()
        server.close()


def test_pagerduty_in_trouble_gets_every_incident_once_and_in_order(tmp_path: Path) -> None:
    """429 with Retry-After, 5xx, a connection that is cut after it was taken."""
    server = PagerDuty()
    config = write_config(tmp_path, pagerduty_at(server.port))
    server.script = [(429, {"Retry-After": "1"}, b""), (500, {}, b"oops"), "late"]
    pager = Pager(read_config(config), tmp_path / "run" / "outbox.db")
    pager.start()
    try:
        keys = [f"proctor:job:r{i}:dp" for i in range(4)]
        for key in keys:
            pager.notify(notice(key))
        assert wait_until(lambda: len(server.incidents) == 4, 60)
        for key in keys:
            pager.notify(notice(key, "resolve"))
        assert wait_until(lambda: all(i.resolved for i in server.incidents), 30)
        assert sorted(i.key for i in server.incidents) == keys
        assert not server.dropped and not server.rejected and pager.close(5)
    finally:
        pager.close(1)
        server.close()
