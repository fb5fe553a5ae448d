"""The official `openai` client samples base models and policies from a live server, whole and streamed."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from opentinker_core.models.renderer import Renderer
from opentinker_core.runtime.operations import Kind
from opentinker_core.sampling.protocol import BASE, SampleRequest, SamplingParams
from opentinker_core.service.sampling import seeds_of
from tests.service.live import Live
from tests.service.policies import PROMPT, direct, step, trained
from tests.waiting import wait_until

TEXT = "1+1="
PARAMS = SamplingParams(12, stop_token_ids=(1,))
IDS = {"return_token_ids": True}


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[openai.OpenAI]:
    training = trained(live, "adder")
    training.save_weights_for_sampler("one").result(60)
    step(training)
    training.save_weights_for_sampler("two").result(60)
    live.service.catalog("default").set_alias("adder", "best", 0)
    with connected(live) as client:
        yield client


def connected(live: Live, tenant: str = "default") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{live.url}/v1", api_key=live.key(tenant), max_retries=0)


def complete(client: openai.OpenAI, model: str, **arguments: Any) -> Any:
    given = {"prompt": TEXT, "max_tokens": 12, "seed": 4, "extra_body": IDS, **arguments}
    return client.completions.create(model=model, **given)


@pytest.mark.parametrize(
    ("model", "version"),
    [("tiny", None), ("adder", "adder@1"), ("adder@0", "adder@0"), ("adder@best", "adder@0")],
)
def test_completions_and_logprobs_are_the_samplers(
    live: Live, client: openai.OpenAI, model: str, version: str | None
) -> None:
    answer = complete(client, model, n=5, logprobs=2)
    expected = direct(
        live, SampleRequest(tuple(PROMPT), PARAMS, BASE, seeds_of(4, 5), top_logprobs=2), version
    )
    assert answer.model == (version or "tiny")
    assert answer.choices[0].prompt_token_ids == PROMPT
    assert [one.index for one in answer.choices] == [0, 1, 2, 3, 4]
    for choice, sequence in zip(answer.choices, expected, strict=True):
        assert choice.token_ids == sequence.tokens.tolist()
        assert choice.finish_reason == sequence.stop_reason.value
        assert sequence.model_logprobs is not None
        np.testing.assert_allclose(choice.logprobs.token_logprobs, sequence.model_logprobs, rtol=1e-6)
        np.testing.assert_allclose(choice.logprobs.token_logprobs, sequence.logprobs, rtol=1e-6)
        for tops, own in zip(choice.logprobs.top_logprobs, sequence.top_logprobs, strict=True):
            np.testing.assert_allclose(sorted(tops.values(), reverse=True)[:2], own, rtol=1e-6)
        assert "".join(choice.logprobs.tokens).removesuffix("<eos>") == choice.text
    assert answer.usage.completion_tokens == sum(len(one.tokens) for one in expected)
    assert answer.usage.prompt_tokens == len(PROMPT)


@pytest.mark.parametrize("model", ["tiny", "adder@0"])
def test_a_stream_is_the_same_piece_by_piece(client: openai.OpenAI, model: str) -> None:
    whole = complete(client, model, n=3, logprobs=1)
    chunks = list(complete(client, model, n=3, logprobs=1, stream=True, stream_options=USAGE))
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    for choice in whole.choices:
        own = [one for chunk in chunks for one in chunk.choices if one.index == choice.index]
        assert "".join(one.text for one in own) == choice.text
        assert [token for one in own for token in one.token_ids] == choice.token_ids
        assert [v for one in own for v in one.logprobs.token_logprobs] == choice.logprobs.token_logprobs
        assert [v for one in own for v in one.logprobs.text_offset] == choice.logprobs.text_offset
        assert [one.finish_reason for one in own][:-1] == [None] * (len(own) - 1)
        assert own[-1].finish_reason == choice.finish_reason
        assert len(own) == len(choice.token_ids)


USAGE = {"include_usage": True}


def test_prompts_of_tokens_and_of_several_texts(client: openai.OpenAI) -> None:
    by_text = complete(client, "tiny")
    by_ids = complete(client, "tiny", prompt=PROMPT)
    both = complete(client, "tiny", prompt=[TEXT, "2+2="], n=2)
    lists = complete(client, "tiny", prompt=[PROMPT, [22, 15, 22, 33]], n=2)
    assert by_ids.choices[0].text == by_text.choices[0].text == both.choices[0].text
    assert [one.text for one in both.choices] == [one.text for one in lists.choices]
    assert [one.prompt_token_ids[0] for one in both.choices] == [21, 21, 22, 22]
    streamed = complete(client, "tiny", prompt=[TEXT, "2+2="], n=2, stream=True)
    texts = dict.fromkeys(range(4), "")
    for chunk in streamed:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert list(texts.values()) == [one.text for one in both.choices]


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI) -> None:
    free = complete(client, "tiny", max_tokens=40, extra_body={**IDS, "ignore_eos": True}).choices[0]
    stop = free.text[20:23]
    assert len(free.token_ids) == 40
    body = {**IDS, "ignore_eos": True}
    stopped = complete(client, "tiny", max_tokens=40, stop=["absent", stop], extra_body=body).choices[0]
    assert stopped.finish_reason == "stop"
    assert stopped.text == free.text[: free.text.index(stop)]
    assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]
    chunks = complete(client, "tiny", max_tokens=40, stop=stop, stream=True, extra_body=body)
    assert "".join(chunk.choices[0].text for chunk in chunks) == stopped.text


def test_chat_is_rendered_by_the_models_template(live: Live, client: openai.OpenAI) -> None:
    messages: Any = [
        {"role": "developer", "content": "Count."},
        {"role": "user", "content": [{"type": "text", "text": "1+"}, {"type": "text", "text": "1="}]},
    ]
    arguments: dict[str, Any] = {
        "model": "adder",
        "messages": messages,
        "max_completion_tokens": 9,
        "seed": 2,
        "n": 3,
        "logprobs": True,
        "top_logprobs": 2,
        "temperature": 0.8,
        "top_p": 0.9,
        "extra_body": IDS,
    }
    answer: Any = client.chat.completions.create(**arguments)
    tokenizer = live.service.engine("tiny", "default").tokenizer
    prompt = tokenizer.encode("system\nCount.<eos>\nuser\n1+1=<eos>\nassistant\n")
    assert answer.prompt_token_ids == prompt
    stops = Renderer(tokenizer, "chat").stop_token_ids
    params = SamplingParams(9, temperature=0.8, top_p=0.9, stop_token_ids=stops)
    expected = direct(live, SampleRequest(tuple(prompt), params, BASE, seeds_of(2, 3)), "adder@1")
    for choice, sequence in zip(answer.choices, expected, strict=True):
        assert choice.token_ids == sequence.tokens.tolist()
        given = [one.logprob for one in choice.logprobs.content]
        np.testing.assert_allclose(given, sequence.model_logprobs, rtol=1e-6)
        assert all(len(one.top_logprobs) == 2 for one in choice.logprobs.content)
        assert choice.message.role == "assistant"
        assert choice.message.content == Renderer(tokenizer, "chat").action_text(sequence.tokens, ())

    chunks: Any = list(client.chat.completions.create(**arguments, stream=True, stream_options=USAGE))
    assert chunks[-1].usage == answer.usage
    assert chunks[0].prompt_token_ids == prompt
    for choice in answer.choices:
        own = [one for chunk in chunks for one in chunk.choices if one.index == choice.index]
        assert "".join(one.delta.content for one in own) == choice.message.content
        assert [one.delta.role for one in own] == ["assistant"] + [None] * (len(own) - 1)
        content = [entry for one in own for entry in one.logprobs.content]
        assert content == choice.logprobs.content
        assert own[-1].finish_reason == choice.finish_reason


def test_chat_goes_on_as_long_as_there_is_room(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hi"}], seed=1, extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None
    assert answer.usage.total_tokens == 512
    assert answer.choices[0].finish_reason == "length"


def test_a_seed_repeats_and_none_does_not(client: openai.OpenAI) -> None:
    assert complete(client, "tiny").choices[0].text == complete(client, "tiny").choices[0].text
    free = {complete(client, "tiny", seed=None, max_tokens=20).choices[0].text for _ in range(4)}
    assert len(free) == 4
    greedy = {complete(client, "tiny", seed=None, temperature=0).choices[0].text for _ in range(2)}
    assert len(greedy) == 1


def test_models_are_listed_and_new_versions_at_once(live: Live, client: openai.OpenAI) -> None:
    ids = [model.id for model in client.models.list()]
    assert ids[0] == "tiny"
    assert {"adder", "adder@best", "adder@latest", "adder@1"} <= set(ids)
    assert client.models.retrieve("adder").id == "adder@1"
    assert client.models.retrieve("adder@0").id == "adder@0"

    training = trained(live, "fresh")
    with pytest.raises(openai.NotFoundError):
        complete(client, "fresh")
    training.save_weights_for_sampler("one").result(60)
    assert complete(client, "fresh").model == "fresh@0"
    step(training)
    training.save_weights_for_sampler("two").result(60)
    assert complete(client, "fresh").model == "fresh@1"


def test_other_tenants_policies_do_not_exist(live: Live, client: openai.OpenAI) -> None:
    with connected(live, "stranger") as stranger:
        assert [model.id for model in stranger.models.list()] == ["tiny"]
        with pytest.raises(openai.NotFoundError) as theirs:
            complete(stranger, "adder")
        with pytest.raises(openai.NotFoundError) as nobodys:
            complete(stranger, "never")
    assert str(theirs.value).replace("adder", "never") == str(nobodys.value).replace(
        nobodys.value.response.json()["request_id"], theirs.value.response.json()["request_id"]
    )


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"model": "huge"}, openai.NotFoundError, "huge"),
        ({"model": "../../etc/passwd"}, openai.NotFoundError, "does not exist"),
        ({"max_tokens": 10_000}, openai.BadRequestError, "max_tokens"),
        ({"prompt": ""}, openai.BadRequestError, "prompt"),
        ({"prompt": []}, openai.UnprocessableEntityError, "prompt"),
        ({"prompt": [300]}, openai.BadRequestError, "prompt_tokens: 300"),
        ({"prompt": "x" * 600}, openai.BadRequestError, "context"),
        ({"n": 0}, openai.UnprocessableEntityError, "n"),
        ({"temperature": -1}, openai.UnprocessableEntityError, "temperature"),
        ({"temperature": 1e-300}, openai.BadRequestError, "temperature"),
        ({"logprobs": 100, "max_tokens": 400, "n": 100}, openai.BadRequestError, "top_logprobs"),
        ({"echo": True}, openai.BadRequestError, "echo"),
        ({"frequency_penalty": 0.5}, openai.BadRequestError, "frequency_penalty"),
        ({"logit_bias": {"5": 1}}, openai.BadRequestError, "logit_bias"),
        ({"n": 1000, "prompt": ["a", "b"]}, openai.BadRequestError, "accepted: 1024"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_wrong_is_an_error_of_openais(
    client: openai.OpenAI,
    fields: dict[str, Any],
    error: type[openai.APIStatusError],
    message: str,
    stream: bool,
) -> None:
    with pytest.raises(error, match=message) as raised:
        complete(client, **{"model": "tiny", "stream": stream, **fields})
    assert isinstance(raised.value.body, dict)
    assert raised.value.body["type"] == "invalid_request_error"


def test_null_is_what_is_not_given_and_the_newer_limit_goes_before(client: openai.OpenAI) -> None:
    left_open = ("n", "top_k", "min_p", "stop_token_ids", "ignore_eos", "return_token_ids", "stop", "top_p")
    plain = complete(client, "tiny", seed=3)
    null: Any = complete(client, "tiny", seed=3, extra_body=dict.fromkeys(left_open))
    assert null.choices[0].text == plain.choices[0].text
    assert len(null.choices) == 1
    both = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "1+1="}],
        max_tokens=8,
        max_completion_tokens=2,
        extra_body={"ignore_eos": True},
    )
    assert both.usage is not None
    assert both.usage.completion_tokens == 2


def test_without_a_key_nothing_is_sampled(live: Live) -> None:
    with (
        openai.OpenAI(base_url=f"{live.url}/v1", api_key="tml-wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        complete(client, "tiny")


def running(live: Live) -> int:
    statistics = live.service.engine("tiny", "default").statistics()
    return statistics.kinds[Kind.SAMPLE].running if Kind.SAMPLE in statistics.kinds else 0


LONG = {"model": "tiny", "prompt": TEXT, "max_tokens": 500, "ignore_eos": True, "n": 16}


def test_tokens_come_while_others_are_still_to_be_drawn(live: Live) -> None:
    headers = {"Authorization": f"Bearer {live.key()}"}
    arguments = {"json": {**LONG, "stream": True}, "headers": headers, "timeout": 60}
    with httpx.stream("POST", f"{live.url}/v1/completions", **arguments) as response:  # type: ignore[arg-type]
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = response.iter_lines()
        first = json.loads(next(lines).removeprefix("data: "))
        assert first["choices"][0]["finish_reason"] is None
        assert running(live) == 1
    wait_until(lambda: running(live) == 0)
    counts = live.service.engine("tiny", "default").statistics().kinds[Kind.SAMPLE]
    assert counts.failed + counts.cancelled >= 1, "what nobody reads was sampled to its end"


def test_a_client_that_leaves_takes_its_request_along(live: Live) -> None:
    headers = {"Authorization": f"Bearer {live.key()}"}
    before = live.service.engine("tiny", "default").statistics().kinds[Kind.SAMPLE]
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{live.url}/v1/completions", json=LONG, headers=headers, timeout=0.3)
    wait_until(lambda: running(live) == 0)
    after = live.service.engine("tiny", "default").statistics().kinds[Kind.SAMPLE]
    assert after.done == before.done
    assert live.service.quotas.running == 0
    assert set(live.service.sampling.leases.users.values()) <= {0}


def test_requests_of_any_seed_are_accepted(client: openai.OpenAI) -> None:
    texts = {complete(client, "tiny", seed=seed).choices[0].text for seed in (-1, 0, 2**62, -(2**63))}
    assert len(texts) == 4


def test_seeds_of_a_request_are_its_own() -> None:
    first, *others = seeds_of(5, 4)
    assert first == 5
    assert len({first, *others, *seeds_of(6, 4)}) == 8
