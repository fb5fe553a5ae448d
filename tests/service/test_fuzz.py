"""Wrong requests of all kinds against a live server: no defect, no hang, nothing left, nobody else's loss.

A few hundred in the suite; OPENTINKER_FUZZ_CASES=10000 for more of them (`make fuzz`), OPENTINKER_FUZZ_SEED
for others.
"""

import os
import random
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx
import pytest
import requests
import schemathesis
from fastapi.routing import APIRoute
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis.generation import GenerationMode

from opentinker_core.service.app import ROUTERS
from opentinker_core.service.tinker import futures
from tests.service.estates import Estate, estate
from tests.service.fuzzing import mutated_json, mutated_protobuf
from tests.service.isolation import cases
from tests.service.live import Live, serving
from tests.service.raw import PROTOBUF, Raw

CASES = int(os.environ.get("OPENTINKER_FUZZ_CASES", "400"))
SEED = int(os.environ.get("OPENTINKER_FUZZ_SEED", "5"))
PATIENCE_S = 30.0
RENEWED = 250
"""Cases after which the tenant that sends them gets new things, for those it has are spoilt."""
NAMES = ("..", "../..", "\0", "a" * 3000, "\r\nX-Y: z", "é", "%2e%2e", "a:b:c", " ", "x/../../y")
MATRIX = cases([route for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)])


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(futures, "POLL_SECONDS", 0.05)
        quotas = {"tenants": {"fuzz": {"policies": 100, "storage_gb": 2.0}}}
        home = tmp_path_factory.mktemp("home")
        with serving(home, quotas=quotas, session_timeout_s=3600) as live:
            yield live


class Fuzzer:
    """A tenant that sends what is wrong, and looks at what it gets."""

    def __init__(self, live: Live) -> None:
        self.live, self.sent, self.statuses = live, 0, dict[int, int]()
        self.client = httpx.Client(base_url=live.url, timeout=PATIENCE_S)
        self.session = requests.Session()
        self._estate: Estate | None = None

    @property
    def estate(self) -> Estate:
        if self._estate is None or self.sent % RENEWED == 0:
            self.end()
            self._estate = estate(self.live, "fuzz", f"policy-{self.sent}")
        return self._estate

    @property
    def next_number(self) -> int:
        """The number that the model's next request has."""
        trained = self.live.service.training.find("fuzz", self.estate.ids["model"])
        return trained.sequencer.next if trained else 1

    def look(self, what: str, status: int, answer: Any) -> None:
        """Look at an answer."""
        self.sent += 1
        self.statuses[status] = self.statuses.get(status, 0) + 1
        assert status < 500, f"{what}: {status} {answer.text:.1000}"
        assert len(answer.headers["x-request-id"]) <= 64
        if status >= 400:
            assert answer.json()["detail"], what

    def send(self, method: str, url: str, **content: Any) -> None:
        headers = {"X-API-Key": self.estate.key, "Content-Type": "application/json"} | content.pop(
            "headers", {}
        )
        request = self.client.build_request(method, url, headers=headers, **content)
        answer = self.client.send(request)
        self.look(f"{request.method} {request.url} {request.content[:500]!r}", answer.status_code, answer)

    def end(self) -> None:
        """End all sessions."""
        headers = {"X-API-Key": self.live.key("fuzz")}
        sessions, _ = self.live.service.records.sessions("fuzz", 100_000, 0)
        for one in sessions:
            if one.status == "live":
                url = f"/api/v1/sessions/{one.session_id}/finish"
                answer = self.client.post(url, json={"reason": {"type": "success"}}, headers=headers)
                assert answer.status_code == 204, answer.text


class Witness:
    """A tenant that does the same again and again."""

    def __init__(self, live: Live) -> None:
        self.raw = Raw(live.url, live.key("witness"))
        self.model, self.seq = self.raw.model(), 0

    def trains(self) -> list[dict[str, Any]]:
        """The metrics of a new model's first steps."""
        model, found = self.raw.model(), []
        for seq in (1, 3, 5):
            found.append(self.raw.result(self.raw.forward_backward(model, seq).json()["request_id"]))
            found.append(self.raw.result(self.raw.step(model, seq + 1).json()["request_id"]))
        return found

    def samples(self) -> Any:
        """Completions of the base model, with their logprobs."""
        body = {"model": "tiny", "prompt": [21, 15], "n": 3, "seed": 7, "max_tokens": 6, "logprobs": 3}
        return self.raw.http.post(
            f"{self.raw.http.base_url.copy_with(path='/v1/completions')}", json=body
        ).json()["choices"]

    def loss(self) -> float:
        """Of the model that it has all the time."""
        self.seq += 1
        promise = self.raw.forward_backward(self.model, self.seq).json()["request_id"]
        return float(self.raw.result(promise)["loss:sum"])


@pytest.fixture(scope="module")
def witness(live: Live) -> Witness:
    return Witness(live)


@pytest.fixture(scope="module", autouse=True)
def before(witness: Witness) -> tuple[Any, Any, float]:
    return witness.trains(), witness.samples(), witness.loss()


@pytest.fixture(scope="module")
def fuzzer(live: Live) -> Fuzzer:
    return Fuzzer(live)


def test_json_that_is_wrong(fuzzer: Fuzzer, witness: Witness, before: tuple[Any, Any, float]) -> None:
    chance = random.Random(SEED)
    for turn in range(CASES // 2):
        case = chance.choice(MATRIX)
        own = fuzzer.estate
        ask = case.ask(own, own.ids.get(case.kind, ""), fuzzer.next_number)
        url = ask.url
        if chance.random() < 0.1:
            url = case.path.replace(":path}", "}").format_map(_Names(chance))
        params = (
            {**ask.params}
            if chance.random() < 0.7
            else {"limit": chance.choice(_LIMITS), "offset": chance.choice(_LIMITS)}
        )
        content = None if ask.body is None else mutated_json(chance, ask.body)
        fuzzer.send(case.method, url, params=params, content=content)
        if turn % 100 == 0:
            assert witness.loss() == pytest.approx(before[2], rel=1e-5)


_LIMITS = ("", "-1", "0", "1", "1001", "9" * 30, "nan", "1e3", "\0", "5", "2147483648")


class _Names(dict[str, str]):
    """For each part of a path a name that is none."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self._chance = chance

    def __missing__(self, key: str) -> str:
        return quote(self._chance.choice(NAMES), safe="")


def test_protobuf_that_is_wrong(fuzzer: Fuzzer, witness: Witness, before: tuple[Any, Any, float]) -> None:
    chance = random.Random(SEED)
    for turn in range(CASES // 4):
        body = mutated_protobuf(chance, fuzzer.estate.ids["model"], fuzzer.next_number)
        fuzzer.send("POST", "/api/v1/forward_backward", content=body, headers=PROTOBUF)
        if turn % 100 == 0:
            assert witness.loss() == pytest.approx(before[2], rel=1e-5)


def test_what_the_schema_allows_and_does_not(live: Live, fuzzer: Fuzzer) -> None:
    schema = schemathesis.openapi.from_dict(httpx.get(f"{live.url}/openapi.json").json())
    operations = [result.ok() for result in schema.get_all_operations()]
    assert {one.path for one in operations} >= {case.path.replace(":path", "") for case in MATRIX}
    modes = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
    strategies = [one.as_strategy(generation_mode=mode) for one in operations for mode in modes]

    @seed(SEED)
    @settings(
        max_examples=CASES // 4,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.one_of(strategies))
    def ask(case: schemathesis.Case) -> None:
        headers = {"X-API-Key": fuzzer.estate.key}
        answer = case.call(live.url, fuzzer.session, headers=headers, timeout=PATIENCE_S)
        fuzzer.look(f"{case.method} {case.path} {case.body!r:.500} {case.query}", answer.status_code, answer)

    ask()


def test_nothing_is_left_of_it(live: Live, fuzzer: Fuzzer) -> None:
    fuzzer.end()
    assert fuzzer.sent >= CASES * 0.9
    assert fuzzer.statuses[200] > CASES // 20, "not all is refused before it gets anywhere"
    deadline = time.monotonic() + 2 * PATIENCE_S
    while live.service.futures.pending or live.service.quotas.running:
        assert time.monotonic() < deadline, f"{live.service.futures.pending} futures are not done"
        time.sleep(0.05)
    assert live.service.training.resident == 2, "the witness has two"


def test_nobody_else_noticed(witness: Witness, before: tuple[Any, Any, float]) -> None:
    assert (witness.trains(), witness.samples(), witness.loss()) == before
