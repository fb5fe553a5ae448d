"""Arithmetic by walking a syntax tree: only what is listed here is computed, nothing is evaluated as code.

Every step is bounded (length, depth, digits of integers), so that no expression takes more than milliseconds.
"""

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import Field

from opentinker_core.agents.tools.protocol import (
    Arguments,
    Deadline,
    ToolError,
    ToolResult,
    checked,
    schema_of,
)

MAX_CHARACTERS = 1000
MAX_DEPTH = 60
MAX_DIGITS = 1000
_MAX_BITS = math.ceil(MAX_DIGITS * math.log2(10))

Number = int | float

_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: Mapping[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "abs": abs,
    "ceil": math.ceil,
    "cos": math.cos,
    "exp": math.exp,
    "floor": math.floor,
    "log": math.log,
    "log10": math.log10,
    "max": max,
    "min": min,
    "round": round,
    "sin": math.sin,
    "sqrt": math.sqrt,
    "tan": math.tan,
}
_CONSTANTS: Mapping[str, float] = {"pi": math.pi, "e": math.e}


class CalculatorArguments(Arguments):
    """What the calculator takes."""

    expression: str = Field(
        min_length=1,
        max_length=MAX_CHARACTERS,
        description="Numbers, + - * / // % **, parentheses, pi, e, and " + ", ".join(_FUNCTIONS),
    )


class Calculator:
    """A tool: the value of an arithmetic expression. Integers are exact, the rest are double floats."""

    name = "calculator"
    description = "Compute the value of an arithmetic expression, such as 3 * (2 + 5) ** 2 or sqrt(2) / 2."
    queue = None
    computes = True

    @property
    def parameters(self) -> dict[str, Any]:
        """JSON schema of its arguments."""
        return schema_of(CalculatorArguments)

    def call(self, arguments: Mapping[str, Any], deadline: Deadline) -> ToolResult:
        """The value, or what is wrong with the expression."""
        given = checked(CalculatorArguments, arguments)
        if isinstance(given, ToolResult):
            return given
        try:
            return ToolResult(_written(_value(_parsed(given.expression).body, deadline, 0)))
        except _Refused as refused:
            return ToolResult(f"Error: {refused}", refused.error)


class _Refused(Exception):  # noqa: N818 - what became of the expression
    """The expression has no value here; the message says why."""

    def __init__(self, message: str, error: ToolError = ToolError.FAILED) -> None:
        super().__init__(message)
        self.error = error


def _parsed(expression: str) -> ast.Expression:
    try:
        return ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError) as error:
        what = error.msg if isinstance(error, SyntaxError) else str(error)
        raise _Refused(f"not an arithmetic expression: {what}") from None
    except (RecursionError, MemoryError):
        raise _Refused("the expression is nested too deeply", ToolError.OVER_LIMIT) from None


def _value(node: ast.expr, deadline: Deadline, depth: int) -> Number:
    if depth > MAX_DEPTH:
        raise _Refused(
            f"the expression is nested too deeply; accepted: {MAX_DEPTH} levels", ToolError.OVER_LIMIT
        )
    if deadline.remaining_s() <= 0:
        raise _Refused("the time for the answer is over", ToolError.TIMED_OUT)

    def value(inner: ast.expr) -> Number:
        return _value(inner, deadline, depth + 1)

    match node:
        case ast.Constant(value=number) if type(number) in (int, float):
            return _bounded(lambda: number)
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _UNARY:
            apply, inside = _UNARY[type(sign)], value(operand)
            return _bounded(lambda: apply(inside))
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _BINARY:
            rest = [(sign, right)]
            while isinstance(left, ast.BinOp) and type(left.op) in _BINARY:  # a long sum is not deep
                rest.append((left.op, left.right))
                left = left.left
            total = value(left)
            for sign, right in reversed(rest):
                total = _combined(_BINARY[type(sign)], total, value(right))
            return total
        case ast.Call(func=ast.Name(id=name), args=inner, keywords=[]) if name in _FUNCTIONS:
            values = [value(argument) for argument in inner]
            return _applied(name, values)
    raise _Refused(_unsupported(node))


def _combined(apply: Callable[[Any, Any], Any], left: Number, right: Number) -> Number:
    """The operation, unless its result would have more digits than are accepted: told beforehand."""
    if isinstance(left, int) and isinstance(right, int):
        bits = 0
        if apply is operator.mul:
            bits = left.bit_length() + right.bit_length() - 1
        elif apply is operator.pow and right > 0 and abs(left) > 1:
            bits = (left.bit_length() - 1) * right
        if bits > _MAX_BITS:
            raise _too_long()
    return _bounded(lambda: apply(left, right))


def _applied(name: str, values: list[Number]) -> Number:
    if name == "round" and len(values) == 2 and abs(values[1]) > MAX_DIGITS:
        raise _too_long()
    return _bounded(lambda: _FUNCTIONS[name](*values))


def _bounded(compute: Callable[[], Any]) -> Number:
    """A finite real number of accepted length, or why there is none."""
    try:
        number = compute()
    except ZeroDivisionError:
        raise _Refused("division by zero") from None
    except OverflowError:
        raise _Refused("the result is too large", ToolError.OVER_LIMIT) from None
    except (ValueError, TypeError) as error:
        raise _Refused(str(error)) from None
    if isinstance(number, complex):
        raise _Refused("the result is not a real number")
    if isinstance(number, float) and not math.isfinite(number):
        raise _Refused("the result is too large", ToolError.OVER_LIMIT)
    if isinstance(number, int) and number.bit_length() > _MAX_BITS:
        raise _too_long()
    return number


def _too_long() -> _Refused:
    return _Refused(f"an integer has too many digits; accepted: {MAX_DIGITS}", ToolError.OVER_LIMIT)


def _unsupported(node: ast.expr) -> str:
    match node:
        case ast.BinOp(op=ast.BitXor()):
            return "'^' is not supported; accepted for powers: **"
        case ast.Call(func=ast.Name(id=name)):
            return f"the function {name!r:.40} is unknown; accepted: {', '.join(_FUNCTIONS)}"
        case ast.Name(id=name):
            return f"the name {name!r:.40} is unknown; accepted: {', '.join(_CONSTANTS)}"
    return f"{type(node).__name__} is not arithmetic; accepted: numbers, + - * / // % **, parentheses"


def _written(number: Number) -> str:
    """Integers without a point, also where a division came out even."""
    if isinstance(number, float) and number.is_integer() and abs(number) < 1e15:
        return str(int(number))
    return str(number)
