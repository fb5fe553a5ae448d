"""Several processes at one catalog: distinct growing numbers, no half states, one migration."""

import itertools
from contextlib import ExitStack

import pytest

from opentinker_core.policies.catalog import Catalog
from tests.policies.builders import new_policy, new_run, publish
from tests.processes import worker

pytestmark = pytest.mark.processes

WORKER = "tests.policies.worker"


def race(url: str, tenant: str, *calls: tuple[str, ...]) -> list[str]:
    """What each worker printed, all started at once."""
    with ExitStack() as stack:
        workers = [stack.enter_context(worker(WORKER, url, tenant, *call)) for call in calls]
        assert [process.line() for process in workers] == ["ready"] * len(calls)
        for process in workers:
            process.say("go")
        return [process.line() for process in workers]


def test_processes_that_open_a_new_catalog_at_once(empty_url: str) -> None:
    assert race(empty_url, "default", *[("open",)] * 4) == ["0"] * 4


def test_processes_publish_under_distinct_growing_numbers(url: str, catalog: Catalog) -> None:
    policy = new_policy(catalog)
    runs = [new_run(catalog, policy, f"run-{n}") for n in range(4)]
    answers = race(url, catalog.tenant, *[("publish", run.run_id, "6") for run in runs])
    published = [[int(number) for number in answer.split()] for answer in answers]
    assert all(numbers == sorted(numbers) and len(numbers) == 6 for numbers in published)
    assert sorted(itertools.chain(*published)) == list(range(24))
    assert [version.number for version in catalog.versions("adder")] == list(range(24))
    assert catalog.aliases("adder") == {"latest": 23, "rollout": 23}
    events = [event for event in catalog.pending_events() if event.kind == "version.published"]
    assert sorted(event.payload["version"] for event in events) == sorted(f"adder@{n}" for n in range(24))


def test_the_same_step_in_several_processes_is_one_version(url: str, catalog: Catalog) -> None:
    run = new_run(catalog, new_policy(catalog))
    assert race(url, catalog.tenant, *[("publish", run.run_id, "3")] * 3) == ["0 1 2"] * 3
    assert len(catalog.versions("adder")) == 3
    assert len(catalog.pending_events()) == 4


def test_a_process_killed_in_its_transaction_leaves_nothing(url: str, catalog: Catalog) -> None:
    run = new_run(catalog, new_policy(catalog))
    first = publish(catalog, run, 0)
    events = catalog.pending_events()
    with worker(WORKER, url, catalog.tenant, "die", run.run_id, "1") as process:
        assert process.line() == "ready"
        process.say("go")
        assert process.line() == "stopped"
        assert catalog.versions("adder") == [first]
    assert catalog.versions("adder") == [first]
    assert catalog.aliases("adder") == {"latest": 0, "rollout": 0}
    assert catalog.pending_events() == events
    assert publish(catalog, run, 1).number == 1
    assert len(catalog.pending_events()) == len(events) + 1
