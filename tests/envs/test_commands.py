import json

import pytest
from typer.testing import CliRunner

from opentinker_core.commands.environments import app
from opentinker_core.errors import UsageError

runner = CliRunner()


def test_list_shows_ids_and_the_arguments_of_one() -> None:
    shown = runner.invoke(app, ["list", "arithmetic"]).stdout
    assert shown.startswith("arithmetic ")
    assert "digits: int = 1" in shown
    assert "reasoning_gym/gcd" in runner.invoke(app, ["list"]).stdout


def test_list_as_json_is_one_object() -> None:
    shown = json.loads(runner.invoke(app, ["list", "leg", "--json"]).stdout)
    (leg,) = shown["environments"]
    assert leg["id"] == "reasoning_gym/leg_counting"
    assert {"name": "min_animals", "type": "int", "default": "3"} in leg["arguments"]


def test_check_reports_a_right_environment() -> None:
    result = runner.invoke(
        app, ["check", "arithmetic", "--arg", "operations=-", "--arg", "digits=2", "--json"]
    )
    assert result.exit_code == 0
    assert json.loads(result.stdout)["ok"] is True


def test_check_of_a_broken_environment_exits_with_1() -> None:
    result = runner.invoke(app, ["check", "tests.envs.broken:NeverEnds"])
    assert result.exit_code == 1
    assert "  ends: " in result.stdout


@pytest.mark.parametrize(
    "arguments", [["nothing"], ["arithmetic", "--arg", "digits=x"], ["arithmetic", "--arg", "digits"]]
)
def test_wrong_requests_are_usage_errors(arguments: list[str]) -> None:
    assert isinstance(runner.invoke(app, ["check", *arguments]).exception, UsageError)
