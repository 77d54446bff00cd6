"""Prometheus metrics: series from the start, bounded labels, and nothing where nobody asked."""

from __future__ import annotations

import importlib.util
import re
import urllib.request

import pytest

from proctor.errors import ProctorError, UsageError
from proctor.invariants.invariant import Severity, Tier
from proctor.verify.metrics import NoMetrics, metrics

prometheus = pytest.importorskip("prometheus_client", reason="metrics need prometheus-client")


def text(made) -> str:
    return prometheus.generate_latest(made.registry).decode()


def value(made, name, **labels):
    return made.registry.get_sample_value(name, {"job": "j", **labels})


def test_every_series_is_there_at_zero_from_the_start():
    made = metrics("j", ["PR101", "PR112"])
    assert value(made, "proctor_invariants_checked_total") == 0
    assert value(made, "proctor_violations_total", code="PR101", severity="error") == 0
    assert value(made, "proctor_violations_total", code="other", severity="critical") == 0
    assert value(made, "proctor_violation_active", tier="page") == 0
    assert value(made, "proctor_dropped_records_total", reason="ring_full") == 0
    assert value(made, "proctor_overhead_seconds_total") == 0
    for outcome in ("sent", "suppressed", "failed"):
        assert value(made, f"proctor_pages_{outcome}_total") == 0
    assert value(made, "proctor_last_step") == 0
    assert value(made, "proctor_last_step_timestamp_seconds") == 0


def test_counts_arrive():
    made = metrics("j", ["PR101"])
    made.checked(7)
    made.violated("PR101", Severity.ERROR, 2)
    made.active({Tier.PAGE: 1})
    made.step(41, 1.7e9)
    made.dropped("gap", 12)
    made.overhead(0.5)
    made.paged("sent")
    made.latency(0.02)
    made.ranks(3, 4)
    made.alive(1.7e9)
    assert value(made, "proctor_invariants_checked_total") == 7
    assert value(made, "proctor_violations_total", code="PR101", severity="error") == 2
    assert value(made, "proctor_violation_active", tier="page") == 1
    assert value(made, "proctor_violation_active", tier="ticket") == 0
    assert value(made, "proctor_last_step") == 41
    assert value(made, "proctor_dropped_records_total", reason="gap") == 12
    assert value(made, "proctor_pages_sent_total") == 1
    assert value(made, "proctor_verdict_latency_seconds_count") == 1
    assert value(made, "proctor_ranks_heard") == 3


def test_labels_stay_few_whatever_is_counted():
    made = metrics("j" * 5000, [f"PR{i}" for i in range(5000)])
    before = text(made).count("\n")
    for i in range(3000):
        made.violated(f"odd{i}", Severity.ERROR)
        made.dropped(f"why{i}", 1)
    assert text(made).count("\n") == before
    labels = set(re.findall(r'(\w+)="', text(made)))
    assert labels == {"job", "code", "severity", "tier", "reason", "le"}


def test_they_are_served_and_the_port_is_given_back():
    made = metrics("j", [])
    port = made.serve("127.0.0.1", 0)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        assert b"proctor_last_step" in answer.read()
    with pytest.raises(ProctorError, match="cannot be served"):
        metrics("k", []).serve("127.0.0.1", port)
    made.close()
    metrics("j", []).serve("127.0.0.1", port)


def test_two_jobs_in_one_process_do_not_meet():
    one, two = metrics("j", []), metrics("j", [])
    one.checked(1)
    assert value(two, "proctor_invariants_checked_total") == 0


def test_without_the_package_only_those_who_asked_are_told(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None)
    with pytest.raises(UsageError, match="prometheus-client"):
        metrics("j", [])
    quiet = metrics("j", [], wanted=False)
    assert isinstance(quiet, NoMetrics)
    quiet.checked(1)
    quiet.violated("PR101", Severity.ERROR)
    assert quiet.serve("127.0.0.1", 0) == 0
    quiet.close()
