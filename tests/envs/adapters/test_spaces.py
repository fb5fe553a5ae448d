import numpy as np
import pytest
from gymnasium import spaces

from envs.adapters.spaces import plain, unreadable, written


@pytest.mark.parametrize(
    ("space", "value", "text"),
    [
        (spaces.Discrete(5), np.int64(3), "3"),
        (spaces.Box(-1, 1, (3,), np.float32), np.array([0.5, -1, 0.12345], np.float32), "0.5 -1 0.123"),
        (spaces.Box(0, 9, (2, 2), np.int8), np.array([[1, 2], [3, 4]], np.int8), "1 2\n3 4"),
        (spaces.Tuple([spaces.Discrete(5), spaces.MultiBinary(2)]), (4, np.array([1, 0])), "4, 1 0"),
        (spaces.Text(9), "words", "words"),
        (
            spaces.Dict({"observation": spaces.Discrete(9), "action_mask": spaces.MultiBinary(2)}),
            {"observation": 7, "action_mask": [1, 1]},
            "7",
        ),
        (
            spaces.Dict({"a": spaces.Discrete(9), "b": spaces.Box(0, 9, (1, 2), np.int8)}),
            {"a": 7, "b": np.array([[1, 2]])},
            "a: 7\nb: 1 2",
        ),
    ],
    ids=lambda part: type(part).__name__,
)
def test_values_are_written(space: spaces.Space, value: object, text: str) -> None:
    assert written(space, value) == text


def test_planes_of_a_board_are_one_board() -> None:
    planes = np.zeros((2, 3, 2), bool)
    planes[0, 1, 0] = planes[1, 2, 1] = True
    space = spaces.Box(0, 1, planes.shape, bool)
    assert written(space, planes) == ".x.\n..o"
    planes[0, 1, 1] = True
    assert written(space, planes) == ".(xo).\n..o"
    numbers = spaces.Box(0, 3, (1, 2, 2), np.int8)
    assert written(numbers, np.array([[[0, 1], [1, 0]]])) == "0 1\n1 0"


def test_what_has_no_text_is_told() -> None:
    image = spaces.Box(0, 255, (64, 64, 3), np.uint8)
    assert unreadable(spaces.Dict({"see": image})) == "observations of 12288 numbers (at most 1024)"
    assert unreadable(spaces.Sequence(spaces.Discrete(3))) == "observations in Sequence"
    assert unreadable(spaces.Tuple([spaces.Discrete(3), spaces.Text(3)])) is None


def test_marks_of_terminals_become_brackets() -> None:
    assert plain("\n  (Left)\n\x1b[41mS\x1b[0mFF\x1b[2K\n") == "  (Left)\n[S]FF"
