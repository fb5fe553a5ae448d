"""Sessions end when their client says so or falls silent, and then nothing of them is left in memory."""

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from opentinker_core.policies.tables import utc_now
from opentinker_core.service.principal import Role
from opentinker_core.service.types import SessionStatus, Usage, UsageKind
from tests.service.live import Live, serving
from tests.service.raw import Raw


@pytest.fixture
def hasty(tmp_path: Path) -> Iterator[Live]:
    with serving(tmp_path, session_timeout_s=1.0) as live:
        yield live


def held(live: Live) -> tuple[int, int, int]:
    """Models in training, states in the engine's memory, futures."""
    engine = live.service.engine("tiny", "default")
    states = engine.shared.scheduler._executor._trainer._states
    return live.service.training.resident, len(states.resident()), len(live.service.futures)


def until(condition: object, seconds: float = 15) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_silent_session_expires_and_one_with_heartbeats_does_not(hasty: Live) -> None:
    raw = Raw(hasty.url, hasty.key())
    silent, alive = raw.session(), raw.session()
    model, other = raw.model(silent), raw.model(alive)
    raw.result(raw.forward_backward(model, 1).json()["request_id"])
    assert held(hasty)[:2] == (2, 2)

    def beat() -> bool:
        raw.ok("session_heartbeat", session_id=alive)
        return held(hasty)[:2] == (1, 1)

    until(beat)
    gone = raw.post("session_heartbeat", session_id=silent)
    assert gone.status_code == 410
    assert "expired" in gone.json()["detail"]
    assert raw.post("session_heartbeat", session_id="nobody").status_code == 410
    late = raw.result(raw.step(model, 2).json()["request_id"])
    assert "released when its session ended" in late["error"]
    assert "metrics" in raw.result(raw.step(other, 1).json()["request_id"])


def test_a_clock_that_is_set_forward_ends_no_session(hasty: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = Raw(hasty.url, hasty.key())
    session = raw.session()
    noted = hasty.service.records.session("default", session).seen_at
    monkeypatch.setattr("opentinker_core.service.sessions.utc_now", lambda: utc_now() + timedelta(days=1))

    def beat() -> bool:
        assert raw.post("session_heartbeat", session_id=session).status_code == 200
        return hasty.service.records.session("default", session).seen_at > noted + timedelta(hours=1)

    until(beat)  # it was swept since
    raw.ok("session_heartbeat", session_id=session)


def test_finish_releases_everything_though_requests_wait(live: Live) -> None:
    raw = Raw(live.url, live.key("ending"))
    session = raw.session()
    model = raw.model(session)
    path = raw.result(raw.ok("save_weights", model_id=model, seq_id=1, path="kept")["request_id"])["path"]
    for seq in range(3, 9):
        raw.step(model, seq)  # number 2 never comes
    assert live.service.quotas.running == 6
    finish = f"sessions/{session}/finish"
    assert raw.post(finish, reason={"type": "success"}).status_code == 204
    until(lambda: held(live) == (0, 0, 0))
    assert live.service.quotas.running == 0
    assert raw.post(finish, reason={"type": "success"}).status_code == 204
    body = {"model_seq_id": 9, "base_model": "tiny", "lora_config": {"rank": 2}}
    assert raw.post("create_model", session_id=session, **body).status_code == 410
    new = raw.ok("load_weights", session_id=raw.session(), model_seq_id=0, path=path, optimizer=True)
    assert raw.result(new["request_id"])["path"] == path


def test_sessions_are_listed_with_what_was_made_in_them(live: Live) -> None:
    raw = Raw(live.url, live.key("listing"))
    sessions = [raw.session() for _ in range(3)]
    model = raw.model(sessions[1])
    assert raw.http.get("/sessions", params={"limit": 2}).json() == {"sessions": sessions[:0:-1]}
    shown = raw.http.get(f"/sessions/{sessions[1]}").json()
    assert (shown["training_run_ids"], shown["sampler_ids"]) == ([model], [])
    assert raw.http.put(f"/sessions/{sessions[1]}/project", json={"project_id": "mine"}).status_code == 204
    runs = raw.http.get("/training_runs", params={"project_id": "mine"}).json()["training_runs"]
    assert [run["training_run_id"] for run in runs] == [model]


def test_a_server_that_stops_makes_a_last_checkpoint_where_it_makes_any(tmp_path: Path) -> None:
    with serving(tmp_path, auto_checkpoint_steps=2) as first:
        raw = Raw(first.url, key := first.key())
        model = raw.model()
        for seq in range(1, 4):
            raw.result(raw.step(model, seq).json()["request_id"])
    with serving(tmp_path) as second:
        raw = Raw(second.url, key)
        lost = raw.result(raw.step(model, 4).json()["request_id"])
        path = f"tinker://{model}/weights/auto-000003"
        assert path in lost["error"]
        assert second.service.checkpoints.resolve("default", path).version.step == 3


def test_a_server_ends_no_session_of_another_over_the_same_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENTINKER_CATALOG_URL", f"sqlite:///{tmp_path / 'shared.sqlite'}")
    with serving(tmp_path / "one") as one, serving(tmp_path / "other") as other:
        key = one.key()
        raw, away = Raw(one.url, key), Raw(other.url, key)
        model = raw.model(session := raw.session())
        finish = f"sessions/{session}/finish"
        refused = away.post(finish, reason={"type": "success"})
        assert refused.status_code == 410
        assert "another server" in refused.json()["detail"]
        assert "metrics" in raw.result(raw.step(model, 1).json()["request_id"])
        # What another server noted in the meantime does not matter to what is held here.
        one.service.records.end_session("default", session, SessionStatus.FINISHED)
        assert raw.post(finish, reason={"type": "success"}).status_code == 204
        assert held(one) == (0, 0, 0)
        assert away.post(finish, reason={"type": "success"}).status_code == 204


def test_a_reader_changes_no_session_in_which_somebody_trains(live: Live) -> None:
    member, reader = Raw(live.url, live.key("shared")), Raw(live.url, live.key("shared", Role.READER))
    model = member.model(session := member.session())
    refused = [
        reader.post(f"sessions/{session}/finish", reason={"type": "success"}),
        reader.post(
            "create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model="tiny"
        ),
    ]
    for answer in refused:
        assert answer.status_code == 403
        assert "'member' for it; the key has 'reader'" in answer.json()["detail"]
    stranger = Raw(live.url, live.key("strange", Role.READER))
    assert stranger.post(f"sessions/{session}/finish", reason={"type": "success"}).status_code == 404
    assert "metrics" in member.result(member.step(model, 1).json()["request_id"])
    own = reader.session()
    reader.ok("create_sampling_session", session_id=own, sampling_session_seq_id=0, base_model="tiny")
    assert reader.post(f"sessions/{own}/finish", reason={"type": "success"}).status_code == 204


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("tags", [""] * 65),
        ("tags", ["t" * 257]),
        ("user_metadata", {"a": "b" * 16_384}),
        ("display_name", "n" * 257),
    ],
    ids=["tags", "tag", "metadata", "name"],
)
def test_a_session_takes_little_room(live: Live, field: str, given: object) -> None:
    raw = Raw(live.url, live.key("large"))
    body = {"tags": ["t" * 256] * 64, "user_metadata": {"a": "b" * 16_000}, "sdk_version": "0.38.0"}
    raw.ok("create_session", **body)
    refused = raw.post("create_session", **{**body, field: given})
    assert refused.status_code == 400
    assert refused.json()["detail"].startswith(f"{field}: ")


def test_sessions_that_ended_and_left_nothing_are_forgotten(live: Live) -> None:
    raw = Raw(live.url, live.key("leaving"))
    running, empty, trained, used = (raw.session() for _ in range(4))
    raw.model(trained)
    raw.ok("create_sampling_session", session_id=empty, sampling_session_seq_id=0, base_model="tiny")
    usage = Usage("leaving", datetime(2026, 1, 1, tzinfo=UTC), UsageKind.SAMPLED, "tiny", used)
    live.service.records.add_usage({usage: 1})
    for session in (empty, trained, used):
        assert raw.post(f"sessions/{session}/finish", reason={"type": "success"}).status_code == 204
    records = live.service.records
    records.forget_sessions(utc_now() - timedelta(days=1))
    assert records.sessions("leaving", 10, 0)[1] == 4
    assert records.forget_sessions(utc_now() + timedelta(seconds=1)) >= 1
    assert {one.session_id for one in records.sessions("leaving", 10, 0)[0]} == {running, trained, used}
    assert raw.post(f"sessions/{empty}/finish", reason={"type": "success"}).status_code == 404
