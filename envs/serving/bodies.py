"""Bodies of requests, as they are accepted."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from envs.protocol import Split

Seed = Annotated[int, Field(ge=0, lt=2**63)]
Text = Annotated[str, Field(max_length=1 << 22)]
Name = Annotated[str, Field(min_length=1, max_length=200)]


class Body(BaseModel):
    """The body of a request: what is not named here is refused."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Making(Body):
    """Which environment; asks for what it is (`POST /v1/describe`)."""

    id: Name
    split: Split = "train"
    args: Annotated[dict[str, JsonValue], Field(max_length=100)] = {}


class Opening(Making):
    """Make one and start an episode (`PUT /v1/sessions/<id>`): the call number 0 of a session."""

    seed: Seed


class Recomputing(Making):
    """Rewards from a log of actions (`POST /v1/recompute`); belongs to no session."""

    seed: Seed
    steps: Annotated[list[dict[Name, Text | None]], Field(max_length=100_000)]


class Numbered(Body):
    """A call of a session; numbers count from 1 without a gap."""

    number: Annotated[int, Field(ge=1, lt=2**53)]


class Resetting(Numbered):
    """Start another episode."""

    do: Literal["reset"]
    seed: Seed


class Stepping(Numbered):
    """Take the action of a single agent."""

    do: Literal["step"]
    text: Text


class SteppingTogether(Numbered):
    """Take actions of several agents; null: the agent has gone for good."""

    do: Literal["step_together"]
    actions: Annotated[dict[Name, Text | None], Field(max_length=1000)]


class Demonstrating(Numbered):
    """Ask for a right action, of the agent or of one of several."""

    do: Literal["demonstration"]
    agent: Name | None = None


class DemonstratingTools(Numbered):
    """Ask what to do after results of tools."""

    do: Literal["demonstration_after"]
    results: Annotated[list[Text], Field(max_length=1000)]


class Calling(Body):
    """One of the calls (`POST /v1/sessions/<id>/calls`)."""

    call: Annotated[
        Resetting | Stepping | SteppingTogether | Demonstrating | DemonstratingTools,
        Field(discriminator="do"),
    ]


class Renewing(Body):
    """Sessions whose clients are still there, and those that they have left (`POST /v1/leases`)."""

    renew: Annotated[list[Name], Field(max_length=10_000)] = []
    close: Annotated[list[Name], Field(max_length=10_000)] = []
