"""`opentinker isolation-report`: says what is equal, and fails where something is not."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner, Result

import opentinker_core.commands.isolation
from opentinker_core.commands.isolation import isolation_report
from opentinker_core.errors import UsageError
from opentinker_core.evaluation.isolation import FIELDS
from opentinker_core.training.state import PolicyState

runner = CliRunner()
app = typer.Typer()
app.command()(isolation_report)
SHORT = ("--policies", "3", "--steps", "2", "--idle-steps", "3", "--solo-steps", "2", "--threads", "1")


@pytest.fixture(autouse=True)
def _home(tiny_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENTINKER_HOME", str(tiny_home))


def _report(*options: str) -> Result:
    return runner.invoke(app, [*SHORT, *options])


def _json(result: Result) -> dict[str, Any]:
    return json.loads(result.stdout)


def test_everything_is_equal_on_the_tiny_model() -> None:
    result = _report("--json")
    assert result.exit_code == 0, result.output
    report = _json(result)
    assert report["isolated"] is True
    assert (report["model"], report["device"], report["dtype"]) == ("tiny", "cpu", "float32")
    assert [policy["lora"]["rank"] for policy in report["policies"]] == [1, 2, 4]
    wide, narrow = report["layouts"].values()
    assert [change["change"] for change in wide][:-1] == [change["change"] for change in narrow]
    assert wide[-1]["change"] == "others take 3 steps"
    for change in (*wide, *narrow):
        assert change["equal"] == dict.fromkeys(FIELDS, True)
    assert [peer["policy"] for peer in report["alone"]] == [policy["policy"] for policy in report["policies"]]
    assert all(peer["loss"] <= report["limit"] == 1e-5 for peer in report["alone"])


def test_the_tables_name_changes_and_policies() -> None:
    result = _report()
    assert result.exit_code == 0, result.output
    for text in ("trained again", "others' rows removed", "gradient", "rank4-3", "lm_head", "isolated:"):
        assert text in result.stdout
    assert "differ" not in result.stdout.replace("difference", "")


def test_a_leak_is_found_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that depend, in their last bits, on how many steps were taken by anybody."""
    steps = itertools.count(1)
    apply = PolicyState.apply_gradients

    def leaking(self: PolicyState, config: Any) -> float:
        norm = apply(self, config)
        self.adapter.row_P.mul_(1 + 1e-6 * next(steps))
        return norm

    monkeypatch.setattr(PolicyState, "apply_gradients", leaking)
    result = _report("--json")
    assert result.exit_code == 1
    report = _json(result)
    assert report["isolated"] is False
    alone = next(c for c in report["layouts"]["rows share prefixes"] if c["change"] == "each trained alone")
    assert "weights" in alone["differing"]
    assert alone["equal"]["step"] is True


def test_a_policy_that_is_not_as_trained_alone_fails_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opentinker_core.commands.isolation, "LIMIT", 1e-12)
    result = _report()
    assert result.exit_code == 1
    assert "not isolated" in result.stdout


def test_bfloat16_is_compared_bit_by_bit_and_not_judged_against_float32_peers() -> None:
    report = _json(_report("--json", "--dtype", "bfloat16", "--policies", "2", "--steps", "1"))
    assert report["dtype"] == "bfloat16"
    assert report["limit"] is None
    assert report["isolated"] is True


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_named() -> None:
    result = _report("--device", "cuda:0")
    assert isinstance(result.exception, UsageError)
    assert "cuda:0" in str(result.exception)
