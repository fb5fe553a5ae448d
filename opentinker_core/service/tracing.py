"""OpenTelemetry traces of requests, where the standard environment variables ask for them."""

import os
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from opentinker_core import __version__
from opentinker_core.errors import UsageError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PROTOCOL = "http/protobuf"


def tracer_provider() -> "TracerProvider | None":
    """What sends spans where `OTEL_EXPORTER_OTLP_ENDPOINT` says; None if it says nothing.

    The variables are those of the OpenTelemetry specification, read by its SDK: sampling, headers, resource
    attributes and time limits among them.

    Raises:
        UsageError: the endpoint is no URL, another protocol than HTTP is asked for, or the SDK's exporter is
            not installed.
    """
    variable = next((name for name in _ENDPOINTS if os.environ.get(name)), None)
    off = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if variable is None or off or os.environ.get("OTEL_TRACES_EXPORTER", "").lower() == "none":
        return None
    endpoint = urlsplit(os.environ[variable])
    if endpoint.scheme not in ("http", "https") or not endpoint.hostname:
        raise UsageError(f"{variable}: {os.environ[variable]!r:.200}; accepted: an http:// or https:// URL")
    for name in _PROTOCOLS:
        if os.environ.get(name, _PROTOCOL) != _PROTOCOL:
            raise UsageError(f"{name}: {os.environ[name]!r:.100}; accepted: {_PROTOCOL}")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise UsageError(
            f"{variable} asks for traces, and {error.name} is not installed; pip install 'opentinker[otel]'"
        ) from error
    resource = Resource.create()
    if str(resource.attributes["service.name"]).startswith("unknown_service"):  # as the specification has it
        resource = resource.merge(Resource({"service.name": "opentinker", "service.version": __version__}))
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider
