"""Metrics in Prometheus' format: what is asked for, and what the engines do. No tenant is named in them."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from opentinker_core.runtime.residency_statistics import Residency, Tier
from opentinker_core.runtime.scheduler_statistics import Statistics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Engines = Callable[[], Mapping[str, Statistics]]
"""Of each base model, by its name, what its engine did."""

_SECONDS = (0.005, 0.02, 0.1, 0.5, 1, 2, 5, 10, 20, 30, 60, 120)
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """What a server counts. Each server has its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._requests = Counter(
            "opentinker_http_requests",
            "Requests that were answered.",
            ["method", "route", "status"],
            registry=self.registry,
        )
        self._seconds = Histogram(
            "opentinker_http_request_seconds",
            "Time until a request was answered; long polls included.",
            ["route"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._open = Gauge(
            "opentinker_http_requests_open", "Requests that are being answered.", registry=self.registry
        )

    def began(self) -> None:
        """A request came."""
        self._open.inc()

    def ended(self, method: str, route: str, status: int, seconds: float) -> None:
        """A request was answered, or its client left."""
        self._open.dec()
        known = method if method in ("GET", "POST", "PUT", "DELETE") else "other"
        self._requests.labels(known, route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def gauge(self, name: str, meaning: str, value: Callable[[], float]) -> None:
        """Show what `value` gives whenever the metrics are read."""
        Gauge(f"opentinker_{name}", meaning, registry=self.registry).set_function(value)

    def watch(self, engines: Engines) -> None:
        """Show what engines do."""
        self.registry.register(_EngineCollector(engines))

    def text(self) -> bytes:
        """All of it, as Prometheus reads it."""
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    """Reads the engines' statistics when the metrics are read; nothing is counted twice."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines

    def collect(self) -> Iterator[Metric]:
        waiting = GaugeMetricFamily(
            "opentinker_queue_depth", "Operations that wait for an engine.", labels=["model", "kind"]
        )
        running = GaugeMetricFamily(
            "opentinker_operations_running", "Operations that an engine runs.", labels=["model", "kind"]
        )
        ended = CounterMetricFamily(
            "opentinker_operations", "Operations that ended.", labels=["model", "kind", "outcome"]
        )
        batches = HistogramMetricFamily(
            "opentinker_fused_batch_size", "Operations that ran together.", labels=["model", "kind"]
        )
        tokens = CounterMetricFamily(
            "opentinker_tokens", "Tokens that went through a base model.", labels=["model", "kind"]
        )
        tiers = _Tiers()
        for model, statistics in self._engines().items():
            if statistics.residency is not None:
                tiers.add(model, statistics.residency)
            for kind, counts in statistics.kinds.items():
                labels = [model, kind.value]
                waiting.add_metric(labels, counts.waiting)
                running.add_metric(labels, counts.running)
                for outcome in ("done", "failed", "cancelled"):
                    ended.add_metric([*labels, outcome], getattr(counts, outcome))
                tokens.add_metric(labels, counts.tokens)
                batches.add_metric(labels, *_histogram(counts.batch_sizes))
        yield from (waiting, running, ended, tokens, batches, *tiers.families)


class _Tiers:
    """Metrics of where adapters and policies' states are."""

    def __init__(self) -> None:
        labels = ["model", "tier"]
        self._entries = GaugeMetricFamily(
            "opentinker_resident", "Adapters or states in a tier.", labels=labels
        )
        self._bytes = GaugeMetricFamily("opentinker_resident_bytes", "Memory that they take.", labels=labels)
        self._loads = CounterMetricFamily(
            "opentinker_residency_loads", "How often one was brought in.", labels=labels
        )
        self._evictions = CounterMetricFamily(
            "opentinker_residency_evictions", "How often one had to leave.", labels=labels
        )

    @property
    def families(self) -> tuple[Metric, ...]:
        return (self._entries, self._bytes, self._loads, self._evictions)

    def add(self, model: str, residency: Residency) -> None:
        for name in ("slots", "states", "snapshots"):
            tier: Tier = getattr(residency, name)
            self._entries.add_metric([model, name], tier.entries)
            self._bytes.add_metric([model, name], tier.bytes)
            self._loads.add_metric([model, name], tier.loads)
            self._evictions.add_metric([model, name], tier.evictions)


def _histogram(sizes: Mapping[int, int]) -> tuple[list[tuple[str, float]], float]:
    """Cumulated buckets and the sum of what was counted by size."""
    edges = [
        (str(float(edge)), float(sum(n for size, n in sizes.items() if size <= edge))) for edge in _BATCHES
    ]
    return [*edges, ("+Inf", float(sum(sizes.values())))], float(sum(size * n for size, n in sizes.items()))
