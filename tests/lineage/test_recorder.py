"""What events become in MLflow (real SQLite), and that delivering them again changes nothing."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from opentinker_core.errors import OpenTinkerError
from opentinker_core.lineage.errors import MirrorOutageError
from opentinker_core.lineage.outbox import OutboxDispatcher
from opentinker_core.lineage.recorder import MLflowRecorder
from opentinker_core.lineage.report import report_schema
from opentinker_core.lineage.runs import flattened
from opentinker_core.lineage.tracking import Tracking, TrackingTarget, connect
from opentinker_core.policies.outbox import OutboxEvent
from opentinker_core.policies.types import RunStatus
from opentinker_core.runtime.workspace import Workspace
from tests.lineage.training import Training, episode, open_workspace


def deliver(dispatcher: OutboxDispatcher) -> None:
    delivery = dispatcher.deliver_pending()
    assert (delivery.outcome, dispatcher.pending()) == ("drained", []), delivery


def run_of(tracking: Tracking, training: Training) -> Any:
    run_id = training.workspace.catalog.run(training.run.run_id).mlflow_run_id
    assert run_id
    return tracking.client.get_run(run_id)


def model_versions(tracking: Tracking, policy: str) -> dict[str, Any]:
    found = tracking.client.search_model_versions(f"name = 'policy.{policy}'")
    return {one.tags["ot.version"]: one for one in found}


def traces_of(tracking: Tracking, run: Any) -> list[Any]:
    traces = tracking.client.search_traces(
        locations=[run.info.experiment_id], run_id=run.info.run_id, max_results=200
    )
    return list(traces)


def contents(tracking: Tracking, training: Training) -> dict[str, Any]:
    """All that MLflow shows of a training."""
    client, run = tracking.client, run_of(tracking, training)
    versions = model_versions(tracking, training.policy)
    number_of = {str(one.version): number for number, one in versions.items()}
    experiments = client.search_experiments(filter_string="name LIKE 'opentinker/%'")
    return {
        "runs": len(client.search_runs([one.experiment_id for one in experiments])),
        "params": run.data.params,
        "tags": run.data.tags,
        "status": run.info.status,
        "metrics": {key: len(client.get_metric_history(run.info.run_id, key)) for key in run.data.metrics},
        "datasets": sorted(one.dataset.name for one in run.inputs.dataset_inputs),
        "versions": {number: (one.source, one.tags, one.description) for number, one in versions.items()},
        "aliases": {
            alias: number_of[str(version)]
            for alias, version in client.get_registered_model(f"policy.{training.policy}").aliases.items()
        },
        "traces": sorted(
            (one.info.trace_id, len(one.data.spans), len(one.info.assessments))
            for one in traces_of(tracking, run)
        ),
    }


def test_a_run_is_recorded_with_config_tags_and_link(
    workspace: Workspace, dispatcher: OutboxDispatcher, tracking: Tracking
) -> None:
    training = Training(workspace)
    deliver(dispatcher)
    run = run_of(tracking, training)
    assert tracking.client.get_experiment(run.info.experiment_id).name == "opentinker/adder"
    assert run.info.run_name == "adder-rl"
    assert run.data.params["policy.lora.rank"] == "8"
    assert run.data.params["rl.objective.name"] == "ppo"
    assert run.data.tags["ot.run_id"] == training.run.run_id
    assert run.data.tags["ot.config_digest"] == training.run.config_digest
    assert run.data.tags["mlflow.source.git.commit"] == "abc123"
    assert run.info.artifact_uri.startswith((workspace.home / "mlartifacts").as_uri())


def test_a_flow_run_is_linked_where_prefects_pages_are_known(
    workspace: Workspace, tracking: Tracking
) -> None:
    training = Training(workspace, flow_run_id="flow-1")
    recorder = MLflowRecorder(
        tracking.target, workspace.catalog, workspace.trajectories, prefect_ui_url="http://prefect:4200/"
    )
    deliver(OutboxDispatcher(workspace.catalog, recorder))
    url = "http://prefect:4200/runs/flow-run/flow-1"
    assert run_of(tracking, training).data.tags["prefect.url"] == url
    assert f"[Prefect flow run]({url})" in model_versions(tracking, "adder")["0"].description


def test_a_version_is_registered_with_what_trained_it(
    workspace: Workspace, dispatcher: OutboxDispatcher, tracking: Tracking
) -> None:
    training = Training(workspace)
    training.step()
    version = training.step()
    deliver(dispatcher)
    (trained_on,) = workspace.catalog.lineages([version.ref])[0].trained_on
    registered = model_versions(tracking, "adder")["2"]
    assert registered.source == version.sampler.uri
    assert registered.run_id == run_of(tracking, training).info.run_id
    assert registered.tags["ot.digest"] == version.sampler.digest
    assert registered.tags["ot.parent"] == "adder@1"
    assert registered.tags["ot.step"] == "2"
    assert registered.tags["ot.trained_on"] == trained_on.digest
    assert registered.tags["ot.sampled_by"] == "adder@1"
    assert trained_on.uri in registered.description
    assert "adder@2" in model_versions(tracking, "adder")["1"].description.split("Generated")[1]


def test_metrics_datasets_and_traces_stand_at_the_run(
    workspace: Workspace, dispatcher: OutboxDispatcher, tracking: Tracking
) -> None:
    training = Training(workspace, trace_episodes=2)
    training.step(turns=2)
    training.step()
    deliver(dispatcher)
    run = run_of(tracking, training)
    history = tracking.client.get_metric_history(run.info.run_id, "loss")
    assert [(one.step, one.value) for one in history] == [(1, -0.1), (2, -0.2)]
    sets = workspace.catalog.trajectory_sets(training.run.run_id)
    datasets = {
        next(tag.value for tag in one.tags if tag.key == "ot.digest"): one
        for one in run.inputs.dataset_inputs
    }
    assert set(datasets) == {one.digest for one in sets}
    for one in sets:
        tags = {tag.key: tag.value for tag in datasets[one.digest].tags}
        assert (tags["ot.sampled_by"], tags["ot.uri"]) == (one.sampled_by, one.uri)
        assert json.loads(datasets[one.digest].dataset.source) == {"uri": one.uri}
    traces = traces_of(tracking, run)
    assert len(traces) == 4
    assert {one.info.trace_metadata["ot.policy_version"] for one in traces} == {"adder@0", "adder@1"}
    assert {feedback.name for one in traces for feedback in one.info.assessments} == {"reward"}
    two_turns = [one for one in traces if one.info.trace_metadata["ot.trained"] == "adder@1"]
    assert [len(one.data.spans) for one in two_turns] == [3, 3]


def test_a_trajectory_is_found_by_its_id_and_a_version_by_what_it_sampled(
    workspace: Workspace, dispatcher: OutboxDispatcher, tracking: Tracking
) -> None:
    training = Training(workspace, trace_episodes=4)
    training.step()
    training.step()
    deliver(dispatcher)
    experiment = run_of(tracking, training).info.experiment_id
    found = tracking.client.search_traces(
        locations=[experiment], filter_string="metadata.`ot.policy_version` = 'adder@1'", include_spans=False
    )
    assert {one.info.trace_metadata["ot.trained"] for one in found} == {"adder@2"}
    assert len(found) == 4


def test_no_traces_are_written_where_none_are_asked_for(
    workspace: Workspace, dispatcher: OutboxDispatcher, tracking: Tracking
) -> None:
    training = Training(workspace, trace_episodes=0)
    training.step()
    deliver(dispatcher)
    assert traces_of(tracking, run_of(tracking, training)) == []


def test_a_run_that_wants_no_mlflow_is_let_pass_without_opening_it(workspace: Workspace) -> None:
    training = Training(workspace, mlflow=False)
    training.step()
    training.finish()
    nowhere = TrackingTarget("http://127.0.0.1:9", None)
    deliver(OutboxDispatcher(
        workspace.catalog, MLflowRecorder(nowhere, workspace.catalog, workspace.trajectories)
    ))  # fmt: skip


def test_demonstrations_shared_by_many_versions_are_traced_once(
    workspace: Workspace, dispatcher: OutboxDispatcher, tracking: Tracking
) -> None:
    training = Training(workspace)
    shown = training.sampled(0, "train", [episode(i, "demonstration") for i in range(4)], "demonstration")
    for step in (1, 2):
        training.version = training._publish(step, "sft", {"loss": 1.0}, [shown.set_id], training.version.ref)
    deliver(dispatcher)
    (trace,) = traces_of(tracking, run_of(tracking, training))
    assert trace.info.trace_metadata["ot.trained"] == "adder@1"
    assert model_versions(tracking, "adder")["2"].tags["ot.sampled_by"] == "demonstration"


def test_aliases_follow_the_catalog(
    workspace: Workspace, dispatcher: OutboxDispatcher, tracking: Tracking
) -> None:
    training = Training(workspace)
    training.step()
    training.step()
    workspace.catalog.set_alias("adder", "best", 1)
    deliver(dispatcher)

    def mirrored(alias: str) -> str:
        return str(tracking.client.get_model_version_by_alias("policy.adder", alias).tags["ot.version"])

    assert (mirrored("rollout"), mirrored("best"), mirrored("0")) == ("2", "1", "0")
    assert tracking.client.get_registered_model("policy.adder").tags["ot.alias.latest"] == "2"
    workspace.catalog.rollback("adder", 1)
    dispatcher.mirror_aliases()
    assert mirrored("rollout") == "1"
    assert tracking.client.get_registered_model("policy.adder").tags["ot.alias.latest"] == "1"


def test_an_evaluation_becomes_metrics_and_part_of_the_versions_page(
    workspace: Workspace, dispatcher: OutboxDispatcher, tracking: Tracking
) -> None:
    training = Training(workspace)
    training.evaluate("base", 0.25)
    version = training.step()
    training.evaluate(version.ref, 0.75)
    deliver(dispatcher)
    metrics = run_of(tracking, training).data.metrics
    assert metrics["eval/mean"] == 0.75
    assert (metrics["eval/low"], metrics["eval/high"]) == pytest.approx((0.65, 0.85))
    assert metrics["eval/base/mean"] == 0.25
    registered = model_versions(tracking, "adder")["1"]
    assert registered.tags["ot.evaluation.mean"] == "0.75"
    assert "0.750 (95 %: 0.650 to 0.850)" in registered.description


@pytest.mark.parametrize(
    ("status", "shown"), [(RunStatus.COMPLETED, "FINISHED"), (RunStatus.FAILED, "FAILED")]
)
def test_a_finished_run_has_its_status_and_its_lineage(
    workspace: Workspace, dispatcher: OutboxDispatcher, tracking: Tracking, status: RunStatus, shown: str
) -> None:
    training = Training(workspace)
    training.step()
    training.finish(status, None if status is RunStatus.COMPLETED else "the disk is full")
    deliver(dispatcher)
    run = run_of(tracking, training)
    assert run.info.status == shown
    assert run.data.tags.get("ot.error") == (None if shown == "FINISHED" else "the disk is full")
    path = tracking.client.download_artifacts(run.info.run_id, "lineage.json", str(workspace.home))
    report = json.loads(Path(path).read_text())
    jsonschema.validate(report, report_schema())
    assert report["version"]["ref"] == "adder@1"


def test_a_resumed_run_runs_again_in_the_same_mlflow_run(
    workspace: Workspace, dispatcher: OutboxDispatcher, tracking: Tracking
) -> None:
    training = Training(workspace)
    training.finish(RunStatus.FAILED, "interrupted")
    deliver(dispatcher)
    first = run_of(tracking, training)
    workspace.catalog.update_run(training.run.run_id, status=RunStatus.RUNNING, flow_run_id="flow-2")
    training.step()
    training.finish()
    deliver(dispatcher)
    run = run_of(tracking, training)
    assert (run.info.run_id, run.info.status) == (first.info.run_id, "FINISHED")
    assert run.data.tags["prefect.flow_run_id"] == "flow-2"
    assert len(tracking.client.search_runs([run.info.experiment_id])) == 1


def test_a_fork_is_a_model_of_its_own_with_its_parent(
    workspace: Workspace, dispatcher: OutboxDispatcher, tracking: Tracking
) -> None:
    training = Training(workspace)
    version = training.step()
    workspace.catalog.fork(version.ref, "copy")
    deliver(dispatcher)
    (forked,) = model_versions(tracking, "copy").values()
    assert (forked.tags["ot.parent"], forked.source) == (version.ref, version.sampler.uri)


def everything(workspace: Workspace) -> Training:
    training = Training(workspace, flow_run_id="flow-1", trace_episodes=2)
    training.evaluate("base", 0.25)
    version = training.step(turns=2)
    training.evaluate(version.ref, 0.5)
    training.step()
    training.finish()
    return training


def test_events_delivered_twice_change_nothing(
    workspace: Workspace, recorder: MLflowRecorder, tracking: Tracking
) -> None:
    training = everything(workspace)
    events = workspace.catalog.pending_events()
    assert len(events) == 7
    recorder.record(events)
    once = contents(tracking, training)
    recorder.record(events)
    assert contents(tracking, training) == once
    for event in events:
        recorder.record([event])
    assert contents(tracking, training) == once
    assert len(once["traces"]) == 4


def test_each_event_may_be_delivered_twice_by_a_new_process(workspace: Workspace, tracking: Tracking) -> None:
    training = everything(workspace)
    for event in workspace.catalog.pending_events():
        for _ in range(2):
            MLflowRecorder(tracking.target, workspace.catalog, workspace.trajectories).record([event])
    shown = contents(tracking, training)
    assert shown["runs"] == 1
    assert sorted(shown["versions"]) == ["0", "1", "2"]
    assert shown["metrics"]["loss"] == 2
    assert len(shown["datasets"]) == 4


def test_an_mlflow_that_was_emptied_is_filled_again(
    workspace: Workspace, dispatcher: OutboxDispatcher, mlflow_template: Path
) -> None:
    training = Training(workspace)
    deliver(dispatcher)
    training.step()
    shutil.copy(mlflow_template, workspace.home / "empty.db")
    empty = TrackingTarget(f"sqlite:///{workspace.home}/empty.db", (workspace.home / "artifacts").as_uri())
    recorder = MLflowRecorder(empty, workspace.catalog, workspace.trajectories)
    deliver(OutboxDispatcher(workspace.catalog, recorder))
    tracking = connect(empty)
    assert run_of(tracking, training).data.metrics["reward_mean"] == 0.5


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        ("run.started", {"run_id": "no-such-run"}),
        ("run.started", {}),
        ("version.published", {"run_id": "x", "version": "nobody@3"}),
        ("run.exploded", {}),
    ],
)
def test_an_event_that_cannot_be_mirrored_says_why(
    recorder: MLflowRecorder, kind: str, payload: dict[str, Any]
) -> None:
    with pytest.raises(OpenTinkerError) as caught:
        recorder.record([OutboxEvent(1, kind, payload, 0)])
    assert not isinstance(caught.value, MirrorOutageError)


def test_a_deleted_trajectory_set_keeps_its_traces_out_and_nothing_else(
    workspace: Workspace, dispatcher: OutboxDispatcher, tracking: Tracking
) -> None:
    training = Training(workspace)
    training.step()
    shutil.rmtree(workspace.home / "trajectories")
    while dispatcher.deliver_pending().outcome == "retry":
        pass
    assert [event.kind for event in dispatcher.pending()] == ["version.published"]
    assert "1" in model_versions(tracking, "adder")
    assert run_of(tracking, training).data.metrics["loss"] == -0.1


@pytest.mark.parametrize(
    "uri",
    ["http://127.0.0.1:9", "nonsense://x", "sqlite:////proc/none/mlflow.db"],
    ids=["http", "scheme", "path"],
)
def test_an_unusable_tracking_uri_is_an_outage(workspace: Workspace, uri: str) -> None:
    Training(workspace)
    recorder = MLflowRecorder(TrackingTarget(uri, None), workspace.catalog, workspace.trajectories)
    with pytest.raises(MirrorOutageError):
        recorder.record(workspace.catalog.pending_events()[:1])


def test_tenants_do_not_share_experiments_or_models(workspace: Workspace, tracking: Tracking) -> None:
    other = open_workspace(workspace.home, tenant="acme")
    for one in (workspace, other):
        Training(one)
        recorder = MLflowRecorder(tracking.target, one.catalog, one.trajectories)
        deliver(OutboxDispatcher(one.catalog, recorder))
    names = {one.name for one in tracking.client.search_experiments(filter_string="name LIKE 'opentinker/%'")}
    assert names == {"opentinker/adder", "opentinker/acme/adder"}
    models = {one.name for one in tracking.client.search_registered_models()}
    assert models == {"policy.adder", "policy.acme~adder"}


def test_configs_are_flattened_to_dotted_leaves() -> None:
    config = {"a": {"b": 1, "c": {"d": None}}, "e": [1, "x"], "f": "text", "g": {}}
    assert dict(flattened(config)) == {"a.b": "1", "a.c.d": "null", "e": '[1, "x"]', "f": "text", "g": "{}"}


def test_mlflows_telemetry_is_off(tracking: Tracking) -> None:
    from mlflow.telemetry.utils import is_telemetry_disabled

    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"
    assert is_telemetry_disabled()
