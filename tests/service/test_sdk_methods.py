"""Every public method of the official SDK's four clients: which test calls it against a live server.

`TABLE` names a test for each; one that the SDK adds is missed there, and a name that does not call it is
seen. What other modules do not call is called here. What is not served has a test of its typed refusal.
"""

import asyncio
import importlib
import inspect
import logging
from collections.abc import Coroutine
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest
import tinker
import torch
from tinker import types
from tinker.lib.api_future_impl import QueueState
from tinker.types.billing_usage_response import CheckpointBillingEvent

from opentinker_core.service.principal import Role
from opentinker_core.service.types import SessionStatus
from tests.service.live import Live
from tests.service.policies import PROMPT
from tests.service.test_rest import timeless
from tests.service.test_training_sdk import TOKENS, datum
from tests.waiting import wait_until

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning"
)  # most of the `_async` methods are deprecated
Result = TypeVar("Result")

_HERE, _TRAIN, _SAMPLE, _REST = "test_sdk_methods", "test_training_sdk", "test_sampling_sdk", "test_rest"
_VALUES, _EXTERNAL = "test_sdk_values", "test_sdk_external"
_LOOP = f"{_HERE}.test_training_by_async_methods_gives_the_same"
_READ = f"{_HERE}.test_async_readers_answer_as_the_others"
_CHANGE = f"{_HERE}.test_async_changes_are_those_of_the_others"
_REFUSED = f"{_HERE}.test_what_is_refused_says_so"
_LOCAL = f"{_HERE}.test_clients_know_their_addresses_and_no_telemetry"

TABLE: dict[type, dict[str, str]] = {
    tinker.ServiceClient: {
        "close": f"{_HERE}.test_closing_a_client_ends_its_session",
        "copy_weights": f"{_HERE}.test_a_service_client_copies_weights_into_its_project",
        "create_custom_loss": f"{_HERE}.test_a_traced_loss_is_computed_by_the_client",
        "create_lora_training_client": f"{_TRAIN}.test_the_seed_and_the_layers_are_as_asked_for",
        "create_lora_training_client_async": _LOOP,
        "create_rest_client": f"{_SAMPLE}.test_a_saved_sampler_stays_as_it_is_while_training_goes_on",
        "create_sampling_client": f"{_SAMPLE}.test_a_sampler_needs_one_known_model",
        "create_sampling_client_async": _LOOP,
        "create_training_client_from_state": (
            f"{_TRAIN}.test_a_saved_state_is_gone_on_from_to_the_same_losses"
        ),
        "create_training_client_from_state_async": _LOOP,
        "create_training_client_from_state_with_optimizer": (
            f"{_TRAIN}.test_a_saved_state_is_gone_on_from_to_the_same_losses"
        ),
        "create_training_client_from_state_with_optimizer_async": _LOOP,
        "get_console_url": _LOCAL,
        "get_server_capabilities": f"{_HERE}.test_capabilities_are_the_base_models",
        "get_server_capabilities_async": f"{_HERE}.test_capabilities_are_the_base_models",
        "get_telemetry": _LOCAL,
        "holder": f"{_HERE}.test_a_sampling_client_is_made_from_a_holder_or_a_handle",
    },
    tinker.TrainingClient: {
        "create_sampling_client": f"{_VALUES}.assert_same_samples",
        "create_sampling_client_async": _LOOP,
        "forward": f"{_VALUES}.check",
        "forward_async": _LOOP,
        "forward_backward": f"{_VALUES}.check",
        "forward_backward_async": _LOOP,
        "forward_backward_custom": f"{_VALUES}.test_a_custom_loss",
        "forward_backward_custom_async": _LOOP,
        "get_console_url": _LOCAL,
        "get_info": f"{_TRAIN}.test_info_tells_the_model",
        "get_info_async": _LOOP,
        "get_telemetry": _LOCAL,
        "get_tokenizer": f"{_TRAIN}.test_info_tells_the_model",
        "load_state": f"{_VALUES}.Policy",
        "load_state_async": _LOOP,
        "load_state_with_optimizer": f"{_TRAIN}.test_a_saved_state_is_gone_on_from_to_the_same_losses",
        "load_state_with_optimizer_async": _LOOP,
        "optim_step": f"{_VALUES}.test_three_steps_are_adamws",
        "optim_step_async": _LOOP,
        "save_state": f"{_TRAIN}.test_a_saved_state_is_gone_on_from_to_the_same_losses",
        "save_state_async": _LOOP,
        "save_weights_and_get_sampling_client": "test_sdk_inflight.inflight",
        "save_weights_and_get_sampling_client_async": _LOOP,
        "save_weights_external": f"{_EXTERNAL}.test_it_is_managed_as_any_checkpoint",
        "save_weights_external_async": _LOOP,
        "save_weights_for_sampler": f"{_TRAIN}.test_sampler_weights_have_a_path_or_a_sampler_of_their_own",
        "save_weights_for_sampler_async": _LOOP,
    },
    tinker.SamplingClient: {
        "compute_logprobs": f"{_VALUES}.assert_same_samples",
        "compute_logprobs_async": _LOOP,
        "create": f"{_HERE}.test_a_sampling_client_is_made_from_a_holder_or_a_handle",
        "from_sampler_handle": f"{_HERE}.test_a_sampling_client_is_made_from_a_holder_or_a_handle",
        "get_base_model": f"{_HERE}.test_a_sampling_client_is_made_from_a_holder_or_a_handle",
        "get_base_model_async": f"{_HERE}.test_a_sampling_client_is_made_from_a_holder_or_a_handle",
        "get_sampler_handle": f"{_HERE}.test_a_sampling_client_is_made_from_a_holder_or_a_handle",
        "get_telemetry": _LOCAL,
        "get_tokenizer": f"{_HERE}.test_a_sampling_client_finds_the_tokenizer_by_the_base_models_name",
        "on_queue_state_change": f"{_HERE}.test_a_pause_would_be_logged",
        "sample": f"{_VALUES}.assert_same_samples",
        "sample_async": _LOOP,
    },
    tinker.RestClient: {
        "assign_session_project": f"{_HERE}.test_a_session_is_assigned_to_a_project",
        "assign_session_project_async": _CHANGE,
        "copy_weights": f"{_REST}.test_a_copy_is_a_run_of_its_own_that_outlives_the_original",
        "copy_weights_async": _CHANGE,
        "delete_checkpoint": _CHANGE,
        "delete_checkpoint_async": _CHANGE,
        "delete_checkpoint_from_tinker_path": (
            f"{_REST}.test_deleting_removes_the_files_that_nobody_else_needs"
        ),
        "delete_checkpoint_from_tinker_path_async": _CHANGE,
        "export_session_trace": _REFUSED,
        "export_session_trace_async": _REFUSED,
        "get_audit_log": f"{_HERE}.test_the_audit_log_tells_what_was_done_on_a_day",
        "get_audit_log_async": f"{_HERE}.test_the_audit_log_tells_what_was_done_on_a_day",
        "get_billing_usage": f"{_HERE}.test_tokens_and_checkpoints_are_counted_by_the_hour",
        "get_billing_usage_async": f"{_HERE}.test_tokens_and_checkpoints_are_counted_by_the_hour",
        "get_current_checkpoint_storage_usage": f"{_HERE}.test_storage_is_told_by_project",
        "get_current_checkpoint_storage_usage_async": f"{_HERE}.test_storage_is_told_by_project",
        "get_external_weights_urls": f"{_EXTERNAL}.test_its_files_are_a_peft_directory_that_needs_no_key",
        "get_external_weights_urls_async": _READ,
        "get_sampler": f"{_SAMPLE}.test_a_saved_sampler_stays_as_it_is_while_training_goes_on",
        "get_sampler_async": _READ,
        "get_server_capabilities": f"{_HERE}.test_capabilities_are_the_base_models",
        "get_session": f"{_HERE}.test_a_session_tells_what_was_made_in_it",
        "get_session_async": _READ,
        "get_telemetry": _LOCAL,
        "get_training_run": f"{_REST}.test_a_training_run_tells_what_it_is_and_its_last_checkpoints",
        "get_training_run_async": _READ,
        "get_training_run_by_tinker_path": (
            f"{_REST}.test_a_training_run_tells_what_it_is_and_its_last_checkpoints"
        ),
        "get_training_run_by_tinker_path_async": _READ,
        "get_weights_info_by_tinker_path": f"{_REST}.test_weights_info_is_what_a_client_needs_to_go_on",
        "list_checkpoints": f"{_REST}.test_checkpoints_are_listed_the_newest_first",
        "list_checkpoints_async": _READ,
        "list_sessions": f"{_REST}.test_sessions_are_searched",
        "list_sessions_async": _READ,
        "list_training_runs": f"{_REST}.test_a_training_run_tells_what_it_is_and_its_last_checkpoints",
        "list_training_runs_async": _READ,
        "list_user_checkpoints": f"{_REST}.test_checkpoints_are_listed_the_newest_first",
        "list_user_checkpoints_async": _READ,
        "publish_checkpoint_from_tinker_path": f"{_REST}.test_nothing_is_made_public",
        "publish_checkpoint_from_tinker_path_async": _REFUSED,
        "search_sessions": f"{_REST}.test_sessions_are_searched",
        "set_checkpoint_ttl_from_tinker_path": f"{_REST}.test_a_checkpoint_expires_when_its_time_is_over",
        "set_checkpoint_ttl_from_tinker_path_async": _CHANGE,
        "unpublish_checkpoint_from_tinker_path": f"{_REST}.test_nothing_is_made_public",
        "unpublish_checkpoint_from_tinker_path_async": _CHANGE,
        "whoami": _REFUSED,
    },
}
"""Client → method → what calls it, `module.function` or, where several tests share it, its helper."""

ALL = [(client, method) for client, methods in TABLE.items() for method in methods]


@pytest.mark.parametrize("client", TABLE, ids=lambda client: client.__name__)
def test_the_table_names_every_public_method(client: type) -> None:
    public = {name for name in dir(client) if not name.startswith("_")}
    assert public == set(TABLE[client])


@pytest.mark.parametrize(
    ("client", "method"), ALL, ids=[f"{client.__name__}.{method}" for client, method in ALL]
)
def test_what_the_table_names_calls_the_method(client: type, method: str) -> None:
    module, _, name = TABLE[client][method].partition(".")
    source = inspect.getsource(getattr(importlib.import_module(f"tests.service.{module}"), name))
    assert f".{method}" in source


class Tenant:
    """A tenant's clients, with a trained model and a checkpoint of each kind."""

    def __init__(self, live: Live, name: str) -> None:
        self.key = live.key(name)
        about = {"base_url": live.url, "api_key": self.key, "project_id": f"project-{name}"}
        self.client = tinker.ServiceClient(user_metadata={"who": name}, display_name="Of all", **about)
        self.rest = tinker.RestClient(base_url=live.url, api_key=self.key)
        self.training = self.client.create_lora_training_client("tiny", rank=4, seed=7).result(60)
        self.training.forward_backward([datum()], "cross_entropy").result(60)
        self.training.optim_step(types.AdamParams(learning_rate=1e-2)).result(60)
        self.weights = self.training.save_state("one").result(60).path
        self.external = self.training.save_weights_external("two").result(60).path
        sampler_weights = self.training.save_weights_for_sampler("three").result(60).path
        self.sampler = self.client.create_sampling_client(model_path=sampler_weights).result(60)
        self.run = self.training.model_id
        self.session = self.run.partition(":")[0]


@pytest.fixture(scope="module")
def tenant(live: Live) -> Tenant:
    return Tenant(live, "all-methods")


def run(call: Coroutine[Any, Any, Result]) -> Result:
    return asyncio.run(call)


# Training and sampling.


def likelihood(_: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    return -torch.cat(logprobs).sum(), {}


def test_training_by_async_methods_gives_the_same(live: Live) -> None:
    """The same calls once by each name, from the same seed: every number is the same."""
    client, data = live.client("loop"), [datum()]
    params, shape = types.AdamParams(learning_rate=1e-2), types.SamplingParams(max_tokens=6, seed=3)
    prompt = types.ModelInput.from_ints(PROMPT)

    def plain() -> list[Any]:
        training = client.create_lora_training_client("tiny", rank=4, seed=7).result(60)
        seen: list[Any] = [training.forward(data, "cross_entropy").result(60).metrics]
        seen.append(training.forward_backward(data, "cross_entropy").result(60).metrics)
        seen.append(training.optim_step(params).result(60).metrics)
        seen.append(training.forward_backward_custom(data, likelihood).result(60).metrics)
        seen.append(training.optim_step(params).result(60).metrics)
        path = training.save_state("kept").result(60).path
        training.load_state(path).result(60)
        training.load_state_with_optimizer(path).result(60)
        seen += [training.forward(data, "cross_entropy").result(60).metrics, training.get_info().lora_rank]
        first = training.create_sampling_client(
            training.save_weights_for_sampler("s").result(60).path
        ).result(60)
        second = training.save_weights_and_get_sampling_client().result(60)
        third = client.create_sampling_client(base_model="tiny").result(60)
        for sampler in (first, second, third):
            seen.append(sampler.sample(prompt, 3, shape).result(60).sequences)
            seen.append(sampler.compute_logprobs(prompt).result(60))
        training.save_weights_external("away").result(60)
        again = client.create_training_client_from_state(path).result(60)
        resumed = client.create_training_client_from_state_with_optimizer(path).result(60)
        return [*seen, again.get_info().model_data, resumed.get_info().model_data]

    async def other() -> list[Any]:
        training = await client.create_lora_training_client_async("tiny", rank=4, seed=7)
        seen: list[Any] = [(await (await training.forward_async(data, "cross_entropy"))).metrics]
        seen.append((await (await training.forward_backward_async(data, "cross_entropy"))).metrics)
        seen.append((await (await training.optim_step_async(params))).metrics)
        seen.append((await (await training.forward_backward_custom_async(data, likelihood))).metrics)
        seen.append((await (await training.optim_step_async(params))).metrics)
        path = (await (await training.save_state_async("kept"))).path
        await (await training.load_state_async(path))
        await (await training.load_state_with_optimizer_async(path))
        seen.append((await (await training.forward_async(data, "cross_entropy"))).metrics)
        seen.append((await training.get_info_async()).lora_rank)
        saved = await (await training.save_weights_for_sampler_async("s"))
        first = await training.create_sampling_client_async(saved.path)
        second = await training.save_weights_and_get_sampling_client_async()
        third = await client.create_sampling_client_async(base_model="tiny")
        for sampler in (first, second, third):
            seen.append((await sampler.sample_async(prompt, 3, shape)).sequences)
            seen.append(await sampler.compute_logprobs_async(prompt))
        await (await training.save_weights_external_async("away"))
        again = await client.create_training_client_from_state_async(path)
        resumed = await client.create_training_client_from_state_with_optimizer_async(path)
        return [*seen, again.get_info().model_data, resumed.get_info().model_data]

    for one, same in zip(plain(), run(other()), strict=True):
        assert repr(_nameless(one)) == repr(_nameless(same))


def _nameless(seen: Any) -> Any:
    """Without the ids of sampled sequences, which are of the request."""
    if isinstance(seen, list) and seen and hasattr(seen[0], "tokens"):
        return [(one.tokens, one.stop_reason, one.logprobs_np.tolist()) for one in seen]
    return seen


def test_a_traced_loss_is_computed_by_the_client(live: Live) -> None:
    def neg_ll(logprobs: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = -(logprobs * weights).sum()
        return loss, {"custom/neg_ll:sum": loss}

    client, data = live.client("traced"), [datum(), datum(TOKENS[::-1], weight=-0.5)]
    training = client.create_lora_training_client("tiny", rank=4, seed=7).result(60)
    still = types.AdamParams(learning_rate=0.0)
    named = training.forward_backward(data, "cross_entropy").result(60)
    norm = (training.optim_step(still).result(60).metrics or {})["grad_norm"]
    handle = client.create_custom_loss(neg_ll, input_ranks={"logprobs": 1, "weights": 1}).result(60)
    traced = training.forward_backward_custom(data, handle).result(60)
    assert traced.metrics["custom/neg_ll:sum"] == pytest.approx(named.metrics["loss:sum"], rel=1e-5)
    assert (training.optim_step(still).result(60).metrics or {})["grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_a_sampling_client_is_made_from_a_holder_or_a_handle(tenant: Tenant) -> None:
    base = tinker.SamplingClient.create(tenant.client.holder, base_model="tiny").result(60)
    copy = tinker.SamplingClient.from_sampler_handle(base.get_sampler_handle(), api_key=tenant.key)
    prompt, shape = types.ModelInput.from_ints(PROMPT), types.SamplingParams(max_tokens=6, seed=3)
    drawn = [one.sample(prompt, 2, shape).result(60).sequences for one in (base, copy, base)]
    assert len({tuple(one.tokens) for sequences in drawn for one in sequences[:1]}) == 1
    assert len({one.sequence_id for sequences in drawn for one in sequences}) == 6, "no request is another's"
    assert base.get_base_model() == copy.get_base_model() == run(base.get_base_model_async()) == "tiny"


def test_a_sampling_client_finds_the_tokenizer_by_the_base_models_name(
    live: Live, tenant: Tenant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name of the hub, or of a directory where the client runs: the server is not asked."""
    (tmp_path / "tiny").symlink_to(live.service.engine("tiny", "default").source.path)
    monkeypatch.chdir(tmp_path)
    assert tenant.sampler.get_tokenizer().decode(PROMPT) == "1+1="


def test_a_pause_would_be_logged(tenant: Tenant, caplog: pytest.LogCaptureFixture) -> None:
    """This server says that its queues are active, so that the SDK logs nothing."""
    logger = logging.getLogger("tinker.lib.public_interfaces.sampling_client")
    logger.addHandler(caplog.handler)
    tenant.sampler.on_queue_state_change(QueueState.ACTIVE, None)
    assert "paused" not in caplog.text
    tenant.sampler.on_queue_state_change(QueueState.PAUSED_CAPACITY, "busy")
    logger.removeHandler(caplog.handler)
    assert "Reason: busy" in caplog.text


# Sessions and what a tenant has.


def test_closing_a_client_ends_its_session(live: Live) -> None:
    client = live.client("closing")
    training = client.create_lora_training_client("tiny", rank=2).result(60)
    session = training.model_id.partition(":")[0]
    assert live.service.training.find("closing", training.model_id) is not None
    client.close("errored", "of no use").result(60)
    ended = live.service.records.session("closing", session)
    assert (ended.status, ended.detail) == (SessionStatus.FINISHED, "errored")
    assert live.service.training.find("closing", training.model_id) is None
    with pytest.raises(RuntimeError, match="closed"), client:
        pass


def test_clients_know_their_addresses_and_no_telemetry(tenant: Tenant) -> None:
    for client in (tenant.client, tenant.training, tenant.sampler, tenant.rest):
        assert client.get_telemetry() is None, "it is off in these tests"
    assert tenant.session in tenant.client.get_console_url()
    assert tenant.session in tenant.training.get_console_url()


def test_capabilities_are_the_base_models(tenant: Tenant) -> None:
    told = tenant.rest.get_server_capabilities().result(60)
    (model,) = told.supported_models
    assert (model.model_name, model.max_context_length, model.trainable, model.sampleable) == (
        "tiny",
        512,
        True,
        True,
    )
    assert tenant.client.get_server_capabilities() == told
    assert run(tenant.client.get_server_capabilities_async()) == told


def test_a_session_tells_what_was_made_in_it(tenant: Tenant) -> None:
    told = tenant.rest.get_session(tenant.session).result(60)
    assert tenant.run in told.training_run_ids
    assert tenant.sampler._sampling_session_id in told.sampler_ids
    assert (told.user_metadata, told.display_name) == ({"who": "all-methods"}, "Of all")


def test_async_readers_answer_as_the_others(tenant: Tenant) -> None:
    rest = tenant.rest
    sampler = tenant.sampler._sampling_session_id
    same = [
        (rest.get_session(tenant.session), rest.get_session_async(tenant.session)),
        (rest.list_sessions(), rest.list_sessions_async()),
        (rest.get_training_run(tenant.run), rest.get_training_run_async(tenant.run)),
        (
            rest.get_training_run_by_tinker_path(tenant.weights),
            rest.get_training_run_by_tinker_path_async(tenant.weights),
        ),
        (rest.list_training_runs(), rest.list_training_runs_async()),
        (rest.list_checkpoints(tenant.run), rest.list_checkpoints_async(tenant.run)),
        (rest.list_user_checkpoints(), rest.list_user_checkpoints_async()),
        (rest.get_sampler(sampler), rest.get_sampler_async(sampler)),
    ]
    for one, other in same:
        assert timeless(one.result(60)) == timeless(run(other))
    urls = rest.get_external_weights_urls(tenant.external).result(60).urls
    assert urls.keys() == run(rest.get_external_weights_urls_async(tenant.external)).urls.keys()


def test_a_session_is_assigned_to_a_project(live: Live) -> None:
    other = Tenant(live, "moving")
    assert other.rest.list_training_runs(project_id="elsewhere").result(60).training_runs == []
    other.rest.assign_session_project(other.session, "elsewhere").result(60)
    (moved,) = other.rest.list_training_runs(project_id="elsewhere").result(60).training_runs
    assert moved.training_run_id == other.run
    assert other.rest.list_training_runs(project_id="project-moving").result(60).training_runs == []


def test_a_service_client_copies_weights_into_its_project(live: Live, tenant: Tenant) -> None:
    archive = tinker.ServiceClient(base_url=live.url, api_key=tenant.key, project_id="the-archive")
    copy = archive.copy_weights(tenant.weights, ttl_seconds=7200).result(60)
    (copied,) = tenant.rest.list_training_runs(project_id="the-archive").result(60).training_runs
    assert copy == f"tinker://{copied.training_run_id}/weights/one"
    assert copied.last_checkpoint is not None
    assert copied.last_checkpoint.expires_at is not None


def test_async_changes_are_those_of_the_others(live: Live) -> None:
    other = Tenant(live, "changing")
    rest = other.rest

    def kept() -> dict[str, datetime | None]:
        found = rest.list_user_checkpoints().result(60).checkpoints
        return {one.tinker_path: one.expires_at for one in found}

    async def change() -> str:
        await rest.assign_session_project_async(other.session, "by-async")
        await rest.set_checkpoint_ttl_from_tinker_path_async(other.weights, 3600)
        await rest.unpublish_checkpoint_from_tinker_path_async(other.weights)
        return await rest.copy_weights_async(other.weights, "copies")

    before = kept()
    copy = run(change())
    assert kept().keys() == {*before, copy}
    assert kept()[other.weights] is not None
    assert rest.list_training_runs(project_id="by-async").result(60).training_runs
    rest.delete_checkpoint(other.run, "weights/one").result(60)
    run(rest.delete_checkpoint_async(other.run, "external_weights/two"))
    run(rest.delete_checkpoint_from_tinker_path_async(copy))
    assert kept().keys() == before.keys() - {other.weights, other.external}


def test_storage_is_told_by_project(live: Live) -> None:
    other = Tenant(live, "storing")
    other.rest.copy_weights(other.weights, "copies").result(60)
    sizes = [one.size_bytes for one in other.rest.list_user_checkpoints().result(60).checkpoints]
    told = other.rest.get_current_checkpoint_storage_usage().result(60)
    counts = {one.project_id: one.checkpoint_count for one in told.data}
    assert counts == {"copies": 1, "project-storing": 3}
    assert sum(one.size_bytes for one in told.data) == sum(filter(None, sizes))
    assert all(one.size_gigabytes == one.size_bytes / 1e9 for one in told.data)
    assert told.effective_rate_usd_per_gigabyte_month is None
    one = run(other.rest.get_current_checkpoint_storage_usage_async("copies"))
    assert one.data == [item for item in told.data if item.project_id == "copies"]


def test_tokens_and_checkpoints_are_counted_by_the_hour(live: Live) -> None:
    other = Tenant(live, "counting")
    prompt, shape = types.ModelInput.from_ints(PROMPT), types.SamplingParams(max_tokens=6, stop=[])
    other.training.forward([datum()], "cross_entropy").result(60)
    other.sampler.sample(prompt, 3, shape).result(60)
    begin = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) - timedelta(hours=1)
    end = begin + timedelta(hours=3)
    told = other.rest.get_billing_usage(begin, end).result(60)
    amounts: dict[str, int] = {}
    for event in told.data:  # of one hour, or of two
        assert (event.base_model, event.session_id) == ("tiny", other.session)
        assert (event.project_id, event.estimated_cost_usd) == ("project-counting", None)
        assert event.bucket_end - event.bucket_start == timedelta(hours=1)
        info = event.event_info
        amount = info.count if isinstance(info, CheckpointBillingEvent) else info.token_count
        amounts[info.type] = amounts.get(info.type, 0) + amount
    tokens = len(TOKENS) - 1
    assert amounts == {
        "training": 2 * tokens,
        "sampling_prefill": len(PROMPT),
        "sampling_sample": 18,
        "checkpoint": 3,
    }
    assert told.sessions[other.session].user_metadata == {"who": "counting"}
    assert run(other.rest.get_billing_usage_async(begin, end)) == told
    assert (
        other.rest.get_billing_usage(begin - timedelta(hours=2), begin - timedelta(hours=1)).result(60).data
        == []
    )
    for wrong, says in ((end, "starting_on"), (begin + timedelta(minutes=1), "full hour")):
        with pytest.raises(tinker.BadRequestError, match=says):
            other.rest.get_billing_usage(wrong, end).result(60)
    with pytest.raises(tinker.BadRequestError, match="14 days"):
        other.rest.get_billing_usage(begin, begin + timedelta(days=15)).result(60)


def test_the_audit_log_tells_what_was_done_on_a_day(live: Live) -> None:
    other = Tenant(live, "audited")
    other.rest.delete_checkpoint(other.run, "weights/one").result(60)

    def events(kind: Any = "all") -> list[str]:
        return [entry.event for entry in other.rest.get_audit_log(kind).result(60).entries]

    wait_until(lambda: "checkpoint_delete" in events())
    assert events("checkpoints") == ["checkpoint_create"] * 3 + ["checkpoint_delete"]
    assert events("teams") == []
    assert "POST /api/v1/optim_step" in events()
    first = other.rest.get_audit_log("checkpoints").result(60).entries[0]
    assert first.model_id == other.run
    assert (first.event_details["path"], first.event_details["status"]) == ("one", 200)
    long_ago = (datetime.now(UTC) - timedelta(days=400)).date()
    assert run(other.rest.get_audit_log_async(day=long_ago)).entries == []
    today = datetime.now(UTC).date()
    told = {entry.event for day in (today, today - timedelta(days=1)) for entry in _entries(other, day)}
    assert "checkpoint_delete" in told
    reader = tinker.RestClient(base_url=live.url, api_key=live.key("audited", Role.MEMBER))
    with pytest.raises(tinker.PermissionDeniedError, match="admin"):
        reader.get_audit_log().result(60)


def _entries(tenant: Tenant, day: Any) -> list[types.AuditLogEntry]:
    return run(tenant.rest.get_audit_log_async("checkpoints", day)).entries


def test_what_is_refused_says_so(tenant: Tenant) -> None:
    rest = tenant.rest
    with pytest.raises(tinker.BadRequestError, match="cannot be made public"):
        run(rest.publish_checkpoint_from_tinker_path_async(tenant.weights))
    with pytest.raises(tinker.BadRequestError, match="trace_export: not served"):
        rest.export_session_trace(tenant.session).result(60)
    with pytest.raises(tinker.BadRequestError, match="trace_export: not served"):
        run(rest.export_session_trace_async(tenant.session))
    with pytest.raises(RuntimeError, match="credential is a plain API key"):
        rest.whoami().result(60)
