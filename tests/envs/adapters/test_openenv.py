"""Against OpenEnv's own server, which is installed once into a folder of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from envs.adapters.openenv_actions import Field, field_of, written
from envs.adapters.openenv_adapter import OpenEnvError
from envs.conformance import assert_conforms
from envs.protocol import Action, Environment, StepResult
from envs.registry import available, make
from opentinker_core.config.settings import Settings
from tests.service.cookbook import installation

REQUIREMENTS = Path(__file__).with_name("openenv_requirements.txt")


@pytest.fixture(scope="module")
def packages() -> Path:
    try:
        return installation.ensure(Settings().home, REQUIREMENTS, "openenv")
    except installation.NotInstallableError as error:
        pytest.skip(str(error))


@contextmanager
def started(packages: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server, and the beginning of its environments' ids."""
    server = subprocess.Popen(
        [sys.executable, Path(__file__).with_name("openenv_server.py")],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(packages)},
    )
    try:
        assert server.stdout is not None
        yield server, f"openenv/127.0.0.1:{int(server.stdout.readline())}"
    finally:
        server.kill()
        server.communicate()


@pytest.fixture(scope="module")
def address(packages: Path) -> Iterator[str]:
    with started(packages) as (_, address):
        yield address


def say(environment: Environment, text: str) -> StepResult:
    return environment.step(Action(text))


@pytest.mark.servers
def test_an_environment_of_a_server_conforms(address: str) -> None:
    assert_conforms(f"{address}/guess", {"illegal": "again", "turns": 20}, seeds=2)


@pytest.mark.servers
def test_an_episode_is_played_to_its_end(address: str) -> None:
    environment = make(f"{address}/guess", high=8)
    shown = environment.reset(1).text
    assert shown.startswith("game ")
    assert shown.endswith(": 1-8?\n")
    low, high = 1, 8
    for _ in range(4):
        guess = (low + high) // 2
        result = say(environment, f"perhaps {guess}")
        if result.done:
            break
        low, high = (guess + 1, high) if result.observation.text == "\nhigher\n" else (low, guess - 1)
    assert (result.reward, result.info) == (1.0, {"illegal": 0, "truncated": False})
    with pytest.raises(RuntimeError, match="no episode is running"):
        say(environment, "3")


@pytest.mark.servers
def test_the_splits_have_different_seeds(address: str) -> None:
    for split, rest in (("train", 0), ("held_out", 1)):
        environment = make(f"{address}/guess", split)  # type: ignore[arg-type]
        shown = environment.reset(7).text
        assert int(shown.split()[1].rstrip(":")) % 2 == rest


@pytest.mark.servers
def test_an_episode_that_takes_too_long_is_cut_off_and_says_so(address: str) -> None:
    environment = make(f"{address}/guess", turns=2)
    environment.reset(1)
    say(environment, "0")
    result = say(environment, "0")
    assert (result.done, result.reward, result.info["truncated"]) == (True, 0.0, True)


@pytest.mark.servers
def test_what_cannot_be_read_loses_or_may_be_said_again(address: str) -> None:
    environment = make(f"{address}/guess", penalty=-0.5)
    environment.reset(1)
    result = say(environment, "seven")
    assert (result.done, result.reward, result.info["illegal"]) == (True, -0.5, 1)
    environment = make(f"{address}/guess", illegal="again")
    environment.reset(1)
    result = say(environment, "seven")
    assert (result.done, result.reward) == (False, 0.0)
    assert result.observation.text == "\nnot accepted: it cannot be read\n"


@pytest.mark.servers
def test_actions_of_several_parts_are_objects_or_have_fixed_parts(address: str) -> None:
    shop = make(f"{address}/shop", illegal="again", show="says.words")
    assert shop.reset(1).text == "good morning\n"
    assert say(shop, "apple").observation.text == "\nthanks\n"
    say(shop, "apple")
    result = say(shop, "pear")
    assert (result.done, result.reward) == (True, 1.0)
    shop = make(f"{address}/shop", field="count", fixed={"item": "apple"})
    assert json.loads(shop.reset(1).text)["items"] == {"apple": 2, "pear": 1}
    assert '"apple": 0' in say(shop, "2, please").observation.text
    shop.close()  # type: ignore[attr-defined]


@pytest.mark.servers
def test_what_the_server_does_not_accept_is_told(address: str) -> None:
    shop = make(f"{address}/shop", illegal="again", field="count")
    shop.reset(1)
    assert "item: Field required" in say(shop, "2").observation.text
    assert not say(shop, "none").done
    shop.close()  # type: ignore[attr-defined]


@pytest.mark.servers
def test_a_server_that_is_full_is_asked_until_it_has_a_place(address: str) -> None:
    first = make(f"{address}/shop")
    first.reset(1)
    with pytest.raises(OpenEnvError, match="capacity") as refused:
        make(f"{address}/shop", patience_s=0.5).reset(1)
    assert refused.value.code == "CAPACITY_REACHED"
    first.reset(2)
    first.close()  # type: ignore[attr-defined]
    second = make(f"{address}/shop", patience_s=0.5)
    second.reset(1)
    second.close()  # type: ignore[attr-defined]


@pytest.mark.servers
def test_an_environment_that_fails_ends_its_episode_only(address: str) -> None:
    environment, other = make(f"{address}/guess"), make(f"{address}/guess")
    environment.reset(1)
    other.reset(1)
    with pytest.raises(OpenEnvError, match="13 is unlucky"):
        say(environment, "13")
    with pytest.raises(RuntimeError, match="no episode is running"):
        say(environment, "1")
    say(other, "0")
    environment.reset(1)
    say(environment, "0")


@pytest.mark.servers
def test_a_server_that_goes_away_is_told(packages: Path) -> None:
    with started(packages) as (server, address):
        environment = make(f"{address}/guess")
        environment.reset(1)
        server.kill()
        server.wait()
        with pytest.raises(OpenEnvError):
            say(environment, "1")
        with pytest.raises(OpenEnvError, match="cannot be reached"):
            environment.reset(1)


@pytest.mark.servers
@pytest.mark.parametrize(
    ("path", "args", "message"),
    [
        ("/guess", {"field": "gess"}, "field: 'gess' does not exist; did you mean guess?"),
        ("/guess", {"fixed": {"x": 1}}, "field: 'x' does not exist; accepted: guess"),
        ("/guess", {"turns": 0}, "turns: 0 is not accepted"),
        ("/guess", {"patience_s": 0.0}, "patience_s: 0.0 is not accepted"),
        (
            "/guess",
            {"token": "NO_SUCH"},
            "token: 'NO_SUCH' is not accepted; accepted: an environment variable",
        ),
        ("/nothing", {}, "/nothing/schema tells no actions: .*404"),
    ],
)
def test_wrong_requests_name_what_is_wrong(
    address: str, path: str, args: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make(address + path, **args)


@pytest.mark.parametrize(
    ("id", "message"),
    [
        ("openenv/127.0.0.1:9", "http://127.0.0.1:9/schema tells no actions: ConnectError"),
        ("openenv/ftp://host", "'openenv/ftp://host' is not accepted; accepted: openenv/<host>:<port>"),
        ("openenv/", "'openenv/' is not accepted"),
    ],
)
def test_an_address_that_is_none_is_refused(id: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(id)


@pytest.mark.parametrize(
    ("schema", "field"),
    [
        ({"properties": {"text": {"type": "string"}, "metadata": {}}}, Field("text", "string")),
        (
            {"properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a"]},
            Field("a", "integer"),
        ),
        ({"properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}, None),
        ({"properties": {"a": {"anyOf": [{"type": "number"}, {"type": "null"}]}}}, Field("a", "number")),
        (
            {
                "properties": {"move": {"$ref": "#/$defs/Move"}},
                "$defs": {"Move": {"enum": ["up", "down"], "type": "string"}},
            },
            Field("move", "string", ("up", "down")),
        ),
        ({"properties": {"x": {"anyOf": [{"type": "string"}, {"type": "integer"}]}}}, Field("x", "any")),
        ({}, None),
    ],
)
def test_the_field_for_a_text_follows_from_the_schema(schema: dict[str, Any], field: Field | None) -> None:
    assert field_of("id", schema, None, {}) == field


@pytest.mark.parametrize(
    ("field", "text", "value"),
    [
        (Field("x", "string"), "as it is ", "as it is "),
        (Field("x", "integer"), "say -3!", -3),
        (Field("x", "integer"), "1.5", None),
        (Field("x", "number"), "1.5", 1.5),
        (Field("x", "number"), "much", None),
        (Field("x", "integer"), "9" * 30, None),
        (Field("x", "boolean"), "True.", True),
        (Field("x", "boolean"), "perhaps", None),
        (Field("x", "array"), "[1, 2]", [1, 2]),
        (Field("x", "any"), "{", None),
        (Field("x", "string", ("up", "down")), "go DOWN", "down"),
        (Field("x", "string", ("up", "down")), "1", None),
    ],
)
def test_a_text_is_read_by_the_kind_of_the_field(field: Field, text: str, value: Any) -> None:
    assert field.read(text) == value


def test_observations_are_their_only_text_or_json_or_a_part() -> None:
    assert written("id", {"text": "words", "metadata": {"x": 1}, "left": None}, None) == "words"
    assert written("id", {"text": "é", "n": 1}, None) == '{"text": "é", "n": 1}'
    assert written("id", {"a": {"b": [1]}}, "a.b") == "[1]"
    with pytest.raises(ValueError, match=r"id: show: 'a.c' does not exist; did you mean"):
        written("id", {"a": {"a.b": [1]}}, "a.c")


def test_it_is_listed() -> None:
    (info,) = [info for info in available() if info.id.startswith("openenv/")]
    assert info.kind == "single"
