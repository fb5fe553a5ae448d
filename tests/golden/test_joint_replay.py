"""A joint run is killed between the phases of its policies, and ends as one that was left alone."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.golden.commands import run_command
from tests.runtime.joint_runs import CONFIG

pytestmark = [pytest.mark.processes, pytest.mark.servers]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "pair.yaml"
    path.write_text(yaml.safe_dump(CONFIG))
    return path


def _outcome(printed: str) -> list[tuple[Any, ...]]:
    keys = ("name", "token_ids_digest", "losses", "digest", "version", "steps", "evaluation")
    return [tuple(result[key] for key in keys) for result in json.loads(printed)]


@pytest.fixture(scope="module")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, prefect_api: str, config: Path
) -> list[tuple[Any, ...]]:
    done = run_command(tmp_path_factory.mktemp("undisturbed"), prefect_api, "train", str(config), "--json")
    assert done.returncode == 0, done.stderr
    return _outcome(done.stdout)


@pytest.mark.parametrize(
    ("point", "count"),
    [
        ("stored", 7),  # of the RL steps' episodes, those of one policy
        ("update", 17),  # one of the two has stepped
        ("recorded", 7),  # one of the two has published its first RL step
        ("joint evaluation", 2),  # both have published their last step
    ],
)
def test_killed_and_resumed_it_ends_the_same(
    undisturbed: list[tuple[Any, ...]],
    tmp_path: Path,
    prefect_api: str,
    config: Path,
    point: str,
    count: int,
) -> None:
    arguments = (point, str(count), "train", str(config), "--json")
    killed = run_command(tmp_path, prefect_api, *arguments, module="tests.golden.killed")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed = run_command(tmp_path, prefect_api, "resume", "pair", "--json")
    assert resumed.returncode == 0, resumed.stderr
    assert _outcome(resumed.stdout) == undisturbed
    assert [name for name, *_ in undisturbed] == ["pair.black", "pair.white"]
