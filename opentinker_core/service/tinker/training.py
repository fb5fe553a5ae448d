"""Routes of training: models, forward and backward passes, steps, and saving and loading weights."""

import asyncio
import secrets
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, TypeVar

import numpy as np
from fastapi import APIRouter, Request
from pydantic import Field, ValidationError
from tinker.types.create_model_request import CreateModelRequest
from tinker.types.get_info_request import GetInfoRequest
from tinker.types.load_weights_request import LoadWeightsRequest
from tinker.types.lora_config import LoraConfig
from tinker.types.optim_step_request import AdamParams, OptimStepRequest
from tinker.types.save_weights_external_request import SaveWeightsExternalRequest
from tinker.types.save_weights_for_sampler_request import SaveWeightsForSamplerRequest
from tinker.types.save_weights_request import SaveWeightsRequest

from opentinker_core.config.schema import LoRAConfig, NonNegativeFloat, OptimizerConfig
from opentinker_core.errors import UsageError
from opentinker_core.names import check_name
from opentinker_core.runtime.engine import Engine
from opentinker_core.runtime.operations import Operation
from opentinker_core.service.checkpoints import expiry
from opentinker_core.service.dependencies import Serving
from opentinker_core.service.new_models import NewModel
from opentinker_core.service.principal import Member, Who
from opentinker_core.service.tinker import losses, wire
from opentinker_core.service.tinker.requests import (
    NumberedRoute,
    check_metadata,
    check_seq,
    digest_of,
    refused,
)
from opentinker_core.service.tinker.wire_json import read_forward_backward_json
from opentinker_core.service.trained import Later, TrainedModel
from opentinker_core.service.training import json_result
from opentinker_core.service.types import CheckpointKind, Model, NamedCheckpoint, StoredResult
from opentinker_core.training.trainer import ForwardBackward, PolicyBatch

router = APIRouter(prefix="/api/v1", tags=["training"], route_class=NumberedRoute)

ALPHA = 32.0
"""Of every adapter: Tinker's, whose API has no field for it."""
_SMALL = 16_384
PROTOBUF = "application/x-protobuf"
Result = TypeVar("Result")
Promise = dict[str, str]
"""`{request_id, model_id}`: where the result of a call will be."""


class StepConfig(OptimizerConfig):
    """AdamW as the Tinker API has it: a learning rate of 0 is a step that changes nothing."""

    learning_rate: NonNegativeFloat = 1e-4
    eps: Annotated[float, Field(ge=1e-30)] = 1e-12
    """Without one, the step of a weight whose gradients were all 0 is 0/0."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95


@router.post("/create_model")
async def create_model(service: Serving, who: Member, body: CreateModelRequest) -> Promise:
    """Give a session a model: a fresh adapter on a base model."""
    if body.optimizer_config.type != "adamw":
        raise UsageError(f"optimizer_config: {body.optimizer_config.type!r:.80}; accepted: adamw")
    served = service.model(body.base_model)
    wanted = body.lora_config or LoraConfig(rank=32)
    engine = await asyncio.to_thread(service.engine, served.name, who.tenant)
    seed = secrets.randbits(62) if wanted.seed is None else wanted.seed % (1 << 63)
    new = NewModel(
        session_id=body.session_id,
        seq=check_seq("model_seq_id", body.model_seq_id),
        served=served,
        lora=adapter_of(wanted, engine),
        wire_lora=wanted.model_dump(mode="json"),
        user_metadata=check_metadata("user_metadata", body.user_metadata),
        digest=digest_of(body),
        seed=seed,
    )
    request_id = await service.training.make(
        who.tenant, new, lambda model: json_result({"type": "create_model", "model_id": model.model_id})
    )
    return {"request_id": request_id, "model_id": new.model_id}


@router.post("/get_info")
async def get_info(service: Serving, who: Who, body: GetInfoRequest) -> dict[str, Any]:
    """What a model is."""
    model = await service.training.model(who.tenant, body.model_id)
    return {
        "type": "get_info",
        "model_id": model.model_id,
        "model_name": model.base_model,
        "is_lora": True,
        "lora_rank": model.lora.get("rank"),
        "optimizer_config": {"type": "adamw"},
        "model_data": {
            "arch": service.model(model.base_model).model,
            "model_name": model.base_model,
            "tokenizer_id": service.model(model.base_model).tokenizer,
        },
    }


@router.post("/forward_backward")
async def forward_backward(service: Serving, who: Member, request: Request) -> Promise:
    """Losses, and gradients that add up until the next step; or losses alone (`forward_only`)."""
    return await _forward_backward(service, who, request, forward_only=False)


@router.post("/forward")
async def forward(service: Serving, who: Member, request: Request) -> Promise:
    """Losses alone, as SDKs before 0.25 ask for them."""
    return await _forward_backward(service, who, request, forward_only=True)


async def _forward_backward(
    service: Serving, who: Member, request: Request, *, forward_only: bool
) -> Promise:
    as_json = "json" in request.headers.get("content-type", "")
    if as_json:
        given = await _json(request)
        body = await asyncio.to_thread(read_forward_backward_json, given, forward_only=forward_only)
    else:
        raw = await request.body()
        body = await _beside_the_loop(len(raw), partial(wire.read_forward_backward, raw))
    request.state.numbered = (body.model_id, body.seq_id)
    seq = check_seq("seq_id", body.seq_id)
    model = await service.training.model(who.tenant, body.model_id)
    trained = service.training.find(who.tenant, body.model_id)
    if trained is not None:
        engine = trained.engine
    else:
        engine = await asyncio.to_thread(service.engine, model.base_model, who.tenant)
    size = sum(one.tokens_N.nbytes for one in body.data)
    make = partial(losses.policy_batch, vocabulary=engine.vocabulary, max_length=engine.max_context)
    batch = await _beside_the_loop(size, partial(make, model.policy_id, body.data, body.loss_fn, body.config))

    async def start(trained: TrainedModel, asked: list[Operation[Any]]) -> Later[StoredResult]:
        later = await _passes(trained, batch, asked, forward_only=body.forward_only)

        async def finish() -> StoredResult:
            result = await later()
            return await _beside_the_loop(size, partial(_written, result, as_json=as_json))

        return finish

    tokens = sum(len(datum) for datum in batch.datums)
    kind = "forward" if body.forward_only else "forward_backward"
    request_id = await service.training.submit(
        who.tenant, body.model_id, seq, kind, body.digest, start, tokens=tokens, size_bytes=body.nbytes
    )
    return {"request_id": request_id, "model_id": body.model_id}


async def _passes(
    trained: TrainedModel, batch: PolicyBatch, asked: list[Operation[Any]], *, forward_only: bool
) -> Later[ForwardBackward]:
    if not forward_only:
        return await trained.forward_backward(batch, asked)
    later = await trained.forward(batch, asked)

    async def finish() -> ForwardBackward:
        logprobs: list[np.ndarray] = await later()
        return await asyncio.to_thread(losses.forward_result, batch, logprobs)

    return finish


def _written(result: ForwardBackward, *, as_json: bool) -> StoredResult:
    outputs, metrics = losses.output(result)
    if as_json:
        return json_result(wire.forward_backward_json(outputs, metrics))
    return StoredResult(wire.write_forward_backward(outputs, metrics), PROTOBUF)


@router.post("/optim_step")
async def optim_step(service: Serving, who: Member, request: Request, body: OptimStepRequest) -> Promise:
    """One AdamW step with the gradients that were added up, which are cleared."""
    seq = _seq(request, body.model_id, body.seq_id)
    params = body.optim_params
    if not isinstance(params, AdamParams):
        raise UsageError(f"optimizer_params.type: {params.type!r:.80}; accepted: adamw")
    try:
        config = StepConfig(**params.model_dump())
    except ValidationError as error:
        raise refused(error) from error

    async def start(trained: TrainedModel, asked: list[Operation[Any]]) -> Later[StoredResult]:
        later = await trained.optim_step(config, asked)
        await service.saving.step_launched(trained)

        async def finish() -> StoredResult:
            metrics = await later()
            return json_result({"type": "optim_step", "metrics": metrics})

        return finish

    return await _submitted(service, who, body.model_id, seq, "optim_step", digest_of(body), start)


@router.post("/save_weights")
async def save_weights(service: Serving, who: Member, request: Request, body: SaveWeightsRequest) -> Promise:
    """Save weights and optimizer state under a name."""
    seq = _seq(request, body.model_id, body.seq_id)
    name = None if body.path is None else check_name("path", body.path)
    metadata = check_metadata("user_metadata", body.user_metadata)
    expiry(body.ttl_seconds)

    async def start(trained: TrainedModel, asked: list[Operation[Any]]) -> Later[StoredResult]:
        later = await service.saving.save(
            trained,
            CheckpointKind.WEIGHTS,
            name,
            expires_at=expiry(body.ttl_seconds),
            user_metadata=metadata,
            overwrite=body.overwrite,
        )
        return _saved(later, "save_weights")

    return await _submitted(service, who, body.model_id, seq, "save_weights", digest_of(body), start)


@router.post("/save_weights_for_sampler")
async def save_weights_for_sampler(
    service: Serving, who: Member, request: Request, body: SaveWeightsForSamplerRequest
) -> Promise:
    """Save weights to sample from: under a name, or for one sampler alone."""
    seq = _seq(request, body.model_id, body.seq_id)
    named = body.path is not None or body.sampling_session_seq_id is None
    inflight = body.kind == "inflight"
    if inflight and named:
        raise UsageError(f"kind: {body.kind!r} with path {body.path!r:.80}; accepted: snapshot, or no path")
    name = None if body.path is None else check_name("path", body.path)
    metadata = check_metadata("user_metadata", body.user_metadata)
    expiry(body.ttl_seconds)
    sampler_seq = 0 if named else check_seq("sampling_session_seq_id", body.sampling_session_seq_id)

    async def start(trained: TrainedModel, asked: list[Operation[Any]]) -> Later[StoredResult]:
        if named:
            later = await service.saving.save(
                trained,
                CheckpointKind.SAMPLER_WEIGHTS,
                name,
                expires_at=expiry(body.ttl_seconds),
                user_metadata=metadata,
            )
            return _saved(later, "save_weights_for_sampler")
        sampler_id = f"{trained.model.session_id}:sample:{sampler_seq}"
        saved = await service.saving.save_sampler(trained, sampler_id, inflight=inflight)

        async def finish() -> StoredResult:
            return json_result(
                {"type": "save_weights_for_sampler", "path": None, "sampling_session_id": await saved()}
            )

        return finish

    kind = "save_weights_for_sampler"
    return await _submitted(service, who, body.model_id, seq, kind, digest_of(body), start)


@router.post("/save_weights_external")
async def save_weights_external(
    service: Serving, who: Member, request: Request, body: SaveWeightsExternalRequest
) -> Promise:
    """Save a PEFT directory under a name, to be fetched by the URLs of `external_weights_urls`."""
    seq = _seq(request, body.model_id, body.seq_id)
    name = check_name("path", body.path)
    if body.age_encryption_recipients:
        raise UsageError(
            "age_encryption_recipients: given; accepted: none, the files stay in this server's own store"
        )
    expiry(body.ttl_seconds)

    async def start(trained: TrainedModel, asked: list[Operation[Any]]) -> Later[StoredResult]:
        kind = CheckpointKind.EXTERNAL_WEIGHTS
        later = await service.saving.save(trained, kind, name, expires_at=expiry(body.ttl_seconds))
        return _saved(later, "save_weights_external")

    kind = "save_weights_external"
    return await _submitted(service, who, body.model_id, seq, kind, digest_of(body), start)


@router.post("/load_weights")
async def load_weights(service: Serving, who: Member, request: Request, body: LoadWeightsRequest) -> Promise:
    """Load a checkpoint into a model, or make a model from it."""
    if body.weights_access_token is not None:
        raise UsageError(
            "weights_access_token: given; accepted: none, weights of other tenants are not loaded"
        )
    if body.session_id is not None:
        return await _create_from(service, who, body)
    if body.model_id is None:
        raise UsageError("model_id: missing; accepted: model_id and seq_id, or session_id and model_seq_id")
    seq = _seq(request, body.model_id, body.seq_id)
    model_id = body.model_id

    async def start(trained: TrainedModel, asked: list[Operation[Any]]) -> Later[StoredResult]:
        await service.saving.load(trained, body.path, with_optimizer=body.optimizer)

        async def finish() -> StoredResult:
            return json_result({"type": "load_weights", "path": body.path, "model_id": model_id})

        return finish

    return await _submitted(service, who, model_id, seq, "load_weights", digest_of(body), start)


async def _create_from(service: Serving, who: Member, body: LoadWeightsRequest) -> Promise:
    """A model with the state of a checkpoint, and with the LoRA config of the model that it is of."""
    if body.model_id is not None or body.seq_id is not None:
        raise UsageError("model_id, seq_id: given beside session_id; accepted: one way to name the model")
    if body.optimizer_config is not None and body.optimizer_config.type != "adamw":
        raise UsageError(f"optimizer_config: {body.optimizer_config.type!r:.80}; accepted: adamw")
    source = await service.saving.loadable(who.tenant, body.path)
    origin = await asyncio.to_thread(service.records.model, who.tenant, source.model_id)
    served = service.model(body.base_model or origin.base_model)
    if served.model != service.model(origin.base_model).model:
        raise UsageError(f"base_model: {served.name}; accepted: that of the checkpoint, {origin.base_model}")
    catalog = await asyncio.to_thread(service.catalog, who.tenant)
    policy = await asyncio.to_thread(catalog.policy, source.version.policy_name)
    new = NewModel(
        session_id=body.session_id or "",
        seq=check_seq("model_seq_id", body.model_seq_id),
        served=served,
        lora=policy.lora,
        wire_lora=origin.lora,
        user_metadata=check_metadata("user_metadata", body.user_metadata),
        digest=digest_of(body),
        source=source,
        with_optimizer=body.optimizer,
    )

    def answer(model: Model) -> StoredResult:
        return json_result({"type": "load_weights", "path": body.path, "model_id": model.model_id})

    request_id = await service.training.make(who.tenant, new, answer)
    return {"request_id": request_id, "model_id": new.model_id}


def adapter_of(wanted: LoraConfig, engine: Engine) -> LoRAConfig:
    """Our LoRA config for Tinker's: which of the base model's linear layers get an adapter.

    The head (`train_unembed`) gets one where it has weights of its own and the sampler can use it.

    Raises:
        UsageError: the rank is not accepted, or no layer is left.
    """
    targets = tuple(sorted({name for name in engine.linear_names if _is_wanted(name, wanted, engine)}))
    if not targets:
        raise UsageError("lora_config: no layer is to be trained; accepted: train_attn or train_mlp")
    try:
        return LoRAConfig(rank=wanted.rank, alpha=ALPHA, target_modules=targets)
    except ValidationError as error:
        raise refused(error) from error


def _is_wanted(name: str, wanted: LoraConfig, engine: Engine) -> bool:
    if name == "lm_head":
        return wanted.train_unembed and engine.has_own_head
    is_attention = name in ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "dense")
    return wanted.train_attn if is_attention else wanted.train_mlp


async def _beside_the_loop(size: int, work: Callable[[], Result]) -> Result:
    """Do work on `size` bytes by a thread, if it takes longer than handing it over."""
    return await asyncio.to_thread(work) if size > _SMALL else work()


def _saved(later: Later[NamedCheckpoint], kind: str) -> Later[StoredResult]:
    async def finish() -> StoredResult:
        checkpoint = await later()
        size = checkpoint.size_bytes
        return json_result({"type": kind, "path": checkpoint.path, "size_bytes": size})

    return finish


async def _submitted(
    service: Serving, who: Member, model_id: str, seq: int, kind: str, digest: str, start: Any
) -> Promise:
    request_id = await service.training.submit(who.tenant, model_id, seq, kind, digest, start)
    return {"request_id": request_id, "model_id": model_id}


def _seq(request: Request, model_id: str, seq_id: int | None) -> int:
    """The number of a request; from here on a refusal consumes it."""
    seq = check_seq("seq_id", seq_id)
    request.state.numbered = (model_id, seq)
    return seq


async def _json(request: Request) -> object:
    try:
        return await request.json()
    except (ValueError, RecursionError) as error:
        raise UsageError(f"the body is no JSON: {error!s:.100}") from error
