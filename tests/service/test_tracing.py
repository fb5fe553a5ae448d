"""Requests are spans of OpenTelemetry, sent where the environment says; or one message says why not."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from opentinker_core.errors import UsageError
from opentinker_core.service.tracing import tracer_provider
from tests.service.live import serving

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


class _Collector(BaseHTTPRequestHandler):
    received: list[ExportTraceServiceRequest]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        assert self.path == "/v1/traces"
        self.received.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ExportTraceServiceRequest]]:
    handler = type("Handler", (_Collector,), {"received": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv(ENDPOINT, f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    yield handler.received
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_request_is_a_span_of_its_callers_trace(
    received: list[ExportTraceServiceRequest], tmp_path: Path
) -> None:
    trace_id, request_id = "0af7651916cd43dd8448eb211c80319c", "a-request"
    with serving(tmp_path) as live:
        headers = {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01", "X-Request-Id": request_id}
        httpx.get(f"{live.url}/v1/models", headers=headers | {"X-API-Key": live.key()}).raise_for_status()
    resources = [one for request in received for one in request.resource_spans]
    about = {a.key: a.value.string_value for one in resources for a in one.resource.attributes}
    assert about["service.name"] == "opentinker"
    spans = [span for one in resources for scope in one.scope_spans for span in scope.spans]
    (span,) = [span for span in spans if span.trace_id.hex() == trace_id]
    said = {a.key: a.value.string_value for a in span.attributes}
    assert span.name == "GET /v1/models"
    assert said["http.route"] == "/v1/models"
    assert said["opentinker.request_id"] == request_id


@pytest.mark.parametrize(
    ("name", "value", "part"),
    [
        (ENDPOINT, "collector:4318", "'collector:4318'; accepted: an http:// or https:// URL"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "'grpc'; accepted: http/protobuf"),
    ],
    ids=["endpoint", "protocol"],
)
def test_what_cannot_be_sent_to_is_named(
    name: str, value: str, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENDPOINT, "http://127.0.0.1:4318")
    monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=name) as error:
        tracer_provider()
    assert part in str(error.value)


@pytest.mark.parametrize(("name", "value"), [("OTEL_SDK_DISABLED", "true"), ("OTEL_TRACES_EXPORTER", "none")])
def test_nothing_is_sent_where_the_environment_says_so(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENDPOINT, "http://127.0.0.1:4318")
    monkeypatch.setenv(name, value)
    assert tracer_provider() is None
