from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.multi import MultiDemonstrates, MultiEnvironment, Recomputes, Situation
from envs.negotiate import Negotiate
from envs.negotiate_rules import Problem, divisions, read_move
from envs.protocol import Action

TALK = ["[201]", "[120]", "[100/010]", "[999]", "[]", "ok", "OK then", "bye", "hello", "", "[2 0 1], ok?"]


def rows(text: str) -> tuple[str, str]:
    """The items and the values that an agent is shown."""
    counts, _, values = text.partition("\n")[0].partition("|")
    return counts, values


def talk(game: Negotiate, seed: int, *messages: str) -> list[Situation]:
    situations = [game.reset(seed)]
    for text in messages:
        (speaker,) = situations[-1].to_act
        situations.append(game.step({speaker: Action(text)}))
    return situations


def everything(game: Negotiate, seed: int) -> str:
    """An offer that leaves the other nothing."""
    counts, _ = rows(game.reset(seed).observations["a1"].text)
    return f"[{counts}]"


games = st.fixed_dictionaries(
    {
        "agents": st.integers(2, 4),
        "messages": st.integers(2, 4),
        "order": st.sampled_from(["alternating", "free"]),
    }
)


@given(games, st.integers(0, 2**40), st.randoms(use_true_random=False))
def test_rewards_follow_from_the_messages_and_the_talk_ends(args, seed: int, random) -> None:
    game = Negotiate(**args)
    situation, steps, paid = game.reset(seed), [], []
    values = {agent: rows(new.text)[1] for agent, new in situation.observations.items()}
    while not situation.done:
        able = situation.to_act
        speaking = [agent for agent in able if len(able) == 1 or random.random() < 0.7] or [able[0]]
        step: dict[str, str | None] = {}
        for agent in speaking:
            say = random.choice([*TALK, game.demonstration(agent).text, "ok"])
            step[agent] = None if random.random() < 0.02 else say
        situation = game.step({agent: None if text is None else Action(text) for agent, text in step.items()})
        steps.append(step)
        paid.append(dict(situation.rewards))
        assert situation.done or not paid[-1]
    assert game.recompute(seed, steps) == paid
    assert len(steps) <= args["agents"] * args["messages"]
    if situation.info["how"] == "deal":
        shares = situation.info["shares"]
        for agent, row in values.items():
            worth = sum(int(got) * int(value) for got, value in zip(shares[agent], row, strict=True))
            assert paid[-1].get(agent, 0) == worth / 10
        taken = [sum(int(shares[agent][kind]) for agent in values) for kind in range(3)]
        assert "".join(map(str, taken)) == situation.info["counts"]


@given(games, st.integers(0, 2**40))
def test_all_items_are_worth_10_to_each_and_some_kind_to_more_than_one(args, seed: int) -> None:
    shown = {agent: rows(new.text) for agent, new in Negotiate(**args).reset(seed).observations.items()}
    ((counts,), values) = {counts for counts, _ in shown.values()}, [row for _, row in shown.values()]
    assert 5 <= sum(map(int, counts)) <= 7
    for row in values:
        assert sum(int(count) * int(value) for count, value in zip(counts, row, strict=True)) == 10
    wanting = [sum(row[kind] != "0" for row in values) for kind in range(3)]
    assert min(wanting) >= 1
    assert max(wanting) >= 2


def test_an_offer_is_told_to_the_other_with_what_it_gives_it() -> None:
    game = Negotiate()
    first, second = talk(game, 1, "I want\na2:ok [200] please")
    counts, _ = rows(first.observations["a2"].text)
    speaker, hearer = first.to_act[0], "a1" if first.to_act == ("a2",) else "a2"
    assert first.observations[speaker].text.endswith(f"\n{speaker}:")
    assert first.observations[hearer].text == f"{counts}|{rows(first.observations[hearer].text)[1]}"
    told = second.observations
    assert set(told) == {hearer}
    assert told[hearer].text.count("\n") == 2  # nobody speaks in another's name
    # `ok` came first: it is what counts, and there was nothing to accept
    assert told[hearer].text == f"\n{speaker}:I want a2:ok [200] please\n{hearer}:"
    rest = f"{int(counts[0]) - 2}{counts[1:]}"
    assert talk(game, 1, "[200]")[1].observations[hearer].text == f"\n{speaker}:[200] you={rest}\n{hearer}:"


def test_an_accepted_offer_is_a_deal() -> None:
    game = Negotiate()
    last = talk(game, 1, everything(game, 1), "ok")[-1]
    (winner,) = last.rewards
    assert last.done
    assert dict(last.rewards) == {winner: 1.0}
    assert last.info["how"] == "deal"


@pytest.mark.parametrize("text", ["ok", "[999]", "[1]", "[-1]", "hello"])
def test_what_is_no_offer_cannot_be_accepted(text: str) -> None:
    game = Negotiate(messages=2)
    situations = talk(game, 1, text, "ok", text, "ok")
    assert situations[-1].info["how"] == "timeout"
    assert not any(situation.rewards for situation in situations)


def test_only_the_last_offer_can_be_accepted_and_not_by_who_made_it() -> None:
    game = Negotiate()
    offer = everything(game, 1)
    assert not talk(game, 1, offer, "no", "ok")[-1].done
    last = talk(game, 1, offer, offer, "ok")[-1]
    assert list(last.rewards) == [talk(game, 1, offer)[1].to_act[0]]


def test_all_others_must_accept() -> None:
    game = Negotiate(agents=3)
    situations = talk(game, 1, "[000/000]", "ok", "ok")
    first = situations[0].to_act[0]
    assert not situations[2].done
    assert situations[3].info["how"] == "deal"
    shares = situations[3].info["shares"]
    assert shares[first] == "000"
    assert sorted(shares.values())[:2] == ["000", "000"]  # the last in turn gets all
    assert not talk(game, 1, "[000/000]", "ok", "no", "hm", "hm")[-1].done


@pytest.mark.parametrize(("action", "how"), [(Action("bye"), "walked"), (None, "left")])
def test_without_a_deal_nobody_earns_anything_and_it_is_told_why(action: Action | None, how: str) -> None:
    game = Negotiate(agents=3)
    (speaker,) = talk(game, 1, "[100/010]")[-1].to_act
    last = game.step({speaker: action})
    assert last.done
    assert not last.rewards
    assert (last.info["how"], last.info["by"]) == (how, [speaker])


def test_anybody_may_leave_out_of_turn() -> None:
    game = Negotiate()
    (speaker,) = game.reset(1).to_act
    other = "a1" if speaker == "a2" else "a2"
    assert game.step({other: None}).info["by"] == [other]


def test_in_free_talk_all_begin_and_who_has_heard_nothing_new_waits() -> None:
    game = Negotiate(agents=3, order="free")
    situation = game.reset(1)
    assert situation.to_act == ("a1", "a2", "a3")
    assert not situation.together
    assert all(new.text.endswith(f"\n{agent}:") for agent, new in situation.observations.items())
    situation = game.step({"a2": Action("hi")})
    assert situation.to_act == ("a1", "a3")
    assert set(situation.observations) == {"a1", "a3"}
    situation = game.step({"a3": Action("hey"), "a1": Action("ho")})
    assert situation.to_act == ("a1", "a2", "a3")
    assert situation.observations["a2"].text.count("\n") == 3


def test_what_is_said_at_the_same_time_is_about_the_offer_before() -> None:
    game = Negotiate(order="free", agents=3)
    counts, _ = rows(game.reset(1).observations["a1"].text)
    game.step({"a1": Action(f"[{counts}/000]")})
    game.step({"a2": Action("ok"), "a3": Action("hm")})
    situation = game.step({"a2": Action(f"[{counts}/000]"), "a3": Action("ok")})
    assert situation.info["shares"]["a1"] == counts


def test_of_offers_made_at_once_the_first_in_order_of_turns_stands() -> None:
    for seed in range(6):
        game = Negotiate(order="free")
        counts, _ = rows(game.reset(seed).observations["a1"].text)
        both = {agent: Action(f"[{counts}]") for agent in ("a2", "a1")}
        game.step(both)
        first = Negotiate().reset(seed).to_act[0]
        other = "a1" if first == "a2" else "a2"
        assert dict(game.step({other: Action("ok")}).rewards) == {first: 1.0}


@pytest.mark.parametrize(
    ("args", "least_deals"),
    [({}, 30), ({"order": "free"}, 30), ({"agents": 3}, 24), ({"kinds": 2, "least": 3, "most": 4}, 30)],
)
def test_the_demonstrated_negotiators_agree(args: dict, least_deals: int) -> None:
    game, deals, total = Negotiate(**args), 0, 0.0
    for seed in range(30):
        situation = game.reset(seed)
        while not situation.done:
            said = {agent: game.demonstration(agent) for agent in situation.to_act}
            assert said == {agent: game.demonstration(agent) for agent in situation.to_act}
            situation = game.step(said)
        deals += situation.info["how"] == "deal"
        total += sum(situation.rewards.values())
    assert deals >= least_deals
    assert total / 30 > 1.1  # more than dividing everything by lot


def test_a_demonstration_knows_no_others_values() -> None:
    """Where all that an agent was shown is the same, it says the same."""
    game, said = Negotiate(), dict[tuple[str, str], str]()
    for seed in range(400):
        situation = game.reset(seed)
        (speaker,) = situation.to_act
        key = (speaker, situation.observations[speaker].text)
        assert said.setdefault(key, game.demonstration(speaker).text) == game.demonstration(speaker).text
    assert len(said) < 390


def test_it_demonstrates_to_those_who_may_speak_alone() -> None:
    game = Negotiate()
    with pytest.raises(RuntimeError, match="call reset first"):
        game.demonstration("a1")
    (speaker,) = game.reset(1).to_act
    other = "a1" if speaker == "a2" else "a2"
    with pytest.raises(ValueError, match=rf"^agent: '{other}' may not act now; accepted: {speaker}$"):
        game.demonstration(other)


def test_pareto_is_what_no_other_division_improves() -> None:
    problem = Problem((1, 2), ((4, 3), (10, 0)))
    assert len(list(divisions(problem.counts, 2))) == 6
    best = {division: problem.is_pareto(division) for division in divisions(problem.counts, 2)}
    assert [division for division, pareto in best.items() if pareto] == [((0, 2), (1, 0)), ((1, 2), (0, 0))]


def test_a_message_beyond_the_width_is_not_heard() -> None:
    assert read_move("[201]", 0, (2, 1, 1), 2) == ((2, 0, 1), (0, 1, 0))
    game = Negotiate(width=5)
    (hearer,) = talk(game, 1, "well [000]")[1].observations
    situation = talk(game, 1, "well [000]")[1]
    assert situation.observations[hearer].text.split("\n")[1].endswith(":well ")


def test_splits_share_no_problem_however_it_is_numbered() -> None:
    def problems(split: str) -> set:
        found = set()
        for seed in range(150):
            shown = Negotiate(split).reset(seed).observations  # type: ignore[arg-type]
            counts, one = rows(shown["a1"].text)
            two = rows(shown["a2"].text)[1]
            pairs = product([(one, two), (two, one)])
            found.add(min(tuple(sorted(zip(counts, *pair, strict=True))) for (pair,) in pairs))
        return found

    train, held_out = problems("train"), problems("held_out")
    assert not train & held_out
    assert len(train) > 50


def test_it_is_an_environment_that_recomputes_and_demonstrates() -> None:
    assert isinstance(Negotiate(), MultiEnvironment)
    assert isinstance(Negotiate(), Recomputes)
    assert isinstance(Negotiate(), MultiDemonstrates)


@pytest.mark.parametrize(
    "arguments",
    [
        {"agents": 5},
        {"kinds": 1},
        {"least": 3},
        {"most": 4},
        {"messages": 1},
        {"order": "any"},
        {"width": 4},
        {"held_out": 1},
    ],
)
def test_refuses_what_it_cannot_play(arguments: dict) -> None:
    name, value = next(iter(arguments.items()))
    with pytest.raises(ValueError, match=f"^{name}: {value!r} is not accepted; accepted: "):
        Negotiate(**arguments)
