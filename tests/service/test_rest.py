"""The official RestClient against a live server: runs, checkpoints and sessions, listed, kept, deleted."""

import io
import re
import tarfile
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker
from tinker import types

from opentinker_core.service.types import CheckpointKind
from tests.service.live import Live
from tests.service.raw import Raw
from tests.service.test_training_sdk import loss


class Tenant:
    """A tenant with a trained model, two checkpoints of it and two samplers."""

    def __init__(self, live: Live, name: str) -> None:
        self.name, self.key = name, live.key(name)
        self.client = tinker.ServiceClient(base_url=live.url, api_key=self.key, user_metadata={"who": name})
        self.rest = tinker.RestClient(base_url=live.url, api_key=self.key)
        self.training = self.client.create_lora_training_client(
            "tiny", rank=4, seed=7, user_metadata={"renderer_name": "qwen3", "policy": "adder"}
        ).result(60)
        loss(self.training)
        self.weights = self.training.save_state("one").result(60).path
        loss(self.training)
        self.sampler = self.training.save_weights_for_sampler("two").result(60).path
        self.run = self.training.model_id


@pytest.fixture(scope="module")
def ada(live: Live) -> Tenant:
    return Tenant(live, "ada")


def timeless(answer: Any) -> str:
    """An answer of the SDK but for when runs were last used, which is noted some seconds later."""
    return re.sub(r'"last_request_time":"[^"]*"', "", answer.model_dump_json())


def snapshots(live: Live, tenant: str) -> set[str]:
    """The folders of snapshots that are there."""
    root = Path(live.service.settings.home) / "snapshots" / tenant
    return {str(path.parent.relative_to(root)) for path in root.rglob("manifest.json")}


def test_a_training_run_tells_what_it_is_and_its_last_checkpoints(ada: Tenant) -> None:
    run = ada.rest.get_training_run(ada.run).result(60)
    assert (run.base_model, run.is_lora, run.lora_rank, run.model_owner) == ("tiny", True, 4, "ada")
    assert run.user_metadata == {"renderer_name": "qwen3", "policy": "adder"}
    assert run.last_checkpoint is not None
    assert run.last_checkpoint.tinker_path == ada.weights
    assert run.last_sampler_checkpoint is not None
    assert run.last_sampler_checkpoint.tinker_path == ada.sampler
    assert timeless(ada.rest.get_training_run_by_tinker_path(ada.sampler).result(60)) == timeless(run)
    listed = ada.rest.list_training_runs().result(60)
    assert [timeless(one) for one in listed.training_runs] == [timeless(run)]
    assert listed.cursor.total_count == 1


def test_the_policy_has_the_name_that_was_asked_for_and_is_in_the_catalog(live: Live, ada: Tenant) -> None:
    versions = live.service.catalog("ada").versions("adder")
    assert [(one.step, one.phase, one.checkpoint is not None) for one in versions][:2] == [
        (1, "sft", True),
        (2, "sft", False),
    ]
    assert versions[1].parent == versions[0].ref
    assert versions[1].metrics["loss"] > 0


def test_weights_info_is_what_a_client_needs_to_go_on(ada: Tenant) -> None:
    info = ada.rest.get_weights_info_by_tinker_path(ada.weights).result(60)
    assert (info.base_model, info.is_lora, info.lora_rank) == ("tiny", True, 4)
    assert (info.train_attn, info.train_mlp, info.train_unembed) == (True, True, True)


def test_checkpoints_are_listed_the_newest_first(ada: Tenant) -> None:
    found = ada.rest.list_checkpoints(ada.run).result(60).checkpoints
    assert [(one.checkpoint_id, one.checkpoint_type) for one in found] == [
        ("sampler_weights/two", "sampler"),
        ("weights/one", "training"),
    ]
    assert all(one.size_bytes and one.size_bytes > 1000 for one in found)
    page = ada.rest.list_user_checkpoints(limit=1, offset=1).result(60)
    assert [one.tinker_path for one in page.checkpoints] == [ada.weights]
    assert page.cursor is not None
    assert page.cursor.total_count == 2


def test_a_checkpoint_expires_when_its_time_is_over(live: Live, ada: Tenant) -> None:
    path = ada.training.save_state("brief", ttl_seconds=3600).result(60).path
    (brief, *_) = ada.rest.list_checkpoints(ada.run).result(60).checkpoints
    assert brief.expires_at is not None
    assert timedelta(minutes=59) < brief.expires_at - datetime.now(UTC) < timedelta(minutes=61)
    ada.rest.set_checkpoint_ttl_from_tinker_path(path, None).result(60)
    assert ada.rest.list_checkpoints(ada.run).result(60).checkpoints[0].expires_at is None
    with pytest.raises(tinker.APIStatusError, match="ttl_seconds"):
        ada.rest.set_checkpoint_ttl_from_tinker_path(path, 1).result(60)
    over = datetime.now(UTC) - timedelta(seconds=1)
    live.service.records.set_expiry("ada", ada.run, CheckpointKind.WEIGHTS, "brief", over)
    with pytest.raises(tinker.NotFoundError):
        ada.rest.get_weights_info_by_tinker_path(path).result(60)
    deadline = time.monotonic() + 20
    while live.service.records.find_checkpoint("ada", ada.run, CheckpointKind.WEIGHTS, "brief"):
        assert time.monotonic() < deadline, "the sweep should have deleted it"
        time.sleep(0.1)


def test_deleting_removes_the_files_that_nobody_else_needs(live: Live, ada: Tenant) -> None:
    before = snapshots(live, "ada")
    loss(ada.training)
    first = ada.training.save_state("twin-a").result(60).path
    second = ada.training.save_state("twin-b").result(60).path
    made = snapshots(live, "ada") - before
    assert len(made) == 2, "one version: weights and checkpoint"
    ada.rest.delete_checkpoint_from_tinker_path(first).result(60)
    assert snapshots(live, "ada") - before == made, "the twin needs them"
    assert ada.client.create_training_client_from_state_with_optimizer(second).result(60)
    before_second = snapshots(live, "ada")
    ada.rest.delete_checkpoint_from_tinker_path(second).result(60)
    gone = before_second - snapshots(live, "ada")
    assert [path.rpartition("/")[2] for path in gone] == ["checkpoint"]
    with pytest.raises(tinker.NotFoundError):
        ada.client.create_training_client_from_state_with_optimizer(second).result(60)
    again = ada.training.save_state("twin-a").result(60).path
    assert ada.client.create_training_client_from_state_with_optimizer(again).result(60)
    with pytest.raises(tinker.NotFoundError):
        ada.rest.delete_checkpoint_from_tinker_path(second).result(60)


def test_weights_of_a_sampler_go_with_its_session(live: Live) -> None:
    raw = Raw(live.url, live.key("gone"))
    session = raw.session()
    model = raw.model(session)
    for seq in (1, 3):
        raw.result(raw.step(model, seq).json()["request_id"])
        saved = raw.ok(
            "save_weights_for_sampler", model_id=model, seq_id=seq + 1, sampling_session_seq_id=seq
        )
        assert raw.result(saved["request_id"])["sampling_session_id"] == f"{session}:sample:{seq}"
    assert len(snapshots(live, "gone")) == 2
    assert raw.post(f"sessions/{session}/finish", reason={"type": "success"}).status_code == 204
    (left,) = snapshots(live, "gone")
    policy = live.service.records.model("gone", model).policy_name
    assert left.endswith(f"v{live.service.catalog('gone').version(policy).number:06d}/sampler"), "the latest"
    assert live.service.records.stored_bytes("gone") > 0


def test_an_archive_is_a_peft_directory(live: Live, ada: Tenant) -> None:
    url = f"{live.url}/api/v1/training_runs/{ada.run}/checkpoints/sampler_weights/two/archive"
    answer = httpx.get(url, headers={"X-API-Key": ada.key})
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as archive:
        names = set(archive.getnames())
    assert {"adapter_config.json", "adapter_model.safetensors"} <= names


def test_a_copy_is_a_run_of_its_own_that_outlives_the_original(ada: Tenant) -> None:
    loss(ada.training)
    path = ada.training.save_state("original").result(60).path
    copy = ada.rest.copy_weights(path, "archive", ttl_seconds=7200).result(60)
    assert copy != path
    ada.rest.delete_checkpoint_from_tinker_path(path).result(60)
    resumed = ada.client.create_training_client_from_state_with_optimizer(copy).result(60)
    assert loss(resumed) > 0
    run = ada.rest.get_training_run_by_tinker_path(copy).result(60)
    found = ada.rest.list_training_runs(project_id="archive").result(60).training_runs
    assert [one.training_run_id for one in found] == [run.training_run_id]


def test_nothing_is_made_public(ada: Tenant) -> None:
    with pytest.raises(tinker.APIStatusError, match="cannot be made public"):
        ada.rest.publish_checkpoint_from_tinker_path(ada.weights).result(60)
    ada.rest.unpublish_checkpoint_from_tinker_path(ada.weights).result(60)


def test_sessions_are_searched(live: Live) -> None:
    raw = Raw(live.url, live.key("searching"))
    made = [
        raw.ok(
            "create_session",
            tags=[],
            user_metadata={"kind": str(i % 2)},
            sdk_version="0.38.0",
            display_name=f"Run {i}",
        )["session_id"]
        for i in range(5)
    ]
    raw.post(f"sessions/{made[0]}/finish", reason={"type": "errored"})
    rest = tinker.RestClient(base_url=live.url, api_key=raw.http.headers["X-API-Key"])

    def search(**query: object) -> list[str]:
        found, cursor = [], None
        while True:
            page = rest.search_sessions(types.SessionSearchRequest(**query, limit=2, cursor=cursor)).result(
                60
            )
            found += [one.session_id for one in page.sessions]
            if (cursor := page.next_cursor) is None:
                return found

    own = set(rest.list_sessions(limit=100).result(60).sessions) - set(made)
    assert [one for one in search() if one not in own] == made[::-1]
    assert search(user_metadata={"kind": "1"}) == [made[3], made[1]]
    assert search(display_name="run 4") == [made[4]]
    finished = {"type": "client_finished", "reasons": ["errored"]}
    assert search(statuses=[finished]) == [made[0]]


def test_what_is_not_served_says_so_at_once(ada: Tenant) -> None:
    with pytest.raises(tinker.APIStatusError, match="trace_export"):
        ada.rest.export_session_trace(ada.run.partition(":")[0]).result(60)
