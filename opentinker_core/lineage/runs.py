"""Mirrors training runs as MLflow runs: parameters, tags, metrics, datasets, status.

Every write is one that can be repeated: a run is found again by its tag, metrics and datasets are equal
rows. What several steps of a run have to tell goes in one call of each kind.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from opentinker_core.digests import digest_json
from opentinker_core.lineage.tracking import TRAINING_VIEW, Tracking
from opentinker_core.policies.catalog import Catalog
from opentinker_core.policies.types import Run, RunStatus, TrajectorySet

if TYPE_CHECKING:
    from mlflow.entities import DatasetInput

_PARAMS_PER_CALL = 100
_METRICS_PER_CALL = 1000
"""What MLflow's `log_batch` takes at once."""
_REFUSED = re.compile(r"[^\w.\- :]")
_METRIC_NAME_LIMIT = 240
_TEXT_LIMIT = 5000
"""Characters of a parameter, tag or note."""
_STATUS = {RunStatus.RUNNING: "RUNNING", RunStatus.COMPLETED: "FINISHED", RunStatus.FAILED: "FAILED"}


@dataclass(frozen=True)
class Measured:
    """Metrics of one step. `at` is a time of the catalog: it makes a repeated metric an equal row."""

    metrics: Mapping[str, float]
    step: int
    at: datetime


def metric_name(key: str) -> str:
    """`key` as MLflow takes it: agents, of whom there are metrics, may have other names than it accepts.

    What it refuses becomes `_`, and a digest of the whole keeps two such names apart.
    """
    parts = [_REFUSED.sub("_", part) for part in key.split("/")]
    name = "/".join(part if part.strip(".") else "_" for part in parts)[:_METRIC_NAME_LIMIT]
    return name if name == key else f"{name}-{digest_json(key)[:8]}"


class RunMirror:
    """The MLflow runs of one tenant's training runs, in an experiment a policy."""

    def __init__(self, tracking: Tracking, catalog: Catalog, prefect_ui_url: str) -> None:
        self._client = tracking.client
        self._target = tracking.target
        self._catalog = catalog
        self._prefect_ui_url = prefect_ui_url.rstrip("/")
        self._policies: dict[str, str] = {}
        self._experiments: dict[str, str] = {}
        self._known: set[str] = set()

    def ensure(self, run: Run) -> str:
        """MLflow's id of `run`, created if needed; a crash right after the creation makes no second one."""
        if run.mlflow_run_id and self._exists(run, run.mlflow_run_id):
            return run.mlflow_run_id
        experiment_id = self.experiment(run)
        same = f"tags.`ot.run_id` = '{run.run_id}'"
        found = self._client.search_runs([experiment_id], same, max_results=1)
        run_id = found[0].info.run_id if found else self._create(run, experiment_id)
        self._log_params(run_id, run.config)
        self._catalog.update_run(run.run_id, mlflow_run_id=run_id)
        self._known.add(run_id)
        return run_id

    def finish(self, run: Run, status: RunStatus, lineage: str | None) -> None:
        """Bring tags and status up to date; `lineage` becomes the artifact `lineage.json`."""
        run_id = self.ensure(run)
        self._set_tags(run_id, self._tags(run) | ({"ot.error": run.error} if run.error else {}))
        if status is RunStatus.RUNNING:
            self._client.update_run(run_id, status=_STATUS[status])
            return
        if lineage is not None:
            self._client.log_text(run_id, lineage, "lineage.json")
        self._client.set_terminated(run_id, _STATUS[status], end_time=_milliseconds(run.updated_at))

    def log_metrics(self, run_id: str, measured: Sequence[Measured]) -> None:
        """Log metrics of any number of steps."""
        from mlflow.entities import Metric

        rows = [
            Metric(metric_name(key), float(value), _milliseconds(one.at), one.step)
            for one in measured
            for key, value in one.metrics.items()
        ]
        for start in range(0, len(rows), _METRICS_PER_CALL):
            self._client.log_batch(run_id, metrics=rows[start : start + _METRICS_PER_CALL])

    def log_sets(self, run: Run, run_id: str, sets: Sequence[TrajectorySet]) -> None:
        """Log trajectory sets as dataset inputs."""
        if sets:
            self._client.log_inputs(run_id, [_dataset_input(run, one) for one in sets])

    def experiment(self, run: Run) -> str:
        """The experiment `opentinker/<policy>` (`opentinker/<tenant>/<policy>` where there are tenants)."""
        tenant, policy = self._catalog.tenant, self.policy_name(run)
        name = f"opentinker/{policy}" if tenant == "default" else f"opentinker/{tenant}/{policy}"
        if name not in self._experiments:
            known = self._client.get_experiment_by_name(name)
            self._experiments[name] = (
                known.experiment_id
                if known
                else self._client.create_experiment(name, artifact_location=self._artifacts(name))
            )
        return self._experiments[name]

    def policy_name(self, run: Run) -> str:
        """The name of the policy that `run` trains."""
        if run.policy_id not in self._policies:
            self._policies = {policy.policy_id: policy.name for policy in self._catalog.policies()}
        return self._policies[run.policy_id]

    def links(self, run: Run | None, run_id: str | None) -> str:
        """Markdown that leads to the pages of a run."""
        if run is None or run_id is None:
            return ""
        page = f"#/experiments/{self.experiment(run)}/runs/{run_id}"
        traces = f"[traces of its episodes]({page}/traces{TRAINING_VIEW})"
        links = [f"[run {run.name}]({page}{TRAINING_VIEW})", traces]
        if url := self._prefect_url(run):
            links.append(f"[Prefect flow run]({url})")
        return " · ".join(links)

    def _exists(self, run: Run, run_id: str) -> bool:
        """Whether MLflow has the run; one that was ended there and goes on is set to run again."""
        from mlflow.exceptions import MlflowException

        if run_id in self._known:
            return True
        try:
            found = self._client.get_run(run_id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return False
        if run.status is RunStatus.RUNNING and found.info.status != _STATUS[run.status]:
            self._client.update_run(run_id, status=_STATUS[run.status])
            self._set_tags(run_id, self._tags(run))
        self._known.add(run_id)
        return True

    def _create(self, run: Run, experiment_id: str) -> str:
        created = self._client.create_run(
            experiment_id,
            start_time=_milliseconds(run.created_at),
            tags=self._tags(run),
            run_name=run.name,
        )
        run_id: str = created.info.run_id
        return run_id

    def _tags(self, run: Run) -> dict[str, str]:
        tags = run_tags(run) | {"ot.policy": self.policy_name(run), "mlflow.source.name": "opentinker"}
        if run.code_commit:
            tags["mlflow.source.git.commit"] = run.code_commit
        if url := self._prefect_url(run):
            tags["prefect.url"] = url
            tags["mlflow.note.content"] = f"[Prefect flow run]({url})"
        return tags

    def _set_tags(self, run_id: str, tags: dict[str, str]) -> None:
        from mlflow.entities import RunTag

        entities = [RunTag(key, value[:_TEXT_LIMIT]) for key, value in tags.items()]
        self._client.log_batch(run_id, tags=entities)

    def _log_params(self, run_id: str, config: dict[str, Any]) -> None:
        from mlflow.entities import Param

        params = [Param(key, value[:_TEXT_LIMIT]) for key, value in flattened(config)]
        for start in range(0, len(params), _PARAMS_PER_CALL):
            self._client.log_batch(run_id, params=params[start : start + _PARAMS_PER_CALL])

    def _artifacts(self, name: str) -> str | None:
        root = self._target.artifact_uri
        return f"{root.rstrip('/')}/{name}" if root else None

    def _prefect_url(self, run: Run) -> str:
        if not (self._prefect_ui_url and run.flow_run_id):
            return ""
        return f"{self._prefect_ui_url}/runs/flow-run/{run.flow_run_id}"


def run_tags(run: Run) -> dict[str, str]:
    """The tags by which a run is found in MLflow, on runs and on model versions alike."""
    tags = {"ot.run_id": run.run_id, "ot.config_digest": run.config_digest}
    if run.code_commit:
        tags["ot.code_commit"] = run.code_commit
    if run.flow_run_id:
        tags["prefect.flow_run_id"] = run.flow_run_id
    return tags


def flattened(config: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """The leaves of a nested config as (dotted key, text); empty mappings and lists are leaves."""
    for key, value in config.items():
        if isinstance(value, dict) and value:
            yield from flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value)


def _dataset_input(run: Run, trajectory_set: TrajectorySet) -> "DatasetInput":
    """A trajectory set as a dataset: MLflow holds 36 characters of a digest, the tag all of it."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    facts = {
        "ot.set_id": trajectory_set.set_id,
        "ot.uri": trajectory_set.uri,
        "ot.digest": trajectory_set.digest,
        "ot.sampled_by": trajectory_set.sampled_by,
        "ot.step": str(trajectory_set.step),
        "ot.environment": trajectory_set.environment,
    }
    sizes = {
        "episodes": trajectory_set.episodes,
        "tokens": trajectory_set.tokens,
        "reward_mean": trajectory_set.reward_mean,
    }
    dataset = Dataset(
        name=f"{run.name}/{trajectory_set.purpose}/step-{trajectory_set.step:05d}",
        digest=trajectory_set.digest[:32],
        source_type="s3" if trajectory_set.uri.startswith("s3:") else "local",
        source=json.dumps({"uri": trajectory_set.uri}),
        profile=json.dumps(sizes),
    )
    context = InputTag("mlflow.data.context", trajectory_set.purpose)
    return DatasetInput(dataset, [context, *(InputTag(key, value) for key, value in facts.items())])


def _milliseconds(time: datetime) -> int:
    return int(time.timestamp() * 1000)
