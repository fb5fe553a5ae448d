"""The desk and its leases over a sampler that is not an engine's: called on threads, it gives all at once."""

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from opentinker_core.policies.types import PolicyVersion
from opentinker_core.runtime.engine import Engine
from opentinker_core.sampling.protocol import BASE, SampledSequence, SampleRequest, SamplingParams
from opentinker_core.service.sampling import COMPLETIONS_AT_ONCE, SampleTarget, SamplingDesk
from opentinker_core.snapshots.protocol import Snapshot, SnapshotError
from tests.tiny import TinyEngine

REQUEST = SampleRequest((21, 15, 21, 33), SamplingParams(5), BASE, (1, 2))


@dataclass
class WholeSampler:
    """The native sampler, one call at a time and without listeners: as remote samplers are."""

    engine: TinyEngine
    calls: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    missing: bool = False

    def refresh(self, version: str, snapshot_uri: str, digest: str) -> None:
        with self.lock:
            self.calls.append(f"refresh {version}")
            if self.missing:
                raise SnapshotError("it is not there")
            self.engine.sampler.refresh(version, snapshot_uri, digest)

    def release(self, version: str) -> None:
        with self.lock:
            self.calls.append(f"release {version}")
            self.engine.sampler.release(version)

    def sample(self, requests: Sequence[SampleRequest]) -> list[list[SampledSequence]]:
        with self.lock:
            self.calls.append(f"sample {requests[0].version}")
            return self.engine.sampler.sample([replace(request, listener=None) for request in requests])


@pytest.fixture
def sampler(tiny_home: Path, tmp_path: Path) -> WholeSampler:
    engine = TinyEngine.open(tiny_home, tmp_path)
    engine.random_policy("p")
    return WholeSampler(engine)


def desk_of(sampler: WholeSampler) -> SamplingDesk:
    engine = cast(Engine, SimpleNamespace(sampler=sampler))
    return SamplingDesk(lambda base_model, tenant: engine)


def target(sampler: WholeSampler, number: int = 1) -> SampleTarget:
    directory = sampler.engine.scratch / f"snapshot-{number}"
    if not directory.exists():
        sampler.engine.trainer.publish_snapshot("p", directory)
    details: dict[str, Any] = {"kind": "sampler", "uri": str(directory), "digest": f"d{number}"}
    snapshot = cast(Snapshot, SimpleNamespace(**details))
    now = datetime.now(UTC)
    version = PolicyVersion("id", "p", number, snapshot, None, None, None, 0, "rl", {}, now)
    return SampleTarget("tiny", version)


def test_samples_are_the_samplers_and_versions_are_refreshed_once(sampler: WholeSampler) -> None:
    desk = desk_of(sampler)

    async def ask() -> list[list[list[SampledSequence]]]:
        return await asyncio.gather(*(desk.sample("a", target(sampler), [REQUEST]) for _ in range(4)))

    answers = asyncio.run(ask())
    expected = sampler.engine.sampler.sample([replace(REQUEST, version="id@1")])[0]
    for answer in answers:
        assert [one.tokens.tolist() for one in answer[0]] == [one.tokens.tolist() for one in expected]
    assert sampler.calls == ["refresh id@1", *["sample id@1"] * 4]


def test_a_stream_of_a_sampler_that_tells_nothing_comes_at_the_end(sampler: WholeSampler) -> None:
    desk = desk_of(sampler)

    async def ask() -> list[Any]:
        return [token async for token in desk.stream("a", SampleTarget("tiny"), REQUEST)]

    sequences = sampler.engine.sampler.sample([REQUEST])[0]
    assert asyncio.run(ask()) == [*sequences[0].drawn(0), *sequences[1].drawn(1)]


def test_many_completions_are_several_operations_with_the_same_tokens(sampler: WholeSampler) -> None:
    many = replace(REQUEST, seeds=tuple(range(2 * COMPLETIONS_AT_ONCE + 1)), prompt_logprobs=True)
    (answer,) = asyncio.run(desk_of(sampler).sample("a", SampleTarget("tiny"), [many]))
    assert sampler.calls == ["sample base"] * 3
    expected = sampler.engine.sampler.sample([many])[0]
    assert [one.tokens.tolist() for one in answer] == [one.tokens.tolist() for one in expected]
    assert answer[0].prompt_logprobs is not None


def test_a_version_that_cannot_be_read_fails_all_who_wait_and_is_tried_again(sampler: WholeSampler) -> None:
    desk, wanted = desk_of(sampler), target(sampler)
    sampler.missing = True

    async def ask() -> list[Any]:
        asked = [desk.sample("a", wanted, [REQUEST]) for _ in range(3)]
        failed = await asyncio.gather(*asked, return_exceptions=True)
        sampler.missing = False
        return [*failed, await desk.sample("a", wanted, [REQUEST])]

    *failed, answer = asyncio.run(ask())
    assert [type(one) for one in failed] == [SnapshotError] * 3
    assert len(answer[0]) == 2
    assert sampler.calls.count("refresh id@1") == 2
    assert desk.leases.users == {"id@1": 0}


def test_versions_in_use_are_never_released(sampler: WholeSampler) -> None:
    desk = desk_of(sampler)
    desk.leases._idle_versions = 0
    versions = [target(sampler, number) for number in (1, 2)]

    async def ask() -> None:
        await asyncio.gather(*(desk.sample("a", one, [REQUEST] * 3) for one in versions * 2))
        await desk.leases.close()

    asyncio.run(ask())
    assert desk.leases.users == {}
    for number in (1, 2):
        own = [call.split()[0] for call in sampler.calls if call.endswith(f"@{number}")]
        assert own == ["refresh", *["sample"] * 6, "release"]


def test_who_is_cancelled_holds_nothing(sampler: WholeSampler) -> None:
    desk = desk_of(sampler)
    desk.leases._idle_versions = 0

    async def ask() -> None:
        with sampler.lock:  # nothing gets through
            task = asyncio.ensure_future(desk.sample("a", target(sampler), [REQUEST]))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        while desk.leases.users:
            await asyncio.sleep(0.01)
            desk.leases._release_idle()
        await desk.leases.close()

    asyncio.run(ask())
    assert sampler.calls == ["refresh id@1", "release id@1"]
