import re
from pathlib import Path

import pytest

from opentinker_core.agents.coordination.log import EpisodeEnd
from opentinker_core.agents.coordination.mutants import MUTANTS
from opentinker_core.agents.coordination.protocol import CoordinationProtocol
from opentinker_core.agents.coordination.violations import Check

DOCUMENT = (Path(__file__).parents[3] / "docs/coordination.md").read_text()


def test_the_example_has_20_lines_and_nothing_is_wrong_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)
    assert len([line for line in example.splitlines() if line.strip()]) <= 20
    exec(example, {})
    said = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"done \{'a1': [\d.]+, 'a2': [\d.]+, 'a3': [\d.]+\}", said[0])
    assert said[1].startswith("[] ")


def test_every_check_end_and_field_is_named() -> None:
    for name in (*Check, *EpisodeEnd, *CoordinationProtocol.model_fields):
        assert f"`{name}`" in DOCUMENT, name


def test_the_number_of_mutants_is_true() -> None:
    assert f"of the {len(MUTANTS)} coordinators" in DOCUMENT
