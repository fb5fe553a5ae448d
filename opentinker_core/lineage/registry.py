"""Mirrors policy versions as MLflow model versions that say what trained them and what they sampled.

Every write is one that can be repeated: a model version is found again by its tag, the rest is set to
what it shall be. Calls go to MLflow's registry client; the client on top of it asks before each write
whether the model is a prompt.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from opentinker_core.lineage.runs import run_tags
from opentinker_core.lineage.tracking import Tracking
from opentinker_core.policies.catalog import Catalog
from opentinker_core.policies.types import PolicyVersion, Run, TrajectorySet, VersionLineage
from opentinker_core.sampling.protocol import BASE

_DESCRIPTION_LIMIT = 5000
"""Characters of a description that MLflow's schema has room for."""
_ALL = 200_000
"""As many results as MLflow returns of a search."""
_SETS = 10
"""Trajectory sets that a description lists; the tags name every one."""


def model_name(policy_name: str, tenant: str) -> str:
    """The registered model of a policy. '~' cannot occur in names, so tenants cannot collide."""
    return f"policy.{policy_name}" if tenant == "default" else f"policy.{tenant}~{policy_name}"


@dataclass(frozen=True)
class Registration:
    """A version to register, and what it comes from."""

    lineage: VersionLineage
    run: Run | None
    mlflow_run_id: str | None
    """Of `run`."""
    links: str
    """Markdown that leads to the runs behind the version."""


class VersionRegistry:
    """Registered models and model versions of one tenant's policies."""

    def __init__(self, tracking: Tracking, catalog: Catalog) -> None:
        self._client = tracking.registry
        self._target = tracking.target
        self._catalog = catalog
        self._tenant = catalog.tenant
        self._created: set[str] = set()
        self._numbers: dict[str, str] = {}
        """MLflow's numbers of versions `name@number`, as far as this process has met them."""
        self._newest: dict[str, int] = {}
        """MLflow's highest number of each model when this process last looked."""
        self._aliases: dict[tuple[str, str], int] = {}
        """Where (policy, alias) points in MLflow, as far as this process has set it."""

    def forget(self) -> None:
        """Look again for what is in MLflow, instead of remembering it."""
        self._created.clear()
        self._numbers.clear()
        self._newest.clear()
        self._aliases.clear()

    def register(self, registrations: Sequence[Registration]) -> None:
        """Create the model versions of versions; of those that exist, bring the description up to date.

        MLflow numbers by itself; the alias `6` makes `policy.adder@6` there mean `adder@6` here.
        """
        for policy_name in dict.fromkeys(one.lineage.version.policy_name for one in registrations):
            self._look(policy_name)
        for one in registrations:
            version = one.lineage.version
            name = model_name(version.policy_name, self._tenant)
            if (number := self._numbers.get(version.ref)) is None:
                number = self._create(name, one)
            else:
                self._client.update_model_version(name, number, _description(one.lineage, one.links))
            self._client.set_registered_model_alias(name, str(version.number), number)

    def describe(self, lineage: VersionLineage, links: str) -> None:
        """Bring the description of a version up to date, if it has been mirrored."""
        name = model_name(lineage.version.policy_name, self._tenant)
        if (number := self._number(lineage.version.ref)) is not None:
            self._client.update_model_version(name, number, _description(lineage, links))

    def tag(self, ref: str, tags: dict[str, str]) -> None:
        """Set tags on the model version of `ref`, if it has been mirrored."""
        name = model_name(ref.rpartition("@")[0], self._tenant)
        if (number := self._number(ref)) is not None:
            for key, value in tags.items():
                self._client.set_model_version_tag(name, number, key, value)

    def mirror_aliases(self, policy_name: str) -> None:
        """Point MLflow's aliases to where the catalog's point now, as far as those versions are mirrored.

        MLflow reserves `latest` and `v1`, `v2`...: such an alias becomes the tag `ot.alias.<alias>`
        of the registered model.
        """
        name = model_name(policy_name, self._tenant)
        for alias, version in self._catalog.aliases(policy_name).items():
            if self._aliases.get((policy_name, alias)) == version:
                continue
            number = self._number(f"{policy_name}@{version}")
            if number is None:
                continue
            if _is_reserved(alias):
                self._client.set_registered_model_tag(name, f"ot.alias.{alias}", str(version))
            else:
                self._client.set_registered_model_alias(name, alias, number)
            self._aliases[policy_name, alias] = version

    def _look(self, policy_name: str) -> None:
        """Learn of the model versions that came since the last look: all of them, at the first.

        So none is created twice: whatever is in MLflow of a delivery that did not get to its end, by
        whichever process, is met here before it is repeated.
        """
        name = model_name(policy_name, self._tenant)
        newest = self._newest.get(name, 0)
        came = f"name = '{name}' and version_number > {newest}"
        for found in self._client.search_model_versions(came, max_results=_ALL):
            self._numbers[f"{policy_name}@{found.tags.get('ot.version')}"] = str(found.version)
            newest = max(newest, int(found.version))
        self._newest[name] = newest

    def _create(self, name: str, one: Registration) -> str:
        version = one.lineage.version
        self._create_model(name, version)
        created = self._client.create_model_version(
            name,
            source=self._source(version),
            run_id=one.mlflow_run_id,
            tags=_tags(one.lineage, one.run),
            description=_description(one.lineage, one.links),
            await_creation_for=0,
        )
        self._newest[name] = int(created.version)
        number = self._numbers[version.ref] = str(created.version)
        return number

    def _number(self, ref: str) -> str | None:
        """MLflow's number of `name@number`, if it has been mirrored."""
        if ref not in self._numbers:
            policy_name, _, number = ref.rpartition("@")
            same = f"name = '{model_name(policy_name, self._tenant)}' and tags.`ot.version` = '{number}'"
            for found in self._client.search_model_versions(same, max_results=1):
                self._numbers[ref] = str(found.version)
        return self._numbers.get(ref)

    def _create_model(self, name: str, version: PolicyVersion) -> None:
        from mlflow.exceptions import MlflowException

        if name in self._created:
            return
        policy = self._catalog.policy(version.policy_name)
        tags = {"ot.policy": version.policy_name, "ot.policy_id": version.policy_id}
        description = (
            f"LoRA policy `{policy.name}`, rank {policy.lora.rank}, over base model `{policy.base_model}`. "
            f"The alias `6` is what OpenTinker calls `{policy.name}@6`."
        )
        try:
            self._client.create_registered_model(name, tags=tags, description=description)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        self._created.add(name)

    def _source(self, version: PolicyVersion) -> str:
        """The sampler snapshot's URI; its digest where a server refuses local paths. The tags have both."""
        if self._target.over_http and version.sampler.uri.startswith("file:"):
            return f"snapshot:/{version.sampler.digest}"
        return version.sampler.uri


def _tags(lineage: VersionLineage, run: Run | None) -> dict[str, str]:
    version, sets = lineage.version, lineage.trained_on
    tags = {
        "ot.version": str(version.number),
        "ot.digest": version.sampler.digest,
        "ot.snapshot_uri": version.sampler.uri,
        "ot.parent": version.parent or BASE,
        "ot.step": str(version.step),
        "ot.phase": version.phase,
        "ot.trained_on": ",".join(one.digest for one in sets),
        "ot.sampled_by": ",".join(dict.fromkeys(one.sampled_by for one in sets)),
    }
    if run is not None:
        tags |= run_tags(run)
    return {key: value for key, value in tags.items() if value}


def _description(lineage: VersionLineage, links: str) -> str:
    version = lineage.version

    def use(trajectory_set: TrajectorySet) -> str:
        consumers = ", ".join(lineage.consumers[trajectory_set.set_id])
        return f"used for {consumers or trajectory_set.purpose}"

    parts = [
        f"**{version.ref}**, {version.phase} step {version.step}; parent: {version.parent or BASE}",
        links,
        _list("Trained on", lineage.trained_on, lambda one: f"sampled by {one.sampled_by}"),
        _list("Generated", lineage.generated, use),
    ]
    for evaluation in lineage.evaluations:
        interval = f"{evaluation.mean:.3f} (95 %: {evaluation.low:.3f} to {evaluation.high:.3f})"
        parts.append(f"Evaluation on {evaluation.environment}: {interval}, {evaluation.episodes} episodes")
    return "\n\n".join(part for part in parts if part)[:_DESCRIPTION_LIMIT]


def _is_reserved(alias: str) -> bool:
    return alias.lower() == "latest" or (alias[:1] in "vV" and alias[1:].isdigit())


def _list(title: str, sets: Sequence[TrajectorySet], use: Callable[[TrajectorySet], str]) -> str:
    """One item a set: MLflow's pages draw tables without any space between columns."""
    if not sets:
        return ""
    lines = [f"**{title}**", ""]
    for one in sets[:_SETS]:
        reward = "" if one.reward_mean is None else f", mean reward {one.reward_mean:.3f}"
        sizes = f"{one.episodes} episodes, {one.tokens} tokens{reward}"
        lines.append(f"- step {one.step}: {sizes}, {use(one)}; set `{one.digest[:12]}` at `{one.uri}`")
    if len(sets) > _SETS:
        lines.append(f"- and {len(sets) - _SETS} more")
    return "\n".join(lines)
