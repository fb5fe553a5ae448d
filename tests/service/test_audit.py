"""The audit log: who changed what, for the tenant's administrators."""

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker
from sqlalchemy import update

from opentinker_core.errors import OpenTinkerError
from opentinker_core.policies.tables import utc_now
from opentinker_core.service.audit import AuditLog, Call
from opentinker_core.service.key_tables import AuditRow
from opentinker_core.service.principal import Principal, Role
from tests.service.live import Live

WHO = Principal("acme", "member", "k1")


def _client(live: Live, tenant: str, role: Role = Role.ADMIN) -> httpx.Client:
    return httpx.Client(base_url=live.url, headers={"X-API-Key": live.key(tenant, role)}, timeout=30)


def _entries(client: httpx.Client, number: int) -> list[dict[str, Any]]:
    deadline = time.monotonic() + 10
    while len(found := client.get("/api/v1/admin/audit").json()["entries"]) < number:
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    return found


def test_what_is_changed_is_in_the_log_with_key_and_outcome(live: Live) -> None:
    with _client(live, "audited") as client:
        made = client.post("/api/v1/admin/keys", json={"name": "x"}, headers={"X-Request-Id": "r1"}).json()
        client.delete(f"/api/v1/admin/keys/{made['key_id']}", headers={"X-Request-Id": "r2"})
        client.delete("/api/v1/admin/keys/ffffffffffff", headers={"X-Request-Id": "r3"})
        client.get("/api/v1/admin/keys")
        third, second, first = _entries(client, 3)
    assert [e["request_id"] for e in (first, second, third)] == ["r1", "r2", "r3"]
    assert [e["status"] for e in (first, second, third)] == [201, 200, 404]
    assert first["action"] == "POST /api/v1/admin/keys"
    assert first["subject"] == {"name": "x"}
    assert second["action"] == "DELETE /api/v1/admin/keys/{key_id}"
    assert second["subject"] == {"key_id": made["key_id"]}
    assert len({e["key_id"] for e in (first, second, third)}) == 1
    assert made["key"] not in str((first, second, third))


def test_what_a_role_was_refused_is_in_the_log(live: Live) -> None:
    with _client(live, "refused", Role.READER) as reader, _client(live, "refused") as boss:
        assert reader.post("/api/v1/admin/keys", json={"name": "x"}).status_code == 403
        assert _entries(boss, 1)[0]["status"] == 403


def test_training_is_in_the_log_with_model_and_number(live: Live) -> None:
    training = live.client("trainer").create_lora_training_client(base_model="tiny", rank=4).result()
    datum = tinker.Datum(
        model_input=tinker.ModelInput.from_ints([1, 2, 3]),
        loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]},
    )
    training.forward_backward([datum], "cross_entropy").result()
    training.optim_step(tinker.AdamParams()).result()
    with _client(live, "trainer") as client:
        found = {entry["action"]: entry["subject"] for entry in _entries(client, 4)}
    assert found["POST /api/v1/create_model"]["base_model"] == "tiny"
    model_id = training.model_id
    assert found["POST /api/v1/forward_backward"] == {"model_id": model_id, "seq_id": 1}
    assert found["POST /api/v1/optim_step"] == {"model_id": model_id, "seq_id": 2}
    assert "POST /api/v1/retrieve_future" not in found


def test_a_tenant_reads_only_its_own_log(live: Live) -> None:
    with _client(live, "mine") as mine, _client(live, "theirs") as theirs:
        theirs.post("/api/v1/admin/keys", json={"name": "x"})
        _entries(theirs, 1)
        assert mine.get("/api/v1/admin/audit").json() == {"entries": [], "next": None}


def test_the_log_is_read_page_by_page(live: Live) -> None:
    with _client(live, "pages") as client:
        for number in range(5):
            client.post("/api/v1/admin/keys", json={"name": f"n{number}"})
        _entries(client, 5)
        seen, before = [], None
        while True:
            query = {"limit": 2} | ({"before": before} if before else {})
            page = client.get("/api/v1/admin/audit", params=query).json()
            seen += [entry["subject"]["name"] for entry in page["entries"]]
            if (before := page["next"]) is None:
                break
    assert seen == ["n4", "n3", "n2", "n1", "n0"]


@pytest.mark.parametrize(
    ("body", "subject"),
    [
        (b'{"model_id": "m", "seq_id": 3, "data": [1]}', {"model_id": "m", "seq_id": 3}),
        (b'{"model_id": ["m"], "seq_id": true, "path": null}', {"seq_id": True}),
        (b'{"path": "' + b"x" * 1000 + b'"}', {"path": "x" * 200}),
        (b'{"path": "\\ud800"}', {"path": "?"}),
        (b'{"seq_id": 1' + b"0" * 400 + b"}", {}),
        (b"{" * 100_000, {}),
        (b"[1]", {}),
        (b"\xff", {}),
        (b"", {}),
    ],
)
def test_what_a_call_is_about_is_read_from_any_body(body: bytes, subject: dict[str, Any]) -> None:
    assert Call("POST", "/x", body=body).named({}) == subject


def test_calls_wait_for_a_database_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = AuditLog(f"sqlite:///{tmp_path / 'catalog.db'}")
    for number in range(3):
        log.add(WHO, f"r{number}", "/x", 200, Call("POST", "/x"))
    with monkeypatch.context() as patched:

        def busy(_: object) -> None:
            raise OpenTinkerError("database is locked")

        patched.setattr(log, "_insert", busy)
        log._write()
    assert log.entries("acme") == []
    log._write()
    log._write()
    assert [entry.request_id for entry in log.entries("acme")] == ["r2", "r1", "r0"]


@pytest.mark.parametrize(
    ("error", "kept"), [(OpenTinkerError("disk full"), 1), (OverflowError("too far"), 0)], ids=["full", "odd"]
)
def test_whatever_fails_the_log_goes_on_and_says_so_seldom(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    kept: int,
) -> None:
    log = AuditLog(f"sqlite:///{tmp_path / 'catalog.db'}")

    def fails(*_: object) -> None:
        raise error

    log.add(WHO, "r0", "/x", 200, Call("POST", "/x"))
    with monkeypatch.context() as patched:
        patched.setattr(log, "_insert", fails)
        patched.setattr(log._database, "write", fails)
        for _ in range(3):
            log._write()
        said = len(caplog.records)
        log._prune()
    assert said == 1
    log.add(WHO, "r1", "/x", 200, Call("POST", "/x"))
    log._write()
    assert [entry.request_id for entry in log.entries("acme")] == ["r1", "r0"][: 1 + kept]


def test_old_calls_are_forgotten(tmp_path: Path) -> None:
    log = AuditLog(f"sqlite:///{tmp_path / 'catalog.db'}", keep_days=30)
    for number in range(2):
        log.add(WHO, f"r{number}", "/x", 200, Call("POST", "/x"))
    log._write()
    with log._database.write("") as session:
        old = utc_now() - timedelta(days=31)
        session.execute(update(AuditRow).where(AuditRow.request_id == "r0").values(at=old))
    log._prune()
    assert [entry.request_id for entry in log.entries("acme")] == ["r1"]
