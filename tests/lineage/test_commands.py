"""`opentinker lineage` and `opentinker sync`, run as the command line runs them."""

import json
import subprocess
import sys

import jsonschema
import pytest

from flows.cli import run
from opentinker_core.lineage.report import report_schema
from opentinker_core.runtime.workspace import Workspace
from tests.lineage.training import Training


@pytest.fixture
def cli(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """The workspace as the environment names it."""
    monkeypatch.setenv("OPENTINKER_HOME", str(workspace.home))
    monkeypatch.setenv("COLUMNS", "200")
    return workspace


def test_lineage_shows_people_the_chain(cli: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    training = Training(cli)
    training.evaluate("base", 0.25)
    for _ in range(3):
        training.step()
    training.evaluate("adder@3", 0.75)
    assert run(["lineage", "adder@3"]) == 0
    shown = capsys.readouterr().out
    for text in ("adder@3", "adder@2", "adder@1", "adder@0", training.run.run_id, "0.750", "0.250", "base"):
        assert text in shown
    for one in cli.catalog.trajectory_sets(training.run.run_id, purpose="train"):
        assert one.digest[:12] in shown


def test_a_long_chain_is_cut_for_people_and_never_in_json(
    cli: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    training = Training(cli)
    for _ in range(40):
        training.step()
    assert run(["lineage", "adder"]) == 0
    shown = capsys.readouterr().out
    assert "adder@39" in shown
    assert "adder@2 " not in shown
    assert "11 older" in shown
    assert run(["lineage", "adder", "--all"]) == 0
    assert "adder@2 " in capsys.readouterr().out
    assert run(["lineage", "adder", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["ancestry"]) == 41


def test_lineage_json_is_one_object_of_the_documented_schema(
    cli: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    Training(cli).step()
    assert run(["lineage", "adder", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    jsonschema.validate(report, report_schema())
    assert report["version"]["ref"] == "adder@1"


def test_lineage_of_nothing_is_a_usage_error(cli: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    Training(cli)
    assert run(["lineage", "subtracter"]) == 2
    captured = capsys.readouterr()
    assert "subtracter" in captured.err
    assert "adder" in captured.err
    assert captured.out == ""


def test_sync_delivers_what_is_pending(cli: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    Training(cli).step()
    assert run(["sync", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"delivered": 3, "outcome": "drained", "pending": []}
    assert run(["sync"]) == 0
    assert "0 events delivered" in capsys.readouterr().out


def test_sync_during_an_outage_fails_with_one_message_and_keeps_everything(
    cli: Workspace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENTINKER_MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    Training(cli)
    assert run(["sync", "--json"]) == 1
    captured = capsys.readouterr()
    assert [one["kind"] for one in json.loads(captured.out)["pending"]] == [
        "run.started",
        "version.published",
    ]
    assert "127.0.0.1" in captured.err
    assert "Traceback" not in captured.err
    monkeypatch.delenv("OPENTINKER_MLFLOW_TRACKING_URI")
    assert run(["sync"]) == 0
    assert "2 events delivered" in capsys.readouterr().out


def test_the_commands_import_nothing_heavy() -> None:
    heavy = ("torch", "transformers", "mlflow", "prefect", "pyarrow", "sqlalchemy")
    program = (
        "import sys, opentinker_core.commands.lineage\n"
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def test_the_report_imports_no_mlflow(cli: Workspace) -> None:
    Training(cli)
    program = (
        "import sys, contextlib, io\nfrom flows.cli import run\n"
        "with contextlib.redirect_stdout(io.StringIO()): run(['lineage', 'adder', '--json'])\n"
        "print([name for name in ('torch', 'mlflow', 'prefect', 'pyarrow') if name in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
