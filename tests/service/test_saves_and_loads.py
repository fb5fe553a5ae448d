"""Saves and loads of one model that are asked for without waiting, that fail, and that are too many."""

import hashlib
import io
import tarfile
from collections.abc import Iterator

import pytest

from opentinker_core.errors import OpenTinkerError
from opentinker_core.service.records import Records
from tests.service.live import Live, serving
from tests.service.raw import Raw

_QUOTA = 0.0002  # GB: of a tiny model's checkpoints two or three


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    quotas = {"tenants": {"small": {"storage_gb": _QUOTA}}}
    with serving(tmp_path_factory.mktemp("home"), quotas=quotas) as live:
        yield live


@pytest.fixture(scope="module")
def raw(live: Live) -> Raw:
    return Raw(live.url, live.key())


def weights(raw: Raw, model: str, name: str) -> dict[str, str]:
    """The digest of each file of a checkpoint."""
    answer = raw.http.get(f"/training_runs/{model}/checkpoints/weights/{name}/archive").raise_for_status()
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as archive:
        files = [(member.name, archive.extractfile(member)) for member in archive if member.isfile()]
        return {name: hashlib.sha256(file.read()).hexdigest() for name, file in files if file is not None}


def save(raw: Raw, model: str, seq: int, name: str) -> str:
    return str(raw.ok("save_weights", model_id=model, seq_id=seq, path=name)["request_id"])


def load(raw: Raw, model: str, seq: int, name: str) -> str:
    body = {"path": f"tinker://{model}/weights/{name}", "optimizer": True}
    return str(raw.ok("load_weights", model_id=model, seq_id=seq, **body)["request_id"])


def trained(raw: Raw, model: str, seq: int, tokens: tuple[int, ...] = (3, 4, 5, 6)) -> list[str]:
    """Ask for a step on some tokens."""
    answers = (raw.forward_backward(model, seq, tokens), raw.step(model, seq + 1))
    return [str(answer.json()["request_id"]) for answer in answers]


def test_a_save_can_be_loaded_by_the_next_request(raw: Raw) -> None:
    model = raw.model()
    asked = [*trained(raw, model, 1), save(raw, model, 3, "a"), load(raw, model, 4, "a")]
    path = f"tinker://{model}/weights/a"
    assert [raw.result(one).get("path") for one in asked[2:]] == [path, path]


def test_what_is_saved_after_a_load_is_what_was_trained_after_it(raw: Raw) -> None:
    for _ in range(4):
        model, alone = raw.model(), raw.model()
        for one in (model, alone):
            raw.result(save(raw, one, 1, "base"))
        other = (9, 10, 11, 12, 13)
        first = raw.forward_backward  # sent last, so that everything waits for it and then follows at once
        asked = [str(raw.step(model, 3).json()["request_id"]), save(raw, model, 4, "b")]
        asked += [load(raw, model, 5, "base"), *trained(raw, model, 6, other), save(raw, model, 8, "c")]
        asked += [str(first(model, 2).json()["request_id"])]
        assert not [answer for answer in map(raw.result, asked) if "error" in answer]
        for one in (*trained(raw, alone, 2, other), save(raw, alone, 4, "c")):
            raw.result(one)
        b, c, expected = (weights(raw, *one) for one in ((model, "b"), (model, "c"), (alone, "c")))
        files = [name for name in expected if name.endswith(".safetensors")]
        assert files
        assert {name: c[name] for name in files} == {name: expected[name] for name in files}
        assert {name: b[name] for name in files} != {name: c[name] for name in files}


def test_a_load_that_fails_leaves_the_state_and_its_versions_alone(
    raw: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = raw.model()
    for one in (save(raw, model, 1, "base"), *trained(raw, model, 2), save(raw, model, 4, "trained")):
        raw.result(one)

    def full(*_: object) -> None:
        raise OpenTinkerError("database or disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(Records, "set_run", full)
        assert "error" in raw.result(load(raw, model, 5, "base"))
    raw.result(save(raw, model, 6, "again"))
    assert weights(raw, model, "again") == weights(raw, model, "trained")
    assert weights(raw, model, "again") != weights(raw, model, "base")
    raw.result(load(raw, model, 7, "base"))
    raw.result(save(raw, model, 8, "back"))
    names = [name for name in weights(raw, model, "base") if name.endswith(".safetensors")]
    back, base = weights(raw, model, "back"), weights(raw, model, "base")
    assert [back[name] for name in names] == [base[name] for name in names]


def test_saves_that_wait_for_their_turn_are_counted(live: Live) -> None:
    raw = Raw(live.url, live.key("small"))
    model = raw.model()
    asked = []
    for seq in range(2, 30, 2):  # all wait for number 1
        asked += [str(raw.step(model, seq).json()["request_id"]), save(raw, model, seq + 1, f"at-{seq}")]
    raw.forward_backward(model, 1)
    answers = [raw.result(one) for one in asked if one.rpartition(":")[2] in map(str, range(3, 31, 2))]
    done = [answer for answer in answers if "path" in answer]
    refused = [answer["error"] for answer in answers if "error" in answer]
    assert 1 <= len(done) < 8
    assert all("storage_gb" in error for error in refused)
    stored = live.service.records.stored_bytes("small")
    assert _QUOTA * 1e9 <= stored < 2 * _QUOTA * 1e9


@pytest.mark.parametrize("kind", ["snapshot", "inflight"])
def test_weights_for_a_sampler_that_is_there_already_are_not_kept(live: Live, raw: Raw, kind: str) -> None:
    model = raw.model()
    session = model.partition(":")[0]
    catalog = live.service.catalog("default")
    for number, seq in enumerate((1, 4, 7)):
        for one in trained(raw, model, seq):
            raw.result(one)
        body = {"seq_id": seq + 2, "sampling_session_seq_id": min(number, 1), "kind": kind}
        raw.result(raw.ok("save_weights_for_sampler", model_id=model, **body)["request_id"])
    for one in trained(raw, model, 10):
        raw.result(one)
    raw.result(save(raw, model, 12, "last"))
    raw.http.post(f"/sessions/{session}/finish", json={"reason": {"type": "success"}}).raise_for_status()
    (policy,) = (one for one in catalog.policies() if session[:8] in one.name)
    sizes = [version.sampler.size for version in catalog.versions(policy.name)]
    assert len(sizes) == 4
    assert sum(size > 0 for size in sizes) == 1, "of the last, which an alias refers to"
