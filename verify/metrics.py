"""Prometheus metrics of a verifier, with a registry of their own.

Every series exists at 0 from the start: a counter that is first scraped at 1 has `increase()` = 0 and never pages
(measured). Labels are the job, a rule's code, a severity or a reason, never a rank, a step or a tensor: those grow
without bound, and one alert a rank is one page a rank. Needs `prometheus-client` only where metrics are asked for.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol

from proctor.errors import ProctorError, UsageError
from proctor.invariants.invariant import Severity, Tier

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

REASONS: Final = ("ring_full", "disconnected", "bad_peer", "gap", "disk_full", "other")
OUTCOMES: Final = ("sent", "suppressed", "failed")
MAX_CODES: Final = 200  # rule codes that have series of their own
_LATENCY_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0, 60.0)


class Metrics(Protocol):
    """What a verifier counts. All methods are cheap, and safe to be called from any thread."""

    def checked(self, count: int) -> None:
        """Rules that were judged on some steps."""

    def violated(self, code: str, severity: Severity, count: int = 1) -> None:
        """Violations of rules that were not violated before."""

    def active(self, tiers: Mapping[Tier, int]) -> None:
        """Incidents that fire now, by tier."""

    def step(self, step: int, at: float) -> None:
        """The last step that was judged, and when: epoch seconds."""

    def dropped(self, reason: str, count: int) -> None:
        """Records that did not arrive; a reason that is not one of `REASONS` counts as `other`."""

    def overhead(self, seconds: float) -> None:
        """Time that the training processes have spent on being recorded."""

    def paged(self, outcome: str, count: int = 1) -> None:
        """Notices: sent, suppressed, failed."""

    def latency(self, seconds: float) -> None:
        """From the end of a step to its verdict."""

    def ranks(self, heard: int, expected: int) -> None:
        """Ranks that are heard of, and how many the job has."""

    def alive(self, at: float) -> None:
        """The verifier's own heartbeat: epoch seconds."""

    def serve(self, host: str, port: int) -> int:
        """Answer scrapes at `/metrics`; returns the port, which is a free one for port 0."""

    def close(self) -> None:
        """Stop answering."""


class NoMetrics:
    """Counts nothing: metrics were not asked for."""

    def checked(self, count: int) -> None: ...

    def violated(self, code: str, severity: Severity, count: int = 1) -> None: ...

    def active(self, tiers: Mapping[Tier, int]) -> None: ...

    def step(self, step: int, at: float) -> None: ...

    def dropped(self, reason: str, count: int) -> None: ...

    def overhead(self, seconds: float) -> None: ...

    def paged(self, outcome: str, count: int = 1) -> None: ...

    def latency(self, seconds: float) -> None: ...

    def ranks(self, heard: int, expected: int) -> None: ...

    def alive(self, at: float) -> None: ...

    def serve(self, host: str, port: int) -> int:
        return 0

    def close(self) -> None: ...


def metrics(job: str, codes: Iterable[str], *, wanted: bool = True) -> Metrics:
    """Metrics of one job.

    Args:
        job: its name, the only label that is free text.
        codes: of all rules that the verifier knows, so that their series begin at 0.
        wanted: somebody asked for them.

    Raises:
        UsageError: they are wanted, and prometheus-client is not installed.
    """
    if not wanted:
        return NoMetrics()
    if importlib.util.find_spec("prometheus_client") is None:
        raise UsageError("metrics need prometheus-client", hint="pip install 'proctor[metrics]'")
    return PrometheusMetrics(job, codes)


class PrometheusMetrics:
    """Counts with prometheus-client."""

    def __init__(self, job: str, codes: Iterable[str]) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        self.registry: CollectorRegistry = CollectorRegistry()
        self._codes = frozenset(sorted(set(codes))[:MAX_CODES])
        self._server: Any = None  # Any: prometheus-client does not name the type of its server
        job = job[:200]

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"proctor_{name}", text, ("job", *labels), registry=self.registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"proctor_{name}", text, ("job", *labels), registry=self.registry)

        self._checked = counter("invariants_checked", "Rules judged").labels(job)
        violations = counter("violations", "Rules violated that were not before", "code", "severity")
        self._violations = {(c, s): violations.labels(job, c, s.value) for c in (*sorted(self._codes), "other") for s in Severity}
        active = gauge("violation_active", "Incidents firing", "tier")
        self._active = {tier: active.labels(job, tier.value) for tier in Tier}
        self._step = gauge("last_step", "Last step judged").labels(job)
        self._stepped = gauge("last_step_timestamp_seconds", "When the last step was judged").labels(job)
        dropped = counter("dropped_records", "Records that did not arrive", "reason")
        self._dropped = {reason: dropped.labels(job, reason) for reason in REASONS}
        self._overhead = counter("overhead_seconds", "Time the training processes spent on being recorded").labels(job)
        self._paged = {o: counter(f"pages_{o}", f"Notices {o}").labels(job) for o in OUTCOMES}
        self._heard = gauge("ranks_heard", "Ranks heard of").labels(job)
        self._expected = gauge("ranks_expected", "Ranks of the job").labels(job)
        self._alive = gauge("heartbeat_timestamp_seconds", "When the verifier was last alive").labels(job)
        latency = Histogram(
            "proctor_verdict_latency_seconds", "From the end of a step to its verdict", ("job",),
            buckets=_LATENCY_S, registry=self.registry,
        )  # fmt: skip
        self._latency = latency.labels(job)

    def checked(self, count: int) -> None:
        self._checked.inc(max(0, count))

    def violated(self, code: str, severity: Severity, count: int = 1) -> None:
        self._violations[code if code in self._codes else "other", severity].inc(max(0, count))

    def active(self, tiers: Mapping[Tier, int]) -> None:
        for tier, series in self._active.items():
            series.set(tiers.get(tier, 0))

    def step(self, step: int, at: float) -> None:
        self._step.set(step)
        self._stepped.set(at)

    def dropped(self, reason: str, count: int) -> None:
        self._dropped[reason if reason in self._dropped else "other"].inc(max(0, count))

    def overhead(self, seconds: float) -> None:
        self._overhead.inc(max(0.0, seconds))

    def paged(self, outcome: str, count: int = 1) -> None:
        self._paged[outcome].inc(max(0, count))

    def latency(self, seconds: float) -> None:
        self._latency.observe(max(0.0, seconds))

    def ranks(self, heard: int, expected: int) -> None:
        self._heard.set(heard)
        self._expected.set(expected)

    def alive(self, at: float) -> None:
        self._alive.set(at)

    def serve(self, host: str, port: int) -> int:
        """Raises `ProctorError` when the address cannot be listened on."""
        from prometheus_client import start_http_server

        try:
            self._server, _ = start_http_server(port, addr=host, registry=self.registry)
        except OSError as error:
            raise ProctorError(f"metrics cannot be served on {host}:{port}: {error.strerror or error}") from None
        return int(self._server.server_address[1])

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
