"""Configs of joint runs: how they are told from others, and that their page tells the truth."""

import re
from pathlib import Path

import pytest
import yaml

from opentinker_core.config.agents import AgentsConfig, MemberConfig
from opentinker_core.config.any import load_any
from opentinker_core.config.episodes import EpisodesConfig
from opentinker_core.config.schema import TrainConfig
from opentinker_core.errors import UsageError
from tests.runtime.joint_runs import CONFIG
from tests.runtime.runs import CONFIG as SINGLE

PAGE = (Path(__file__).parents[2] / "docs/agents.md").read_text()


@pytest.fixture
def page_config(tmp_path: Path) -> Path:
    block = re.search(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    assert block is not None
    file = tmp_path / "pair.yaml"
    file.write_text(block[1])
    return file


def test_the_config_of_the_page_is_one(page_config: Path) -> None:
    config = load_any(page_config)
    assert isinstance(config, AgentsConfig)
    black, white = config.members().values()
    assert black.evaluation.environment is not None
    assert (white.steps, white.evaluation.environment) == (11, None)


def test_the_page_names_every_field() -> None:
    for name in (*EpisodesConfig.model_fields, *MemberConfig.model_fields):
        assert re.search(rf"\b{name}\b", PAGE), name


def test_a_file_with_policies_is_a_joint_run_and_others_are_not(tmp_path: Path) -> None:
    joint, single = tmp_path / "joint.yaml", tmp_path / "single.yaml"
    joint.write_text(yaml.safe_dump(CONFIG))
    single.write_text(yaml.safe_dump(SINGLE))
    assert isinstance(load_any(joint, ["rl.steps=7"]), AgentsConfig)
    assert isinstance(load_any(single), TrainConfig)
    with pytest.raises(UsageError, match=r"policies\.black\.lorra"):
        load_any(joint, ["policies.black.lorra=3"])


def test_what_a_member_has_for_itself_replaces_what_all_have() -> None:
    own = {"lora": {"rank": 2}, "start": "other@3", "rl": CONFIG["rl"] | {"shuffle_rewards": True}}
    config = AgentsConfig.model_validate(CONFIG | {"policies": {"black": own, "white": {}}})
    black, white = config.members("j").values()
    assert (black.policy.lora.rank, white.policy.lora.rank) == (2, 4)
    assert black.policy.start == "other@3"
    assert black.joint == white.joint
    assert black.joint is not None
    assert black.joint.joint_id == "j"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["policies.black.rl={steps: 2, groups: 7}"], r"policies\.white\.rl\.groups: 4; accepted: .* 7"),
        (
            ["policies.white.rl={steps: 2, groups: 4, group_size: 4}"],
            r"policies\.white\.rl\.sampling",
        ),
        (["episodes.history=template"], r"rl\.sampling\.render: 'plain'; accepted .* 'chat'"),
        (["name=" + "n" * 60], r"policies\.black: its run would be called .* accepted: up to 63"),
        (["policies={base: {}, white: {}}", "protocol.policies.X=base"], r"policies\.base: is reserved"),
    ],
    ids=["groups", "sampling", "history", "long name", "reserved name"],
)
def test_mistakes_about_members_are_told(tmp_path: Path, changes: list[str], message: str) -> None:
    file = tmp_path / "joint.yaml"
    file.write_text(yaml.safe_dump(CONFIG))
    with pytest.raises(UsageError, match=message):
        load_any(file, changes)


def test_what_train_fills_in_is_refused_in_a_file(tmp_path: Path) -> None:
    member = AgentsConfig.model_validate(CONFIG).members()["black"]
    file = tmp_path / "member.yaml"
    file.write_text(yaml.safe_dump(member.model_dump(mode="json")))
    with pytest.raises(UsageError, match=r"joint: is filled in by `train`; accepted: .*'policies'"):
        load_any(file)
