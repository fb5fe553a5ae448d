import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.conformance import assert_conforms
from envs.guess_number import GuessNumber
from envs.protocol import Action, Demonstrates, Observation

SEEDS = st.integers(0, 2**63 - 1)


def shown(observation: Observation) -> tuple[int, int]:
    low, high = observation.text.removesuffix("?").split("-")
    return int(low), int(high)


def answer(environment: GuessNumber, seed: int) -> int:
    """The secret of a seed, as a wrong guess's info tells it."""
    environment.reset(seed)
    return environment.step(Action("-1")).info["answer"]


@pytest.mark.parametrize(
    "args",
    [
        {},
        {"low": 0, "high": 9, "least": 3, "attempts": 8, "discount": 0.5},
        {"low": 100, "high": 10**6, "least": 1000, "instruction": "Guess my number: "},
    ],
    ids=["default", "small", "large"],
)
def test_it_keeps_the_promises(args: dict) -> None:
    assert_conforms("guess_number", args, seeds=6)


@given(SEEDS, st.integers(0, 60), st.integers(1, 60), st.data())
def test_bisection_always_finds_the_number_in_the_attempts_and_earns_all_there_is(
    seed: int, low: int, more: int, data: st.DataObject
) -> None:
    least = data.draw(st.integers(2, more + 1))
    environment = GuessNumber(low=low, high=low + more, least=least, discount=0.5, held_out=0.0)
    assert isinstance(environment, Demonstrates)
    smallest, largest = shown(environment.reset(seed))
    assert low <= smallest <= largest - least + 1 <= low + more - least + 1
    rewards, done, guesses = [], False, 0
    while not done:
        guess = int(environment.demonstration().text)
        assert smallest <= guess <= largest
        result = environment.step(Action(str(guess)))
        guesses += 1
        done = result.done
        rewards.append(result.reward)
        if result.observation.text == "\nhigher?":
            smallest = guess + 1
        elif result.observation.text == "\nlower?":
            largest = guess - 1
    assert rewards == [0.0] * (guesses - 1) + [1.0]
    assert result.info["correct"]
    assert result.info["guesses"] == guesses


def test_the_answers_are_true_and_the_attempts_run_out() -> None:
    environment = GuessNumber(attempts=5)
    number = answer(environment, 3)
    low, high = shown(environment.reset(3))
    said = [environment.step(Action(text)) for text in ("-1", "99999", "the secret?", "9" * 5000, "0 or 1")]
    texts = [result.observation.text for result in said]
    assert texts == ["\nhigher?", "\nlower?", "\nno number?", "\nno number?", ""]
    assert [(result.reward, result.done) for result in said] == [(0.0, False)] * 4 + [(0.0, True)]
    assert low <= number <= high
    assert said[-1].info == {
        "problem": f"{low}-{high}", "answer": number, "correct": False, "guesses": 5, "unreadable": 2,
    }  # fmt: skip
    with pytest.raises(RuntimeError):
        environment.step(Action("1"))


@pytest.mark.parametrize("around", ["{}", "{}, or 99", " I say {}.", "0{}", "is it {}?\n1"])
def test_the_first_integer_of_an_action_is_the_guess(around: str) -> None:
    environment = GuessNumber()
    number = answer(environment, 3)
    environment.reset(3)
    result = environment.step(Action(around.format(number)))
    assert (result.reward, result.done, result.info["correct"]) == (1.0, True, True)


def test_a_demonstration_goes_by_what_was_answered_however_odd_the_guesses() -> None:
    environment = GuessNumber(attempts=9)
    number = answer(environment, 3)
    low, high = shown(environment.reset(3))
    for text in ("-1", "99999", "?"):  # tell nothing that the range did not
        environment.step(Action(text))
    assert environment.demonstration() == Action(str((low + high) // 2))
    environment.step(Action(str(number - 1)))
    environment.step(Action(str(number + 1)))
    environment.step(Action(str(number - 1)))
    assert environment.demonstration() == Action(str(number))


def test_the_discount_begins_after_the_guesses_that_bisection_may_need() -> None:
    # of at most 3 numbers: two guesses are enough
    rewards = []
    for misses in range(5):
        environment = GuessNumber(low=5, high=7, least=2, attempts=5, discount=0.5, held_out=0.0)
        number = answer(environment, 0)
        environment.reset(0)
        for _ in range(misses):
            environment.step(Action("no idea"))
        rewards.append(environment.step(Action(str(number))).reward)
    assert rewards == [1.0, 1.0, 0.5, 0.25, 0.125]


def test_the_splits_share_no_range_and_every_number_of_a_range_can_be_its_secret() -> None:
    ranges, numbers = {}, {}
    for split in ("train", "held_out"):
        environment = GuessNumber(split, low=1, high=15, least=4)
        ranges[split] = {shown(environment.reset(seed)) for seed in range(1500)}
        numbers[split] = {answer(environment, seed) for seed in range(1500)}
    everything = {(low, high) for low in range(1, 13) for high in range(low + 3, 16)}
    assert not ranges["train"] & ranges["held_out"]
    assert ranges["train"] | ranges["held_out"] == everything
    for split, shown_ones in ranges.items():
        assert numbers[split] == {number for low, high in shown_ones for number in range(low, high + 1)}


@pytest.mark.parametrize(
    ("args", "field"),
    [
        ({"low": -1}, "low"),
        ({"low": 31}, "high"),
        ({"high": 10**6 + 1}, "high"),
        ({"least": 1}, "least"),
        ({"least": 32}, "least"),
        ({"attempts": 4}, "attempts"),
        ({"attempts": 0}, "attempts"),
        ({"discount": 1.5}, "discount"),
        ({"held_out": 1.0}, "held_out"),
    ],
)
def test_wrong_values_are_refused_with_field_and_accepted_values(args: dict, field: str) -> None:
    with pytest.raises(ValueError, match=rf"^{field}: .* is not accepted; accepted: "):
        GuessNumber(**args)


def test_an_empty_split_is_refused_when_made() -> None:
    with pytest.raises(ValueError, match=r"held_out: 0\.0 leaves no range in the split 'held_out'"):
        GuessNumber("held_out", held_out=0.0)
