"""Random trajectories, built through the state machine; few distinct token ids, so that they collide."""

from hypothesis import strategies as st

from opentinker_core.trajectories.fsm import TrajectoryBuilder
from opentinker_core.trajectories.types import EndReason, StopReason, Trajectory

VERSIONS = ("adder@0", "adder@12", "base")
tokens = st.lists(st.integers(0, 9), max_size=5)
some_tokens = st.lists(st.integers(0, 9), min_size=1, max_size=5)
logprobs = st.floats(-8, 0, width=32)
rewards = st.floats(-10, 10)


@st.composite
def trajectories(
    draw: st.DrawFn,
    trajectory_id: str = "s00001-g0-m0",
    max_turns: int = 4,
    prompts: st.SearchStrategy[list[int]] = some_tokens,
) -> Trajectory:
    """A finished episode of 1 to `max_turns` turns, with or without context after the last one."""
    builder = TrajectoryBuilder(
        trajectory_id=trajectory_id,
        agent="solver",
        environment="arithmetic",
        seed=draw(st.integers(0, 2**63 - 1)),
        group=draw(st.integers(0, 3)),
        member=draw(st.integers(0, 3)),
    )
    builder.observed(draw(prompts))
    for turn in range(draw(st.integers(1, max_turns))):
        if turn:
            builder.observed(draw(tokens))
        ids = draw(some_tokens)
        builder.generated(
            ids,
            draw(st.lists(logprobs, min_size=len(ids), max_size=len(ids))),
            draw(st.sampled_from(VERSIONS)),
            draw(st.sampled_from(StopReason)),
        )
        builder.rewarded(draw(rewards))
    if draw(st.booleans()):
        builder.observed(draw(tokens))
    return builder.terminate(draw(st.sampled_from(EndReason)), {"prompt": draw(st.text(max_size=5))})


@st.composite
def trajectory_lists(draw: st.DrawFn, min_size: int = 1, max_size: int = 5) -> list[Trajectory]:
    """Trajectories with ids of their own; some share their prompt, as the members of a group do."""
    size = draw(st.integers(min_size, max_size))
    prompts = st.sampled_from(draw(st.lists(some_tokens, min_size=1, max_size=3)))
    return [draw(trajectories(f"s00001-g0-m{member}", prompts=prompts)) for member in range(size)]


@st.composite
def with_masked_turns(draw: st.DrawFn) -> tuple[Trajectory, frozenset[int]]:
    """A trajectory and some of its turns, one at least being left."""
    trajectory = draw(trajectories())
    turns = range(len(trajectory.turns))
    kept = draw(st.sets(st.sampled_from(turns), min_size=1))
    return trajectory, frozenset(turns) - kept


def two_turns() -> Trajectory:
    """Tokens 10 11 [20 21] 12 [22] 13, the bracketed ones sampled."""
    builder = TrajectoryBuilder(trajectory_id="t", agent="solver", environment="arithmetic", seed=7)
    builder.observed([10, 11])
    builder.generated([20, 21], [-0.5, -1.5], "adder@3", StopReason.STOP)
    builder.rewarded(0.25)
    builder.observed([12])
    builder.generated([22], [-2.5], "adder@4", StopReason.LENGTH)
    builder.rewarded(1.0)
    builder.observed([13])
    return builder.terminate(EndReason.CONTEXT)


def demonstration() -> Trajectory:
    """Tokens 10 [20 21], demonstrated."""
    builder = TrajectoryBuilder(trajectory_id="d", agent="solver", environment="arithmetic", seed=7)
    builder.observed([10])
    builder.generated([20, 21], [0, 0], "demonstration", StopReason.STOP)
    builder.rewarded(1.0)
    return builder.terminate(EndReason.DONE)
