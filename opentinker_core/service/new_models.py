"""What a model is made from, and the policy and run that are recorded of it."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from opentinker_core.config.schema import LoRAConfig
from opentinker_core.digests import digest_json
from opentinker_core.errors import NotFoundError
from opentinker_core.names import check_name
from opentinker_core.policies.catalog import Catalog
from opentinker_core.policies.types import Policy, Run
from opentinker_core.runtime.opening import code_commit
from opentinker_core.service.types import NamedCheckpoint

if TYPE_CHECKING:
    from opentinker_core.service.core import ServedModel


@dataclass(frozen=True)
class NewModel:
    """What a model is made from: a fresh adapter, or a checkpoint (`source`)."""

    session_id: str
    seq: int
    served: "ServedModel"
    lora: LoRAConfig
    wire_lora: Mapping[str, Any]
    """The `lora_config` as the client has it."""
    user_metadata: Mapping[str, Any]
    digest: str
    seed: int = 0
    source: NamedCheckpoint | None = None
    with_optimizer: bool = True

    @property
    def model_id(self) -> str:
        return f"{self.session_id}:train:{self.seq}"


def record(catalog: Catalog, new: NewModel) -> tuple[Policy, Run]:
    """Record the policy and the run of a new model."""
    source = new.source.version if new.source else None
    config = {
        "policy": {"base_model": new.served.model, "lora": new.lora.model_dump(mode="json")},
        "service": {
            "model_id": new.model_id,
            "seed": new.seed,
            "source": source.ref if source else None,
            "optimizer": new.with_optimizer,
        },
    }
    _commit()
    with catalog.transaction():
        forked = source.ref if source else None
        name = _free_name(catalog, new)
        policy = catalog.create_policy(name, new.served.model, new.lora, forked_from=forked)
        return policy, new_run(catalog, policy, config)


def new_run(catalog: Catalog, policy: Policy, config: dict[str, Any]) -> Run:
    """Record a run of a policy."""
    return catalog.start_run(policy.name, policy.policy_id, config, digest_json(config), _commit())


@cache
def _commit() -> str | None:
    """The commit of the code that runs; git is asked once."""
    return code_commit()


def _free_name(catalog: Catalog, new: NewModel) -> str:
    """The policy's name: as the client wishes, with something added if there is one of it."""
    wanted = new.user_metadata.get("policy")
    wanted = (
        check_name("user_metadata.policy", wanted) if wanted else f"tinker-{new.session_id[:8]}-{new.seq}"
    )
    try:
        catalog.policy(wanted)
    except NotFoundError:
        return wanted
    return f"{wanted[:54]}-{secrets.token_hex(4)}"
