"""A sampler whose tokens a service draws."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import tinker

from opentinker_core.errors import UsageError
from opentinker_core.runtime.remote.connection import Connection, service_errors
from opentinker_core.runtime.remote.reference import read_reference
from opentinker_core.sampling.protocol import BASE, SampledSequence, SampleRequest
from opentinker_core.trajectories.types import StopReason

FetchSnapshot = Callable[[str, str], Path]


class RemoteSampler:
    """See `Sampler`. Versions are those that were saved at the service; draws are by its own seeds."""

    def __init__(self, connection: Connection, base_model: str, fetch: FetchSnapshot) -> None:
        self._connection, self._base_model, self._fetch = connection, base_model, fetch
        self._clients: dict[str, tinker.SamplingClient] = {}

    def refresh(self, version: str, snapshot_uri: str, digest: str) -> None:
        """See `Sampler.refresh`.

        Raises:
            SnapshotError: the snapshot is missing or corrupt.
            UsageError: the service does not have it.
        """
        if version in self._clients:
            return
        directory = self._fetch(snapshot_uri, digest)
        path = read_reference(directory, self._connection, version)
        with service_errors():
            self._clients[version] = self._connection.client.create_sampling_client(model_path=path).result()

    def release(self, version: str) -> None:
        """See `Sampler.release`."""
        self._clients.pop(version, None)

    def sample(self, requests: Sequence[SampleRequest]) -> list[list[SampledSequence]]:
        """See `Sampler.sample`.

        Raises:
            UsageError: also for what the Tinker API has no field for.
        """
        for request in requests:
            _check(request)
        with service_errors():
            asked = [
                [self.client(r.version).sample(_input(r.prompt_tokens), 1, _params(r, s)) for s in r.seeds]
                for r in requests
            ]
            return [
                [_sequence(future.result().sequences[0], request) for future in futures]
                for request, futures in zip(requests, asked, strict=True)
            ]

    def client(self, version: str) -> tinker.SamplingClient:
        """The SDK's client of a version, or of the base model.

        Raises:
            UsageError: the sampler was not refreshed with the version.
        """
        if version == BASE and BASE not in self._clients:
            with service_errors():
                self._clients[BASE] = self._connection.client.create_sampling_client(
                    base_model=self._base_model
                ).result()
        if version not in self._clients:
            raise UsageError(
                f"version: {version!r} is not served; accepted: {', '.join(sorted({BASE, *self._clients}))}"
            )
        return self._clients[version]


def _input(tokens: Sequence[int]) -> tinker.ModelInput:
    return tinker.ModelInput.from_ints(list(tokens))


def _params(request: SampleRequest, seed: int) -> tinker.SamplingParams:
    params = request.params
    return tinker.SamplingParams(
        max_tokens=params.max_tokens,
        seed=seed,
        stop=list(params.stop) if params.stop else list(params.stop_token_ids),
        temperature=params.temperature,
        top_k=params.top_k or -1,
        top_p=params.top_p,
    )


def _check(request: SampleRequest) -> None:
    if request.params.min_p:
        raise UsageError(f"min_p: {request.params.min_p}; accepted by a service: 0")
    if request.prompt_logprobs or request.top_logprobs or request.about_prompt or request.scaled_logprobs:
        raise UsageError("a request to a service asks for tokens and their logprobs alone")


def _sequence(answer: tinker.SampledSequence, request: SampleRequest) -> SampledSequence:
    """The completion; with stop texts, token ids that stop as well are looked for here."""
    assert answer.tokens_np is not None
    tokens = answer.tokens_np.astype(np.int32)
    logprobs = np.minimum(np.asarray(answer.logprobs, np.float32), 0)
    reason = StopReason(answer.stop_reason)
    ends = np.flatnonzero(np.isin(tokens, request.params.stop_token_ids))
    if len(ends):
        tokens, logprobs, reason = tokens[: ends[0] + 1], logprobs[: ends[0] + 1], StopReason.STOP
    if request.params.temperature == 0:
        logprobs = np.zeros_like(logprobs)
    plain = request.params.temperature == 1
    return SampledSequence(tokens, logprobs, reason, request.version, logprobs if plain else None)
