"""Values of Gymnasium's spaces as text."""

import re
from typing import Any

import numpy as np
from gymnasium import spaces

MAX_NUMBERS = 1024
"""An observation of more is refused: it is no text."""
_LETTERS = "xoabcdefghijklmnpqrstuvwyz"
_MARKED = re.compile(r"\x1b\[[0-9;]+m(.*?)\x1b\[0m", re.DOTALL)
_OTHER_CODES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def unreadable(space: spaces.Space[Any]) -> str | None:
    """Why values of a space have no text; None: they have."""
    match space:
        case spaces.Dict():
            inner = [unreadable(one) for name, one in space.spaces.items() if name != "action_mask"]
            return next((why for why in inner if why), None)
        case spaces.Tuple():
            return next((why for why in map(unreadable, space.spaces) if why), None)
        case spaces.Discrete() | spaces.Text():
            return None
        case spaces.Box() | spaces.MultiDiscrete() | spaces.MultiBinary():
            size = int(np.prod(space.shape))
            return None if size <= MAX_NUMBERS else f"observations of {size} numbers (at most {MAX_NUMBERS})"
    return f"observations in {type(space).__name__}"


def written(space: spaces.Space[Any], value: Any) -> str:
    """A value as text, a row of a grid in each line; an `action_mask` is left out."""
    match space:
        case spaces.Dict():
            parts = {
                name: written(one, value[name]) for name, one in space.spaces.items() if name != "action_mask"
            }
            if len(parts) == 1:
                return next(iter(parts.values()))
            return "\n".join(f"{name}:{_separated(text)}" for name, text in parts.items())
        case spaces.Tuple():
            return ", ".join(written(one, part) for one, part in zip(space.spaces, value, strict=True))
        case spaces.Text():
            return str(value)
    array = np.asarray(value)
    return board(array) if _is_board(space) else _numbers(array)


def board(planes: np.ndarray) -> str:
    """Binary planes (the last axis) as one board.

    `x` stands where the first has 1, `o` for the second, further letters for others, `.` for none; in
    brackets for several.
    """
    return "\n".join("".join(map(_cell, row)) for row in planes)


def plain(rendered: str) -> str:
    """What was rendered for a terminal, without its codes: what it marks by colours is put in brackets."""
    return _OTHER_CODES.sub("", _MARKED.sub(r"[\1]", rendered)).strip("\n")


def _separated(text: str) -> str:
    return ("\n" if "\n" in text else " ") + text


def _is_board(space: spaces.Space[Any]) -> bool:
    """Whether each point of a board has some of a few binary planes."""
    if not isinstance(space, spaces.Box | spaces.MultiBinary) or len(space.shape) != 3:
        return False
    binary = isinstance(space, spaces.MultiBinary) or bool((space.low == 0).all() and (space.high == 1).all())
    return binary and space.shape[2] <= len(_LETTERS) and not np.issubdtype(space.dtype, np.floating)


def _cell(planes: np.ndarray) -> str:
    letters = "".join(_LETTERS[at] for at in np.flatnonzero(planes))
    return f"({letters})" if len(letters) > 1 else letters or "."


def _numbers(array: np.ndarray) -> str:
    if array.ndim <= 1:
        return " ".join(map(_number, array.reshape(-1)))
    return "\n".join(_numbers(part) for part in array)


def _number(value: Any) -> str:
    # adding 0 takes the sign of -0.0
    return f"{float(value) + 0:.3g}" if isinstance(value, np.floating) else str(int(value))
