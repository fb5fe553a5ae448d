"""The nouns of the service: ServiceSession, Model, SamplerHandle, NamedCheckpoint, Usage, StoredResult."""

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from opentinker_core.policies.types import PolicyVersion


class SessionStatus(StrEnum):
    """Where a client's session stands."""

    LIVE = "live"
    FINISHED = "finished"
    """The client said so."""
    EXPIRED = "expired"
    """No heartbeat came in time."""


class ModelStatus(StrEnum):
    """Whether the trainer holds the state of a model."""

    LIVE = "live"
    RELEASED = "released"
    """Its session ended."""
    LOST = "lost"
    """The server was restarted; what was saved is there."""


class CheckpointKind(StrEnum):
    """What a name was given to; the middle of a `tinker://` path."""

    WEIGHTS = "weights"
    """Weights and optimizer state."""
    SAMPLER_WEIGHTS = "sampler_weights"
    EXTERNAL_WEIGHTS = "external_weights"
    """A PEFT directory to be taken elsewhere."""


@dataclass(frozen=True)
class ServiceSession:
    """One `ServiceClient` of the SDK."""

    session_id: str
    tenant: str
    tags: tuple[str, ...]
    user_metadata: dict[str, Any]
    sdk_version: str
    project_id: str | None
    display_name: str | None
    status: SessionStatus
    detail: str | None
    """How it ended, as the client said: `success`, `errored`, `interrupted`."""
    created_at: datetime
    seen_at: datetime


@dataclass(frozen=True)
class Model:
    """One `TrainingClient` of the SDK: a policy that is trained, and the run that trains it."""

    model_id: str
    """`<session>:train:<n>`; the SDK builds it itself."""
    tenant: str
    session_id: str
    policy_id: str
    policy_name: str
    run_id: str
    base_model: str
    """As the client named it."""
    lora: dict[str, Any]
    """The `lora_config` of the request: rank, seed, which layers."""
    user_metadata: dict[str, Any]
    digest: str
    """Of the request, to know it again."""
    status: ModelStatus
    created_at: datetime
    used_at: datetime


@dataclass(frozen=True)
class SamplerHandle:
    """One `SamplingClient` of the SDK."""

    sampler_id: str
    """`<session>:sample:<n>`."""
    tenant: str
    session_id: str
    base_model: str
    """As the client named it."""
    model_path: str | None
    """The `tinker://` path it was opened with, if any."""
    version: PolicyVersion | None
    """None: the base model."""
    inflight_of: str | None = None
    """The model whose newest inflight save it samples from; `version` was that when the record was read.

    None: what it samples from never changes.
    """


@dataclass(frozen=True)
class NamedCheckpoint:
    """A version that a client gave a name: `tinker://<model>/<kind>/<name>`."""

    model_id: str
    tenant: str
    kind: CheckpointKind
    name: str
    version: PolicyVersion
    size_bytes: int
    user_metadata: dict[str, str] = field(default_factory=dict)
    created_at: datetime | None = None
    expires_at: datetime | None = None

    @property
    def path(self) -> str:
        return f"tinker://{self.model_id}/{self.kind}/{self.name}"

    @property
    def checkpoint_id(self) -> str:
        return f"{self.kind}/{self.name}"


class UsageKind(StrEnum):
    """What is counted of a tenant's use."""

    TRAINING = "training"
    """Tokens of forward and backward passes."""
    PREFILL = "sampling_prefill"
    """Tokens of prompts, whether the sampler had them already or not."""
    SAMPLED = "sampling_sample"
    """Tokens that were drawn."""
    CHECKPOINTS = "checkpoint"
    """Named checkpoints that were saved."""


@dataclass(frozen=True)
class Usage:
    """What an amount is of."""

    tenant: str
    hour: datetime
    """Its beginning."""
    kind: UsageKind
    base_model: str
    session_id: str
    """Empty: of no session."""


@dataclass(frozen=True)
class StoredResult:
    """How a future ended, as it is answered."""

    body: bytes
    media_type: str = "application/json"
