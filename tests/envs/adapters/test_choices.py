import pytest

from envs.adapters.choices import Choices

NAMED = Choices(4, ["left", "down", "right", "go right"])


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("left", 0),
        ("I go DOWN, then left.", 1),
        ("2", 2),
        ("[3]", 3),
        ("go right", 3),
        ("upright", None),
        ("4", None),
        ("-1", None),
        ("1.5", 1),
        ("left or <answer>down</answer>", 1),
        ("<answer>up</answer> left", None),
        ("99999999999999999999", None),
        ("", None),
        ("é 日本 🙂", None),
        ("4 left", None),
    ],
)
def test_the_first_name_or_number_counts(text: str, number: int | None) -> None:
    assert NAMED.read(text) == number


def test_numbers_may_begin_elsewhere_than_at_0() -> None:
    choices = Choices(2, first=-1)
    assert [choices.read(text) for text in ("-1", "0", "1")] == [-1, 0, None]
    assert choices.listed() == "-1 to 0"
    assert choices.listed([0]) == "0"


def test_actions_are_shown_by_their_names_and_not_endlessly() -> None:
    assert NAMED.listed() == "left down right go right"
    assert NAMED.listed([2, 0]) == "left right"
    assert Choices(1000).listed(range(1000)).endswith(" 98 99 ...")


@pytest.mark.parametrize("names", [["a"], ["a", "A"], ["a", ""]])
def test_names_that_do_not_fit_are_refused(names: list[str]) -> None:
    with pytest.raises(ValueError, match=r"actions: .* not accepted"):
        Choices(2, names)
