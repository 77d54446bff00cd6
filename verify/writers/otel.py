"""OpenTelemetry: incidents as spans of one trace a run, curves as gauges, sent by the SDK over OTLP and HTTP.

A run is a span from its first point to its last; each incident is a span in it, with what an engineer reads first as an event. An incident of severity
error gives its span that status. Curves are gauges, the step is one of them. Headers, certificates and time-outs are the SDK's own settings
(`OTEL_EXPORTER_OTLP_HEADERS`, …). Nothing is sent but what is said here: no environment, no arguments.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any, Final

import proctor
from proctor.invariants.invariant import Severity
from proctor.verify.writers import PREFIX, Writer, library

KIND: Final = "otel"
TARGET: Final = "http://HOST:4318"
PACKAGE: Final = "opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"

_EVERY_MS: Final = 5_000.0  # between two exports
_CLOSE_MS: Final = 5_000  # for the last
_LONGEST_NAME: Final = 255  # of an instrument, whose letters are
_NOT_IN_A_NAME: Final = re.compile(r"[^A-Za-z0-9_./-]")  # all but these


class OpenTelemetry:
    """One trace, and one set of gauges.

    Args:
        endpoint: of a collector, without the path.
        name: of the run.
    """

    def __init__(self, endpoint: str, name: str) -> None:
        if not endpoint.startswith(("http://", "https://")):
            raise ValueError(f"{endpoint} is no address of a collector")
        base = endpoint.rstrip("/")
        sdk, spans, metrics = library("opentelemetry.sdk.trace"), library("opentelemetry.sdk.trace.export"), library("opentelemetry.sdk.metrics")
        otlp = "opentelemetry.exporter.otlp.proto.http"
        facts = {"service.name": "proctor", "service.version": proctor.__version__, "proctor.run": name}
        resource = library("opentelemetry.sdk.resources").Resource(facts)  # not `create`: that adds what the environment says
        self._spans: Any = sdk.TracerProvider(resource=resource, shutdown_on_exit=False)
        sender = library(f"{otlp}.trace_exporter").OTLPSpanExporter(endpoint=f"{base}/v1/traces")
        self._spans.add_span_processor(spans.BatchSpanProcessor(sender, schedule_delay_millis=_EVERY_MS))
        points = library(f"{otlp}.metric_exporter").OTLPMetricExporter(endpoint=f"{base}/v1/metrics")
        reader = library("opentelemetry.sdk.metrics.export").PeriodicExportingMetricReader(points, export_interval_millis=_EVERY_MS)
        self._metrics: Any = metrics.MeterProvider(metric_readers=[reader], resource=resource, shutdown_on_exit=False)
        self._trace: Any = library("opentelemetry.trace")
        self._tracer = self._spans.get_tracer("proctor")
        self._meter = self._metrics.get_meter("proctor")
        self._gauges: dict[str, Any] = {}
        self._run = self._tracer.start_span("training", attributes={"proctor.run": name})
        self._within = self._trace.set_span_in_context(self._run)
        self._step = -1

    def series(self, step: int, values: Mapping[str, float]) -> None:
        self._step = max(self._step, step)
        for name, value in {**values, "step": step}.items():
            gauge = self._gauges.get(name)
            if gauge is None:
                gauge = self._gauges[name] = self._meter.create_gauge(_NOT_IN_A_NAME.sub("_", PREFIX.replace("/", ".") + name)[:_LONGEST_NAME])
            gauge.set(value)

    def incident(self, step: int | None, title: str, text: str, severity: Severity) -> None:
        facts: dict[str, Any] = {"proctor.severity": severity.value} | ({} if step is None else {"proctor.step": step})
        facts |= {f"proctor.{key}": value for key, value in (line.split(": ", 1) for line in text.splitlines() if ": " in line)}
        span = self._tracer.start_span(title, context=self._within, attributes=facts)
        span.add_event("incident", {"message": text})
        if severity is Severity.ERROR:
            span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, title))
        span.end()

    def close(self) -> None:
        self._run.set_attribute("proctor.steps", self._step + 1)
        self._run.end(time.time_ns())
        if not self._spans.force_flush(_CLOSE_MS):
            raise TimeoutError("the collector did not take the last spans")
        self._spans.shutdown()
        self._metrics.shutdown(timeout_millis=_CLOSE_MS)


def open_target(target: str, run: str) -> Writer:
    """Begin a trace at a collector."""
    return OpenTelemetry(target, run)
