import subprocess
import sys

import pytest

from envs.multi import MultiEnvironment
from envs.protocol import Environment
from envs.registry import available, make, make_any, make_multi


def test_everything_available_has_a_unique_id_and_a_summary() -> None:
    infos = available()
    assert len({info.id for info in infos}) == len(infos) > 100
    assert all(info.summary for info in infos)
    assert [one.name for one in infos[0].arguments][:3] == ["operations", "digits", "shots"]


def test_listing_imports_neither_the_tasks_nor_anything_heavy() -> None:
    code = (
        "import sys; from envs.registry import available; assert len(available()) > 100;"
        "print([name for name in ('reasoning_gym', 'numpy', 'torch', 'sympy') if name in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def test_what_the_sources_say_of_the_tasks_is_what_the_package_registers() -> None:
    code = """
import dataclasses
import reasoning_gym.composite
from reasoning_gym.factory import DATASETS
from envs.reasoning_gym_catalog import tasks

own, adapters = {"seed", "size"}, {"extract", "partial", "held_out", "task", "args"}
fields = {
    name: {field.name for field in dataclasses.fields(config)} - own for name, (_, config) in DATASETS.items()
}
assert fields == {name: {one.name for one in task.arguments} for name, task in tasks().items()}
assert not any(names & adapters for names in fields.values())
print(len(fields))
"""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(shown.stdout) > 100


def test_a_class_of_another_package_is_made_by_its_path() -> None:
    assert isinstance(make("tests.envs.broken:Right", "held_out"), Environment)


@pytest.mark.parametrize(
    ("id", "args", "message"),
    [
        ("arithmetik", {}, "environment: 'arithmetik' does not exist; did you mean arithmetic"),
        (
            "zzz",
            {},
            "environment: 'zzz' does not exist; accepted: arithmetic, gomoku, guess_number, ",
        ),
        ("reasoning_gym/leg_count", {}, "did you mean reasoning_gym/leg_counting"),
        ("reasoning_gym/", {}, "does not exist"),
        ("arithmetic", {"digit": 2}, "arithmetic: argument: 'digit' does not exist; did you mean digits"),
        ("arithmetic", {"digits": "2"}, "arithmetic: digits: '2' is not accepted; accepted: int"),
        ("arithmetic", {"digits": True}, "arithmetic: digits: True is not accepted; accepted: int"),
        ("arithmetic", {"operations": 3}, r"arithmetic: operations: 3 is not accepted; accepted: str \| "),
        ("reasoning_gym/gcd", {"min_number": 3}, "did you mean min_numbers"),
        ("reasoning_gym/gcd", {"min_numbers": "3"}, "min_numbers: '3' is not accepted; accepted: int"),
        ("reasoning_gym/gcd", {"min_numbers": -3}, "-3.* is not accepted: min_numbers must be at least 2"),
        ("reasoning_gym/gcd", {"seed": 3}, "argument: 'seed' does not exist"),
        (
            "reasoning_gym/gcd",
            {"extract": "all"},
            r"extract: 'all' is not accepted; accepted: Literal\['auto'",
        ),
        ("reasoning_gym/gcd", {"held_out": 1.5}, "held_out: 1.5 is not accepted"),
        ("reasoning_gym/word_sorting", {"transformation": "x"}, "'x' is not a valid TextTransformation"),
        ("reasoning_gym/composite", {}, "at least one dataset"),
        ("no.such.module:Class", {}, "No module named 'no'.*accepted: a class of an installed package"),
        ("tests.envs.broken:Nothing", {}, "has no class or function 'Nothing'"),
        ("tests.envs.broken:itertools", {}, "has no class or function 'itertools'"),
        ("os:getcwd; rm", {}, "does not exist"),
    ],
)
def test_wrong_requests_name_the_field_the_value_and_what_is_accepted(
    id: str, args: dict, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make(id, **args)


class Closing:
    """Of several agents; tells whether it was closed."""

    agents = ("a", "b")
    closed = 0

    def __init__(self, split: str = "train") -> None:
        pass

    def reset(self, seed: int) -> None:
        pass

    def step(self, actions: object) -> None:
        pass

    def close(self) -> None:
        Closing.closed += 1


def test_environments_of_several_agents_are_made_beside_the_others() -> None:
    kinds = {info.id: info.kind for info in available()}
    assert kinds["gomoku_match"] == kinds["collect"] == "multi"
    assert kinds["gomoku"] == kinds["reasoning_gym/gcd"] == "single"
    assert make_multi("collect", "held_out", agents=4).agents == ("a1", "a2", "a3", "a4")
    assert make_multi(f"{__name__}:Closing").agents == ("a", "b")
    assert isinstance(make_any("gomoku_match"), MultiEnvironment)
    assert not isinstance(make_any("gomoku"), MultiEnvironment)


@pytest.mark.parametrize(
    ("maker", "id", "message"),
    [
        (make, "gomoku_match", "'gomoku_match' has the agents X, O; accepted here: one of a single agent$"),
        (make, f"{__name__}:Closing", "has the agents a, b; accepted here: one of a single agent$"),
        (make_multi, "gomoku", "'gomoku' has a single agent; accepted here: one of several agents$"),
        (make_multi, "tests.envs.broken:Right", "has a single agent; accepted here: one of several"),
        (make_multi, "reasoning_gym/gcd", "has a single agent; accepted here: one of several agents$"),
        (make_multi, "gomoku_mach", "does not exist; did you mean gomoku_match"),
        (make_multi, "zzz", "does not exist; accepted: collect, gomoku_match, negotiate"),
    ],
)
def test_the_wrong_number_of_agents_is_refused(maker, id: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^environment: .*{message}"):
        maker(id)


def test_what_is_refused_is_closed() -> None:
    before = Closing.closed
    with pytest.raises(ValueError, match="single agent"):
        make(f"{__name__}:Closing")
    assert Closing.closed == before + 1


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(ValueError, match="split: 'test' is not accepted; accepted: train, held_out"):
        make("arithmetic", "test")  # type: ignore[arg-type]
