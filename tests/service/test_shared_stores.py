"""Servers of several machines over one PostgreSQL and one S3: what one saved the other serves."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import tinker
from tinker import types

from tests.servers import S3_CREDENTIALS, new_bucket, postgres_binaries, postgres_server, s3_server
from tests.service.live import Live, serving
from tests.service.test_training_sdk import loss

pytestmark = pytest.mark.servers

_PROMPT = types.ModelInput.from_ints([1, 2, 3])
_GREEDY = types.SamplingParams(max_tokens=4, temperature=0.0)


@pytest.fixture(scope="module")
def stores() -> Iterator[dict[str, str]]:
    """Variables of the environment that name a database and a bucket, both empty."""
    binaries = postgres_binaries()
    if binaries is None:
        pytest.skip("PostgreSQL's server programs (initdb, pg_ctl) are not installed")
    with postgres_server(binaries) as url, s3_server() as endpoint:
        bucket = new_bucket(endpoint)
        yield {
            **S3_CREDENTIALS,
            "OPENTINKER_CATALOG_URL": url,
            "OPENTINKER_SNAPSHOT_URI": f"s3://{bucket}/snapshots",
            "OPENTINKER_S3_ENDPOINT_URL": endpoint,
        }


@pytest.fixture
def machines(
    stores: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Live, Live]]:
    """Two servers, the second of which starts when the first one is at work."""
    for name, value in stores.items():
        monkeypatch.setenv(name, value)
    with serving(tmp_path / "one") as one:
        at_work = one.client("acme").create_lora_training_client("tiny", rank=4, seed=7).result()
        loss(at_work)
        with serving(tmp_path / "other") as other:
            assert loss(at_work) > 0, "the other one's start took nothing from the first"
            yield one, other


def _greedy(client: tinker.ServiceClient, path: str) -> list[int]:
    sampler = client.create_sampling_client(model_path=path).result()
    return list(sampler.sample(_PROMPT, 1, _GREEDY).result().sequences[0].tokens)


def test_what_one_saved_the_other_serves_and_trains_on(machines: tuple[Live, Live]) -> None:
    clients = [machine.client("acme") for machine in machines]
    first = clients[0].create_lora_training_client("tiny", rank=4, seed=3).result()
    loss(first)
    state = first.save_state("here").result().path
    weights = first.save_weights_for_sampler("here").result().path
    again = clients[1].create_training_client_from_state_with_optimizer(state).result()
    assert [loss(again) for _ in range(3)] == pytest.approx([loss(first) for _ in range(3)], abs=1e-6)
    assert _greedy(clients[1], weights) == _greedy(clients[0], weights)


def test_a_key_works_at_both_and_a_session_at_its_own(machines: tuple[Live, Live]) -> None:
    one, other = machines
    headers = {"X-API-Key": one.key("acme")}
    body = {"sdk_version": "0.38.0", "tags": [], "user_metadata": None, "type": "create_session"}
    made = httpx.post(f"{one.url}/api/v1/create_session", json=body, headers=headers).raise_for_status()
    beat = {"session_id": made.json()["session_id"], "type": "session_heartbeat"}
    assert httpx.post(f"{one.url}/api/v1/session_heartbeat", json=beat, headers=headers).status_code == 200
    away = httpx.post(f"{other.url}/api/v1/session_heartbeat", json=beat, headers=headers)
    assert away.status_code == 410
    assert "another server" in away.text
