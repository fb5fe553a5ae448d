"""Config of the service: which base models it serves, where it listens, what tenants may use."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveInt, model_validator

from opentinker_core.config.schema import Frozen, Name, NonNegativeFloat, RuntimeConfig

Limit = Annotated[int, Field(ge=0, le=10**15)]
Megabytes = Annotated[float, Field(gt=0, le=10**6)]
Patience = Annotated[float, Field(gt=0, le=86_400)]
"""Seconds, up to a day: the kernel and the event loop count no further than some weeks."""


class ServedModelConfig(Frozen):
    """A base model that is served."""

    model: str = "smollm2-135m"
    """A bundled model's name, a hub id, or the path of a local Hugging Face directory."""
    name: str = ""
    """What clients call it; empty: as `model`."""
    tokenizer: str = ""
    """What the SDK's `get_tokenizer` loads: a hub id or a path on the client's machine; empty: the
    model's own directory, where that has a name the client can load, else its hub id."""

    @property
    def served_name(self) -> str:
        return self.name or self.model


def _as_models(value: Any) -> Any:
    """`tiny` and `[tiny, smollm2-135m]` are short for mappings."""
    if isinstance(value, str):
        value = [value]
    return (
        [{"model": one} if isinstance(one, str) else one for one in value]
        if isinstance(value, list)
        else value
    )


class TLSConfig(Frozen):
    """Files of the server's certificate (PEM)."""

    certificate: Path
    """The certificate, with those between it and the root."""
    key: Path
    """Its private key."""


class QuotaConfig(Frozen):
    """What one tenant may use; 0: no limit."""

    policies: Limit = 0
    """Policies in training at once."""
    storage_gb: NonNegativeFloat = 0.0
    """GB of checkpoints and sampler weights."""
    concurrent_requests: Limit = 4096
    """Operations and samples that wait or run."""
    tokens_per_minute: Limit = 0
    """Tokens trained on, read as prompts and sampled."""


class QuotasConfig(Frozen):
    """Quotas of all tenants."""

    default: QuotaConfig = QuotaConfig()
    tenants: dict[Name, QuotaConfig] = Field(default_factory=dict)
    """Those of single tenants, instead of the default ones."""

    def of(self, tenant: str) -> QuotaConfig:
        return self.tenants.get(tenant, self.default)


class LimitsConfig(Frozen):
    """What one request may be."""

    request_mb: Megabytes = 64.0
    """MB of a body, decompressed."""
    json_mb: Megabytes = 16.0
    """MB of a body of JSON, where it is no training data."""
    body_timeout_s: Patience = 60.0
    """Seconds without a further piece of a body, after which the request is given up."""
    answer_timeout_s: Patience = 60.0
    """Seconds without anything of an answer being taken, after which its connection is closed; on Linux."""
    buffered_mb: Megabytes = 1024.0
    """MB of all bodies that are read at the same time; others wait."""
    waiting_mb: Megabytes = 2048.0
    """MB of one tenant's requests for losses and gradients that wait or run; above that, only the next of a
    model is taken."""


class ServeConfig(Frozen):
    """A server: `opentinker serve`."""

    host: str = "127.0.0.1"
    """The address to listen on; `0.0.0.0` for all of this machine's."""
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    models: Annotated[tuple[ServedModelConfig, ...], BeforeValidator(_as_models), Field(min_length=1)] = (
        ServedModelConfig(),
    )
    """Base models, each a mapping, or the model alone; the first is what OpenAI clients get by default."""
    runtime: RuntimeConfig = RuntimeConfig()
    limits: LimitsConfig = LimitsConfig()
    quotas: QuotasConfig = QuotasConfig()
    tls: TLSConfig | None = None
    auto_checkpoint_steps: PositiveInt | None = None
    """Optimizer steps of a policy between checkpoints that the server makes by itself; None: none."""
    session_timeout_s: Annotated[float, Field(ge=0.1, le=30 * 86_400)] = 300.0
    """Seconds without a heartbeat after which a session has ended and what it held is released."""
    drain_timeout_s: Annotated[float, Field(ge=0, le=86_400)] = 30.0
    """Seconds that work in progress has, once the server is told to stop."""
    metrics: Literal["open", "keyed", "off"] = "open"
    """`/metrics` for anyone who reaches the server, with a key of the role `admin`, or not at all."""
    audit_days: Annotated[int, Field(ge=1, le=36_500)] = 90
    """Days that the audit log is kept."""

    @model_validator(mode="after")
    def _distinct(self) -> "ServeConfig":
        names = [model.served_name for model in self.models]
        if len(set(names)) != len(names):
            raise ValueError(f"models: {', '.join(names)}; accepted: each name once")
        return self

    @model_validator(mode="after")
    def _computes_itself(self) -> "ServeConfig":
        if self.runtime.url is not None:
            raise ValueError(f"runtime.url: {self.runtime.url}; accepted by a server: none")
        return self
