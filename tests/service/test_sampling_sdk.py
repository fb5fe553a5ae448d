"""The official SDK samples from a live server; values are the sampler's, and the model's own."""

import time
from pathlib import Path

import httpx
import numpy as np
import pytest
import tinker
from tinker import types

from opentinker_core.runtime.operations import Kind
from opentinker_core.sampling.protocol import BASE, SampleRequest, SamplingParams
from opentinker_core.service.sampling import seeds_of
from tests.service.live import Live, serving
from tests.service.policies import PROMPT, direct, log_softmax, step, trained
from tests.waiting import wait_until

EOS = 1


@pytest.fixture(scope="module")
def sampler(live: Live) -> tinker.SamplingClient:
    return live.client().create_sampling_client(base_model="tiny").result(60)


def chunks(*parts: list[int]) -> types.ModelInput:
    return types.ModelInput(chunks=[types.EncodedTextChunk(tokens=part) for part in parts])


def sample(
    sampler: tinker.SamplingClient,
    samples: int = 1,
    prompt: types.ModelInput | None = None,
    *,
    include_prompt_logprobs: bool = False,
    topk_prompt_logprobs: int = 0,
    topk_sample_logprobs: int = 0,
    target_prompt_logprobs: types.TensorData | None = None,
    prompt_alt_tokens_k: int = 0,
    prompt_logprobs_last_n: int | None = None,
    **params: object,
) -> types.SampleResponse:
    shape = types.SamplingParams(**{"max_tokens": 6, "seed": 3, **params})  # type: ignore[arg-type]
    future = sampler.sample(
        prompt or chunks(PROMPT[:2], PROMPT[2:]),
        samples,
        shape,
        include_prompt_logprobs=include_prompt_logprobs,
        topk_prompt_logprobs=topk_prompt_logprobs,
        topk_sample_logprobs=topk_sample_logprobs,
        target_prompt_logprobs=target_prompt_logprobs,
        prompt_alt_tokens_k=prompt_alt_tokens_k,
        prompt_logprobs_last_n=prompt_logprobs_last_n,
    )
    return future.result(120)


def raw(live: Live, path: str, body: dict[str, object], tenant: str = "default") -> httpx.Response:
    headers = {"X-API-Key": live.key(tenant)}
    return httpx.post(f"{live.url}/api/v1/{path}", json=body, headers=headers, timeout=60)


def asample(sampler_id: str, seq: int, **fields: object) -> dict[str, object]:
    base = {"sampling_session_id": sampler_id, "seq_id": seq, "prompt": text(PROMPT)}
    return {**base, "sampling_params": {"max_tokens": 2, "seed": 1}, **fields}


def text(tokens: list[int]) -> dict[str, object]:
    """A prompt as JSON."""
    return {"chunks": [{"type": "encoded_text", "tokens": tokens}]}


def test_completions_are_those_of_the_sampler(live: Live, sampler: tinker.SamplingClient) -> None:
    given = sample(sampler, 70, temperature=0.7)
    params = SamplingParams(6, temperature=0.7, stop_token_ids=(EOS,))
    expected = direct(live, SampleRequest(tuple(PROMPT), params, BASE, seeds_of(3, 70)))
    assert [one.tokens for one in given.sequences] == [one.tokens.tolist() for one in expected]
    for one, other in zip(given.sequences, expected, strict=True):
        assert np.array_equal(one.logprobs_np, other.logprobs)
        assert one.stop_reason == other.stop_reason.value
    assert len({tuple(one.tokens) for one in given.sequences}) > 30
    assert len({one.sequence_id for one in given.sequences}) == 70


@pytest.mark.parametrize(
    "shape", [{"temperature": 0.5}, {"temperature": 2.0, "top_k": 5}, {"temperature": 0.7, "top_p": 0.5}]
)
def test_logprobs_are_of_the_temperature_alone(
    live: Live, sampler: tinker.SamplingClient, shape: dict[str, float]
) -> None:
    (sequence,) = sample(sampler, topk_sample_logprobs=3, stop=[], **shape).sequences
    expected_TV = log_softmax(live, [*PROMPT, *sequence.tokens], shape["temperature"])[len(PROMPT) - 1 : -1]
    own_T = expected_TV[np.arange(6), sequence.tokens]
    np.testing.assert_allclose(sequence.logprobs_np, own_T, atol=2e-5)
    likeliest = [sorted(row.tolist(), reverse=True)[:3] for row in expected_TV]
    np.testing.assert_allclose(sequence.topk_logprobs_np.logprobs, likeliest, atol=2e-5)
    np.testing.assert_array_equal(sequence.topk_logprobs_np.token_ids, np.argsort(-expected_TV)[:, :3])


def test_greedy_tokens_have_the_models_logprobs(live: Live, sampler: tinker.SamplingClient) -> None:
    (sequence,) = sample(sampler, temperature=0.0, stop=[]).sequences
    expected_TV = log_softmax(live, [*PROMPT, *sequence.tokens])[len(PROMPT) - 1 : -1]
    assert sequence.tokens == expected_TV.argmax(-1).tolist()
    np.testing.assert_allclose(sequence.logprobs_np, expected_TV.max(-1), atol=2e-5)


def test_prompts_are_scored(live: Live, sampler: tinker.SamplingClient) -> None:
    expected_PV = log_softmax(live, PROMPT)
    targets = np.array([[5, 6], [-1, 7], [8, -1]])
    given = sample(
        sampler,
        include_prompt_logprobs=True,
        topk_prompt_logprobs=2,
        target_prompt_logprobs=types.TensorData.from_numpy(targets),
        prompt_alt_tokens_k=400,
    )
    own_P = [expected_PV[at, token] for at, token in enumerate(PROMPT[1:])]
    assert given.prompt_logprobs is not None
    assert given.prompt_logprobs[0] is None
    np.testing.assert_allclose(given.prompt_logprobs[1:], own_P, atol=2e-5)
    assert sampler.compute_logprobs(chunks(PROMPT)).result(60) == given.prompt_logprobs

    assert given.topk_prompt_logprobs is not None
    assert given.topk_prompt_logprobs[0] is None
    for row, pairs in zip(expected_PV, given.topk_prompt_logprobs[1:], strict=False):
        assert [token for token, _ in pairs or ()] == np.argsort(-row)[:2].tolist()

    cells = given.target_prompt_logprobs
    assert cells is not None
    wanted = np.where(targets < 0, 0.0, np.take_along_axis(expected_PV[:-1], targets.clip(0), 1))
    np.testing.assert_allclose(cells.to_numpy(), wanted, atol=2e-5)

    drawn = given.prompt_alt_tokens
    assert drawn is not None
    tokens = drawn.tokens.to_numpy()
    np.testing.assert_allclose(
        drawn.logprobs.to_numpy(), np.take_along_axis(expected_PV[:-1], tokens, 1), atol=2e-5
    )
    for row, own in zip(expected_PV, tokens, strict=False):
        share = np.bincount(own, minlength=len(row)) / 400
        assert np.abs(share - np.exp(row)).max() < 0.1


def test_sparse_targets_come_back_as_they_went(live: Live, sampler: tinker.SamplingClient) -> None:
    expected_PV = log_softmax(live, PROMPT)
    targets = types.TensorData(
        data=[9, 3, 4],
        dtype="int64",
        shape=[3, 50],
        sparse_crow_indices=[0, 1, 1, 3],
        sparse_col_indices=[7, 0, 49],
    )
    cells = sample(sampler, target_prompt_logprobs=targets).target_prompt_logprobs
    assert cells is not None
    assert (cells.sparse_crow_indices, cells.sparse_col_indices) == ([0, 1, 1, 3], [7, 0, 49])
    wanted = [expected_PV[0, 9], expected_PV[2, 3], expected_PV[2, 4]]
    np.testing.assert_allclose(cells.data, wanted, atol=2e-5)


def test_only_the_end_of_a_prompt_is_scored_if_asked(sampler: tinker.SamplingClient) -> None:
    whole = sample(sampler, include_prompt_logprobs=True, topk_prompt_logprobs=1)
    last = sample(sampler, include_prompt_logprobs=True, topk_prompt_logprobs=1, prompt_logprobs_last_n=2)
    assert whole.prompt_logprobs is not None
    assert whole.topk_prompt_logprobs is not None
    assert last.prompt_logprobs == [None, None, *whole.prompt_logprobs[2:]]
    assert last.topk_prompt_logprobs == [None, None, *whole.topk_prompt_logprobs[2:]]


def test_a_prompt_of_one_token_has_nothing_to_score(sampler: tinker.SamplingClient) -> None:
    given = sample(
        sampler,
        prompt=chunks([7]),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=2,
        prompt_alt_tokens_k=2,
    )
    assert given.prompt_logprobs == [None]
    assert given.topk_prompt_logprobs == [None]
    assert given.prompt_alt_tokens is not None
    assert given.prompt_alt_tokens.tokens.shape == [0, 2]


def test_stops(live: Live, sampler: tinker.SamplingClient) -> None:
    free = sample(sampler, stop=[], max_tokens=12, seed=8).sequences[0]
    assert (len(free.tokens), free.stop_reason) == (12, "length")
    token = free.tokens[4]
    until = free.tokens[: free.tokens.index(token) + 1]
    text = live.service.engine("tiny", "default").tokenizer.decode([token])
    for stop in ([token], [text], text):
        stopped = sample(sampler, stop=stop, max_tokens=12, seed=8).sequences[0]
        assert (stopped.tokens, stopped.stop_reason) == (until, "stop")


def test_the_end_of_sequence_stops_by_itself_unless_the_list_is_empty(
    sampler: tinker.SamplingClient,
) -> None:
    samples = sample(sampler, 200, stop=None, max_tokens=20).sequences
    ended = [one for one in samples if one.stop_reason == "stop"]
    assert ended
    assert all(one.tokens.count(EOS) == 1 and one.tokens[-1] == EOS for one in ended)
    free = sample(sampler, 200, stop=[], max_tokens=20).sequences
    assert {one.stop_reason for one in free} == {"length"}
    assert any(EOS in one.tokens[:-1] for one in free)
    by_name = sample(sampler, 200, stop=["<eos>"], max_tokens=20).sequences
    assert [one.tokens for one in by_name] == [one.tokens for one in samples]


def test_without_max_tokens_the_context_is_the_limit(sampler: tinker.SamplingClient) -> None:
    (sequence,) = sample(sampler, max_tokens=None, stop=[]).sequences
    assert len(sequence.tokens) == 512 - len(PROMPT)


def test_2048_completions_of_one_request_beside_others(live: Live, sampler: tinker.SamplingClient) -> None:
    many = sampler.sample(chunks(PROMPT), 2048, types.SamplingParams(max_tokens=4, seed=5))
    other = live.client("other").create_sampling_client(base_model="tiny").result(60)
    began = time.monotonic()
    sample(other)
    beside = time.monotonic() - began
    sequences = many.result(240).sequences
    assert len(sequences) == 2048
    assert beside < time.monotonic() - began, "the other tenant waited for all of them"
    few = sample(sampler, 100, seed=5, max_tokens=4).sequences
    assert [one.tokens for one in sequences[:100]] == [one.tokens for one in few]


def test_many_requests_at_once(sampler: tinker.SamplingClient) -> None:
    params = [types.SamplingParams(max_tokens=2, seed=seed) for seed in range(300)]
    futures = [sampler.sample(chunks(PROMPT), 1, one) for one in params]
    assert len({tuple(future.result(120).sequences[0].tokens) for future in futures}) > 100


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": {"chunks": []}}, "prompt"),
        ({"prompt": {"chunks": [{"type": "image", "data": "", "format": "png"}]}}, "encoded_text"),
        ({"num_samples": 0}, "num_samples"),
        ({"num_samples": 2049}, "num_samples"),
        ({"record_stability_info": True}, "importance_sampling"),
        ({"prompt": text([5] * 500), "sampling_params": {"max_tokens": 20}}, "accepted: max_tokens up to 12"),
        ({"prompt": text([5] * 512), "sampling_params": {"max_tokens": 1}}, "fewer than 512 tokens"),
        ({"prompt": text([5] * 600), "sampling_params": {}}, "600 prompt tokens + 1 max_tokens > 512"),
        ({"topk_prompt_logprobs": -1}, "topk_prompt_logprobs"),
        ({"topk_sample_logprobs": 1 << 40}, "topk_sample_logprobs"),
        ({"prompt_logprobs_last_n": 1}, "prompt_logprobs_last_n"),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 4}, "prompt_logprobs_last_n"),
        ({"sampling_params": {"max_tokens": 0}}, "max_tokens"),
        ({"sampling_params": {"temperature": -1}}, "temperature"),
        ({"sampling_params": {"temperature": 1e-300}}, "temperature"),
        ({"sampling_params": {"top_k": -2}}, "top_k"),
        ({"sampling_params": {"stop": [""]}}, "stop"),
        ({"target_prompt_logprobs": {"data": [1], "dtype": "int64", "shape": [1, 1]}}, "target_prompt"),
        ({"target_prompt_logprobs": {"data": [-1] * 3, "dtype": "int64", "shape": [3, 1]}}, "no token"),
        (
            {
                "target_prompt_logprobs": {
                    "data": [1],
                    "dtype": "int64",
                    "shape": [3, 1],
                    "sparse_crow_indices": [0, 2, 1, 1],
                    "sparse_col_indices": [0],
                }
            },
            "CSR",
        ),
        ({"seq_id": -1}, "seq_id"),
    ],
)
def test_what_is_wrong_is_refused_at_once(
    live: Live, sampler: tinker.SamplingClient, fields: dict[str, object], message: str
) -> None:
    answer = raw(live, "asample", asample(sampler._sampling_session_id, 10**6, **fields))
    assert answer.status_code in (400, 422), answer.text
    assert message in answer.text


def test_what_the_model_cannot_do_is_the_users_error(sampler: tinker.SamplingClient) -> None:
    with pytest.raises(tinker.RequestFailedError, match="prompt_tokens: 200") as failed:
        sample(sampler, prompt=chunks([200]), max_tokens=2)
    assert failed.value.category == "user"


def test_clients_know_by_the_words_that_the_context_is_full(sampler: tinker.SamplingClient) -> None:
    """Those of the vendor's service, which the cookbook looks for to shorten a conversation."""
    words = r"prompt length plus max_tokens exceeds .*: 500 prompt tokens \+ 20 max_tokens > 512"
    with pytest.raises(tinker.BadRequestError, match=words):
        sample(sampler, prompt=chunks([5] * 500), max_tokens=20)


def test_a_retry_is_the_same_request_and_another_is_refused(
    live: Live, sampler: tinker.SamplingClient
) -> None:
    body = asample(sampler._sampling_session_id, 2_000_000)
    first, again = raw(live, "asample", body), raw(live, "asample", body)
    assert first.status_code == 200
    assert first.json() == again.json()
    other = raw(live, "asample", {**body, "num_samples": 2})
    assert other.status_code == 400
    assert "seq_id" in other.text


def test_a_saved_sampler_stays_as_it_is_while_training_goes_on(live: Live) -> None:
    training = trained(live, "pinned")
    path = training.save_weights_for_sampler("one").result(60).path
    client = live.client()
    by_path = client.create_sampling_client(model_path=path).result(60)
    first = sample(by_path, 8)
    step(training)
    ephemeral = training.save_weights_and_get_sampling_client().result(60)
    assert [one.tokens for one in sample(by_path, 8).sequences] == [one.tokens for one in first.sequences]
    later = sample(ephemeral, 8)
    request = SampleRequest(tuple(PROMPT), SamplingParams(6, stop_token_ids=(EOS,)), BASE, seeds_of(3, 8))
    for given, version in ((first, "pinned@0"), (later, "pinned@1")):
        expected = direct(live, request, version)
        for one, other in zip(given.sequences, expected, strict=True):
            assert one.tokens == other.tokens.tolist()
            assert np.array_equal(one.logprobs_np, other.logprobs)
    assert first.sequences[0].logprobs != later.sequences[0].logprobs
    known = client.create_rest_client().get_sampler(by_path._sampling_session_id).result(60)
    assert (known.base_model, known.model_path) == ("tiny", path)


def test_samplers_of_other_tenants_do_not_exist(live: Live, sampler: tinker.SamplingClient) -> None:
    sampler_id = sampler._sampling_session_id
    theirs = raw(live, "asample", asample(sampler_id, 5), "stranger")
    nobodys = raw(live, "asample", asample("none:sample:0", 5), "stranger")
    assert (theirs.status_code, nobodys.status_code) == (404, 404)
    assert theirs.json()["detail"].replace(sampler_id, "") == nobodys.json()["detail"].replace(
        "none:sample:0", ""
    )
    training = trained(live, "secret")
    path = training.save_weights_for_sampler("one").result(60).path
    with pytest.raises(tinker.NotFoundError):
        live.client("stranger").create_sampling_client(model_path=path).result(60)


def test_a_sampler_needs_one_known_model(live: Live) -> None:
    client = live.client()
    with pytest.raises(tinker.NotFoundError, match="accepted: tiny"):
        client.create_sampling_client(base_model="huge").result(60)
    with pytest.raises(tinker.NotFoundError):
        client.create_sampling_client(model_path="tinker://a:train:0/sampler_weights/b").result(60)
    with pytest.raises(tinker.BadRequestError, match="path"):
        client.create_sampling_client(model_path="tinker://nonsense").result(60)


def test_a_cancelled_sample_leaves_the_running_batch(live: Live, sampler: tinker.SamplingClient) -> None:
    params = {"max_tokens": 500, "stop": []}
    body = asample(sampler._sampling_session_id, 3_000_000, sampling_params=params, num_samples=32)
    request_id = raw(live, "asample", body).json()["request_id"]
    wait_until(lambda: running(live) == 1)
    assert raw(live, "cancel_future", {"request_id": request_id}).status_code == 200
    wait_until(lambda: running(live) == 0)
    failed = raw(live, "retrieve_future", {"request_id": request_id, "allow_metadata_only": False}).json()
    assert "cancelled" in failed["error"]


def test_versions_nobody_wants_are_released_in_time(live: Live) -> None:
    desk = live.service.sampling
    training = trained(live, "leased")
    client = live.client()
    paths = [training.save_weights_for_sampler("first").result(60).path]
    step(training)
    paths.append(training.save_weights_for_sampler("last").result(60).path)
    desk.leases._idle_versions, before = 1, desk.leases._idle_versions
    try:
        samplers = [client.create_sampling_client(model_path=path).result(60) for path in paths]
        first = sample(samplers[0])
        sample(samplers[1])
        wait_until(lambda: len(desk.leases.users) == 1 and set(desk.leases.users.values()) == {0})
        assert sample(samplers[0]).sequences[0].tokens == first.sequences[0].tokens
    finally:
        desk.leases._idle_versions = before


def running(live: Live) -> int:
    statistics = live.service.engine("tiny", "default").statistics()
    return statistics.kinds[Kind.SAMPLE].running if Kind.SAMPLE in statistics.kinds else 0


def test_samplers_outlive_the_server(tmp_path: Path) -> None:
    with serving(tmp_path) as live:
        training = trained(live, "kept")
        session = training.holder.get_session_id()
        sampler_id = training.save_weights_and_get_sampling_client().result(60)._sampling_session_id
        before = raw(live, "asample", asample(sampler_id, 1)).json()["request_id"]
        first = result(live, before)
    with serving(tmp_path) as live:
        lost = raw(live, "retrieve_future", {"request_id": f"{sampler_id}:9", "allow_metadata_only": False})
        assert lost.status_code == 410, "the SDK asks for the sample again"
        assert sampler_id.startswith(session)
        again = raw(live, "asample", asample(sampler_id, 2)).json()["request_id"]
        assert result(live, again) == first


def result(live: Live, request_id: str) -> bytes:
    answer = raw(live, "retrieve_future", {"request_id": request_id, "allow_metadata_only": False})
    assert answer.headers["content-type"] == "application/x-protobuf", answer.text
    return answer.content
