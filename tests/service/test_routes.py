"""The table of routes: each has a caller, and says whether it changes anything."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.routing import APIRoute
from starlette.routing import Route

import opentinker_core.service
from opentinker_core.service.app import ROUTERS, dependencies_of, routes
from opentinker_core.service.principal import CALLERS, admin, member, principal, reader
from opentinker_core.service.routes import ANSWERED_WHILE_STOPPING, METRICS, PUBLIC, UNCHANGING
from tests.service.live import Live

_TABLE = [route for router in ROUTERS for route in router.routes]


def _named(route: APIRoute) -> str:
    return f"{','.join(sorted(route.methods))} {route.path}"


@pytest.mark.parametrize("route", _TABLE, ids=_named)
def test_each_route_knows_its_caller(route: APIRoute) -> None:
    assert isinstance(route, APIRoute), "routers hold routes, so that all of them can be seen here"
    if route.path in PUBLIC | {METRICS}:
        assert route.methods == {"GET"}
        assert not dependencies_of(route) & CALLERS
    else:
        assert dependencies_of(route) & CALLERS


@pytest.mark.parametrize("route", _TABLE, ids=_named)
def test_what_changes_something_is_not_for_readers(route: APIRoute) -> None:
    changes = route.methods != {"GET"} and route.path not in UNCHANGING
    if changes and route.path not in _READERS_MAY:
        assert dependencies_of(route) & {member, admin}


_READERS_MAY = {
    "/api/v1/create_session",
    "/api/v1/sessions/{session_id}/finish",
    "/api/v1/create_sampling_session",
    "/api/v1/cancel_future",
}
"""A client that only samples has a session, too."""


def test_the_application_serves_nothing_but_the_table(live: Live) -> None:
    extra = [route for route in live.app.routes if route not in _TABLE]
    assert [route.path for route in extra if isinstance(route, Route)] == ["/openapi.json"]
    assert len(extra) == 1
    assert routes(live.app) == _TABLE


@pytest.mark.parametrize("path", sorted(UNCHANGING | ANSWERED_WHILE_STOPPING | PUBLIC - {"/openapi.json"}))
def test_every_path_that_is_spoken_of_exists(path: str) -> None:
    assert path in {route.path for route in _TABLE if isinstance(route, APIRoute)}


def test_a_route_without_a_caller_would_be_seen() -> None:
    def open_to_all() -> None: ...

    assert not dependencies_of(APIRoute("/open", open_to_all)) & CALLERS
    assert {principal, reader, member, admin} == CALLERS


def _numbers() -> Iterator[tuple[str, int]]:
    for path in Path(opentinker_core.service.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and type(node.value) is int:
                yield f"{path.name}:{node.lineno}", node.value


def test_nothing_is_answered_with_409_which_stalls_the_sdk_for_minutes() -> None:
    numbers = list(_numbers())
    assert 404 in {number for _, number in numbers}
    assert [place for place, number in numbers if number == 409] == []
