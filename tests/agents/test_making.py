"""Environments that cannot be made are told of in one message, before anything is begun."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from envs.protocol import Action, Observation, StepResult
from opentinker_core.agents.making import check_makeable, environment_maker, joint_maker
from opentinker_core.config.schema import EnvironmentConfig
from opentinker_core.errors import UsageError

AGENTS = ("X", "O")


class Fine:
    def __init__(self, split: str = "train") -> None:
        self.split = split

    def reset(self, seed: int) -> Observation:
        return Observation.user("hi")

    def step(self, action: Action) -> StepResult:
        return StepResult(Observation(()), 0.0, done=True)


def raising(error: BaseException) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Any]], EnvironmentConfig]:
    """A config of an environment of its own module, with the attributes given."""

    def config(attributes: dict[str, Any]) -> EnvironmentConfig:
        module = ModuleType("strange")
        module.Strange = type("Strange", (Fine,), attributes)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "strange", module)
        return EnvironmentConfig(id="strange:Strange")

    return config


@pytest.mark.parametrize(
    "error", [RuntimeError("no"), KeyError("no"), SystemExit("no"), OSError("no")], ids=repr
)
@pytest.mark.parametrize("place", ["making", "closing"])
def test_one_that_cannot_be_made_or_closed(
    made: Callable[[dict[str, Any]], EnvironmentConfig], place: str, error: BaseException
) -> None:
    name = {"making": "__new__", "closing": "close"}[place]
    with pytest.raises(UsageError, match=r"environment: 'strange:Strange' cannot be made: \w+: .?no"):
        environment_maker(made({name: raising(error)}), "train")
    with pytest.raises(UsageError, match="cannot be made"):
        check_makeable(made({name: raising(error)}))


@pytest.mark.parametrize(
    "agents",
    [None, (1, 2), property(raising(RuntimeError("who?"))), ("X",)],
    ids=["none", "numbers", "raises", "one"],
)
def test_agents_that_are_none(made: Callable[[dict[str, Any]], EnvironmentConfig], agents: Any) -> None:
    with pytest.raises(UsageError):
        joint_maker(made({"agents": agents}), AGENTS, "train")


@pytest.mark.parametrize("line", ["1 / 0", "raise SystemExit(3)", "from os import nothing"])
def test_a_module_that_cannot_be_imported(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    (tmp_path / "unimportable_module.py").write_text(line)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match=r"module 'unimportable_module' cannot be imported: \w+"):
        environment_maker(EnvironmentConfig(id="unimportable_module:Env"), "train")
