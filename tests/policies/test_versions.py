"""Policies, their numbers, publication, aliases, rollback, forks and pruned checkpoints."""

import math
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest

from opentinker_core.config.schema import LoRAConfig
from opentinker_core.errors import NotFoundError, UsageError
from opentinker_core.policies.catalog import Catalog
from opentinker_core.policies.refs import Ref, parse_ref
from opentinker_core.policies.types import Policy, PolicyVersion
from opentinker_core.snapshots.protocol import SnapshotConflictError, SnapshotKind
from tests.policies.builders import LORA, new_policy, new_run, publish, snapshot, trajectory_set


def test_a_policy_is_created_once(catalog: Catalog) -> None:
    policy = catalog.create_policy("adder", "tiny", LORA)
    assert catalog.create_policy("adder", "tiny", LORA) == policy == catalog.policy("adder")
    assert (policy.tenant, policy.base_model, policy.lora) == (catalog.tenant, "tiny", LORA)
    assert policy.created_at.tzinfo is UTC
    assert datetime.now(UTC) - policy.created_at < timedelta(minutes=1)


@pytest.mark.parametrize(("base", "lora"), [("tiny", LoRAConfig(rank=8)), ("smollm2-135m", LORA)])
def test_a_policy_of_another_base_or_adapter_needs_another_name(
    catalog: Catalog, base: str, lora: LoRAConfig
) -> None:
    new_policy(catalog)
    with pytest.raises(
        UsageError, match=r"policy: 'adder' exists with base model 'tiny'.*choose another name"
    ):
        catalog.create_policy("adder", base, lora)


@pytest.mark.parametrize("name", ["", "../x", "a/b", "a@1", "nul\0", "n" * 64, "base", "demonstration"])
def test_policy_names_are_checked(catalog: Catalog, name: str) -> None:
    with pytest.raises(UsageError, match=r"policy: .*accepted"):
        catalog.create_policy(name, "tiny", LORA)


def test_numbers_grow_and_are_one_for_a_step(catalog: Catalog) -> None:
    policy = new_policy(catalog)
    first, second = new_run(catalog, policy, "first"), new_run(catalog, policy, "second")

    def reserve(run_id: str, step: int) -> int:
        return catalog.reserve_version(policy.policy_id, run_id, step)

    numbers = [reserve(first.run_id, 0), reserve(second.run_id, 0), reserve(first.run_id, 1)]
    assert numbers == [0, 1, 2]
    assert [reserve(first.run_id, 0), reserve(second.run_id, 0), reserve(first.run_id, 1)] == numbers


def test_a_version_keeps_everything(catalog: Catalog) -> None:
    policy = new_policy(catalog)
    run = new_run(catalog, policy)
    first = publish(catalog, run, 0)
    sets = [catalog.add_trajectory_set(trajectory_set(run, step, first.ref)) for step in (1, 2)]
    version = publish(
        catalog, run, 2, parent=first.ref, metrics={"loss": 0.25}, trained_on=[one.set_id for one in sets]
    )
    read = catalog.version("adder@1")
    assert read == version
    assert read.metrics == {"loss": 0.25}
    assert (read.number, read.policy_name, read.parent, read.run_id) == (1, "adder", "adder@0", run.run_id)
    assert (read.step, read.phase) == (2, "rl")
    assert read.sampler == snapshot(SnapshotKind.SAMPLER, f"{run.run_id}/2")
    assert read.checkpoint == snapshot(SnapshotKind.CHECKPOINT, f"{run.run_id}/2")
    assert catalog.versions("adder") == [first, catalog.version("adder")]
    assert catalog.run_versions(run.run_id) == catalog.versions("adder")
    (of_first, of_second) = catalog.lineages([first.ref, version.ref])
    assert of_first.generated == of_second.trained_on == sets


def test_metrics_need_not_be_finite(catalog: Catalog) -> None:
    run = new_run(catalog, new_policy(catalog))
    publish(catalog, run, 0, metrics={"kl": math.nan, "ratio": math.inf, "loss": -math.inf, "count": 3})
    metrics = catalog.version("adder@0").metrics
    assert math.isnan(metrics.pop("kl"))
    assert metrics == {"ratio": math.inf, "loss": -math.inf, "count": 3.0}


def test_publishing_again_changes_nothing(catalog: Catalog) -> None:
    run = new_run(catalog, new_policy(catalog))
    version = publish(catalog, run, 0)
    later = publish(catalog, run, 1)
    events = catalog.pending_events()
    assert publish(catalog, run, 0, metrics={"other": 1.0}) == version
    assert catalog.aliases("adder") == {"latest": later.number, "rollout": later.number}
    assert catalog.pending_events() == events


def test_other_content_under_a_number_is_refused(catalog: Catalog) -> None:
    run = new_run(catalog, new_policy(catalog))
    version = publish(catalog, run, 0)
    with pytest.raises(SnapshotConflictError, match="adder@0 is published already"):
        publish(catalog, run, 0, "other content")
    with pytest.raises(SnapshotConflictError):
        publish(catalog, run, 0, checkpoint=None)
    assert catalog.version("adder@0") == version


def test_only_the_step_that_reserved_a_number_publishes_it(catalog: Catalog) -> None:
    policy = new_policy(catalog)
    run, other = new_run(catalog, policy), new_run(catalog, policy, "other")
    number = catalog.reserve_version(policy.policy_id, run.run_id, 0)
    for wrong in ((other, 0, number), (run, 1, number), (run, 0, number + 1)):
        with pytest.raises(UsageError, match="is not reserved for step"):
            publish(catalog, wrong[0], wrong[1], number=wrong[2])
    assert catalog.versions("adder") == []


def test_a_refused_publication_leaves_nothing(catalog: Catalog) -> None:
    run = new_run(catalog, new_policy(catalog))
    events = catalog.pending_events()
    with pytest.raises(NotFoundError, match="trained_on: there is no trajectory set lost"):
        publish(catalog, run, 0, trained_on=["lost"])
    with pytest.raises(NotFoundError, match="version: there is no adder@7; there is none yet"):
        publish(catalog, run, 0, parent="adder@7")
    with pytest.raises(UsageError, match="alias: '7' would be a version number"):
        publish(catalog, run, 0, aliases=("7",))
    with pytest.raises(UsageError, match="parent: 'adder@latest'; accepted: 'name@number'"):
        publish(catalog, run, 0, parent="adder@latest")
    assert catalog.versions("adder") == []
    assert catalog.aliases("adder") == {}
    assert catalog.pending_events() == events


def test_references(catalog: Catalog) -> None:
    run = new_run(catalog, new_policy(catalog))
    versions = [publish(catalog, run, step) for step in range(3)]
    assert catalog.set_alias("adder", "best", 1) == versions[1]
    assert catalog.version("adder") == catalog.version("adder@latest") == versions[2]
    assert catalog.version("adder@best") == catalog.version("adder@1") == versions[1]
    with pytest.raises(
        NotFoundError, match=r"no adder@9; there is: adder@2, adder@1, adder@0, adder@best \(= 1\)"
    ):
        catalog.version("adder@9")
    with pytest.raises(NotFoundError, match="there is no adder@worst"):
        catalog.version("adder@worst")
    with pytest.raises(NotFoundError, match="there is no 'subtracter'; there is: adder"):
        catalog.version("subtracter")


@pytest.mark.parametrize(
    "ref", ["", "@", "adder@", "@3", "a@b@c", "adder@-1", "a/b@1", "adder@1.5/..", "a\0@1"]
)
def test_what_is_no_reference_is_refused(catalog: Catalog, ref: str) -> None:
    with pytest.raises(UsageError, match="is not a reference; accepted: 'name', 'name@number', 'name@alias'"):
        catalog.version(ref)


def test_references_are_read_as_written() -> None:
    assert [parse_ref(text) for text in ("a", "a@12", "a@best")] == [
        Ref("a", "latest"),
        Ref("a", 12),
        Ref("a", "best"),
    ]
    assert str(Ref("a", 12)) == "a@12"


def test_a_late_publication_does_not_undo_a_later_one(catalog: Catalog) -> None:
    policy = new_policy(catalog)
    slow, fast = new_run(catalog, policy, "slow"), new_run(catalog, policy, "fast")
    catalog.reserve_version(policy.policy_id, slow.run_id, 0)
    later = publish(catalog, fast, 0)
    early = publish(catalog, slow, 0)
    assert early.number < later.number
    assert catalog.version("adder") == later


def test_rollback_moves_what_is_sampled_and_the_next_version_moves_on(catalog: Catalog) -> None:
    run = new_run(catalog, new_policy(catalog))
    versions = [publish(catalog, run, step) for step in range(3)]
    assert catalog.rollback("adder", 0) == versions[0]
    assert catalog.aliases("adder") == {"latest": 0, "rollout": 0}
    assert catalog.version("adder@2") == versions[2]
    assert publish(catalog, run, 3).number == 3
    assert catalog.aliases("adder") == {"latest": 3, "rollout": 3}
    with pytest.raises(NotFoundError, match="no adder@9"):
        catalog.rollback("adder", 9)


def test_a_fork_starts_from_the_same_snapshots(catalog: Catalog) -> None:
    policy = new_policy(catalog)
    run = new_run(catalog, policy)
    source = [publish(catalog, run, step) for step in range(2)][1]
    fork = catalog.fork("adder@latest", "adder-2")
    assert (fork.ref, fork.parent, fork.run_id, fork.phase) == ("adder-2@0", "adder@1", None, "init")
    assert (fork.sampler, fork.checkpoint) == (source.sampler, source.checkpoint)
    forked = catalog.policy("adder-2")
    assert (forked.forked_from, forked.base_model, forked.lora) == ("adder@1", policy.base_model, policy.lora)
    assert catalog.fork("adder@1", "adder-2") == fork
    with pytest.raises(UsageError, match="'adder-2' exists already and is no fork of adder@0"):
        catalog.fork("adder@0", "adder-2")
    child = publish(catalog, new_run(catalog, forked, "on"), 1, parent=fork.ref)
    assert (child.ref, child.parent) == ("adder-2@1", "adder-2@0")
    assert catalog.version("adder") == source


def test_checkpoints_that_someone_needs_are_kept(catalog: Catalog) -> None:
    run = new_run(catalog, new_policy(catalog))
    versions = [publish(catalog, run, step) for step in range(6)]
    catalog.set_alias("adder", "best", 1)
    catalog.fork("adder@2", "other")
    assert catalog.prune_checkpoints(run.run_id, keep=6) == []
    assert catalog.prune_checkpoints(run.run_id, keep=2) == [versions[0].checkpoint, versions[3].checkpoint]
    assert catalog.prune_checkpoints(run.run_id, keep=2) == []
    kept = [version.number for version in catalog.versions("adder") if version.checkpoint is not None]
    assert kept == [1, 2, 4, 5]
    assert catalog.version("adder@0").sampler == versions[0].sampler
    catalog.rollback("adder", 2)
    assert catalog.prune_checkpoints(run.run_id, keep=1) == [versions[4].checkpoint]
    with pytest.raises(UsageError, match="keep: 0; accepted: 1 or more"):
        catalog.prune_checkpoints(run.run_id, 0)


def test_the_checkpoint_of_a_step_that_the_run_needs_is_kept(catalog: Catalog) -> None:
    run = new_run(catalog, new_policy(catalog))
    versions = [publish(catalog, run, step) for step in range(3)]
    assert catalog.prune_checkpoints(run.run_id, keep=1, needed=1) == [versions[0].checkpoint]
    assert catalog.prune_checkpoints(run.run_id, keep=1) == [versions[1].checkpoint]


def test_checkpoints_of_other_runs_are_not_touched(catalog: Catalog) -> None:
    policy = new_policy(catalog)
    first, second = new_run(catalog, policy, "first"), new_run(catalog, policy, "second")
    theirs = [publish(catalog, first, step) for step in range(3)]
    mine = [publish(catalog, second, step) for step in range(3)]
    assert catalog.prune_checkpoints(second.run_id, keep=1) == [mine[0].checkpoint, mine[1].checkpoint]
    assert catalog.versions("adder")[:3] == theirs


def test_publishing_again_after_pruning_is_still_the_same_version(catalog: Catalog) -> None:
    run = new_run(catalog, new_policy(catalog))
    for step in range(3):
        publish(catalog, run, step)
    catalog.prune_checkpoints(run.run_id, keep=1)
    assert publish(catalog, run, 0).checkpoint is None


def test_summaries_count_versions_and_name_aliases(catalog: Catalog) -> None:
    policy, empty = new_policy(catalog), new_policy(catalog, "empty")
    run = new_run(catalog, policy)
    for step in range(3):
        publish(catalog, run, step)
    catalog.set_alias("adder", "best", 1)
    found = [(one.policy, one.versions, one.aliases) for one in catalog.summaries()]
    assert found == [(policy, 3, {"latest": 2, "rollout": 2, "best": 1}), (empty, 0, {})]
    assert catalog.policies() == [policy, empty]


def test_tenants_do_not_see_each_other(open_catalog: Callable[[str], Catalog], tenant: str) -> None:
    mine, theirs = open_catalog(f"{tenant}-1"), open_catalog(f"{tenant}-2")
    policy = new_policy(mine)
    run = new_run(mine, policy, flow="flow")
    version = publish(mine, run, 0)
    mine.add_trajectory_set(trajectory_set(run, 1, version.ref))
    event = mine.pending_events()[0]
    attempts: list[Callable[[], object]] = [
        lambda: theirs.policy("adder"),
        lambda: theirs.version("adder@0"),
        lambda: theirs.versions("adder"),
        lambda: theirs.aliases("adder"),
        lambda: theirs.set_alias("adder", "best", 0),
        lambda: theirs.rollback("adder", 0),
        lambda: theirs.fork("adder@0", "stolen"),
        lambda: theirs.reserve_version(policy.policy_id, run.run_id, 1),
        lambda: theirs.start_run("stolen", policy.policy_id, {}, ""),
        lambda: publish(theirs, run, 0, number=0),
        lambda: theirs.run(run.run_id),
        lambda: theirs.run(run.run_id[:6]),
        lambda: theirs.run(run.name),
        lambda: theirs.update_run(run.run_id, mlflow_run_id="stolen"),
        lambda: theirs.run_versions(run.run_id),
        lambda: theirs.trajectory_sets(run.run_id),
        lambda: theirs.prune_checkpoints(run.run_id, 1),
        lambda: theirs.lineages(["adder@0"]),
        lambda: theirs.add_trajectory_set(trajectory_set(run, 2)),
        lambda: theirs.mark_delivered([event.id]),
        lambda: theirs.mark_failed(event.id, "stolen"),
    ]
    for attempt in attempts:
        with pytest.raises(NotFoundError):
            attempt()
    nothing: list[object] = []
    assert theirs.policies() == theirs.runs() == theirs.pending_events() == theirs.evaluations() == nothing
    assert theirs.summaries() == []
    assert theirs.run_of_flow("flow") is None
    their_policy: Policy = new_policy(theirs)
    assert their_policy.policy_id != policy.policy_id
    their_version: PolicyVersion = publish(theirs, new_run(theirs, their_policy, flow="flow"), 0)
    assert mine.version("adder") == version != their_version
