"""Inflight sampling clients: all of a model's follow what the newest inflight save saved."""

from pathlib import Path

import tinker
from tinker import types

from opentinker_core.sampling.protocol import BASE, SampleRequest, SamplingParams
from opentinker_core.service.sampling import seeds_of
from tests.service.live import Live, serving
from tests.service.policies import PROMPT, direct, step, trained
from tests.service.raw import Raw
from tests.waiting import wait_until


def inflight(training: tinker.TrainingClient) -> tinker.SamplingClient:
    return training.save_weights_and_get_sampling_client(kind="inflight").result(60)


def drawn(sampler: tinker.SamplingClient, tokens: int = 6) -> list[list[int]]:
    shape = types.SamplingParams(max_tokens=tokens, seed=3, stop=[])
    return [
        one.tokens
        for one in sampler.sample(types.ModelInput.from_ints(PROMPT), 8, shape).result(60).sequences
    ]


def drawn_by(live: Live, version: str, tokens: int = 6) -> list[list[int]]:
    """What a version of the policy gives, asked without the service's API."""
    request = SampleRequest(tuple(PROMPT), SamplingParams(tokens), BASE, seeds_of(3, 8))
    return [one.tokens.tolist() for one in direct(live, request, version)]


def kept(live: Live, training: tinker.TrainingClient) -> list[int]:
    """Numbers of the policy's versions whose weights are there."""
    model = live.service.records.model("default", training.model_id)
    return [
        one.number for one in live.service.catalog("default").versions(model.policy_name) if one.sampler.size
    ]


def test_all_inflight_clients_of_a_model_follow_its_newest_save(live: Live) -> None:
    training = trained(live, "mutable")
    fixed = training.save_weights_and_get_sampling_client().result(60)
    first = inflight(training)
    begun = drawn(first)
    assert begun == drawn(fixed) == drawn_by(live, "mutable@0")
    step(training)
    assert drawn(first) == begun, "a step alone changes nothing"
    second = inflight(training)
    assert drawn(first) == drawn(second) == drawn_by(live, "mutable@1") != begun
    assert first._sampling_session_id != second._sampling_session_id
    assert drawn(fixed) == begun
    other = trained(live, "another")
    assert drawn(inflight(other)) == drawn_by(live, "another@0")
    assert drawn(first) == drawn(second), "another model's save is not theirs"


def test_weights_that_inflight_clients_have_left_are_deleted(live: Live) -> None:
    training = trained(live, "rolling")
    clients = []
    for number in range(3):
        clients.append(inflight(training))
        assert kept(live, training) == [number]
        step(training)
    named = training.save_weights_for_sampler("kept").result(60).path
    clients.append(inflight(training))
    step(training)
    clients.append(inflight(training))
    assert kept(live, training) == [3, 4], "what has a name stays"
    assert len({str(drawn(one)) for one in clients}) == 1
    by_name = live.client().create_sampling_client(model_path=named).result(60)
    assert drawn(by_name) == drawn_by(live, "rolling@3")


def test_a_completion_is_of_one_version_whose_weights_stay_until_its_end(live: Live) -> None:
    training = trained(live, "steady")
    client = inflight(training)
    shape = types.SamplingParams(max_tokens=400, seed=3, stop=[])
    running = client.sample(types.ModelInput.from_ints(PROMPT), 8, shape)
    wait_until(lambda: any(live.service.sampling.leases.users.values()) or running.future().done())
    step(training)
    inflight(training)
    was_running = not running.future().done()
    numbers = kept(live, training)
    assert numbers[-1] == 1
    assert 0 in numbers or not was_running
    sequences = running.result(120).sequences
    assert [len(one.tokens) for one in sequences] == [400] * 8
    step(training)
    inflight(training)
    assert kept(live, training) == [2]


def test_an_inflight_save_has_no_name(live: Live) -> None:
    raw = Raw(live.url, live.key("raw"))
    model = raw.model()
    answer = raw.post("save_weights_for_sampler", model_id=model, seq_id=1, path="mine", kind="inflight")
    assert (answer.status_code, "accepted: snapshot, or no path" in answer.text) == (400, True)
    saved = raw.ok(
        "save_weights_for_sampler", model_id=model, seq_id=2, sampling_session_seq_id=0, kind="inflight"
    )
    assert raw.result(saved["request_id"])["path"] is None
    about = raw.http.get(f"/samplers/{raw.result(saved['request_id'])['sampling_session_id']}").json()
    assert about["base_model"] == "tiny"


def test_inflight_clients_outlive_the_server_with_the_newest_weights(tmp_path: Path) -> None:
    with serving(tmp_path) as live:
        training = trained(live, "lasting")
        first = inflight(training)
        step(training)
        expected = drawn(inflight(training))
        sampler_id = first._sampling_session_id
        assert drawn(first) == expected
    with serving(tmp_path) as live:
        sampler = live.service.records.sampler("default", sampler_id)
        assert sampler.version is not None
        assert sampler.version.number == 1
        raw = Raw(live.url, live.key())
        prompt = {"chunks": [{"type": "encoded_text", "tokens": PROMPT}]}
        params = {"max_tokens": 6, "seed": 3, "stop": []}
        body = {"num_samples": 8, "prompt": prompt, "sampling_params": params}
        promise = raw.ok("asample", sampling_session_id=sampler_id, seq_id=99, **body)
        assert raw.samples(promise["request_id"]) == expected
