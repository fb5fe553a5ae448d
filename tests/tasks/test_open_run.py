"""The order of phases that is left of a run, for every place it may have been stopped at."""

from hypothesis import assume, given
from hypothesis import strategies as st

from opentinker_core.config.schema import EnvironmentConfig, PolicyConfig, RLPhase, SFTPhase, TrainConfig
from tasks.open_run import OpenRun


def at(next_step: int, sft: int, every: int, rl: int) -> OpenRun:
    config = TrainConfig(
        name="x",
        policy=PolicyConfig(name="x"),
        environment=EnvironmentConfig(id="arithmetic"),
        sft=SFTPhase(steps=sft, publish_every=every) if sft else None,
        rl=RLPhase(steps=rl) if rl else None,
    )
    return OpenRun("id", "x", config, "x@0", next_step)


def test_chunks_end_where_versions_are_published() -> None:
    assert at(1, sft=7, every=3, rl=2).sft_chunks == [(1, 3), (4, 6), (7, 7)]
    assert at(1, sft=6, every=3, rl=2).sft_chunks == [(1, 3), (4, 6)]
    assert at(4, sft=7, every=3, rl=2).sft_chunks == [(4, 6), (7, 7)]
    assert list(at(1, sft=7, every=3, rl=2).rl_steps) == [8, 9]


@given(
    sft=st.integers(0, 30),
    every=st.integers(1, 12),
    rl=st.integers(0, 30),
    published=st.integers(0, 60),
)
def test_what_is_left_is_every_step_after_the_last_published_once(
    sft: int, every: int, rl: int, published: int
) -> None:
    assume(sft + rl > 0)
    whole = at(1, sft, every, rl)
    ends = [0, *(end for _, end in whole.sft_chunks), *whole.rl_steps]
    last = ends[published % len(ends)]
    left = at(last + 1, sft, every, rl)
    steps = [step for first, end in left.sft_chunks for step in range(first, end + 1)]
    assert steps + list(left.rl_steps) == list(range(last + 1, whole.config.steps + 1))
