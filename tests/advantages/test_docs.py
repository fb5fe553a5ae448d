"""The page on credit: its examples print what they say, and it names every kind."""

import re
from pathlib import Path

import pytest

from opentinker_core.config.credit import Advantage, Baseline, CreditConfig, Returns
from opentinker_core.config.league import OpponentConfig, OpponentKind

DOCUMENT = (Path(__file__).parents[2] / "docs/credit.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_an_example_prints_what_stands_beside_it(example: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(example, {})
    said = capsys.readouterr().out.splitlines()
    assert said == re.findall(r"^print.*?\n?# (.*)$", example, re.MULTILINE)


@pytest.mark.parametrize("kind", [*Returns, *Baseline, *Advantage, *OpponentKind])
def test_every_kind_is_explained(kind: str) -> None:
    assert f"`{kind}`" in DOCUMENT


@pytest.mark.parametrize(
    "field", [name for config in (CreditConfig, OpponentConfig) for name in config.model_fields]
)
def test_every_field_is_named(field: str) -> None:
    assert re.search(rf"[`(:, ]{field}[`=:]", DOCUMENT)
