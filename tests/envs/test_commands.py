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
    everything = runner.invoke(app, ["list"]).stdout
    assert "reasoning_gym/gcd" in everything
    assert "gomoku_match                             [several agents] " in everything


def test_list_as_json_is_one_object() -> None:
    shown = json.loads(runner.invoke(app, ["list", "leg", "--json"]).stdout)
    (leg,) = shown["environments"]
    assert (leg["id"], leg["kind"]) == ("reasoning_gym/leg_counting", "single")
    assert {"name": "min_animals", "type": "int", "default": "3"} in leg["arguments"]


def test_check_reports_a_right_environment() -> None:
    result = runner.invoke(
        app, ["check", "arithmetic", "--arg", "operations=-", "--arg", "digits=2", "--json"]
    )
    assert result.exit_code == 0
    assert json.loads(result.stdout)["ok"] is True


def test_check_plays_several_agents_and_demonstrations_with_the_calculator() -> None:
    for id in ("negotiate", "tool_math"):
        result = runner.invoke(app, ["check", id, "--seeds", "3", "--json"])
        assert result.exit_code == 0
        assert "demonstration" in json.loads(result.stdout)["passed"]


def test_check_counts_turns_up_to_a_limit() -> None:
    result = runner.invoke(app, ["check", "gomoku_match", "--max-turns", "3", "--seeds", "2"])
    assert result.exit_code == 1
    assert "  ends: " in result.stdout
    assert "not done after 3 turns" in result.stdout


def test_check_of_a_broken_environment_exits_with_1() -> None:
    result = runner.invoke(app, ["check", "tests.envs.broken:NeverEnds"])
    assert result.exit_code == 1
    assert "  ends: " in result.stdout


@pytest.mark.parametrize(
    "arguments", [["nothing"], ["arithmetic", "--arg", "digits=x"], ["arithmetic", "--arg", "digits"]]
)
def test_wrong_requests_are_usage_errors(arguments: list[str]) -> None:
    assert isinstance(runner.invoke(app, ["check", *arguments]).exception, UsageError)
