"""Config of a joint run: several policies that play in one environment, each trained on its own turns.

A file with `policies` at its top is such a config; what else stands there is shared by all of them.
`members` takes it apart into one training config a policy, as the catalog records them.
"""

from typing import Annotated

from pydantic import Field, PositiveInt, model_validator

from opentinker_core.agents.coordination.protocol import CoordinationProtocol
from opentinker_core.config.common import Frozen, Name
from opentinker_core.config.league import OpponentConfig
from opentinker_core.config.schema import (
    EnvironmentConfig,
    JointPart,
    LoRAConfig,
    PolicyConfig,
    RLPhase,
    RunConfig,
    SFTPhase,
    TrainConfig,
)
from opentinker_core.errors import UsageError
from opentinker_core.names import check_name
from opentinker_core.policies.refs import RESERVED

IN_COMMON = ("groups", "group_size", "sampling")
"""Fields of `rl` that are of the episodes, which all policies play together."""


class MemberConfig(Frozen):
    """What one policy of a joint run has for itself; None: as all of them."""

    lora: LoRAConfig | None = None
    start: Annotated[str, Field(coerce_numbers_to_str=True)] = "base"
    """As `policy.start` of a training config."""
    sft: SFTPhase | None = None
    """Of as many steps as the others', so that all policies go on together."""
    rl: RLPhase | None = None
    """What is of the episodes in it (`groups`, `group_size`, `sampling`) is all policies'."""
    evaluate_in: EnvironmentConfig | None = None
    """An environment for one agent in which this policy is evaluated; None: the joint one, where its
    reward says how it does against, or with, the others as they are."""


class AgentsConfig(RunConfig):
    """A joint run."""

    base_model: str = "smollm2-135m"
    lora: LoRAConfig = LoRAConfig()
    policies: dict[Name, MemberConfig] = Field(min_length=1)
    """The policies that are trained, by name."""
    opponents: dict[Name, OpponentConfig] = Field(default_factory=dict)
    """Policies that play and are not trained: versions that stay, or past ones of those that are."""
    protocol: CoordinationProtocol
    """Which agent plays with which policy, in which order, and what becomes of the dead."""
    check_every: PositiveInt = 1
    """Steps between checks of the coordinator's log; a violation stops the run."""

    @model_validator(mode="after")
    def _consistent(self) -> "AgentsConfig":
        seated = set(self.protocol.policies.values())
        for field, names in (("policies", set(self.policies)), ("opponents", set(self.opponents))):
            if idle := sorted(names - seated):
                raise ValueError(f"{field}: {idle[0]!r} plays no agent of protocol.policies")
        if unknown := sorted(seated - set(self.policies) - set(self.opponents)):
            raise ValueError(
                f"protocol.policies: {unknown[0]!r} is neither in 'policies' nor in 'opponents'; "
                f"accepted: {', '.join([*self.policies, *self.opponents])}"
            )
        if both := sorted(set(self.policies) & set(self.opponents)):
            raise ValueError(f"opponents: {both[0]!r} is in 'policies' too; accepted: one of them")
        if given := sorted(set(self.protocol.frozen) - set(self.opponents)):
            raise ValueError(
                f"protocol.frozen: {given[0]!r} is no opponent; accepted: none, 'opponents' says it"
            )
        for name, opponent in self.opponents.items():
            unsaid = opponent.policy is None and len(self.policies) == 1
            if opponent.version is None and not unsaid and opponent.policy not in self.policies:
                raise ValueError(
                    f"opponents.{name}.policy: {opponent.policy!r}; accepted: {', '.join(self.policies)}"
                )
        for name in self.policies:
            check_member_name(self.name, name)
        members = self.members()
        if len({(one.sft_steps, one.steps) for one in members.values()}) > 1:
            raise ValueError("policies: their phases have different numbers of steps; accepted: the same")
        for name, member in members.items():
            _check_in_common(name, member.rl, next(iter(members.values())).rl)
        return self

    def members(self, joint_id: str = "") -> dict[str, TrainConfig]:
        """One training config a policy, by its name; `joint_id`: of the run, once it is one."""
        protocol = self.protocol.model_copy(update={"frozen": tuple(self.opponents)})
        part = JointPart(
            name=self.name,
            joint_id=joint_id,
            members=tuple(self.policies),
            protocol=protocol,
            opponents=self.opponents,
            check_every=self.check_every,
        )
        return {name: self._member(name, own, part) for name, own in self.policies.items()}

    def _member(self, name: str, own: MemberConfig, part: JointPart) -> TrainConfig:
        values = {field: getattr(self, field) for field in RunConfig.model_fields}
        values["name"] = f"{self.name}.{name}"
        values["sft"], values["rl"] = own.sft or self.sft, own.rl or self.rl
        if own.evaluate_in is not None:
            values["evaluation"] = self.evaluation.model_copy(update={"environment": own.evaluate_in})
        policy = PolicyConfig(
            name=name, base_model=self.base_model, lora=own.lora or self.lora, start=own.start
        )
        return TrainConfig(**values, policy=policy, joint=part)


def check_member_name(joint: str, policy: str) -> None:
    """Refuse the name of a policy that cannot be one, or makes none of the run's, `<joint>.<policy>`.

    Raises:
        ValueError: the message names both fields.
    """
    if policy in RESERVED:
        names = ", ".join(sorted(RESERVED))
        raise ValueError(f"policies.{policy}: is reserved; accepted: any name but {names}")
    try:
        check_name("name", f"{joint}.{policy}")
    except UsageError as error:
        raise ValueError(
            f"policies.{policy}: its run would be called '{joint}.{policy}', of "
            f"{len(joint) + 1 + len(policy)} characters; accepted: up to 63"
        ) from error


def _check_in_common(name: str, own: RLPhase | None, first: RLPhase | None) -> None:
    """Refuse a policy with other ideas of the episodes than the first has: they are the same episodes."""
    for field in IN_COMMON if own is not None and first is not None else ():
        if getattr(own, field) != getattr(first, field):
            raise ValueError(
                f"policies.{name}.rl.{field}: {getattr(own, field)!r:.80}; "
                f"accepted: as that of the others, {getattr(first, field)!r:.80}: they play the same episodes"
            )
