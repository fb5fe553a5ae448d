"""The report answers from the catalog: ancestry across forks, what trained what, and in few queries."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jsonschema
import pytest
from sqlalchemy import Engine, event

from opentinker_core.errors import NotFoundError
from opentinker_core.lineage.report import LineageReport, build_report, report_schema
from opentinker_core.runtime.workspace import Workspace
from tests.lineage.training import Training, episode, open_workspace

SCHEMA = Path(__file__).parents[2] / "docs" / "lineage.schema.json"


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return open_workspace(tmp_path)


def report_of(workspace: Workspace, ref: str) -> LineageReport:
    """The report, checked against the schema in the form in which it is printed."""
    report = build_report(workspace.catalog, ref)
    jsonschema.validate(json.loads(report.model_dump_json()), report_schema())
    return report


@contextmanager
def counted_queries() -> Iterator[list[str]]:
    statements: list[str] = []

    def note(conn: object, cursor: object, statement: str, *rest: object) -> None:
        if statement.startswith("SELECT"):
            statements.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    try:
        yield statements
    finally:
        event.remove(Engine, "before_cursor_execute", note)


def test_the_schema_in_the_documentation_is_current() -> None:
    assert json.loads(SCHEMA.read_text()) == report_schema(), (
        "write it anew: python -m opentinker_core.lineage.report > docs/lineage.schema.json"
    )


def test_the_schema_refuses_what_is_no_report(workspace: Workspace) -> None:
    Training(workspace)
    good = json.loads(report_of(workspace, "adder").model_dump_json())
    for change in ({"format": "other"}, {"extra": 1}, {"ancestry": [{}]}, {"version": None}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(good | change, report_schema())


def test_every_step_back_to_the_base_names_its_trajectory_set(workspace: Workspace) -> None:
    training = Training(workspace, flow_run_id="flow-1")
    for _ in range(5):
        training.step()
    report = report_of(workspace, "adder")
    assert [one.ref for one in report.ancestry] == [f"adder@{number}" for number in range(5, -1, -1)]
    for version, parent in zip(report.ancestry, report.ancestry[1:], strict=False):
        (trained_on,) = version.trained_on
        (recorded,) = workspace.catalog.lineages([version.ref])[0].trained_on
        assert version.parent == trained_on.sampled_by == parent.ref
        assert (trained_on.uri, trained_on.digest) == (recorded.uri, recorded.digest)
        assert (trained_on.episodes, trained_on.tokens, trained_on.step) == (4, 8, version.step)
        assert version.metrics["grad_norm"] == 1.0
    base = report.ancestry[-1]
    assert (base.parent, base.trained_on, base.phase) == (None, [], "init")
    assert report.version == report.ancestry[0]
    assert report.version.sampler.uri == "file:///snapshots/adder-5/sampler"
    assert report.run is not None
    assert (report.run.run_id, report.run.flow_run_id) == (training.run.run_id, "flow-1")
    assert (report.run.config_digest, report.run.code_commit) == (training.run.config_digest, "abc123")


def test_a_version_in_the_middle_has_its_own_ancestry_and_what_it_generated(workspace: Workspace) -> None:
    training = Training(workspace)
    training.step()
    training.evaluate("adder@1", 0.5)
    training.step()
    training.step()
    report = report_of(workspace, "adder@1")
    assert [one.ref for one in report.ancestry] == ["adder@1", "adder@0"]
    assert [(one.purpose, one.trained) for one in report.generated] == [
        ("evaluation", []),
        ("train", ["adder@2"]),
    ]


def test_the_ancestry_of_a_fork_crosses_policies_and_runs(workspace: Workspace) -> None:
    first = Training(workspace)
    source = first.step()
    first.step()
    second = Training(workspace, policy="copy", name="copy-rl", start=source.ref)
    second.step()
    report = report_of(workspace, "copy")
    assert [one.ref for one in report.ancestry] == ["copy@1", "copy@0", "adder@1", "adder@0"]
    assert [one.run_id for one in report.runs] == [second.run.run_id, first.run.run_id]
    assert report.policy.forked_from == "adder@1"
    assert report.ancestry[2].trained_on[0].sampled_by == "adder@0"


def test_a_fork_without_a_run_has_none(workspace: Workspace) -> None:
    version = Training(workspace).step()
    workspace.catalog.fork(version.ref, "copy")
    report = report_of(workspace, "copy")
    assert report.run is None
    assert [one.ref for one in report.ancestry] == ["copy@0", "adder@1", "adder@0"]


def test_demonstrations_and_several_sets_a_version_are_named(workspace: Workspace) -> None:
    training = Training(workspace)
    shown = [
        training.sampled(step, "train", [episode(step, "demonstration")], "demonstration") for step in (1, 2)
    ]
    ids = [one.set_id for one in shown]
    training.version = training._publish(2, "sft", {"loss": float("nan")}, ids, "adder@0")
    version = report_of(workspace, "adder").version
    assert [one.sampled_by for one in version.trained_on] == ["demonstration"] * 2
    assert version.metrics == {"loss": None}


def test_evaluations_of_the_version_and_of_the_base_are_named(workspace: Workspace) -> None:
    training = Training(workspace)
    training.evaluate("base", 0.25)
    training.step()
    training.evaluate("adder@1", 0.5)
    training.step()
    training.evaluate("adder@2", 0.75)
    found = {one.subject: one for one in report_of(workspace, "adder@2").evaluations}
    assert {subject: one.mean for subject, one in found.items()} == {"adder@2": 0.75, "base": 0.25}
    assert found["adder@2"].trajectory_set is not None


def test_aliases_are_resolved(workspace: Workspace) -> None:
    training = Training(workspace)
    training.step()
    workspace.catalog.set_alias("adder", "best", 0)
    assert report_of(workspace, "adder@best").version.ref == "adder@0"


@pytest.mark.parametrize("ref", ["nobody", "adder@7", "adder@best"])
def test_what_does_not_exist_is_named(workspace: Workspace, ref: str) -> None:
    Training(workspace)
    with pytest.raises(NotFoundError, match="adder"):
        build_report(workspace.catalog, ref)


def test_the_number_of_queries_does_not_grow_with_the_chain(workspace: Workspace) -> None:
    training = Training(workspace)
    counts = []
    for _ in range(3):
        for _ in range(10):
            training.step()
        with counted_queries() as queries:
            report = build_report(workspace.catalog, "adder")
        counts.append(len(queries))
    assert len(report.ancestry) == 31
    assert counts[0] == counts[1] == counts[2] < 30
