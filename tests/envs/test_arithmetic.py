import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.arithmetic import Arithmetic
from envs.protocol import Action, Demonstrates, Observation

SEEDS = st.integers(0, 2**63 - 1)


def asked(observation: Observation) -> str:
    return observation.text.splitlines()[-1]


def test_two_shots_of_one_digit_sums_give_the_documented_prompt() -> None:
    text = Arithmetic(shots=2, digits=1, operations="+").reset(0).text
    head, _, problem = text.rpartition("\n")
    assert head == "1+1=2\n5+4=9"
    left, _, right = problem.removesuffix("=").partition("+")
    assert problem == f"{int(left)}+{int(right)}="


@given(SEEDS, st.sampled_from(["+", "-", "*", "+-*"]), st.integers(1, 9))
def test_the_demonstration_is_right_and_ends_the_episode(seed: int, operations: str, digits: int) -> None:
    environment = Arithmetic(operations=operations, digits=digits)
    assert isinstance(environment, Demonstrates)
    problem = asked(environment.reset(seed)).removesuffix("=")
    action = environment.demonstration()
    result = environment.step(action)
    operation = problem[0] + problem[1:].lstrip("0123456789")[:1]
    left, right = problem.split(operation[-1], 1)
    expected = {"+": int(left) + int(right), "-": int(left) - int(right), "*": int(left) * int(right)}
    assert action.text == str(expected[operation[-1]])
    assert (result.reward, result.done) == (1.0, True)
    assert result.info == {"problem": problem, "answer": int(action.text), "correct": True}


@pytest.mark.parametrize("around", ["{}", "{}\n5+4=9", " {} ", "The answer is {}.", "0{}", "{} or 99"])
def test_the_first_integer_of_the_action_counts(around: str) -> None:
    environment = Arithmetic()
    environment.reset(3)
    assert environment.step(Action(around.format(environment.demonstration().text))).reward == 1.0


@pytest.mark.parametrize("text", ["", "no idea", "99 {}", "-{}", "{}0", "٣", "9" * 5000, "\x00"])
def test_anything_else_is_worth_nothing(text: str) -> None:
    environment = Arithmetic()
    environment.reset(3)
    result = environment.step(Action(text.format(environment.demonstration().text)))
    assert (result.reward, result.done, result.info["correct"]) == (0.0, True, False)


def test_partial_credit_is_for_any_integer_and_only_on_request() -> None:
    environment = Arithmetic(partial_credit=0.25)
    for text, reward in (("999", 0.25), ("none", 0.0)):
        environment.reset(1)
        assert environment.step(Action(text)).reward == reward


def test_a_wrong_answer_leaves_attempts_with_a_reward_each() -> None:
    environment = Arithmetic(attempts=3, shots=2)
    problem = asked(environment.reset(5))
    first = environment.step(Action("999"))
    assert (first.reward, first.done) == (0.0, False)
    assert "wrong" in first.observation.text.lower()
    assert asked(first.observation) == problem
    second = environment.step(environment.demonstration())
    assert (second.reward, second.done) == (1.0, True)
    with pytest.raises(RuntimeError):
        environment.step(Action("1"))


def test_attempts_run_out() -> None:
    environment = Arithmetic(attempts=2)
    environment.reset(5)
    assert [environment.step(Action("999")).done for _ in range(2)] == [False, True]


def problems(split: str, **args: object) -> set[str]:
    environment = Arithmetic(split, **args)  # type: ignore[arg-type]
    return {asked(environment.reset(seed)) for seed in range(2000)}


@pytest.mark.parametrize("operation", "+-*")
def test_a_fifth_of_the_one_digit_problems_is_held_out_and_examples_are_in_neither_split(
    operation: str,
) -> None:
    train = problems("train", operations=operation, shots=2)
    held_out = problems("held_out", operations=operation, shots=2)
    assert not train & held_out
    everything = {f"{left}{operation}{right}=" for left in range(10) for right in range(10)}
    shown = {f"1{operation}1=", f"5{operation}4="} | ({f"4{operation}5="} - ({"4-5="}))
    assert train | held_out == everything - shown
    assert len(held_out) == 20


def test_the_two_orders_of_a_sum_are_in_one_split() -> None:
    train = problems("train", held_out=0.5)
    assert all(f"{right}+{left}=" in train for left, right in (p.rstrip("=").split("+") for p in train))


def test_the_split_of_a_problem_does_not_depend_on_what_else_is_asked() -> None:
    alone = problems("held_out", operations="+")
    among_others = {p for p in problems("held_out", operations="*-+") if "+" in p}
    assert among_others <= alone


@pytest.mark.parametrize(
    ("args", "field"),
    [
        ({"operations": ""}, "operations"),
        ({"operations": "/"}, "operations"),
        ({"digits": 0}, "digits"),
        ({"digits": 10}, "digits"),
        ({"shots": 9}, "shots"),
        ({"attempts": 0}, "attempts"),
        ({"partial_credit": 1.0}, "partial_credit"),
        ({"held_out": 1.0}, "held_out"),
    ],
)
def test_wrong_values_are_refused_with_field_and_accepted_values(args: dict, field: str) -> None:
    with pytest.raises(ValueError, match=rf"^{field}: .* is not accepted; accepted: "):
        Arithmetic(**args)


def test_an_empty_split_is_refused_when_made() -> None:
    with pytest.raises(ValueError, match=r"held_out: 0\.0 leaves no problem in the split 'held_out'"):
        Arithmetic("held_out", held_out=0.0)
