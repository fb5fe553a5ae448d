"""Data and settings that cannot be trained on: refused by name, nothing half-trained is published."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from opentinker_core.errors import OpenTinkerError, UsageError
from opentinker_core.runtime.session import open_session
from tests.runtime.runs import CONFIG, small_config, workspace_at

GOOD = '{"prompt": "1+1=", "completion": "2"}'


def _sft(data: Path | str, **optimizer: float) -> dict[str, Any]:
    return {"steps": 2, "batch_size": 2, "data": str(data), "examples": 4, "optimizer": optimizer}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"caf\xe9\n", "is not UTF-8"),
        (GOOD.encode() + b"\n\n\nbad\n", r"data\.jsonl:4: not JSON"),
        (b"[" * 100_000, r"data\.jsonl:1: not JSON"),
        (b'{"prompt": "1", "completion": 3}', r"data\.jsonl:1: accepted: an object"),
        (b'{"prompt": "' + b"1" * 5000 + b'", "completion": "2"}', r"data\.jsonl:1: 500\d tokens.*512"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    data = tmp_path / "data.jsonl"
    data.write_bytes(content)
    session = open_session(small_config(sft=_sft(data)), workspace_at(tmp_path / "home"))
    with pytest.raises(UsageError, match=message):
        session.demonstrations()


def test_every_legal_line_is_read(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    separated = '{"prompt": "1+1=", "completion": "2\u2028"}'
    data.write_bytes("\ufeff".encode() + f"{GOOD}\r\n\n{separated}\n".encode())
    session = open_session(small_config(sft=_sft(data)), workspace_at(tmp_path / "home"))
    assert session.demonstrations().episodes == 2


@pytest.mark.parametrize("rate", [1e30, 1e308])
def test_a_run_that_diverges_publishes_nothing(tmp_path: Path, rate: float) -> None:
    session = open_session(small_config(sft=_sft("environment", learning_rate=rate)), workspace_at(tmp_path))
    with pytest.raises(OpenTinkerError, match="diverged"):
        session.publish(2, session.sft(1, 2))
    assert [version.number for version in session.workspace.catalog.versions("adder")] == [0]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"runtime": {"threads": 10**8}}, "threads"),
        ({"policy": {**CONFIG["policy"], "lora": {"alpha": 1e300}}}, "alpha"),
        ({"policy": {**CONFIG["policy"], "lora": {"target_modules": []}}}, "target_modules"),
    ],
)
def test_settings_out_of_bounds_are_refused(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ValidationError, match=field):
        small_config(**changes)


def test_more_tokens_than_the_context_holds_start_no_run(tmp_path: Path) -> None:
    config = small_config(rl={"steps": 1, "sampling": {"max_tokens": 512}})
    with pytest.raises(UsageError, match=r"rl\.sampling\.max_tokens: 512.*512"):
        open_session(config, workspace_at(tmp_path))
    assert workspace_at(tmp_path).catalog.runs() == []
