"""External weights: the official SDK saves them, and whoever has a signed URL of theirs fetches a file."""

import json
from datetime import UTC, datetime, timedelta

import httpx
import pytest
import tinker
from safetensors.torch import load

from opentinker_core.policies.tables import utc_now
from opentinker_core.service.types import CheckpointKind
from tests.service.live import Live
from tests.service.policies import trained
from tests.service.test_training_sdk import loss


@pytest.fixture(scope="module")
def training(live: Live) -> tinker.TrainingClient:
    return trained(live, "taken")


@pytest.fixture(scope="module")
def rest(live: Live) -> tinker.RestClient:
    return tinker.RestClient(base_url=live.url, api_key=live.key())


@pytest.fixture(scope="module")
def path(training: tinker.TrainingClient) -> str:
    return training.save_weights_external("away").result(60).path


def test_its_files_are_a_peft_directory_that_needs_no_key(
    training: tinker.TrainingClient, rest: tinker.RestClient, path: str
) -> None:
    assert path == f"tinker://{training.model_id}/external_weights/away"
    given = rest.get_external_weights_urls(path).result(60)
    assert timedelta(minutes=59) < given.expires - datetime.now(UTC) <= timedelta(hours=1)
    assert set(given.urls) == {"adapter_config.json", "adapter_model.safetensors"}
    config, weights = (httpx.get(given.urls[name]).raise_for_status() for name in sorted(given.urls))
    assert json.loads(config.content)["r"] == 4
    tensors = load(weights.content)
    assert all(tensor.any() for tensor in tensors.values()), "both factors, as they are after a step"
    assert weights.headers["content-disposition"] == 'attachment; filename="adapter_model.safetensors"'


def test_it_is_managed_as_any_checkpoint(
    live: Live, training: tinker.TrainingClient, rest: tinker.RestClient
) -> None:
    saved = training.save_weights_external("brief", ttl_seconds=3600).result(60).path
    listed = {one.tinker_path: one for one in rest.list_checkpoints(training.model_id).result(60).checkpoints}
    assert listed[saved].checkpoint_type == "external"
    assert (listed[saved].size_bytes or 0) > 1000
    assert listed[saved].expires_at is not None
    rest.set_checkpoint_ttl_from_tinker_path(saved, None).result(60)
    urls = rest.get_external_weights_urls(saved).result(60).urls
    rest.delete_checkpoint_from_tinker_path(saved).result(60)
    with pytest.raises(tinker.NotFoundError):
        rest.get_external_weights_urls(saved).result(60)
    assert {httpx.get(url).status_code for url in urls.values()} == {404}
    assert live.service.records.find_checkpoint(
        "default", training.model_id, CheckpointKind.EXTERNAL_WEIGHTS, "away"
    )


def test_a_signature_is_of_one_path_of_one_tenant_until_it_expires(
    live: Live, rest: tinker.RestClient, path: str
) -> None:
    live.key("other")
    url = httpx.URL(rest.get_external_weights_urls(path).result(60).urls["adapter_config.json"])
    assert httpx.get(url).status_code == 200
    later = str(int(url.params["expires"]) + 1)
    others = [
        url.copy_with(path=url.path.replace("adapter_config.json", "adapter_model.safetensors")),
        url.copy_with(path=url.path.rpartition("/files/")[0] + "/archive"),
        url.copy_with(path="/api/v1/training_runs"),
        url.copy_set_param("tenant", "other"),
        url.copy_set_param("expires", later),
        url.copy_set_param("expires", "never"),
        url.copy_remove_param("sig"),
        url.copy_set_param("sig", "é" * 64),
    ]
    assert [httpx.get(one).status_code for one in others] == [401] * len(others)
    assert httpx.delete(url).status_code == 401
    over = live.app.state.signer.sign("default", url.path, utc_now() - timedelta(seconds=1))
    assert httpx.get(f"{live.url}{over}").status_code == 401
    elsewhere = live.app.state.signer.sign("other", url.path, utc_now() + timedelta(minutes=1))
    assert httpx.get(f"{live.url}{elsewhere}").status_code == 404


def test_a_key_opens_the_files_as_well(live: Live, path: str) -> None:
    run, _, name = path.removeprefix("tinker://").split("/")
    files = f"{live.url}/api/v1/training_runs/{run}/checkpoints/external_weights/{name}/files"
    with httpx.Client(headers={"X-API-Key": live.key()}) as client:
        assert client.get(f"{files}/adapter_config.json").status_code == 200
        absent = client.get(f"{files}/passwords")
        assert (absent.status_code, "accepted: adapter_config.json" in absent.text) == (404, True)
        assert client.get(f"{files}/..%2f..%2fmanifest.json").status_code == 404


def test_files_are_not_encrypted_and_the_refusal_consumes_its_number(training: tinker.TrainingClient) -> None:
    with pytest.raises(tinker.APIStatusError, match="age_encryption_recipients"):
        training.save_weights_external("secret", age_encryption_recipients=["age1abc"]).result(60)
    assert loss(training) > 0


def test_only_external_weights_have_such_urls(
    training: tinker.TrainingClient, rest: tinker.RestClient
) -> None:
    saved = training.save_weights_for_sampler("stays").result(60).path
    with pytest.raises(ValueError, match="external_weights"):
        rest.get_external_weights_urls(saved)
    external = training.save_weights_external("elsewhere").result(60).path
    with pytest.raises(tinker.RequestFailedError, match="holds no training state"):
        training.load_state(external).result(60)
