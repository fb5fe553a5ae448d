import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.collect import MOVES, Collect
from envs.multi import MultiDemonstrates, MultiEnvironment, Recomputes, Situation
from envs.protocol import Action


def layout(text: str) -> tuple[str, list[str], list[str]]:
    """Where an agent stands, its items, and the others."""
    own, _, others = text.strip().removesuffix(">").partition("|")
    return own.split()[0], own.split()[1:], others.split()


def views(situation: Situation) -> dict[str, tuple[str, list[str], list[str]]]:
    return {agent: layout(new.text) for agent, new in situation.observations.items()}


@given(st.integers(0, 2**40), st.integers(3, 5), st.randoms(use_true_random=False))
def test_rewards_follow_from_the_actions_and_from_what_is_shown(seed: int, agents: int, random) -> None:
    collect = Collect(agents=agents, size=4, items=2, rounds=9)
    situation, steps, paid = collect.reset(seed), [], []
    totals = dict.fromkeys(collect.agents, 0.0)
    while not situation.done:
        before = views(situation)
        step: dict[str, str | None] = {}
        for agent in situation.to_act:
            leaves = random.random() < 0.03
            step[agent] = None if leaves else random.choice([*MOVES, "?", "go r", ""])
        actions = {agent: None if text is None else Action(text) for agent, text in step.items()}
        situation = collect.step(actions)
        steps.append(step)
        paid.append(dict(situation.rewards))
        for agent, (_, items, _) in views(situation).items():
            fewer = len(before[agent][1]) - len(items)
            assert paid[-1].get(agent, 0) == fewer / 2
        for agent, reward in paid[-1].items():
            totals[agent] += reward
    assert collect.recompute(seed, steps) == paid
    assert len(steps) <= 9
    assert all(0 <= total <= 1 for total in totals.values())
    assert situation.info["left"] == {agent: round(2 - 2 * total) for agent, total in totals.items()}


def test_items_are_disjoint_and_nobody_starts_on_one() -> None:
    collect = Collect(agents=5, size=4, items=3)
    for seed in range(30):
        seen = views(collect.reset(seed))
        items = [item for _, own, _ in seen.values() for item in own]
        assert len(set(items)) == len(items) == 15
        assert not {start for start, _, _ in seen.values()} & set(items)


def test_others_are_shown_where_they_stand() -> None:
    collect = Collect()
    seen = views(collect.reset(2))
    for agent, (_, _, others) in seen.items():
        assert others == [at for name, (at, _, _) in seen.items() if name != agent]
    assert "|" not in Collect(others=False).reset(2).observations["a1"].text


@pytest.mark.parametrize("agents", [3, 4, 5])
def test_going_to_the_nearest_item_collects_all(agents: int) -> None:
    collect = Collect(agents=agents, size=5, items=2, rounds=30)
    for seed in range(10):
        situation = collect.reset(seed)
        totals = dict.fromkeys(collect.agents, 0.0)
        while not situation.done:
            situation = collect.step({agent: collect.demonstration(agent) for agent in situation.to_act})
            for agent, reward in situation.rewards.items():
                totals[agent] += reward
        assert totals == dict.fromkeys(collect.agents, 1.0)


def test_a_step_takes_all_that_play_and_those_alone() -> None:
    collect = Collect()
    situation = collect.reset(4)
    assert situation.together
    assert situation.to_act == ("a1", "a2", "a3")
    with pytest.raises(ValueError, match=r"^actions: those of a1, a3; accepted: all of a1, a2, a3$"):
        collect.step({"a1": Action("u"), "a3": Action("u")})
    after = collect.step({"a1": Action("u"), "a2": None, "a3": Action("u")})
    assert after.to_act == ("a1", "a3")
    with pytest.raises(ValueError, match="accepted: one or more of a1, a3"):
        collect.step({"a1": Action("u"), "a2": Action("u"), "a3": Action("u")})
    with pytest.raises(ValueError, match="accepted: one or more of a1, a3"):
        collect.step({"a1": Action("u"), "a2": None, "a3": Action("u")})


def test_the_order_in_which_actions_are_given_does_not_matter() -> None:
    one, other = Collect(), Collect()
    one.reset(7)
    other.reset(7)
    actions = {"a1": Action("u"), "a2": Action("l"), "a3": Action("d")}
    assert one.step(actions) == other.step(dict(reversed(actions.items())))


def test_an_episode_depends_on_its_seed_alone() -> None:
    used = Collect()
    used.reset(1)
    used.step({agent: Action("r") for agent in used.agents})
    assert used.reset(9) == Collect().reset(9)
    assert used.reset(9) != used.reset(10)


def test_splits_share_no_layout() -> None:
    train, held_out = (
        {str(views(Collect(split, size=3, items=1).reset(seed))) for seed in range(60)}
        for split in ("train", "held_out")
    )
    assert not train & held_out


def test_it_is_an_environment_that_recomputes_and_demonstrates() -> None:
    assert isinstance(Collect(), MultiEnvironment)
    assert isinstance(Collect(), Recomputes)
    assert isinstance(Collect(), MultiDemonstrates)


def test_it_demonstrates_to_those_who_may_act_alone() -> None:
    collect = Collect()
    with pytest.raises(RuntimeError, match="call reset first"):
        collect.demonstration("a1")
    collect.reset(4)
    collect.step({"a1": Action("."), "a2": None, "a3": Action(".")})
    with pytest.raises(ValueError, match=r"^agent: 'a2' may not act now; accepted: a1, a3$"):
        collect.demonstration("a2")


@pytest.mark.parametrize("arguments", [{"agents": 2}, {"size": 11}, {"items": 9}, {"rounds": 0}])
def test_refuses_what_it_cannot_play(arguments: dict) -> None:
    name, value = next(iter(arguments.items()))
    with pytest.raises(ValueError, match=f"^{name}: {value!r} is not accepted; accepted: "):
        Collect(**arguments)
