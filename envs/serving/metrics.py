"""What a server counts, in Prometheus' format; nobody who calls is named in it."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.001, 0.005, 0.02, 0.1, 0.5, 1, 5, 20, 60, 300)


class Metrics:
    """Each server has its own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._opened = Counter("opentinker_env_sessions_opened", "Sessions begun.", registry=self._registry)
        self._ended = Counter(
            "opentinker_env_sessions_ended", "Sessions ended.", ["reason"], registry=self._registry
        )
        self._calls = Histogram(
            "opentinker_env_call_seconds",
            "Time until a call was answered, waiting for its shard included.",
            ["do"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._errors = Counter("opentinker_env_errors", "Errors answered.", ["code"], registry=self._registry)
        self._restarts = Counter(
            "opentinker_env_shard_restarts", "Shards that were replaced.", registry=self._registry
        )

    def gauge(self, name: str, meaning: str, value: Callable[[], float]) -> None:
        """Show what `value` gives whenever the metrics are read."""
        Gauge(f"opentinker_env_{name}", meaning, registry=self._registry).set_function(value)

    def opened(self) -> None:
        """A session began."""
        self._opened.inc()

    def ended(self, reason: str) -> None:
        """A session ended."""
        self._ended.labels(reason).inc()

    def called(self, do: str, seconds: float) -> None:
        """A call was answered, whatever the answer."""
        self._calls.labels(do).observe(seconds)

    def refused(self, code: str) -> None:
        """An error was answered."""
        self._errors.labels(code).inc()

    def restarted(self) -> None:
        """A shard was replaced."""
        self._restarts.inc()

    def text(self) -> bytes:
        """All of it, as Prometheus reads it."""
        return generate_latest(self._registry)
