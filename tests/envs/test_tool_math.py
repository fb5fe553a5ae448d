import ast
import operator
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.protocol import Action, Call, Demonstrates, DemonstratesTools, Environment
from envs.tool_math import ToolMath
from opentinker_core.agents.tools.calculator import Calculator
from opentinker_core.agents.tools.protocol import Deadline

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def value(text: str) -> int:
    """The value of an expression, by the syntax tree that Python reads it as."""

    def of(node: ast.expr) -> int:
        if isinstance(node, ast.BinOp):
            return OPERATORS[type(node.op)](of(node.left), of(node.right))
        assert isinstance(node, ast.Constant)
        return node.value

    return of(ast.parse(text, mode="eval").body)


def asked(environment: ToolMath, seed: int) -> str:
    return environment.reset(seed).text.removesuffix("=")


def solve(environment: ToolMath) -> tuple[Action, list[tuple[Call, ...]]]:
    """The demonstrated answer with the real calculator, and the rounds of calls before it."""
    calculator, results, rounds = Calculator(), list[str](), list[tuple[Call, ...]]()
    while not isinstance(shown := environment.demonstration_after(tuple(results)), Action):
        rounds.append(shown)
        for call in shown:
            assert call.name == calculator.name
            answer = calculator.call(call.arguments, Deadline.after(60))
            assert answer.error is None
            results.append(answer.text)
    return shown, rounds


settings = st.fixed_dictionaries(
    {
        "operations": st.sampled_from(["*", "+", "-", "+-*", ["*", "-"]]),
        "digits": st.integers(1, 9),
        "operands": st.integers(2, 6),
        "parts": st.integers(1, 4),
        "demonstrate": st.sampled_from(["whole", "parts"]),
    }
)


@given(settings, st.integers(0, 2**62))
def test_the_value_of_the_expression_is_right_and_demonstrated_with_the_calculator(args, seed) -> None:
    environment = ToolMath(**args)
    problem = asked(environment, seed)
    assert environment.demonstration_after(()) == environment.demonstration_after(())
    action, rounds = solve(environment)
    assert action.text == str(value(problem))
    by_parts = args["demonstrate"] == "parts" and args["parts"] > 1
    assert [len(calls) for calls in rounds] == ([args["parts"], 1] if by_parts else [1])
    result = environment.step(action)
    assert (result.reward, result.done) == (1.0, True)
    assert result.info == {"problem": problem, "answer": value(problem), "correct": True}


def test_a_product_as_a_model_is_shown_it() -> None:
    environment = ToolMath(digits=2, instruction="Use the calculator. ")
    text = environment.reset(3).text
    instruction, problem = text[:20], text[20:]
    left, right = problem.removesuffix("=").split("*")
    assert instruction == "Use the calculator. "
    assert 10 <= int(left) <= 99
    assert 10 <= int(right) <= 99
    (call,) = environment.demonstration_after(())
    assert call == Call("calculator", {"expression": f"{left}*{right}"})
    assert environment.demonstration_after(("17",)) == Action("17")


def test_parts_are_called_for_at_once_and_summed_by_a_call_of_what_they_gave() -> None:
    environment = ToolMath(operations="-", digits=1, parts=3, demonstrate="parts")
    problem = asked(environment, 2)
    calls = environment.demonstration_after(())
    assert [f"({call.arguments['expression']})" for call in calls] == problem.split("+")
    assert environment.demonstration_after(("3", "-4", "0")) == (
        Call("calculator", {"expression": "3+-4+0"}),
    )
    assert environment.demonstration_after(("3", "-4", "0", "-1")) == Action("-1")


@pytest.mark.parametrize(
    ("text", "correct"),
    [
        ("{}", True),
        ("47*83 is {}.", True),
        ("= {:,}", True),
        ("{}.00", True),
        ("first 7, then {}\n", True),
        ("{}.5", False),
        ("-{}", False),
        ("{} or 7", False),
        ("{}0", False),
        ("", False),
        ("none", False),
        ("9" * 5000, False),
    ],
)
def test_the_last_number_is_the_answer(text: str, correct: bool) -> None:
    environment = ToolMath()
    answer = value(asked(environment, 4))
    assert environment.step(Action(text.format(answer))).reward == float(correct)


def test_a_difference_may_be_negative() -> None:
    environment = ToolMath(operations="-")
    seed = next(seed for seed in range(100) if value(asked(environment, seed)) < 0)
    answer = value(asked(environment, seed))
    assert environment.step(Action(f"It is {answer}.")).reward == 1
    environment.reset(seed)
    assert environment.step(Action(f"It is {-answer}.")).reward == 0


def test_a_call_that_was_not_made_is_no_answer() -> None:
    environment = ToolMath()
    (call,) = environment.reset(1) and environment.demonstration_after(())
    assert environment.step(Action(f'{{"name": "calculator", "arguments": {call.arguments}}}')).reward == 0


def test_partial_credit_is_for_a_wrong_number_alone() -> None:
    environment = ToolMath(partial_credit=0.1)
    answer = value(asked(environment, 9))
    rewards = {}
    for text in ("no idea", str(answer + 1), str(answer)):
        environment.reset(9)
        rewards[text] = environment.step(Action(text)).reward
    assert list(rewards.values()) == [0, 0.1, 1]


def test_splits_share_no_problem_in_any_order_of_its_factors() -> None:
    train, held_out = (
        {tuple(sorted(asked(ToolMath(split, digits=1), seed).split("*"))) for seed in range(300)}
        for split in ("train", "held_out")
    )
    assert not train & held_out
    assert len(train | held_out) == 45
    assert held_out


def test_an_episode_depends_on_its_seed_alone_and_ends_once() -> None:
    used = ToolMath()
    with pytest.raises(RuntimeError, match="call reset first"):
        used.step(Action("1"))
    used.reset(1)
    used.step(Action("1"))
    with pytest.raises(RuntimeError, match="call reset first"):
        used.step(Action("1"))
    with pytest.raises(RuntimeError, match="call reset first"):
        used.demonstration_after(())
    assert used.reset(7) == ToolMath().reset(7)
    assert used.reset(7) != used.reset(8)


def test_it_demonstrates_with_tools_and_not_without() -> None:
    assert isinstance(ToolMath(), Environment)
    assert isinstance(ToolMath(), DemonstratesTools)
    assert not isinstance(ToolMath(), Demonstrates)


@pytest.mark.parametrize(
    "arguments",
    [
        {"operations": ""},
        {"operations": "*/"},
        {"digits": 10},
        {"operands": 1},
        {"parts": 5},
        {"demonstrate": "all"},
        {"partial_credit": 1},
        {"held_out": 1},
    ],
)
def test_refuses_what_it_cannot_play(arguments: dict) -> None:
    name, given_value = next(iter(arguments.items()))
    with pytest.raises(ValueError, match=re.escape(f"{name}: {given_value!r} is not accepted")):
        ToolMath(**arguments)
