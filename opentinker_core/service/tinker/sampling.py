"""Routes of the Tinker API that sample: samplers of a session, and completions by them."""

import asyncio
import hashlib
from functools import partial
from typing import Any

from fastapi import APIRouter
from tinker.types.create_sampling_session_request import CreateSamplingSessionRequest
from tinker.types.sample_request import SampleRequest as SampleBody

from opentinker_core.errors import UsageError
from opentinker_core.service.core import Service
from opentinker_core.service.dependencies import Serving
from opentinker_core.service.principal import Who
from opentinker_core.service.sampling import SampleTarget
from opentinker_core.service.tinker.requests import check_may_change, check_seq
from opentinker_core.service.tinker.samples import MEDIA_TYPE, Sample
from opentinker_core.service.types import SamplerHandle, StoredResult, UsageKind

router = APIRouter(prefix="/api/v1", tags=["sampling"])

LARGEST_SAMPLE_SEQ = 2**63 - 1
"""Copies of a sampling client count on from multiples of a billion."""


@router.post("/create_sampling_session")
async def create_sampling_session(
    service: Serving, who: Who, body: CreateSamplingSessionRequest
) -> dict[str, str]:
    """A sampler of a base model, or of a checkpoint, in no session where others train."""
    seq = check_seq("sampling_session_seq_id", body.sampling_session_seq_id)
    await check_may_change(service, who, body.session_id)
    await service.sessions.check_live(who.tenant, body.session_id)
    base_model, path, version = body.base_model, body.model_path, None
    if path is not None:
        checkpoint = await service.read(lambda: service.checkpoints.resolve(who.tenant, path))
        model = await service.read(lambda: service.records.model(who.tenant, checkpoint.model_id))
        if base_model not in (None, model.base_model):
            raise UsageError(
                f"base_model: {base_model!r:.100}, and {path} is of {model.base_model!r}; "
                "accepted: none, or that"
            )
        base_model, version = model.base_model, (checkpoint.version.policy_id, checkpoint.version.number)
    if base_model is None:
        raise UsageError("base_model, model_path: none given; accepted: one of them")
    service.model(base_model)
    sampler_id = f"{body.session_id}:sample:{seq}"
    sampler = await service.write(
        lambda: service.records.add_sampler(
            who.tenant, sampler_id, body.session_id, base_model=base_model, model_path=path, version=version
        )
    )
    return {"type": "create_sampling_session", "sampling_session_id": sampler.sampler_id}


@router.get("/samplers/{sampler_id}")
async def get_sampler(service: Serving, who: Who, sampler_id: str) -> dict[str, str | None]:
    """What a sampler samples from."""
    sampler = await service.read(lambda: service.records.sampler(who.tenant, sampler_id))
    return {
        "sampler_id": sampler.sampler_id,
        "base_model": sampler.base_model,
        "model_path": sampler.model_path,
    }


@router.post("/asample")
async def asample(service: Serving, who: Who, body: SampleBody) -> dict[str, Any]:
    """Begin to sample; the completions are fetched with `retrieve_future`."""
    sampler_id, seq = body.sampling_session_id, body.seq_id
    if sampler_id is None:
        raise UsageError("sampling_session_id: none; accepted: one of create_sampling_session")
    if seq is None or not 0 <= seq <= LARGEST_SAMPLE_SEQ:
        raise UsageError(f"seq_id: {seq}; accepted: 0 to {LARGEST_SAMPLE_SEQ}")
    sampler = await service.sampling.handle(
        who.tenant,
        sampler_id,
        lambda: service.read(lambda: service.records.sampler(who.tenant, sampler_id)),
    )
    await service.sessions.check_live(who.tenant, sampler.session_id)
    sample = Sample.read(body, service.engine(sampler.base_model, who.tenant))
    request_id = f"{sampler_id}:{seq}"
    _begin(service, who.tenant, sampler, sample, request_id, _digest(body))
    return {
        "request_id": request_id,
        "sample_sequence_ids": [f"{request_id}:{index}" for index in range(body.num_samples)],
    }


def _digest(body: SampleBody) -> str:
    """The digest of a request; prompts are long, so it is pydantic that writes them down."""
    try:
        return hashlib.sha256(body.model_dump_json().encode()).hexdigest()
    except ValueError as error:  # a lone surrogate
        raise UsageError(f"the request cannot be written as JSON: {error}") from error


def _begin(
    service: Service, tenant: str, sampler: SamplerHandle, sample: Sample, request_id: str, digest: str
) -> None:
    if service.futures.known(tenant, request_id, digest):
        return
    hold = service.quotas.admit(tenant, len(sample.request.prompt_tokens))

    async def work() -> StoredResult:
        target = SampleTarget(sampler.base_model, service.training.sampled(sampler))
        sequences = (await service.sampling.sample(tenant, target, [sample.request]))[0]
        drawn = sum(len(sequence.tokens) for sequence in sequences)
        hold.end(drawn)
        count = partial(
            service.usage.add, tenant, base_model=sampler.base_model, session_id=sampler.session_id
        )
        count(UsageKind.PREFILL, len(sample.request.prompt_tokens))
        count(UsageKind.SAMPLED, drawn)
        return StoredResult(await asyncio.to_thread(sample.write, sequences), MEDIA_TYPE)

    service.futures.submit(tenant, request_id, "sample", digest, work, on_end=hold.end)
