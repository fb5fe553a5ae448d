"""What the name of a model stands for: a base model, or a version of one of the tenant's policies."""

from collections.abc import Iterator
from dataclasses import dataclass

from opentinker_core.errors import NotFoundError, UsageError
from opentinker_core.policies.catalog import Catalog, PolicySummary
from opentinker_core.policies.refs import LATEST
from opentinker_core.policies.types import Policy, PolicyVersion
from opentinker_core.service.core import ServedModel, Service
from opentinker_core.service.errors import NotFound
from opentinker_core.service.sampling import SampleTarget


@dataclass(frozen=True)
class NamedTarget:
    """A target and the name that stands for it for good: `policy@number`, or the base model's."""

    name: str
    target: SampleTarget
    created: int
    """Seconds since 1970; 0: not known."""

    def card(self) -> dict[str, object]:
        """How `/v1/models` shows it."""
        return _card(self.name, self.created, self.target.base_model)


async def find_target(service: Service, tenant: str, name: str) -> NamedTarget:
    """What `name` stands for: the name of a base model, `policy`, `policy@number` or `policy@alias`.

    Raises:
        NotFound: there is no such model for this tenant, or its base model is not served.
    """
    if any(model.name == name for model in service.models()):
        return NamedTarget(name, SampleTarget(name), 0)
    try:
        policy, version = await service.read(lambda: _version(service, tenant, name))
    except (NotFoundError, UsageError) as error:
        bases = ", ".join(model.name for model in service.models())
        raise NotFound(
            f"model: {name!r:.100} does not exist; accepted: a base model ({bases}), or 'policy', "
            "'policy@number', 'policy@alias'"
        ) from error
    served = _served(service, policy)
    if served is None:
        raise NotFound(f"model: {name!r:.100} has the base model {policy.base_model!r}, which is not served")
    return NamedTarget(version.ref, SampleTarget(served.name, version), int(version.created_at.timestamp()))


async def list_targets(service: Service, tenant: str) -> list[dict[str, object]]:
    """The base models, and every policy that can be sampled, by its name and its aliases."""
    cards = [_card(model.name, 0, model.name) for model in service.models()]
    for summary in await service.read(lambda: service.catalog(tenant).summaries()):
        served = _served(service, summary.policy)
        if served is not None and summary.versions:
            created = int(summary.policy.created_at.timestamp())
            cards += [_card(name, created, served.name) for name in _names(summary)]
    return cards


def _card(name: str, created: int, root: str) -> dict[str, object]:
    return {"id": name, "object": "model", "created": created, "owned_by": "opentinker", "root": root}


def _names(summary: PolicySummary) -> Iterator[str]:
    yield summary.policy.name
    for alias, number in sorted(summary.aliases.items()):
        yield f"{summary.policy.name}@{alias}"
        if alias == LATEST:
            yield f"{summary.policy.name}@{number}"


def _version(service: Service, tenant: str, name: str) -> tuple[Policy, PolicyVersion]:
    catalog: Catalog = service.catalog(tenant)
    version = catalog.version(name)
    return catalog.policy(version.policy_name), version


def _served(service: Service, policy: Policy) -> ServedModel | None:
    """How the base model of a policy is served."""
    return next((model for model in service.models() if model.model == policy.base_model), None)
