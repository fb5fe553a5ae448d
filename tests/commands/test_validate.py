"""`opentinker validate coordinator`: the table, JSON, and exit code 1 where a check does not catch."""

import json

import pytest
from typer.testing import CliRunner

from opentinker_core.agents.coordination import trial
from opentinker_core.agents.coordination.mutants import MUTANTS
from opentinker_core.agents.coordination.violations import Check
from opentinker_core.commands.validate import app

runner = CliRunner()
SHORT = ("coordinator", "--generations", "2", "--episodes", "8")


def test_the_table_has_every_mutant_and_what_caught_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    result = runner.invoke(app, SHORT)
    assert result.exit_code == 0, result.output
    assert "WRONG" not in result.stdout
    for mutant in MUTANTS:
        assert mutant.name in result.stdout
    words = " ".join(result.stdout.split())
    assert f"The log gives away {len(MUTANTS)} of {len(MUTANTS)} broken coordinators" in words


def test_json_says_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "MUTANTS", MUTANTS[:3])
    result = runner.invoke(app, [*SHORT, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["right"]
    correct, *broken = found["coordinators"]
    assert correct["name"] == "correct"
    assert correct["violations"] == {}
    assert [one["name"] for one in broken] == [mutant.name for mutant in MUTANTS[:3]]
    for one in broken:
        assert one["violations"][one["must_be_caught_by"]] > 0


def test_a_mutant_that_is_not_caught_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = MUTANTS[0].__class__("sound", Check.ORDER)
    monkeypatch.setattr(trial, "MUTANTS", (sound,))
    result = runner.invoke(app, SHORT)
    assert result.exit_code == 1
    assert "WRONG" in result.stdout
