"""Prometheus metrics: what was asked for, what the engine did, where adapters are."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import tinker
from prometheus_client.parser import text_string_to_metric_families

from opentinker_core.runtime.operations import Kind
from opentinker_core.runtime.residency_statistics import Residency, Tier
from opentinker_core.runtime.scheduler_statistics import KindStatistics, Statistics
from opentinker_core.service.metrics import Metrics
from opentinker_core.service.principal import Role
from tests.service.live import Live, serving

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def _samples(text: str) -> Samples:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def _value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, frozenset(labels.items())]


def test_statistics_become_metrics() -> None:
    metrics = Metrics()
    counts = KindStatistics(3, 2, 7, 1, 4, {1: 5, 3: 2, 300: 1}, tokens=900)
    idle = KindStatistics(0, 0, 0, 0, 0, {})
    kinds = {kind: counts if kind is Kind.FORWARD_BACKWARD else idle for kind in Kind}
    residency = Residency(Tier(1, 0, 5, 4), Tier(2, 100, 6, 3), Tier(3, 200, 7, 2))
    metrics.watch(lambda: {"tiny": Statistics(kinds, residency)})
    samples = _samples(metrics.text().decode())
    here = {"model": "tiny", "kind": "forward_backward"}
    assert _value(samples, "opentinker_queue_depth", **here) == 3
    assert _value(samples, "opentinker_operations_running", **here) == 2
    assert _value(samples, "opentinker_operations_total", **here, outcome="cancelled") == 4
    assert _value(samples, "opentinker_tokens_total", **here) == 900
    buckets = {le: _value(samples, "opentinker_fused_batch_size_bucket", **here, le=le) for le in _EDGES}
    assert buckets == {"1.0": 5, "2.0": 5, "4.0": 7, "256.0": 7, "+Inf": 8}
    assert _value(samples, "opentinker_fused_batch_size_sum", **here) == 5 + 6 + 300
    assert _value(samples, "opentinker_resident_bytes", model="tiny", tier="snapshots") == 200
    assert _value(samples, "opentinker_residency_evictions_total", model="tiny", tier="slots") == 4


_EDGES = ("1.0", "2.0", "4.0", "256.0", "+Inf")


@pytest.fixture(scope="module")
def trained(live: Live) -> Live:
    """A server on which somebody trained."""
    client = live.client("secret-tenant")
    training = client.create_lora_training_client(base_model="tiny", rank=4).result()
    datum = tinker.Datum(
        model_input=tinker.ModelInput.from_ints([1, 2, 3]),
        loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]},
    )
    for _ in range(2):
        training.forward_backward([datum], "cross_entropy").result()
        training.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
    return live


def test_training_shows_in_the_metrics(trained: Live) -> None:
    samples = _samples(httpx.get(f"{trained.url}/metrics").text)
    model = {"model": "tiny"}
    assert _value(samples, "opentinker_operations_total", **model, kind="optim_step", outcome="done") == 2
    assert _value(samples, "opentinker_tokens_total", **model, kind="forward_backward") >= 6
    assert _value(samples, "opentinker_resident", **model, tier="states") == 1
    assert _value(samples, "opentinker_resident_bytes", **model, tier="states") > 0
    assert _value(samples, "opentinker_resident", **model, tier="slots") == 1
    path = "/api/v1/optim_step"
    assert _value(samples, "opentinker_http_requests_total", method="POST", route=path, status="200") == 2
    assert _value(samples, "opentinker_http_request_seconds_count", route=path) == 2


def test_no_tenant_is_named_in_the_metrics(trained: Live) -> None:
    assert "secret" not in httpx.get(f"{trained.url}/metrics").text


def test_what_clients_make_up_adds_no_series(live: Live) -> None:
    before = len(_samples(httpx.get(f"{live.url}/metrics").text))
    headers = {"X-API-Key": live.key()}
    for number in range(20):
        httpx.request(f"M{number}", f"{live.url}/p{number}", headers=headers)
    after = len(_samples(httpx.get(f"{live.url}/metrics").text))
    assert after - before <= 40


@pytest.fixture(params=["keyed", "off"])
def closed(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Live]]:
    with serving(tmp_path, metrics=request.param) as live:
        yield request.param, live


def test_metrics_may_need_an_admins_key_or_be_off(closed: tuple[str, Live]) -> None:
    access, live = closed
    assert httpx.get(f"{live.url}/metrics").status_code == 401
    for role in Role:
        answer = httpx.get(f"{live.url}/metrics", headers={"X-API-Key": live.key(role=role)})
        assert answer.status_code == (200 if (access, role) == ("keyed", Role.ADMIN) else 404)
