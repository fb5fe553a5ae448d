"""The command line: fast help, one message for each mistake, exit codes, nothing but JSON on stdout."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli import COMMANDS, app, run
from flows.lazy import load
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted(path for path in (ROOT / "deployments" / "configs").glob("*.yaml") if path.stem != "serve")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OPENTINKER_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    return tmp_path / "home"


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flows.cli", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )


def test_help_lists_every_command_and_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom flows.cli import run\nassert run(['--help']) == 0\n"
        "heavy = {'torch', 'prefect', 'mlflow', 'pyarrow', 'sqlalchemy', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=PATIENCE_S
    )
    for name in COMMANDS:
        assert f" {name} " in done.stdout


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_resolves_and_has_help(name: str) -> None:
    assert load(name, COMMANDS[name]).name == name
    result = CliRunner().invoke(app, [name, "--help"])
    assert result.exit_code == 0
    assert "Usage" in result.output


def test_an_unknown_command_gets_a_suggestion() -> None:
    done = command("trian")
    assert done.returncode == 2
    assert "'train'" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_every_example_config_is_valid(config: Path) -> None:
    done = command("train", str(config), "--dry-run", "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    for one in plan if isinstance(plan, list) else [plan]:  # a joint run has a plan a policy
        assert one["steps"] > 0
        assert one["stored_in"]["home"]


def test_a_dry_run_is_fast_and_stores_nothing(home: Path) -> None:
    code = (
        "import sys\nfrom flows.cli import run\n"
        "assert run(['train', 'deployments/configs/quickstart.yaml', '--dry-run']) == 0\n"
        "heavy = {'torch', 'transformers', 'prefect', 'mlflow', 'pyarrow', 'sqlalchemy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True, timeout=PATIENCE_S
    )
    assert not home.exists()


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["rl.step=3"], ["rl.step", "did you mean 'steps'?"]),
        (["rl.steps=many"], ["rl.steps", "'many'", "integer"]),
        (["policy.lora.rank=-1"], ["policy.lora.rank", "-1", "greater than or equal to 1"]),
        (["policy.base_model=nonsense"], ["base_model", "'nonsense'", "smollm2-135m", "tiny"]),
        (["environment.id=nowhere"], ["environment", "nowhere", "arithmetic"]),
        (["environment.args.digit=2"], ["arithmetic", "'digit'", "did you mean digits?"]),
        (["sft.steps=1", "sft.data=missing.jsonl"], ["sft.data", "missing.jsonl", "JSONL"]),
        (["rl.sampling.temperature=0"], ["rl", "temperature"]),
    ],
)
@pytest.mark.parametrize("dry_run", [["--dry-run"], []], ids=["dry", "real"])
def test_a_wrong_config_is_one_message_and_exit_code_2(
    overrides: list[str], parts: list[str], dry_run: list[str], capsys: pytest.CaptureFixture[str], home: Path
) -> None:
    code = run(["train", str(ROOT / "deployments/configs/tiny_rl.yaml"), *overrides, *dry_run, "--json"])
    out, err = capsys.readouterr()
    assert code == 2, err
    assert out == ""
    assert err.startswith("opentinker: ")
    assert len(err.splitlines()) == 1
    for part in parts:
        assert part in err
    assert not home.exists()


def test_a_missing_config_is_named() -> None:
    done = command("train", "nowhere.yaml")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "opentinker: nowhere.yaml: no such file; accepted: the path of a YAML config\n"


def test_an_unreachable_prefect_server_is_one_message_and_exit_code_1() -> None:
    config = str(ROOT / "deployments/configs/tiny_rl.yaml")
    done = command("train", config, "--json", PREFECT_API_URL="http://127.0.0.1:9/api")
    assert (done.returncode, done.stdout) == (1, "")
    assert "no Prefect server answers at http://127.0.0.1:9/api" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_home_that_cannot_be_made_is_one_message_and_exit_code_1(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = str(ROOT / "deployments/configs/tiny_rl.yaml")
    done = command("train", config, OPENTINKER_HOME=str(tmp_path / "file" / "home"))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"opentinker: {tmp_path / 'file' / 'home'}: Not a directory\n"


def test_a_run_that_does_not_exist_is_named() -> None:
    done = command("resume", "nonesuch")
    assert (done.returncode, done.stdout) == (2, "")
    assert "nonesuch" in done.stderr
    assert "Traceback" not in done.stderr


def test_arguments_that_are_no_text_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["resume", "a\udcff"]) == 2  # as Python gives an argument of bytes that are not UTF-8
    assert capsys.readouterr().err == "opentinker: 'a\\udcff': accepted: text in UTF-8\n"


def test_a_version_that_does_not_exist_is_named_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = ROOT / "deployments" / "configs" / "quickstart.yaml"
    assert run(["evaluate", "adder@3", "--config", str(config)]) == 2
    assert "there is no 'adder'" in capsys.readouterr().err


def test_deploy_without_a_server_says_how_to_start_one(tmp_path: Path) -> None:
    done = command("deploy", HOME=str(tmp_path))
    assert done.returncode == 1
    assert "opentinker up" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_reader_that_goes_away_is_no_failure_worth_words() -> None:
    pipe = subprocess.Popen(
        [sys.executable, "-m", "flows.cli", "--help"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert pipe.stdout is not None
    assert pipe.stderr is not None
    pipe.stdout.close()
    assert b"Traceback" not in pipe.stderr.read()
    pipe.wait(PATIENCE_S)
    pipe.stderr.close()
