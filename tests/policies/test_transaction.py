"""Several calls as one transaction: seen by others at its end, or not at all."""

import threading
from collections.abc import Callable

import pytest

from opentinker_core.errors import NotFoundError
from opentinker_core.policies.catalog import Catalog
from tests.policies.builders import new_policy, new_run, publish, trajectory_set


def test_what_is_done_together_is_seen_together(open_catalog: Callable[[str], Catalog], tenant: str) -> None:
    mine, reader = open_catalog(tenant), open_catalog(tenant)
    run = new_run(mine, new_policy(mine))
    events = len(reader.pending_events())
    with mine.transaction():
        version = publish(mine, run, 0)
        mine.add_trajectory_set(trajectory_set(run, 1, version.ref))
        assert mine.version("adder") == version
        assert reader.versions("adder") == reader.trajectory_sets(run.run_id) == []
    assert reader.version("adder") == version
    assert [one.sampled_by for one in reader.trajectory_sets(run.run_id)] == [version.ref]
    assert len(reader.pending_events()) == events + 1


def test_an_error_undoes_all_of_it(catalog: Catalog) -> None:
    policy = new_policy(catalog)
    run = new_run(catalog, policy)
    first = publish(catalog, run, 0)
    events = catalog.pending_events()

    def both() -> None:
        with catalog.transaction():
            publish(catalog, run, 1)
            publish(catalog, run, 2, trained_on=["nowhere"])

    with pytest.raises(NotFoundError, match="no trajectory set nowhere"):
        both()
    assert catalog.versions("adder") == [first]
    assert catalog.pending_events() == events
    assert catalog.reserve_version(policy.policy_id, run.run_id, 5) == first.number + 1


def test_a_transaction_within_another_is_part_of_it(catalog: Catalog) -> None:
    run = new_run(catalog, new_policy(catalog))

    def outer() -> None:
        with catalog.transaction():
            with catalog.transaction():
                publish(catalog, run, 0)
            publish(catalog, run, 1)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        outer()
    assert catalog.versions("adder") == []


def test_other_threads_are_not_part_of_it(catalog: Catalog) -> None:
    run = new_run(catalog, new_policy(catalog))
    seen: list[object] = []
    with catalog.transaction():
        publish(catalog, run, 0)
        thread = threading.Thread(target=lambda: seen.append(catalog.versions("adder")))
        thread.start()
        thread.join()
    assert seen == [[]]
    assert len(catalog.versions("adder")) == 1
