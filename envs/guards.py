"""Reading what a model wrote without running it.

Several scorers of reasoning-gym hand the model's answer to `eval`, or to sympy's `parse_expr`,
which calls `eval`. What is here takes their place.
"""

import ast
from collections.abc import Callable
from typing import Any

_MAX_LENGTH = 1000
_MAX_DEGREE = 60
_MAX_EXPONENT = 1000
_TRIGONOMETRIC = ("sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos", "atan", "sinh", "cosh", "tanh")
_FUNCTIONS = frozenset((*_TRIGONOMETRIC, "exp", "log", "ln", "sqrt", "Abs"))
_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow)


def literal(text: str) -> Any:
    """Stands in for `eval`: reads Python literals only.

    Raises:
        ValueError: the text is not a literal.
    """
    if len(text) > 100_000:
        raise ValueError("too long")
    try:
        return ast.literal_eval(text)
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(f"not a literal: {error}") from error


def guarded(parse_expr: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap sympy's `parse_expr` so that it sees only arithmetic of modest size."""

    def parse(text: str, *args: Any, **kwargs: Any) -> Any:
        check_expression(text)
        return parse_expr(text, *args, **kwargs)

    return parse


def check_expression(text: str) -> None:
    """Accept numbers, short names, + - * / ** and the elementary functions; and no huge powers.

    Raises:
        ValueError: anything else.
    """
    if len(text) > _MAX_LENGTH:
        raise ValueError("too long")
    try:
        _degree(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(f"not an expression: {error}") from error


def _degree(node: ast.expr) -> int:
    """An upper bound of the polynomial degree (and of the digits of numbers) an expression grows to."""
    degree = 1
    match node:
        case ast.Constant(value=int() | float()) if not isinstance(node.value, bool):
            degree = 1 + len(str(node.value)) // 20
        case ast.Name(id=name) if len(name) <= 2 or name == "pi":
            pass
        case ast.UnaryOp(op=ast.UAdd() | ast.USub(), operand=operand):
            degree = _degree(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            degree = _degree(left) * _exponent(right)
        case ast.BinOp(left=left, op=operation, right=right) if isinstance(operation, _OPERATORS):
            degree = _degree(left) + _degree(right)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            degree = sum(_degree(argument) for argument in args)
        case _:
            raise ValueError(f"not accepted in an expression: {ast.unparse(node):.80}")
    if degree > _MAX_DEGREE * (1 if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow) else 20):
        raise ValueError("an expression of too high a degree")
    return degree


def _exponent(node: ast.expr) -> int:
    """A bound of an exponent's size: no powers inside, and a small product of its numbers."""
    size = 1.0
    for part in ast.walk(node):
        if isinstance(part, ast.Pow | ast.Call):
            raise ValueError("a power or function in an exponent")
        if isinstance(part, ast.Constant) and isinstance(part.value, int | float):
            size *= max(1.0, abs(part.value))
    _degree(node)
    if size > _MAX_EXPONENT:
        raise ValueError("too large an exponent")
    return max(1, round(size))
