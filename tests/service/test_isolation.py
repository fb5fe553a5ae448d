"""The isolation matrix against a live server: nobody learns of, or touches, what is another tenant's."""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.routing import APIRoute
from sqlalchemy import Engine, create_engine, event, select
from starlette.testclient import TestClient

from opentinker_core.policies.tables import Base
from opentinker_core.service.app import ROUTERS, make_app, routes
from opentinker_core.service.errors import NotFound
from opentinker_core.service.principal import Who
from opentinker_core.service.routes import METRICS, PUBLIC
from opentinker_core.service.tables import SessionRow
from opentinker_core.service.tinker import futures
from opentinker_core.service.types import ServiceSession
from tests.service.estates import Estate, estate
from tests.service.isolation import KINDS, Case, Unaskable, cases, findings, told
from tests.service.live import Live
from tests.service.raw import Raw

TABLE = [route for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)]
MATRIX = cases(TABLE)


@pytest.fixture(scope="module")
def theirs(live: Live) -> Estate:
    return estate(live, "ada-owns")


@pytest.fixture(scope="module")
def asker(live: Live) -> Estate:
    return estate(live, "bob-asks")


@pytest.fixture(scope="module")
def unknown(theirs: Estate) -> dict[str, str]:
    """Ids that look like those of `theirs`, of nothing that ever was."""
    session, key = theirs.ids["session"], theirs.ids["key"]
    changed = {session: secrets.token_hex(8), key: secrets.token_hex(6), theirs.tenant: "eve-gone"}
    ids = dict(theirs.ids)
    for old, new in changed.items():
        assert len(old) == len(new)
        ids = {kind: value.replace(old, new) for kind, value in ids.items()}
    assert not set(ids.values()) & set(theirs.ids.values())
    return ids


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=live.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module", autouse=True)
def before(live: Live, theirs: Estate) -> "State":
    """What there is of `theirs` before anybody asks."""
    return state(live, theirs, next(theirs.numbers))


@pytest.fixture(autouse=True)
def _polls_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futures, "POLL_SECONDS", 0.2)


def test_every_kind_of_thing_is_asked_for() -> None:
    assert {case.kind for case in MATRIX if case.field} == KINDS
    assert {case.path for case in MATRIX} == {route.path for route in TABLE} - PUBLIC - {METRICS}


@pytest.mark.parametrize("case", MATRIX, ids=str)
def test_a_stranger_is_told_what_he_would_be_told_of_nothing(
    case: Case, client: httpx.Client, asker: Estate, theirs: Estate, unknown: dict[str, str]
) -> None:
    assert findings(case, client, asker, theirs, unknown) == []


@pytest.mark.parametrize("case", [case for case in MATRIX if case.field], ids=str)
def test_a_stranger_makes_the_server_look_for_the_same_as_for_nothing(
    case: Case, client: httpx.Client, asker: Estate, theirs: Estate, unknown: dict[str, str]
) -> None:
    """So that the time of an answer tells nothing: the same statements meet the database."""
    for _ in range(5):  # what runs in the background shows up as well
        asked = []
        for named in (theirs.ids[case.kind], unknown[case.kind]):
            with statements() as seen:
                told(client, asker.key, case.ask(asker, named))
            asked.append(seen)
        if asked[0] == asked[1]:
            return
    assert asked[0] == asked[1]


@contextmanager
def statements() -> Iterator[list[str]]:
    """What the database is asked within the block, but for the audit log and keys."""
    seen: list[str] = []

    def note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        if not any(table in statement for table in ("ot_keys", "ot_audit")):
            seen.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    try:
        yield seen
    finally:
        event.remove(Engine, "before_cursor_execute", note)


_NAMED = "/api/v1/training_runs/{training_run_id}/checkpoints/{kind}/{name}"
REFUSED_TO_OWNERS = {
    ("POST", f"{_NAMED}/publish"),
    ("GET", "/api/v1/sessions/{session_id}/trace_export"),
}
"""What is not served: an owner gets 400, once it is clear that it is one."""


ABOUT_OBJECTS = [case for case in MATRIX if case.field]


@pytest.mark.parametrize("case", ABOUT_OBJECTS, ids=str)
def test_an_owner_is_served(case: Case, client: httpx.Client, asker: Estate) -> None:
    """Or else the matrix would only see that its questions are malformed."""
    answer = case.ask(asker, asker.ids[case.kind]).send(client, asker.key)
    refused = (case.method, case.path) in REFUSED_TO_OWNERS or "asample model_path" in str(case)
    assert answer.status_code in ((400,) if refused else (200, 204)), answer.text


LISTS = {
    "/api/v1/sessions": "session",
    "/api/v1/training_runs": "model",
    "/api/v1/checkpoints": "weights",
    "/api/v1/admin/keys": "key",
    "/api/v1/admin/audit": "model",
    "/api/v1/audit": "model",
    "/v1/models": "policy",
}


@pytest.mark.parametrize("path", sorted(LISTS))
def test_a_list_shows_all_that_is_its_tenants_and_no_more(
    path: str, live: Live, client: httpx.Client, theirs: Estate
) -> None:
    mine = client.get(path, headers={"X-API-Key": theirs.key}).text
    others = client.get(path, headers={"X-API-Key": live.key("carol")}).text
    assert theirs.ids[LISTS[path]] in mine
    assert not [secret for secret in theirs.secrets() if secret in others]


def test_nothing_of_a_tenant_was_changed_by_strangers(live: Live, theirs: Estate, before: "State") -> None:
    assert state(live, theirs, next(theirs.numbers)) == before


State = tuple[dict[str, Any], dict[str, list[tuple[Any, ...]]]]


def state(live: Live, owner: Estate, seq: int) -> State:
    """A loss of the tenant's model, and all that the database has of the tenant but for times of use."""
    raw = Raw(live.url, owner.key)
    loss = raw.result(raw.forward_backward(owner.ids["model"], seq).json()["request_id"])
    rows: dict[str, list[tuple[Any, ...]]] = {}
    engine = create_engine(live.service.settings.resolved_catalog_url)
    with engine.connect() as connection:
        for table in Base.metadata.sorted_tables:
            if "tenant" in table.columns and table.name not in ("ot_audit", "ot_futures", "ot_usage"):
                kept = [one for one in table.columns if one.name not in ("seen_at", "used_at")]
                query = select(*kept).where(table.columns.tenant == owner.tenant)
                rows[table.name] = sorted(map(tuple, connection.execute(query)), key=repr)
    engine.dispose()
    return loss, rows


# Would it be seen? Routes that are wrong, in a copy of the application.


@pytest.fixture
def copy(live: Live) -> FastAPI:
    return make_app(live.service)


def seen_in(app: FastAPI, asker: Estate, theirs: Estate, unknown: dict[str, str]) -> list[str]:
    """What the matrix finds in the routes that were added to an application."""
    added = [route for route in routes(app) if route not in TABLE]
    client = TestClient(app)
    return [one for case in cases(added) for one in findings(case, client, asker, theirs, unknown)]


def any_session(live: Live, session_id: str) -> ServiceSession | None:
    """A session, whoever asks."""
    with live.service.records._database.read() as session:
        row = session.get(SessionRow, session_id)
        return row and row.value()


def test_a_route_without_an_owner_check_is_seen(
    live: Live, copy: FastAPI, asker: Estate, theirs: Estate, unknown: dict[str, str]
) -> None:
    @copy.get("/api/v1/peek/{session_id}")
    async def peek(who: Who, session_id: str) -> dict[str, str]:
        if any_session(live, session_id) is None:
            raise NotFound(f"session_id: there is no {session_id}")
        return {"session_id": session_id}

    found = seen_in(copy, asker, theirs, unknown)
    assert any("status=200" in one and "accepted: (404, 403)" in one for one in found)


def test_a_route_that_tells_that_something_exists_is_seen(
    live: Live, copy: FastAPI, asker: Estate, theirs: Estate, unknown: dict[str, str]
) -> None:
    @copy.get("/api/v1/hint/{session_id}")
    async def hint(who: Who, session_id: str) -> None:
        row = any_session(live, session_id)
        raise NotFound("it is not yours" if row and row.tenant != who.tenant else "there is none")

    found = "".join(seen_in(copy, asker, theirs, unknown))
    assert "it is not yours" in found
    assert "for what never was" in found


def test_a_list_that_shows_all_tenants_things_is_seen(
    live: Live, copy: FastAPI, asker: Estate, theirs: Estate, unknown: dict[str, str]
) -> None:
    @copy.get("/api/v1/everything")
    async def everything(who: Who) -> list[str]:
        return [one.session_id for one in live.service.records.live_sessions()]

    assert f"shows {theirs.ids['session']}" in "".join(seen_in(copy, asker, theirs, unknown))


def test_a_route_that_cannot_be_asked_is_seen(copy: FastAPI) -> None:
    @copy.get("/api/v1/gadgets/{gadget_id}")
    async def gadget(who: Who, gadget_id: str) -> None: ...

    with pytest.raises(Unaskable, match="gadget_id"):
        cases(routes(copy))


def test_a_route_that_reads_the_request_by_itself_is_seen(copy: FastAPI) -> None:
    @copy.post("/api/v1/anything")
    async def anything(who: Who, request: Request) -> None: ...

    with pytest.raises(Unaskable, match="the whole request"):
        cases(routes(copy))
