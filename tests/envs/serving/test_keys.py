from pathlib import Path

import pytest

from envs.serving.keys import Keys, read_keys

FIRST, SECOND = "first-key-of-this-test", "second-key-of-this-test"


def test_each_key_is_an_owner_of_its_own() -> None:
    keys = Keys([FIRST, SECOND])
    assert keys.owner(f"Bearer {FIRST}") == 1
    assert keys.owner(f"bearer {SECOND}") == 2


@pytest.mark.parametrize(
    "header",
    ["", "Bearer", "Bearer ", f"Basic {FIRST}", f"Bearer {FIRST}x", f"Bearer {FIRST[:-1]}", "Bearer é"],
    ids=["none", "bare", "empty", "basic", "longer", "shorter", "not ASCII"],
)
def test_everything_else_is_nobody(header: str) -> None:
    assert Keys([FIRST, SECOND]).owner(header) is None


def test_without_keys_everybody_is_the_same_owner() -> None:
    keys = Keys([])
    assert keys.owner("") == keys.owner("Bearer whatever") == 0


@pytest.mark.parametrize(
    "wrong",
    [["short"], [FIRST, FIRST], ["with a blank in the middle"], ["schlüssel-" * 3]],
    ids=["short", "twice", "blank", "not ASCII"],
)
def test_wrong_keys_are_named_by_their_place_and_not_shown(wrong: list[str]) -> None:
    with pytest.raises(ValueError, match=f"keys: number {len(wrong)} ") as refused:
        Keys(wrong)
    assert wrong[-1] not in str(refused.value)


def test_keys_are_read_from_a_file_and_a_variable(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# of the trainer\n{FIRST}\n\n")
    assert read_keys(file, {"OPENTINKER_ENV_KEYS": f"{SECOND}, third"}) == [SECOND, "third", FIRST]
    assert read_keys(None, {}) == []


def test_a_file_without_keys_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    with pytest.raises(ValueError, match=r"key-file: .*No such file"):
        read_keys(file, {})
    file.write_text("# none\n")
    with pytest.raises(ValueError, match=r"key-file: .*there is no key in it"):
        read_keys(file, {})
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="not UTF-8"):
        read_keys(file, {})
