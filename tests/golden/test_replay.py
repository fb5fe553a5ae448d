"""The same config gives the same tokens, losses and snapshot: run twice, or killed anywhere and resumed."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.golden.commands import run_command
from tests.runtime.runs import CONFIG

GOLDEN = Path(__file__).parent / "golden.json"

pytestmark = [pytest.mark.processes, pytest.mark.servers]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "golden.yaml"
    path.write_text(yaml.safe_dump(CONFIG))
    return path


def _train(home: Path, api: str, config: Path) -> dict[str, Any]:
    done = run_command(home, api, "train", str(config), "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _outcome(result: dict[str, Any]) -> tuple[Any, ...]:
    keys = ("token_ids_digest", "losses", "digest", "version", "steps", "evaluation")
    return tuple(result[key] for key in keys)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, prefect_api: str, config: Path) -> dict[str, Any]:
    return _train(tmp_path_factory.mktemp("undisturbed"), prefect_api, config)


def test_a_second_run_is_the_same(
    undisturbed: dict[str, Any], tmp_path: Path, prefect_api: str, config: Path
) -> None:
    assert _outcome(_train(tmp_path, prefect_api, config)) == _outcome(undisturbed)


@pytest.mark.parametrize(
    ("point", "count"),
    [
        *(("rollout", 3), ("stored", 4), ("update", 8), ("snapshot", 9), ("record", 4), ("recorded", 5)),
        ("evaluation", 2),  # of the last version; the base model's came first
    ],
)
def test_killed_and_resumed_it_ends_the_same(
    undisturbed: dict[str, Any], tmp_path: Path, prefect_api: str, config: Path, point: str, count: int
) -> None:
    arguments = (point, str(count), "train", str(config), "--json")
    killed = run_command(tmp_path, prefect_api, *arguments, module="tests.golden.killed")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert killed.stdout == ""
    resumed = run_command(tmp_path, prefect_api, "resume", "small", "--json")
    assert resumed.returncode == 0, resumed.stderr
    assert _outcome(json.loads(resumed.stdout)) == _outcome(undisturbed)


def test_losses_follow_the_golden_sequence(undisturbed: dict[str, Any]) -> None:
    """A change that must not change behaviour keeps these; one that must, replaces the file and says why.

    The tolerance is for processors that round differently; token ids may differ there, early losses not.
    """
    golden = json.loads(GOLDEN.read_text())
    assert undisturbed["losses"] == pytest.approx(golden["losses"], rel=1e-3, abs=1e-5)
    assert undisturbed["steps"] == golden["steps"]
