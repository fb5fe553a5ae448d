"""Mirrors policy versions as MLflow model versions that say what trained them and what they sampled."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from opentinker_core.lineage.tracking import Tracking
from opentinker_core.policies.catalog import Catalog
from opentinker_core.policies.types import PolicyVersion, Run, TrajectorySet
from opentinker_core.sampling.protocol import BASE

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion, RegisteredModel

_DESCRIPTION_LIMIT = 5000
"""Characters of a description that MLflow's schema has room for."""
_SETS = 10
"""Trajectory sets that a description lists; the tags name every one."""


def model_name(policy_name: str, tenant: str) -> str:
    """The registered model of a policy. '~' cannot occur in names, so tenants cannot collide."""
    return f"policy.{policy_name}" if tenant == "default" else f"policy.{tenant}~{policy_name}"


class VersionRegistry:
    """Registered models and model versions of one tenant's policies. Everything here can be repeated."""

    def __init__(self, tracking: Tracking, catalog: Catalog) -> None:
        self._client = tracking.client
        self._target = tracking.target
        self._catalog = catalog
        self._tenant = catalog.tenant
        self._created: set[str] = set()

    def register(self, version: PolicyVersion, run: Run | None, run_id: str | None, links: str) -> None:
        """Create the model version of `version`, or bring its description up to date.

        MLflow numbers by itself; the alias `6` makes `policy.adder@6` there mean `adder@6` here.
        `run_id` is MLflow's id of `run`; `links` is Markdown that leads to the runs behind the version.
        """
        name = model_name(version.policy_name, self._tenant)
        description = self._description(version, links)
        existing = self.find(version.ref)
        if existing is None:
            self._create_model(name, version)
            existing = self._client.create_model_version(
                name,
                source=self._source(version),
                run_id=run_id,
                tags=self._tags(version, run),
                description=description,
                await_creation_for=0,
            )
        else:
            self._describe(existing, description)
        self._client.set_registered_model_alias(name, str(version.number), str(existing.version))

    def refresh(self, version: PolicyVersion, links: str) -> None:
        """Bring the description of a version up to date, if it has been mirrored."""
        existing = self.find(version.ref)
        if existing is not None:
            self._describe(existing, self._description(version, links))

    def _describe(self, existing: "ModelVersion", description: str) -> None:
        if existing.description != description:
            self._client.update_model_version(existing.name, str(existing.version), description)

    def tag(self, ref: str, tags: dict[str, str]) -> None:
        """Set tags on the model version of `ref`, if it has been mirrored."""
        found = self.find(ref)
        if found is not None:
            for key, value in tags.items():
                self._client.set_model_version_tag(found.name, str(found.version), key, value)

    def find(self, ref: str) -> "ModelVersion | None":
        """The model version of `name@number`; MLflow numbers by itself, so it is found by tag."""
        policy_name, _, number = ref.rpartition("@")
        name = model_name(policy_name, self._tenant)
        found = self._client.search_model_versions(f"name = '{name}' and tags.`ot.version` = '{number}'")
        return found[0] if found else None

    def mirror_aliases(self, policy_name: str) -> None:
        """Point MLflow's aliases to where the catalog's point now, as far as those versions are mirrored.

        MLflow reserves `latest` and `v1`, `v2`...: such an alias becomes the tag `ot.alias.<alias>`
        of the registered model. A policy without a mirrored version is left out.
        """
        name = model_name(policy_name, self._tenant)
        models = self._client.search_registered_models(f"name = '{name}'", max_results=1)
        aliases = self._catalog.aliases(policy_name) if models else {}
        for alias, number in aliases.items():
            model = models[0]
            if _is_reserved(alias):
                self._tag_model(model, f"ot.alias.{alias}", str(number))
                continue
            target = self.find(f"{policy_name}@{number}")
            if target is not None and str(model.aliases.get(alias)) != str(target.version):
                self._client.set_registered_model_alias(model.name, alias, str(target.version))

    def _tag_model(self, model: "RegisteredModel", key: str, value: str) -> None:
        if model.tags.get(key) != value:
            self._client.set_registered_model_tag(model.name, key, value)

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

    def _tags(self, version: PolicyVersion, run: Run | None) -> dict[str, str]:
        sets = self._catalog.trained_on(version.ref)
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

    def _description(self, version: PolicyVersion, links: str) -> str:
        trained_on = self._catalog.trained_on(version.ref)
        generated = self._catalog.generated_by(version.ref)
        parent = version.parent or BASE
        parts = [f"**{version.ref}**, {version.phase} step {version.step}; parent: {parent}", links]
        if trained_on:
            parts.append(_list("Trained on", trained_on, lambda one: f"sampled by {one.sampled_by}"))
        if generated:
            parts.append(_list("Generated", generated, lambda one: f"used for {self._use(one)}"))
        for evaluation in self._catalog.evaluations(subject=version.ref):
            interval = f"{evaluation.mean:.3f} (95 %: {evaluation.low:.3f} to {evaluation.high:.3f})"
            parts.append(
                f"Evaluation on {evaluation.environment}: {interval}, {evaluation.episodes} episodes"
            )
        return "\n\n".join(part for part in parts if part)[:_DESCRIPTION_LIMIT]

    def _use(self, trajectory_set: TrajectorySet) -> str:
        return ", ".join(self._catalog.consumers(trajectory_set.set_id)) or trajectory_set.purpose


def run_tags(run: Run) -> dict[str, str]:
    """The tags by which a run is found in MLflow, on runs and on model versions alike."""
    tags = {"ot.run_id": run.run_id, "ot.config_digest": run.config_digest}
    if run.code_commit:
        tags["ot.code_commit"] = run.code_commit
    if run.flow_run_id:
        tags["prefect.flow_run_id"] = run.flow_run_id
    return tags


def _is_reserved(alias: str) -> bool:
    return alias.lower() == "latest" or (alias[:1] in "vV" and alias[1:].isdigit())


def _list(title: str, sets: Sequence[TrajectorySet], use: Callable[[TrajectorySet], str]) -> str:
    """One item a set: MLflow's pages draw tables without any space between columns."""
    lines = [f"**{title}**", ""]
    for one in sets[:_SETS]:
        reward = "" if one.reward_mean is None else f", mean reward {one.reward_mean:.3f}"
        sizes = f"{one.episodes} episodes, {one.tokens} tokens{reward}"
        lines.append(f"- step {one.step}: {sizes}, {use(one)}; set `{one.digest[:12]}` at `{one.uri}`")
    if len(sets) > _SETS:
        lines.append(f"- and {len(sets) - _SETS} more")
    return "\n".join(lines)
