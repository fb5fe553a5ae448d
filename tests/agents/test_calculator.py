"""The calculator: right values, bounded work, and errors that say what would be accepted."""

import ast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opentinker_core.agents.tools.calculator import MAX_CHARACTERS, Calculator
from opentinker_core.agents.tools.protocol import Deadline, ToolError, ToolResult
from tests.waiting import PATIENCE_S


def compute(expression: object, seconds: float = PATIENCE_S) -> ToolResult:
    return Calculator().call({"expression": expression}, Deadline.after(seconds))


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2+3*4", "14"),
        (" (2 + 3) * -4 ", "-20"),
        ("7 / 2", "3.5"),
        ("6 / 3", "2"),
        ("7 // 2 + 7 % 4", "6"),
        ("2**100", str(2**100)),
        ("2 ** -1", "0.5"),
        ("0.1 + 0.2", "0.30000000000000004"),
        ("1e300 * 1e-300", "1"),
        ("sqrt(2) / 2", "0.7071067811865476"),
        ("max(1, 2.5, round(3.14159, 2))", "3.14"),
        ("floor(-1.5) + ceil(1.2) + abs(-3)", "3"),
        ("log(e) + log10(100) + cos(0) + sin(0) + tan(0) + exp(0)", "5"),
        ("pi", "3.141592653589793"),
        ("1" + "+1" * 499, "500"),
        ("10 - 2 - 3 * 2 - 1", "1"),
        ("2 ** 3 ** 2", "512"),
        ("12345678901234567890 * 98765432109876543210", str(12345678901234567890 * 98765432109876543210)),
    ],
)
def test_values(expression: str, value: str) -> None:
    assert compute(expression) == ToolResult(value)


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("1 / 0", "division by zero"),
        ("5 % 0", "division by zero"),
        ("(-8) ** 0.5", "the result is not a real number"),
        ("sqrt(-1)", "math domain error"),
        ("2 ^ 3", "'^' is not supported; accepted for powers: **"),
        ("x + 1", "the name 'x' is unknown; accepted: pi, e"),
        ("gcd(4, 6)", "the function 'gcd' is unknown; accepted: abs,"),
        ("2 +", "not an arithmetic expression: invalid syntax"),
        ("1; 2", "not an arithmetic expression: invalid syntax"),
        ("\x00", "not an arithmetic expression:"),
        ("'a' * 3", "Constant is not arithmetic; accepted: numbers"),
        ("True + 1", "Constant is not arithmetic"),
        ("1j", "Constant is not arithmetic"),
        ("1 < 2", "Compare is not arithmetic"),
        ("[1, 2]", "List is not arithmetic"),
        ("(lambda: 1)()", "Call is not arithmetic"),
        ("__import__('os').system('true')", "Call is not arithmetic"),
        ("().__class__", "Attribute is not arithmetic"),
        ("sqrt(x=2)", "the function 'sqrt' is unknown"),
        ("sqrt()", "takes exactly one argument"),
        ("1 << 100", "BinOp is not arithmetic"),
    ],
)
def test_what_is_no_arithmetic_is_told(expression: str, message: str) -> None:
    result = compute(expression)
    assert result.error is ToolError.FAILED
    assert result.text.startswith("Error: ")
    assert message in result.text


@pytest.mark.parametrize(
    "expression",
    [
        "9**9**9**9",
        "2 ** 10**9",
        "10**999 * 10**999 * 10",
        "1e308 * 10",
        "1e999",
        "exp(1000)",
        "2.0 ** 5000",
        "10**999 / 1e-9",
        "round(1, -10**9)",
        "-" * 200 + "1",
        "(" * 150 + "1" + ")" * 150 + "+" * 100 + "1",
        "sqrt(1 + " * 70 + "1" + ")" * 70,
    ],
)
def test_what_would_be_too_much_is_refused(expression: str) -> None:
    result = compute(expression)
    assert result.error is ToolError.OVER_LIMIT
    assert result.text.startswith("Error: ")


def test_parentheses_without_end_are_refused() -> None:
    assert compute("(" * 900).error in (ToolError.FAILED, ToolError.OVER_LIMIT)
    assert compute("(" * 300 + "1" + ")" * 300).error in (ToolError.FAILED, ToolError.OVER_LIMIT)


def test_a_deadline_that_has_passed_is_told() -> None:
    assert compute("1 + 1", seconds=0).error is ToolError.TIMED_OUT


@pytest.mark.parametrize("expression", ["", "1" * (MAX_CHARACTERS + 1), 3, None, ["1"]])
def test_wrong_arguments_are_told(expression: object) -> None:
    result = compute(expression)
    assert result.error is ToolError.INVALID_ARGUMENTS
    assert "expression: " in result.text
    assert "accepted: expression" in result.text


@given(st.text(max_size=50) | st.text("0123456789+-*/%(). episqrtlog,^", max_size=60))
def test_any_text_gets_an_answer(expression: str) -> None:
    assert compute(expression).text


numbers = st.integers(-(10**6), 10**6).map(str) | st.floats(-1e6, 1e6).map(repr)
expressions = st.recursive(
    numbers.map(lambda number: f"({number})"),
    lambda inner: st.tuples(inner, st.sampled_from("+-*"), inner).map(lambda parts: f"({' '.join(parts)})"),
    max_leaves=10,
)


@given(expressions)
def test_the_value_is_pythons(expression: str) -> None:
    expected = eval(compile(ast.parse(expression, mode="eval"), "", "eval"))
    assert float(compute(expression).text) == float(expected)
