"""`opentinker trajectories`: sets are found by URI, by id and by run, and shown as text, ids or JSON."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from opentinker_core.commands.trajectories import app
from opentinker_core.config.schema import LoRAConfig
from opentinker_core.errors import NotFoundError, UsageError
from opentinker_core.policies.types import Run, TrajectorySet
from opentinker_core.runtime.workspace import Workspace
from opentinker_core.trajectories.store import TrajectoryStore
from opentinker_core.trajectories.types import Trajectory
from tests.trajectories.strategies import demonstration, two_turns

WIDE = {"COLUMNS": "120"}


@pytest.fixture(autouse=True)
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    monkeypatch.setenv("OPENTINKER_HOME", str(tmp_path / "home"))
    return Workspace()


@pytest.fixture
def run(workspace: Workspace) -> Run:
    policy = workspace.catalog.create_policy("adder", "tiny", LoRAConfig())
    config = {"policy": {"base_model": "tiny"}}
    return workspace.catalog.start_run("sums", policy.policy_id, config, "digest")


def record(
    workspace: Workspace, run: Run, step: int, trajectories: list[Trajectory], purpose: str = "train"
) -> TrajectorySet:
    stored = workspace.trajectories.save((run.run_id, f"step-{step}", purpose), trajectories)
    return workspace.catalog.add_trajectory_set(
        TrajectorySet(
            set_id=f"set-{step}-{purpose}",
            uri=stored.uri,
            digest=stored.digest,
            episodes=stored.episodes,
            tokens=stored.tokens,
            environment="arithmetic",
            sampled_by="base",
            run_id=run.run_id,
            step=step,
            purpose=purpose,
            reward_mean=1.0 if step else None,
        )
    )


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), env=WIDE, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def show_json(*arguments: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(invoke("show", *arguments, "--json"))
    return value


def test_a_set_of_any_place_is_shown_by_its_uri(tmp_path: Path) -> None:
    store = TrajectoryStore((tmp_path / "elsewhere").as_uri(), tmp_path / "cache")
    uri = store.save(("run", "step"), [two_turns(), replace(demonstration(), member=1)]).uri
    output = invoke("show", uri, "--limit", "1")
    assert "2 episodes, mean reward 1.125" in output
    assert "10 11 ⟦20 21⟧ 12 ⟦22⟧ 13" in output
    assert "... and 1 more" in output
    assert show_json(uri)["reward_mean"] == 1.125
    assert not (tmp_path / "home" / "catalog.db").exists()


def test_a_run_shows_its_newest_training_set(workspace: Workspace, run: Run) -> None:
    record(workspace, run, 1, [two_turns()])
    newest = record(workspace, run, 2, [demonstration()])
    record(workspace, run, 3, [two_turns()], purpose="evaluation")
    for key in (run.run_id, run.run_id[:6], "sums"):
        value = show_json(key, "--tokens")
        assert (value["uri"], value["digest"]) == (newest.uri, newest.digest)
        assert [t["token_ids"] for t in value["trajectories"]] == [[10, 20, 21]]


def test_a_set_is_found_by_its_id_or_the_beginning_of_it(workspace: Workspace, run: Run) -> None:
    trained = record(workspace, run, 1, [two_turns()])
    record(workspace, run, 1, [demonstration()], purpose="evaluation")
    for key in ("set-1-train", "set-1-t"):
        assert show_json(key, "--tokens")["uri"] == trained.uri
    with pytest.raises(UsageError, match="fits 2 trajectory sets"):
        invoke("show", "set-1")
    with pytest.raises(NotFoundError, match="neither a run nor a trajectory set"):
        invoke("show", "set-9")


def test_text_is_decoded_with_the_run_s_base_model(workspace: Workspace, run: Run) -> None:
    stored = record(workspace, run, 1, [two_turns()])
    by_run = show_json("sums")["trajectories"][0]
    assert by_run["turns"][0]["text"] in by_run["text"]
    assert len(by_run["turns"][0]["text"]) == 2
    assert show_json(stored.uri, "--model", "tiny")["trajectories"] == [by_run]
    assert f"⟦{by_run['turns'][0]['text']}⟧" in invoke("show", "sums")


def test_the_sets_of_a_run_are_listed_by_step(workspace: Workspace, run: Run) -> None:
    sets = [record(workspace, run, step, [two_turns()]) for step in (2, 0, 1)]
    value = json.loads(invoke("list", "sums", "--json"))
    assert value["run"] == run.run_id
    assert [item["step"] for item in value["sets"]] == [0, 1, 2]
    assert value["sets"][2]["digest"] == sets[0].digest
    output = invoke("list", run.run_id)
    assert all(item.set_id in output for item in sets)
    assert "missing" in output


def test_a_run_without_trajectories_says_so(run: Run) -> None:
    with pytest.raises(NotFoundError, match="no trajectories yet"):
        invoke("show", "sums")
