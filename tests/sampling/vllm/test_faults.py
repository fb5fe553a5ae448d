"""What the client does when servers fail, forget, or are not what they should be."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import numpy as np
import pytest
from safetensors.torch import load_file

from opentinker_core.config.schema import VLLMConfig
from opentinker_core.errors import OpenTinkerError, UsageError
from opentinker_core.models.source import ModelSource, resolve
from opentinker_core.sampling.protocol import BASE, PromptQuestion, SampleRequest, SamplingParams
from opentinker_core.sampling.vllm.command import served_name
from opentinker_core.sampling.vllm.opening import open_sampler
from opentinker_core.sampling.vllm.sampler import VLLMSampler
from opentinker_core.snapshots.protocol import SnapshotError
from tests.sampling.vllm.fake import FakeVLLM, fakes
from tests.tiny import TinyEngine

PROMPT = tuple(range(1, 21))


class Open(Protocol):
    def __call__(self, *servers: FakeVLLM, **settings: object) -> VLLMSampler: ...


@pytest.fixture(scope="module")
def engine(tiny_home: Path, tmp_path_factory: pytest.TempPathFactory) -> TinyEngine:
    engine = TinyEngine.open(tiny_home, tmp_path_factory.mktemp("scratch"))
    engine.random_policy("p")
    return engine


@pytest.fixture(scope="module")
def snapshot(engine: TinyEngine) -> str:
    directory = engine.scratch / "snapshot"
    engine.trainer.publish_snapshot("p", directory)
    return str(directory)


@pytest.fixture(scope="module")
def source(tiny_home: Path) -> ModelSource:
    return resolve("tiny", tiny_home)


def fetch(uri: str, digest: str) -> Path:
    if not Path(uri).is_dir():
        raise SnapshotError(f"{uri}: there is no such snapshot")
    return Path(uri)


@pytest.fixture
def opened(engine: TinyEngine, source: ModelSource, tmp_path: Path) -> Iterator["Open"]:
    """Opens samplers over given servers."""
    with ExitStack() as stack:

        def opened(*servers: FakeVLLM, **settings: object) -> VLLMSampler:
            urls = tuple(server.url for server in servers)
            config = VLLMConfig.model_validate({"urls": urls, "startup_timeout_s": 5.0, **settings})
            sampler = open_sampler(
                source,
                config,
                tmp_path,
                device="cpu",
                dtype="float32",
                layout=engine.pool.model,
                max_context=64,
                fetch=fetch,
                read_adapter=engine.trainer.read_adapter,
            )
            stack.callback(sampler.close)
            return sampler

        yield opened


def request(version: str = BASE, seeds: tuple[int, ...] = (1,), **params: object) -> SampleRequest:
    settings = SamplingParams(**{"max_tokens": 4, **params})  # type: ignore[arg-type]
    return SampleRequest(PROMPT, settings, version, seeds)


def test_a_server_of_another_model_is_refused(opened: Open, source: ModelSource) -> None:
    name = f"{source.name}@0123456789abcdef"
    with fakes(name) as (other,), pytest.raises(UsageError, match=f"serves {name}.*accepted"):
        opened(other)


def test_a_server_with_logprobs_of_another_distribution_is_refused(opened: Open, source: ModelSource) -> None:
    with fakes(served_name(source)) as (raw,):
        raw.certain_logprob = -0.3
        with pytest.raises(UsageError, match="processed_logprobs"):
            opened(raw)


@pytest.mark.parametrize("fault", ["failures", "drops"])
def test_failures_are_asked_again_elsewhere(opened: Open, source: ModelSource, fault: str) -> None:
    name = served_name(source)
    with fakes(name, name) as (first, second):
        sampler = opened(first, second)
        expected = sampler.sample([request(seeds=tuple(range(8)))])[0]
        setattr(first, fault, 1)
        again = sampler.sample([request(seeds=tuple(range(8)))])[0]
        assert [s.tokens.tolist() for s in again] == [s.tokens.tolist() for s in expected]
        assert getattr(first, fault) == 0


def test_a_request_that_always_fails_is_given_up(opened: Open, source: ModelSource) -> None:
    with fakes(served_name(source)) as (server,):
        sampler = opened(server)
        server.failures = 1000
        with pytest.raises(OpenTinkerError, match="a planted failure"):
            sampler.sample([request()])
        assert server.failures == 997
        server.failures = 0
        assert len(sampler.sample([request()])[0][0].tokens) == 4


def test_a_server_that_is_gone_is_waited_for_and_then_told(opened: Open, source: ModelSource) -> None:
    with fakes(served_name(source)) as (server,):
        sampler = opened(server, startup_timeout_s=1.0)
        server.close()
        with pytest.raises(OpenTinkerError, match=f"no vLLM server works: {server.url} cannot be reached"):
            sampler.sample([request()])


def test_a_server_that_was_started_anew_gets_the_adapters_again(
    opened: Open, source: ModelSource, snapshot: str
) -> None:
    with fakes(served_name(source)) as (server,):
        sampler = opened(server)
        sampler.refresh("p@1", snapshot, "a" * 64)
        server.adapters.clear()
        assert len(sampler.sample([request("p@1"), request(BASE)])) == 2
        assert {body["model"].split("-")[0] for body in server.bodies} >= {"p", "zero"}


def test_one_that_came_back_with_another_model_is_refused(opened: Open, source: ModelSource) -> None:
    with fakes(served_name(source)) as (server,):
        sampler = opened(server)
        server.name = "another"
        server.adapters.clear()
        with pytest.raises(UsageError, match="serves another"):
            sampler.sample([request()])


def test_base_rows_go_with_an_adapter_that_changes_nothing(opened: Open, source: ModelSource) -> None:
    with fakes(served_name(source)) as (server,):
        opened(server).sample([request(BASE)])
        directory = Path(server.adapters[server.bodies[-1]["model"]])
        assert all(not tensor.any() for tensor in load_file(directory / "adapter_model.safetensors").values())


def test_a_released_version_is_unloaded_when_its_last_request_has_ended(
    opened: Open, source: ModelSource, snapshot: str
) -> None:
    with fakes(served_name(source)) as (server,):
        sampler = opened(server)
        sampler.refresh("p@1", snapshot, "a" * 64)
        server.gate.clear()
        answers: list[object] = []
        asking = threading.Thread(
            target=lambda: answers.extend(sampler.sample([request("p@1", tuple(range(16)))])[0])
        )
        asking.start()
        for _ in range(16):
            assert server.waiting.acquire(timeout=10)
        sampler.release("p@1")
        sampler.release("p@1")
        assert server.unloaded == []
        with pytest.raises(UsageError, match="'p@1' is not served"):
            sampler.sample([request("p@1")])
        server.gate.set()
        asking.join(10)
        assert len(answers) == 16
        assert [name.split("-")[:2] for name in server.unloaded] == [["p", "1"]]


def test_names_on_the_server_are_never_used_again(opened: Open, source: ModelSource, snapshot: str) -> None:
    with fakes(served_name(source)) as (server,):
        sampler, other = opened(server), opened(server)
        names: list[str] = []
        for one, version, digest in ((sampler, "p@1", "a"), (sampler, "p@1", "a"), (other, "p@1", "a")):
            before = set(server.adapters)
            one.refresh(version, snapshot, digest * 64)
            names += set(server.adapters) - before
            one.release(version)
        assert len(set(names)) == 3
        assert all(name.startswith(f"p-1-{'a' * 16}-") for name in names)


def test_a_version_cannot_change_its_digest(opened: Open, source: ModelSource, snapshot: str) -> None:
    with fakes(served_name(source)) as (server,):
        sampler = opened(server)
        sampler.refresh("p@1", snapshot, "a" * 64)
        sampler.refresh("p@1", snapshot, "a" * 64)
        with pytest.raises(UsageError, match="'p@1' is served with another digest"):
            sampler.refresh("p@1", snapshot, "b" * 64)
        assert sum(name.startswith("p-1") for name in server.adapters) == 1


def test_a_missing_snapshot_leaves_the_old_version_serving(
    opened: Open, source: ModelSource, snapshot: str, tmp_path: Path
) -> None:
    with fakes(served_name(source)) as (server,):
        sampler = opened(server)
        sampler.refresh("p@1", snapshot, "a" * 64)
        with pytest.raises(SnapshotError):
            sampler.refresh("p@2", str(tmp_path / "missing"), "b" * 64)
        assert sampler.sample([request("p@1")])
        with pytest.raises(UsageError, match=r"'p@2' is not served; accepted: base, p@1"):
            sampler.sample([request("p@2")])


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (SampleRequest((), SamplingParams(4), BASE, (1,)), "prompt_tokens: empty"),
        (SampleRequest(PROMPT, SamplingParams(45), BASE, (1,)), "max_tokens: 45.*at most 44"),
        (SampleRequest(PROMPT * 4, SamplingParams(1), BASE, (1,)), "prompt: 80 tokens"),
        (SampleRequest(PROMPT, SamplingParams(4), BASE, (1,), prompt_logprobs=True), "prompt_logprobs"),
        (
            SampleRequest(PROMPT, SamplingParams(4), BASE, (1,), about_prompt=PromptQuestion(1)),
            "about_prompt",
        ),
        (SampleRequest(PROMPT, SamplingParams(4, top_p=0.9), BASE, (1,), top_logprobs=2), "top_logprobs"),
        (SampleRequest(PROMPT, SamplingParams(4, top_k=9), BASE, (1,), scaled_logprobs=True), "scaled_lo"),
        (SampleRequest(PROMPT, SamplingParams(4, temperature=0.001), BASE, (1,)), "temperature: 0.001"),
        (SampleRequest(PROMPT, SamplingParams(4), "p@9", (1,)), "'p@9' is not served"),
    ],
)
def test_what_vllm_would_do_wrong_is_refused(
    opened: Open, source: ModelSource, asked: SampleRequest, message: str
) -> None:
    with fakes(served_name(source)) as (server,):
        sampler = opened(server)
        server.bodies.clear()
        with pytest.raises(UsageError, match=message):
            sampler.sample([request(), asked])
        assert server.bodies == []


def test_each_completion_has_the_seed_of_its_own(opened: Open, source: ModelSource) -> None:
    with fakes(served_name(source)) as (server,):
        sampler = opened(server)
        server.bodies.clear()
        sampler.sample([request(seeds=(1, 2, 1 << 32, 2**63 - 1))])
        seeds = [body["seed"] for body in server.bodies]
        assert len({seed % (1 << 32) for seed in seeds}) == 4
        assert np.all(np.array(seeds) >= 0)


def test_what_killed_clients_left_behind_is_removed(
    opened: Open, source: ModelSource, tmp_path: Path
) -> None:
    with fakes(served_name(source)) as (server,):
        left = tmp_path / "vllm" / "adapters" / "client-gone"
        left.mkdir(parents=True)
        first = opened(server)
        mine = set(left.parent.glob("client-*"))
        opened(server)
        assert left not in mine
        assert len(mine) == 1
        assert mine < set(left.parent.glob("client-*"))
        first.close()
        assert not any(directory.exists() for directory in mine)
