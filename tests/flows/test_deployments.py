"""What deployments/prefect.yaml says is valid, and `deploy` brings a server in line with it, once."""

import copy
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from flows import servers
from flows.deploy import ROOT, apply, check_parameters, default_file
from opentinker_core.config.agents import AgentsConfig
from opentinker_core.config.any import load_any
from opentinker_core.config.loading import read_mapping, validate
from opentinker_core.config.schema import TrainConfig
from opentinker_core.errors import UsageError
from tests.waiting import PATIENCE_S

WANTED = read_mapping(default_file())
DEPLOYMENTS = WANTED["deployments"]


def names(deployment: dict[str, Any]) -> str:
    return str(deployment["name"])


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=names)
def test_every_entrypoint_loads_and_takes_its_parameters(deployment: dict[str, Any]) -> None:
    flow = check_parameters(deployment | {"entrypoint": str(ROOT / deployment["entrypoint"])})
    assert flow.name in {"train-rl", "train-sft", "warm-up-then-rl", "train-agents", "evaluate"}


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=names)
def test_every_deployment_names_a_queue_of_a_pool(deployment: dict[str, Any]) -> None:
    pool = deployment["work_pool"]
    assert pool["work_queue_name"] in WANTED["definitions"]["work_pools"][pool["name"]]["queues"]
    assert "CUDA_VISIBLE_DEVICES" in pool["job_variables"]["env"]


def test_parameters_are_the_example_configs() -> None:
    files = (ROOT / "deployments/configs").glob("*.yaml")
    examples = {one.name: one for one in (load_any(path) for path in files if path.stem != "serve")}
    for deployment in DEPLOYMENTS:
        given = deployment["parameters"]["config"]
        config = validate(given, AgentsConfig if "policies" in given else TrainConfig, deployment["name"])
        assert config == examples[config.name]


def test_rl_sft_and_evaluation_are_deployed_and_one_runs_by_the_clock() -> None:
    flows = {Path(deployment["entrypoint"].split(":")[0]).stem for deployment in DEPLOYMENTS}
    assert flows >= {"train_rl", "train_sft", "warm_up_then_rl", "train_agents", "evaluate"}
    assert any(one.get("cron") for deployment in DEPLOYMENTS for one in deployment.get("schedules", []))


def test_wrong_parameters_are_told_with_the_name_of_the_deployment() -> None:
    wrong = copy.deepcopy(DEPLOYMENTS[0]) | {"entrypoint": str(ROOT / DEPLOYMENTS[0]["entrypoint"])}
    wrong["parameters"]["config"]["rl"]["steps"] = 0
    with pytest.raises(UsageError, match=r"(?s)'quickstart'.*config\.rl\.steps"):
        check_parameters(wrong)
    with pytest.raises(UsageError, match="'quickstart'"):
        check_parameters(wrong | {"entrypoint": str(ROOT / "flows/nowhere.py:train")})


@pytest.mark.servers
def test_deploy_creates_then_changes_nothing_then_only_what_differs(prefect_api: str) -> None:
    assert {row["done"] for row in apply(WANTED, ROOT)} == {"created"}
    assert {row["done"] for row in apply(WANTED, ROOT)} == {"unchanged"}
    changed = copy.deepcopy(WANTED)
    changed["definitions"]["work_pools"]["gpu"]["queues"]["train"]["concurrency_limit"] = 2
    changed["deployments"][2]["tags"] = ["sft", "changed"]
    done = {row["name"]: row["done"] for row in apply(changed, ROOT)}
    assert {name for name, what in done.items() if what == "updated"} == {"gpu/train", "train-sft/sft"}
    assert set(done.values()) == {"updated", "unchanged"}
    apply(WANTED, ROOT)


@pytest.fixture
def up(home: Path) -> Iterator[tuple["subprocess.Popen[str]", dict[str, Any]]]:
    """A running `opentinker up --json` and what it printed."""
    ports = ["--port", str(servers.free_port()), "--mlflow-port", str(servers.free_port())]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    process = subprocess.Popen(
        [sys.executable, "-m", "flows.cli", "up", "--json", *ports],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "up ended without a word"
    yield process, json.loads(line)
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    process.wait(PATIENCE_S)
    process.stdout.close()


@pytest.mark.servers
@pytest.mark.processes
def test_up_serves_both_is_found_refuses_a_second_and_leaves_nothing(
    up: tuple["subprocess.Popen[str]", dict[str, Any]], home: Path
) -> None:
    process, addresses = up
    assert servers.answers(f"{addresses['prefect_url']}/api/health")
    assert servers.answers(f"{addresses['mlflow_url']}/health")
    assert json.loads((home / "up.json").read_text())["pid"] == process.pid
    second = subprocess.run(
        [sys.executable, "-m", "flows.cli", "up"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert second.returncode == 2
    assert "runs already" in second.stderr
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE_S) == 0
    assert not any(member.is_running() for member in family)
    assert not (home / "up.json").exists()


def test_up_names_a_taken_port(home: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            [sys.executable, "-m", "flows.cli", "up", "--port", port],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 2
    assert f"port {port}" in done.stderr
    assert len(done.stderr.splitlines()) == 1
