"""`opentinker train` with several configs: one command, one engine where it can be, and a report for each."""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from flows.cli import run
from flows.run_commands import configs_and_overrides
from opentinker_core.config.loading import load_config
from opentinker_core.config.schema import TrainConfig
from opentinker_core.config.settings import Settings
from opentinker_core.errors import OpenTinkerError
from opentinker_core.policies.types import RunStatus
from opentinker_core.runtime.workspace import Workspace
from tests.programs import Program
from tests.waiting import PATIENCE_S, read_until

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "deployments/configs/tiny_rl.yaml"
SMALL = ["rl.steps=2", "rl.groups=2", "rl.group_size=2", "record.mlflow=false"]
SMALL += ["sft=null", "evaluation.episodes=2", "evaluation.samples=1"]


def written(folder: Path, name: str, *changes: tuple[str, str]) -> str:
    """The tiny config as a file of its own, for a run and a policy called `name`."""
    text = TINY.read_text(encoding="utf-8")
    for old, new in (("name: tiny-rl", f"name: {name}"), ("name: tiny-adder", f"name: {name}"), *changes):
        assert old in text
        text = text.replace(old, new)
    path = folder / f"{name}.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def dry_run(*arguments: str, capsys: pytest.CaptureFixture[str]) -> Any:
    assert run(["train", *arguments, "--dry-run", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_arguments_without_an_equals_sign_are_configs_wherever_they_stand() -> None:
    arguments = ["rl.steps=2", "one.yaml", "seed=1", "two.yaml"]
    assert configs_and_overrides(arguments) == (["one.yaml", "two.yaml"], ["rl.steps=2", "seed=1"])
    assert configs_and_overrides(["lr=3/one.yaml", "seed=1"]) == (["lr=3/one.yaml"], ["seed=1"])


def test_a_dry_run_plans_each_and_says_which_share_an_engine(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [written(tmp_path, "one"), written(tmp_path, "two")]
    files.append(written(tmp_path, "three", ("threads: 1", "threads: 2")))
    one, two, three = dry_run(*files, "rl.steps=7", capsys=capsys)
    assert [plan["phases"][1]["steps"] for plan in (one, two, three)] == [7, 7, 7]
    assert one["engine"] == {"shared_with": ["two"], "differs": {"three": ["runtime.threads"]}}
    assert two["engine"]["shared_with"] == ["one"]
    assert three["engine"]["shared_with"] == []
    assert all(
        plan["engine"]["differs"] == {} for plan in dry_run(*files, "runtime.threads=3", capsys=capsys)
    )
    assert "engine" not in dry_run(files[0], capsys=capsys)
    assert run(["train", *files, "--dry-run"]) == 0
    assert "shared with two; not with three (runtime.threads differs)" in capsys.readouterr().out
    assert not home.exists()


@pytest.mark.parametrize(
    ("overrides", "field"), [(["policy.name=same"], "policy.name: 'same'"), (["name=same"], "name: 'same'")]
)
def test_runs_of_one_policy_or_one_name_are_refused(
    overrides: list[str], field: str, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [written(tmp_path, "one"), written(tmp_path, "two")]
    assert run(["train", *files, *overrides]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"opentinker: {field} in {files[0]} and again in {files[1]}")
    assert len(err.splitlines()) == 1
    assert not home.exists()


def test_a_wrong_config_among_others_is_named_before_anything_starts(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = written(tmp_path, "two", ("seed: 0", "seed: -1"))
    assert run(["train", written(tmp_path, "one"), wrong]) == 2
    assert f"{wrong}: seed: -1" in capsys.readouterr().err
    assert not home.exists()


def small_configs(folder: Path, *names: str) -> list[TrainConfig]:
    return [load_config(written(folder, name), SMALL) for name in names]


@pytest.mark.servers
def test_a_run_that_fails_leaves_the_others_alone_and_is_named(
    prefect_api: str, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import typer

    from flows.together import run_together
    from tasks.progress import Progress, listening
    from tasks.sessions import session_of

    engines = set()

    opened, both_open = set[str](), Barrier(2)

    def fails_one(told: Progress) -> None:
        if told.run_id not in opened:  # an engine ends with its last run: both must have begun
            opened.add(told.run_id)
            both_open.wait(PATIENCE_S)
        engines.add(id(session_of(told.run_id).engine.shared))
        if (told.run_name, told.step) == ("one", 1):
            raise OpenTinkerError("no more")

    with listening(fails_one), pytest.raises(typer.Exit) as ended:
        run_together(small_configs(tmp_path, "one", "two"), Settings(), as_json=True, verbose=False)
    assert ended.value.exit_code == 1
    assert len(engines) == 1
    out, err = capsys.readouterr()
    failed, completed = json.loads(out)
    assert {name: failed[name] for name in ("name", "policy", "status", "error")} == {
        "name": "one",
        "policy": "one",
        "status": "failed",
        "error": "no more",
    }
    assert (completed["name"], completed["status"], completed["steps"]) == ("two", "completed", 2)
    lines = err.splitlines()
    assert "opentinker: one: no more" in lines
    assert f"opentinker: one: stopped; go on with: opentinker resume {failed['run']}" in lines
    assert "opentinker: two" not in err
    assert Workspace().catalog.run(failed["run"]).status is RunStatus.FAILED


@pytest.mark.servers
@pytest.mark.processes
def test_ctrl_c_stops_all_and_says_how_to_go_on_with_each(
    prefect_api: str, start: Callable[..., Program], home: Path, tmp_path: Path
) -> None:
    files = [written(tmp_path, name) for name in ("one", "two")]
    slow = [
        "rl.groups=16",
        "rl.group_size=8",
    ]  # so that the first leaves the second's start some time to write
    process = start("train", *files, *SMALL, *slow, "rl.steps=500")
    read_until(process.stderr, "one: rl step", "two: rl step")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, err
    assert out == ""
    assert "Traceback" not in err
    runs = {found.name: found for found in Workspace().catalog.runs()}
    assert set(runs) == {"one", "two"}
    for name, found in runs.items():
        assert f"opentinker: {name}: interrupted; go on with: opentinker resume {found.run_id}" in err
        assert found.status is RunStatus.FAILED
