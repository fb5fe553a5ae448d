"""The flows against a real Prefect server: phases in order, artifacts, failure, kill and resume."""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from opentinker_core.config.loading import load_config
from opentinker_core.errors import UsageError
from opentinker_core.policies.types import RunStatus
from opentinker_core.runtime.workspace import Workspace
from opentinker_core.sampling.protocol import BASE
from tests.programs import Program
from tests.servers import prefect_server
from tests.waiting import PATIENCE_S, read_until, wait_until

ROOT = Path(__file__).resolve().parents[2]
TINY = "deployments/configs/tiny_rl.yaml"
SMALL = ["sft.steps=3", "sft.publish_every=2", "rl.steps=3", "rl.groups=4", "rl.group_size=4"]
SMALL += ["evaluation.episodes=2", "evaluation.samples=2", "record.artifact_every=2"]

pytestmark = pytest.mark.servers
Start = Callable[..., Program]


def task_names(flow_run_id: str) -> list[str]:
    """Names of the flow run's finished tasks, in the order they started, once the server has all of them."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

    chosen = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id]))
    names: list[str] = []
    with get_client(sync_client=True) as client:

        def all_there() -> bool:
            found = client.read_task_runs(flow_run_filter=chosen)
            names[:] = [run.name for run in sorted(found, key=lambda run: run.expected_start_time)]
            return "report[6]" in names and all(run.state.is_completed() for run in found)

        wait_until(all_there, "the last report on the server", poll_s=0.2)
    return names


def artifact_keys(flow_run_id: str) -> set[str]:
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId

    chosen = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run_id]))
    with get_client(sync_client=True) as client:
        return {artifact.key for artifact in client.read_artifacts(artifact_filter=chosen)}


def test_one_flow_run_shows_every_phase_in_order_and_its_artifacts(prefect_api: str, home: Path) -> None:
    from flows.warm_up_then_rl import warm_up_then_rl

    run_id = warm_up_then_rl(load_config(ROOT / TINY, SMALL))
    catalog = Workspace().catalog
    run = catalog.run(run_id)
    assert run.status is RunStatus.COMPLETED
    assert [v.step for v in catalog.run_versions(run_id)] == [0, 2, 3, 4, 5, 6]
    assert {e.subject for e in catalog.evaluations(run_id)} == {BASE, "tiny-adder@5"}
    assert run.flow_run_id is not None
    one_step = ["rollout[{0}]", "build-batch[{0}]", "update-policy[{0}]", "publish-snapshot[{0}]"]
    refreshed = {4: 3, 5: 4, 6: 5}
    rl = [
        name
        for step, number in refreshed.items()
        for name in [*(part.format(step) for part in one_step), f"refresh-sampler[{number}]"]
    ]
    shown = [name for name in task_names(run.flow_run_id) if not name.startswith(("report", "link"))]
    assert shown == [
        "open-run",
        "evaluate[base]",
        "collect-demonstrations",
        *("supervised-steps[1-2]", "publish-snapshot[2]", "refresh-sampler[1]"),
        *("supervised-steps[3-3]", "publish-snapshot[3]", "refresh-sampler[2]"),
        *rl,
        "evaluate[tiny-adder@5]",
    ]
    keys = {f"tiny-adder-{what}" for what in ("progress", "metrics", "episodes", "lineage")}
    assert artifact_keys(run.flow_run_id) == keys
    assert not catalog.pending_events()


def test_a_flow_refuses_a_config_with_other_phases_and_starts_nothing(prefect_api: str, home: Path) -> None:
    from flows.train_rl import train_rl
    from flows.train_sft import train_sft

    both = load_config(ROOT / TINY, SMALL)
    for flow, accepted in ((train_rl, "rl"), (train_sft, "sft")):
        with pytest.raises(UsageError, match=f"sft and rl; accepted: {accepted}$"):
            flow(both)
    assert Workspace().catalog.runs() == []


def test_a_failed_run_says_why_and_goes_on(prefect_api: str, home: Path) -> None:
    from flows.train_sft import train_sft

    config = load_config(ROOT / TINY, [*SMALL, "rl=null"])
    snapshots = home / "snapshots"
    home.mkdir()
    snapshots.write_text("a file where a directory belongs")
    with pytest.raises(Exception, match=str(snapshots)):
        train_sft(config)
    snapshots.unlink()
    run_id = train_sft(config)
    assert Workspace().catalog.run(run_id).status is RunStatus.COMPLETED


def test_evaluation_outside_of_runs_gives_what_the_run_found(prefect_api: str, home: Path) -> None:
    from flows.evaluate import evaluate_policy
    from flows.train_sft import train_sft

    config = load_config(ROOT / TINY, [*SMALL, "rl=null"])
    run_id = train_sft(config)
    catalog = Workspace().catalog
    for inside in catalog.evaluations(run_id):
        outside = evaluate_policy(config, inside.subject)
        assert (outside.mean, outside.episodes, outside.run_id) == (inside.mean, inside.episodes, None)
    assert len(catalog.evaluations()) == 4


def result(process: Program) -> dict[str, Any]:
    """The one object on stdout."""
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    assert out.count("\n") == 1
    loaded: dict[str, Any] = json.loads(out)
    return loaded


@pytest.mark.processes
def test_a_killed_run_resumes_to_the_same_tokens_losses_and_snapshot(
    prefect_api: str, start: Start, tmp_path: Path
) -> None:
    arguments = ["train", TINY, *SMALL, "--json"]
    whole = result(start(*arguments, OPENTINKER_HOME=str(tmp_path / "whole")))
    assert whole["steps"] == 6
    assert len(whole["rewards"]) == 3
    assert whole["losses"]
    assert {"base", "trained", "n", "intervals"} == set(whole["evaluation"])
    assert Path(whole["curve"]).read_bytes().startswith(b"\x89PNG")

    home = {"OPENTINKER_HOME": str(tmp_path / "killed")}
    killed = start(*arguments, **home)
    published = tmp_path / "killed" / "snapshots" / "default"
    wait_until(
        lambda: list(published.glob("*/v000003/sampler")) or killed.poll() is not None,
        "version 3",
        poll_s=0.01,
    )
    assert killed.poll() is None
    killed.kill()
    killed.communicate()
    resumed = result(start("resume", "tiny-rl", "--json", **home))
    for key in ("token_ids_digest", "losses", "digest", "rewards", "steps"):
        assert resumed[key] == whole[key]
    again = result(start("resume", resumed["run"], "--json", **home))
    assert again == resumed


@pytest.mark.processes
def test_a_prefect_server_that_goes_away_ends_the_run_with_one_message(start: Start, tmp_path: Path) -> None:
    with prefect_server(tmp_path / "prefect") as api:
        environment = {"PREFECT_API_URL": api, "PREFECT_CLIENT_MAX_RETRIES": "0"}
        home = {"OPENTINKER_HOME": str(tmp_path / "home")}
        process = start("train", TINY, *SMALL, "rl.steps=500", "record.mlflow=false", **home, **environment)
        read_until(process.stderr, "rl step")
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1, err
    assert out == ""
    assert f"opentinker: Prefect at {api}: ConnectError" in err
    assert "opentinker resume " in err
    assert "Traceback" not in err


@pytest.mark.processes
def test_ctrl_c_ends_with_130_and_says_how_to_go_on(prefect_api: str, start: Start, tmp_path: Path) -> None:
    process = start(
        "train", TINY, *SMALL, "sft.steps=300", "record.mlflow=false", OPENTINKER_HOME=str(tmp_path)
    )
    read_until(process.stderr, "sft step")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, err
    assert out == ""
    assert "opentinker resume " in err
    assert "Traceback" not in err
