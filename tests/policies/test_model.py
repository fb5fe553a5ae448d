"""Any sequence of calls leaves the catalog as a dictionary would have it."""

import tempfile
from pathlib import Path
from uuid import uuid4

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from opentinker_core.errors import NotFoundError
from opentinker_core.policies.catalog import Catalog
from opentinker_core.policies.types import PolicyVersion, Run
from opentinker_core.snapshots.protocol import SnapshotConflictError
from tests.policies.builders import new_policy, new_run, publish

_FOLDER = tempfile.TemporaryDirectory(prefix="opentinker-catalog-")
runs = st.integers(0, 1)
steps = st.integers(0, 3)
numbers = st.integers(0, 5)
aliases = st.sampled_from(["latest", "rollout", "best"])


class CatalogMachine(RuleBasedStateMachine):
    """Two runs of one policy; every example is a tenant of its own in one database."""

    @initialize()
    def start(self) -> None:
        self.catalog = Catalog(f"sqlite:///{Path(_FOLDER.name) / 'catalog.db'}", f"t-{uuid4().hex}")
        self.policy = new_policy(self.catalog)
        self.runs: list[Run] = [new_run(self.catalog, self.policy, f"run-{n}") for n in range(2)]
        self.reserved: dict[tuple[int, int], int] = {}
        self.published: dict[int, PolicyVersion] = {}
        self.aliases: dict[str, int] = {}
        self.events = 2
        self.forks = 0

    def teardown(self) -> None:
        self.catalog.close()

    @rule(run=runs, step=steps)
    def reserve(self, run: int, step: int) -> None:
        number = self.catalog.reserve_version(self.policy.policy_id, self.runs[run].run_id, step)
        assert number == self.reserved.setdefault((run, step), len(self.reserved))

    @rule(run=runs, step=steps)
    def publish(self, run: int, step: int) -> None:
        version = publish(self.catalog, self.runs[run], step)
        number = self.reserved.setdefault((run, step), len(self.reserved))
        if number not in self.published:
            self.events += 1
            for alias in ("latest", "rollout"):
                self.aliases[alias] = max(number, self.aliases.get(alias, 0))
        assert version == self.published.setdefault(number, version)
        assert version.number == number

    @rule(run=runs, step=steps)
    def publish_other_content(self, run: int, step: int) -> None:
        if self.reserved.get((run, step)) in self.published:
            with pytest.raises(SnapshotConflictError):
                publish(self.catalog, self.runs[run], step, "other")

    @rule(alias=aliases, number=numbers)
    def set_alias(self, alias: str, number: int) -> None:
        if number in self.published:
            assert self.catalog.set_alias("adder", alias, number) == self.published[number]
            self.aliases[alias] = number
        else:
            with pytest.raises(NotFoundError):
                self.catalog.set_alias("adder", alias, number)

    @rule(number=numbers)
    def rollback(self, number: int) -> None:
        if number in self.published:
            self.catalog.rollback("adder", number)
            self.aliases |= {"latest": number, "rollout": number}

    @precondition(lambda self: self.published)
    @rule()
    def fork(self) -> None:
        fork = self.catalog.fork("adder", f"fork-{self.forks}")
        self.forks += 1
        self.events += 1
        latest = self.published[self.aliases["latest"]]
        assert (fork.number, fork.parent, fork.sampler) == (0, latest.ref, latest.sampler)

    @invariant()
    def catalog_is_as_the_model(self) -> None:
        assert {one.number: one for one in self.catalog.versions("adder")} == self.published
        assert self.catalog.aliases("adder") == self.aliases
        assert len(self.catalog.pending_events(1000)) == self.events
        for alias, number in self.aliases.items():
            assert self.catalog.version(f"adder@{alias}") == self.published[number]


CatalogMachine.TestCase.settings = settings(max_examples=15, stateful_step_count=15, deadline=None)
TestCatalog = CatalogMachine.TestCase
