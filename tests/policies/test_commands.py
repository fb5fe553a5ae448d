"""The commands, as the `opentinker` program runs them."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from opentinker_core.policies.catalog import Catalog
from tests import programs
from tests.policies.builders import new_policy, new_run, publish


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A catalog with a policy of three versions, in the installation that the variables name."""
    monkeypatch.setenv("OPENTINKER_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("OPENTINKER_TENANT", "team")
    for name in ("OPENTINKER_CATALOG_URL", "OPENTINKER_SNAPSHOT_URI"):
        monkeypatch.delenv(name, raising=False)
    catalog = Catalog(f"sqlite:///{tmp_path / 'catalog.db'}", "team")
    run = new_run(catalog, new_policy(catalog), "first")
    for step in range(3):
        publish(catalog, run, step, metrics={"kl": math.nan if step == 2 else 0.5})
    catalog.set_alias("adder", "best", 1)
    catalog.close()
    return tmp_path


def opentinker(*arguments: str, code: int = 0) -> str:
    result = programs.run(arguments)
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    return result.stdout if code == 0 else result.stderr


def as_json(*arguments: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(opentinker(*arguments, "--json"), parse_constant=pytest.fail)
    return answer


@pytest.mark.usefixtures("home")
def test_tables_for_people() -> None:
    listed = opentinker("policies").splitlines()
    assert listed[0].split() == [
        "policy",
        "base",
        "model",
        "rank",
        "versions",
        "latest",
        "best",
        "forked",
        "from",
    ]
    assert listed[1].split() == ["adder", "tiny", "4", "3", "2", "1"]
    shown = [line.split()[:5] for line in opentinker("versions", "adder").splitlines()[1:]]
    assert shown[1] == ["adder@1", "best", "rl", "1", shown[1][4]]
    assert shown[2][:4] == ["adder@2", "latest,", "rollout", "rl"]
    assert opentinker("runs").splitlines()[1].split()[1:4] == ["first", "adder", "running"]


@pytest.mark.usefixtures("home")
def test_one_object_for_programs() -> None:
    (policy,) = as_json("policies")["policies"]
    assert (policy["name"], policy["lora"]["rank"], policy["versions"]) == ("adder", 4, 3)
    assert policy["aliases"] == {"best": 1, "latest": 2, "rollout": 2}
    listed = as_json("versions", "adder")
    assert [version["ref"] for version in listed["versions"]] == ["adder@0", "adder@1", "adder@2"]
    assert [version["metrics"]["kl"] for version in listed["versions"]] == [0.5, 0.5, None]
    assert listed["versions"][2]["aliases"] == ["latest", "rollout"]
    (run,) = as_json("runs")["runs"]
    assert (run["name"], run["policy"], run["status"]) == ("first", "adder", "running")


@pytest.mark.usefixtures("home")
def test_rollback_and_fork() -> None:
    answer = as_json("rollback", "adder", "0")
    assert (answer["version"]["ref"], answer["aliases"]["latest"]) == ("adder@0", 0)
    assert "latest and rollout are adder@1" in opentinker("rollback", "adder", "1")
    assert as_json("fork", "adder@2", "other")["version"]["parent"] == "adder@2"
    assert "other@0 is a fork of adder@2" in opentinker("fork", "adder@2", "other")


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("versions", "nobody"), "opentinker: policy: there is no 'nobody'; there is: adder"),
        (("rollback", "adder", "9"), "opentinker: version: there is no adder@9; there is: adder@2"),
        (("fork", "adder@", "x"), "opentinker: version: 'adder@' is not a reference"),
        (("fork", "adder", "../x"), "opentinker: policy: '../x' is not a name"),
    ],
)
def test_wrong_requests_are_one_message(arguments: tuple[str, ...], message: str) -> None:
    assert opentinker(*arguments, code=2).startswith(message)


def test_a_damaged_catalog_is_one_message(home: Path) -> None:
    (home / "catalog.db").write_bytes(b"\1" * 8192)
    message = opentinker("policies", code=1)
    assert message == f"opentinker: catalog sqlite:///{home}/catalog.db: file is not a database\n"


def test_nothing_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENTINKER_HOME", str(tmp_path / "new"))
    monkeypatch.delenv("OPENTINKER_CATALOG_URL", raising=False)
    assert opentinker("policies") == "there is none yet\n"
    assert as_json("runs") == {"runs": []}


def test_the_module_is_light() -> None:
    program = (
        "import sys, opentinker_core.commands.policies\n"
        "heavy = ('sqlalchemy', 'alembic', 'rich.table', 'pydantic', 'torch')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "[]\n"
