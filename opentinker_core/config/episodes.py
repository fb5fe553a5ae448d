"""Config of how episodes are played: their limits, and how an agent's record is kept."""

from typing import Annotated, Literal

from pydantic import Field

from opentinker_core.config.common import Frozen

Seconds = Annotated[float, Field(gt=0, le=86_400)]


class EpisodesConfig(Frozen):
    """What an episode may take, after which its reward is missing, and what an agent is shown."""

    turn_s: Seconds = 3600.0
    """Seconds for one attempt at a turn of an agent: for the sampler and the tools."""
    episode_s: Seconds = 7200.0
    """For a whole episode; nothing in it may take longer."""
    step_s: Seconds = 120.0
    """For one call of the environment."""
    attempts: Annotated[int, Field(ge=1, le=100)] = 2
    """At a turn; a second draws the same tokens."""
    max_observation_chars: Annotated[int, Field(ge=0)] = 0
    """Characters of a message that an agent is shown; of longer ones the beginning; 0: no limit."""
    history: Literal["append", "template"] = "append"
    """`append`: what was recorded stays, and new messages are appended. `template`: each prompt is what the
    chat template makes of the conversation; where it rewrites what was before, the record forks."""
