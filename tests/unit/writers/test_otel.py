"""OpenTelemetry: what the real SDK sends to a collector, read with the collector's own protocol."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from proctor.errors import ConfigError
from proctor.invariants.invariant import Severity
from proctor.verify.writers import Target, open_writer

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")


@pytest.fixture
def collector() -> Iterator[tuple[str, dict[str, list[bytes]]]]:
    got: dict[str, list[bytes]] = {}

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                import gzip

                body = gzip.decompress(body)
            got.setdefault(self.path, []).append(body)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", got
        server.shutdown()


def test_incidents_are_spans_of_one_trace_and_curves_are_gauges(collector: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "secret=hidden")
    address, got = collector
    writer = open_writer(Target("otel", address), "run-a")
    writer.series(4, {"loss": 1.5, "grad norm": 2.0})
    writer.incident(4, "fc.weight differs", "rule: replicas are equal\nid: PR101 abc", Severity.ERROR)
    writer.incident(None, "a ticket", "rule: other", Severity.INFO)
    writer.close()
    sent = ExportTraceServiceRequest.FromString(b"".join(got["/v1/traces"]))
    spans = {s.name: s for r in sent.resource_spans for scope in r.scope_spans for s in scope.spans}
    assert set(spans) == {"training", "fc.weight differs", "a ticket"}
    found = spans["fc.weight differs"]
    facts = {a.key: a.value.string_value or a.value.int_value for a in found.attributes}
    assert facts == {"proctor.severity": "error", "proctor.step": 4, "proctor.rule": "replicas are equal", "proctor.id": "PR101 abc"}
    assert found.parent_span_id == spans["training"].span_id and len({s.trace_id for s in spans.values()}) == 1
    assert found.status.code == 2 and spans["a ticket"].status.code == 0
    about = {a.key: a.value.string_value for a in sent.resource_spans[0].resource.attributes}
    assert about["proctor.run"] == "run-a" and "secret" not in about
    measured = ExportMetricsServiceRequest.FromString(got["/v1/metrics"][-1])
    points = {m.name: m.gauge.data_points[0] for r in measured.resource_metrics for scope in r.scope_metrics for m in scope.metrics}
    assert set(points) == {"proctor.loss", "proctor.grad_norm", "proctor.step"}
    assert points["proctor.loss"].as_double == 1.5 and points["proctor.step"].as_int == 4


def test_what_is_no_address_is_refused() -> None:
    with pytest.raises(ConfigError, match="no address of a collector"):
        open_writer(Target("otel", "collector"), "run-a")
