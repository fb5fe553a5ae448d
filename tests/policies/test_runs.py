"""Runs, trajectory sets, evaluations, lineage edges and the outbox."""

import math
from dataclasses import replace

import pytest

from opentinker_core.errors import NotFoundError, OpenTinkerError, UsageError
from opentinker_core.policies.catalog import Catalog
from opentinker_core.policies.types import RunStatus, VersionLineage
from tests.policies.builders import evaluation, new_policy, new_run, publish, trajectory_set


def test_a_run_is_found_by_id_by_its_beginning_and_by_name(catalog: Catalog) -> None:
    policy = new_policy(catalog)
    runs = [new_run(catalog, policy, name) for name in ("one", "two", "two")]
    assert catalog.run(runs[0].run_id) == catalog.run(runs[0].run_id[:10]) == catalog.run("one") == runs[0]
    assert catalog.run("two") == runs[2]
    assert catalog.runs() == runs[::-1]
    assert catalog.runs(limit=1) == [runs[2]]
    assert runs[0].config == {"name": "one"}
    assert runs[0].code_commit == "c0ffee"
    with pytest.raises(NotFoundError, match="run: there is no 'three'"):
        catalog.run("three")
    with pytest.raises(UsageError, match="several ids begin with ''"):
        catalog.run("")
    with pytest.raises(NotFoundError):
        catalog.run("%")


def test_a_retried_flow_run_finds_its_run(catalog: Catalog) -> None:
    policy = new_policy(catalog)
    run = new_run(catalog, policy, flow="flow-1")
    assert new_run(catalog, policy, flow="flow-1") == run == catalog.run_of_flow("flow-1")
    assert catalog.run_of_flow("flow-2") is None
    with pytest.raises(UsageError, match=r"flow-1 has started the run .* of another config"):
        new_run(catalog, policy, "other", flow="flow-1")
    moved = catalog.update_run(run.run_id, flow_run_id="flow-2")
    assert catalog.run_of_flow("flow-2") == moved
    other = new_run(catalog, policy, "other", flow="flow-3")
    with pytest.raises(UsageError, match="flow-2 works on the run"):
        catalog.update_run(other.run_id, flow_run_id="flow-2")


def test_the_runs_of_a_joint_run_are_found_by_its_id_and_its_name(catalog: Catalog) -> None:
    policies = [new_policy(catalog, name) for name in ("black", "white")]
    new_run(catalog, policies[0])
    catalog.start_run("single", policies[0].policy_id, {"joint": None}, "d")

    def begin(joint_id: str) -> list[str]:
        part = {"name": "pair", "joint_id": joint_id}
        return [
            catalog.start_run(one.name, one.policy_id, {"joint": part}, joint_id, flow_run_id=joint_id).run_id
            for one in policies
        ]

    first, second = begin("j1"), begin("j2")
    assert [run.run_id for run in catalog.joint_runs("j1")] == first
    assert [run.run_id for run in catalog.joint_runs("pair")] == second
    assert catalog.joint_runs("single") == []


def test_updates_change_what_is_given(catalog: Catalog) -> None:
    run = new_run(catalog, new_policy(catalog), flow="flow")
    failed = catalog.update_run(run.run_id, status=RunStatus.FAILED, error="disk full", mlflow_run_id="m")
    assert (failed.status, failed.error, failed.flow_run_id) == (RunStatus.FAILED, "disk full", "flow")
    assert failed.updated_at > run.updated_at
    assert failed.created_at == run.created_at
    again = catalog.update_run(run.run_id, status=RunStatus.RUNNING)
    assert (again.status, again.error, again.mlflow_run_id) == (RunStatus.RUNNING, None, "m")
    assert catalog.run(run.run_id) == again


def test_trajectory_sets_are_recorded_once(catalog: Catalog) -> None:
    run = new_run(catalog, new_policy(catalog))
    version = publish(catalog, run, 0)
    recorded = catalog.add_trajectory_set(trajectory_set(run, 1, version.ref))
    assert recorded.created_at is not None
    assert recorded == replace(trajectory_set(run, 1, version.ref), created_at=recorded.created_at)
    assert catalog.add_trajectory_set(recorded) == recorded
    assert catalog.add_trajectory_set(replace(recorded, set_id="another-attempt", uri="x")) == recorded
    with pytest.raises(OpenTinkerError, match="recorded already, with other content"):
        catalog.add_trajectory_set(replace(recorded, digest="other"))
    with pytest.raises(UsageError, match="is that of the train set of step 1"):
        catalog.add_trajectory_set(replace(recorded, step=2))
    by_base = catalog.add_trajectory_set(
        trajectory_set(run, 0, "base", purpose="evaluation", reward_mean=None)
    )
    demonstrated = catalog.add_trajectory_set(trajectory_set(run, 1, "demonstration"))
    assert catalog.trajectory_sets(run.run_id) == [by_base, recorded, demonstrated]
    assert catalog.trajectory_sets(run.run_id, "evaluation") == [by_base]
    assert catalog.lineages([version.ref])[0].generated == [recorded]


@pytest.mark.parametrize(
    ("sampled_by", "problem"),
    [
        ("adder", "accepted: 'name@number'"),
        ("adder@latest", "accepted: 'name@number'"),
        ("adder@5", "no adder@5"),
    ],
)
def test_sets_name_the_version_that_sampled_them(catalog: Catalog, sampled_by: str, problem: str) -> None:
    run = new_run(catalog, new_policy(catalog))
    publish(catalog, run, 0)
    with pytest.raises(UsageError, match=problem):
        catalog.add_trajectory_set(trajectory_set(run, 1, sampled_by))
    assert catalog.trajectory_sets(run.run_id) == []


def test_lineage_leads_back_to_the_base(catalog: Catalog) -> None:
    run = new_run(catalog, new_policy(catalog))
    version = publish(catalog, run, 0)
    for step in (1, 2):
        recorded = catalog.add_trajectory_set(trajectory_set(run, step, version.ref))
        version = publish(catalog, run, step, parent=version.ref, trained_on=[recorded.set_id])
    seen = []
    while version.parent is not None:
        (lineage,) = catalog.lineages([version.ref])
        (recorded,) = lineage.trained_on
        assert recorded.sampled_by == version.parent
        assert lineage.consumers[recorded.set_id] == [version.ref]
        seen.append((version.ref, recorded.step))
        version = catalog.version(version.parent)
    assert seen == [("adder@2", 2), ("adder@1", 1)]
    assert catalog.lineages(["adder@0"])[0].trained_on == []


def test_evaluations_are_recorded_once_with_their_set(catalog: Catalog) -> None:
    run = new_run(catalog, new_policy(catalog))
    version = publish(catalog, run, 0)
    measured = evaluation(
        run, version.ref, trajectory_set=trajectory_set(run, 0, version.ref, purpose="evaluation")
    )
    recorded = catalog.add_evaluation(measured)
    assert catalog.add_evaluation(replace(measured, mean=0.45)) == recorded
    (found,) = catalog.trajectory_sets(run.run_id, "evaluation")
    assert recorded == replace(measured, trajectory_set=found)
    base = catalog.add_evaluation(evaluation(run, "base"))
    by_hand = [catalog.add_evaluation(evaluation(None, version.ref)) for _ in range(2)]
    assert catalog.evaluations() == [recorded, base, *by_hand]
    assert catalog.evaluations(run_id=run.run_id) == [recorded, base]
    assert catalog.evaluations(subject="base") == [base]
    for wrong in (
        evaluation(run, "adder"),
        evaluation(run, "adder@9"),
        evaluation(None, "base", mean=math.nan),
    ):
        with pytest.raises(UsageError):
            catalog.add_evaluation(wrong)
    with pytest.raises(UsageError, match="evaluation details: cannot be kept as JSON"):
        catalog.add_evaluation(evaluation(None, "base", details={"x": math.nan}))


def test_events_stand_in_the_order_of_what_happened(catalog: Catalog) -> None:
    run = new_run(catalog, new_policy(catalog))
    version = publish(catalog, run, 0)
    for _ in range(2):
        catalog.add_evaluation(evaluation(run, version.ref))
    catalog.fork(version.ref, "other")
    for _ in range(2):
        catalog.update_run(run.run_id, status=RunStatus.COMPLETED)
    assert [(event.kind, event.payload) for event in catalog.pending_events()] == [
        ("run.started", {"run_id": run.run_id, "status": "running"}),
        ("version.published", {"run_id": run.run_id, "version": "adder@0"}),
        ("evaluation.recorded", {"run_id": run.run_id, "subject": "adder@0"}),
        ("version.published", {"run_id": None, "version": "other@0"}),
        ("run.finished", {"run_id": run.run_id, "status": "completed"}),
    ]
    assert len(catalog.pending_events(limit=2)) == 2


def test_events_stay_until_they_are_delivered(catalog: Catalog) -> None:
    run = new_run(catalog, new_policy(catalog))
    publish(catalog, run, 0)
    first, second = catalog.pending_events()
    catalog.mark_failed(first.id, "mlflow is away")
    catalog.mark_failed(first.id, "mlflow is away")
    assert catalog.pending_events() == [replace(first, attempts=2), second]
    for _ in range(2):
        catalog.mark_delivered([first.id])
    assert catalog.pending_events() == [second]
    with pytest.raises(NotFoundError, match="event: there is no 999999"):
        catalog.mark_delivered([second.id, 999999])
    assert catalog.pending_events() == [second]


def test_lineages_are_those_of_each_version_in_the_order_asked(catalog: Catalog) -> None:
    policy = new_policy(catalog)
    run = new_run(catalog, policy)
    first = publish(catalog, run, 0)
    sets = [catalog.add_trajectory_set(trajectory_set(run, step, first.ref)) for step in (1, 2)]
    second = publish(catalog, run, 1, trained_on=[sets[0].set_id])
    third = publish(catalog, run, 2, trained_on=[one.set_id for one in sets])
    fork = catalog.fork(second.ref, "other")
    judged = catalog.add_evaluation(evaluation(run, second.ref))
    consumers = {sets[0].set_id: [second.ref, third.ref], sets[1].set_id: [third.ref]}
    of_second = {sets[0].set_id: consumers[sets[0].set_id]}
    assert catalog.lineages([third.ref, first.ref, second.ref, fork.ref]) == [
        VersionLineage(third, sets, [], consumers, []),
        VersionLineage(first, [], sets, consumers, []),
        VersionLineage(second, sets[:1], [], of_second, [judged]),
        VersionLineage(fork, [], [], {}, []),
    ]
    assert catalog.trained_on_by_version("adder") == {second.ref: sets[:1], third.ref: sets}
    assert catalog.lineages([]) == []
    with pytest.raises(NotFoundError, match="version: there is no adder@9"):
        catalog.lineages([first.ref, "adder@9"])
    with pytest.raises(UsageError, match="version: 'adder@latest'; accepted: 'name@number'"):
        catalog.lineages(["adder@latest"])
