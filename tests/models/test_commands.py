import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from opentinker_core.commands.models import app
from opentinker_core.errors import UsageError
from opentinker_core.models.source import resolve


@pytest.fixture
def fresh_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OPENTINKER_HOME", str(tmp_path))
    return tmp_path


def test_list_says_what_is_fetched(fresh_home: Path) -> None:
    def fetched() -> dict[str, bool]:
        result = CliRunner().invoke(app, ["list", "--json"], catch_exceptions=False)
        return {model["name"]: model["fetched"] for model in json.loads(result.stdout)["models"]}

    assert fetched() == {"smollm2-135m": False, "tiny": False}
    assert CliRunner().invoke(app, ["fetch", "tiny"], catch_exceptions=False).exit_code == 0
    assert fetched() == {"smollm2-135m": False, "tiny": True}


def test_fetch_prints_one_object_and_nothing_else(fresh_home: Path) -> None:
    result = CliRunner().invoke(app, ["fetch", "tiny", "--json"], catch_exceptions=False)
    source = resolve("tiny", fresh_home)
    assert json.loads(result.stdout) == {"name": "tiny", "path": str(source.path), "digest": source.digest}


def test_human_output_names_path_and_digest(fresh_home: Path) -> None:
    result = CliRunner().invoke(app, ["fetch", "tiny"], catch_exceptions=False)
    source = resolve("tiny", fresh_home)
    assert str(source.path) in result.stdout
    assert source.digest in result.stdout
    table = CliRunner().invoke(app, ["list"], catch_exceptions=False).stdout
    assert "smollm2-135m" in table
    assert "Apache-2.0" in table


def test_unknown_model_propagates_as_usage_error(fresh_home: Path) -> None:
    with pytest.raises(UsageError, match="smollm2-135m, tiny"):
        CliRunner().invoke(app, ["fetch", "nothing"], catch_exceptions=False)


def test_listing_imports_nothing_heavy(fresh_home: Path) -> None:
    code = (
        "import sys; from opentinker_core.commands.models import app; app(['list'], standalone_mode=False); "
        "print({'torch', 'transformers', 'gguf', 'numpy'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ}, check=True)
    assert done.stdout.splitlines()[-1] == "set()"
