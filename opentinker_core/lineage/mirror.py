"""What each outbox event becomes in MLflow: one run a training run, one registered model a policy.

Every write is one that can be repeated: runs and model versions are found again by their tags, metrics
and datasets are equal rows, traces have ids derived from what they show.
"""

import json
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from opentinker_core.lineage.errors import EventError
from opentinker_core.lineage.registry import VersionRegistry, run_tags
from opentinker_core.lineage.report import build_report
from opentinker_core.lineage.traces import episode_trace, sample_episodes
from opentinker_core.lineage.tracking import TRAINING_VIEW, Tracking
from opentinker_core.policies.catalog import Catalog
from opentinker_core.policies.types import Evaluation, PolicyVersion, Run, RunStatus, TrajectorySet
from opentinker_core.trajectories.store import TrajectoryStore

if TYPE_CHECKING:
    from mlflow.entities import DatasetInput

_PARAMS_PER_BATCH = 100
_TEXT_LIMIT = 5000
"""Characters of a parameter, tag or note."""
_STATUS = {RunStatus.RUNNING: "RUNNING", RunStatus.COMPLETED: "FINISHED", RunStatus.FAILED: "FAILED"}


class Mirror:
    """The handlers of the outbox's event kinds, writing through one connection to MLflow."""

    def __init__(
        self, tracking: Tracking, catalog: Catalog, trajectories: TrajectoryStore, prefect_ui_url: str
    ) -> None:
        self._client = tracking.client
        self._traces = tracking.traces
        self._target = tracking.target
        self._catalog = catalog
        self._trajectories = trajectories
        self._prefect_ui_url = prefect_ui_url.rstrip("/")
        self._experiments: dict[str, str] = {}
        self._known_runs: set[str] = set()
        self.versions = VersionRegistry(tracking, catalog)
        self._handlers = {
            "run.started": self._run_started,
            "version.published": self._version_published,
            "evaluation.recorded": self._evaluation_recorded,
            "run.finished": self._run_finished,
        }

    def handle(self, kind: str, payload: dict[str, Any]) -> None:
        """Mirror one event.

        Raises:
            EventError: the kind is unknown.
        """
        if kind not in self._handlers:
            raise EventError(f"event kind {kind!r} is unknown; known: {', '.join(self._handlers)}")
        self._handlers[kind](payload)

    # Events

    def _run_started(self, payload: dict[str, Any]) -> None:
        self._mlflow_run(self._catalog.run(payload["run_id"]))

    def _version_published(self, payload: dict[str, Any]) -> None:
        version = self._catalog.version(payload["version"])
        run = self._catalog.run(version.run_id) if version.run_id else None
        sets = self._catalog.trained_on(version.ref)
        run_id = None
        if run is not None:
            run_id = self._mlflow_run(run)
            self._log_metrics(run_id, version.metrics, version.step, version.created_at)
            if sets:
                self._client.log_inputs(run_id, [_dataset_input(run, one) for one in sets])
        self.versions.register(version, run, run_id, self._links(run, run_id))
        for ref in dict.fromkeys(one.sampled_by for one in sets if "@" in one.sampled_by):
            self._describe_again(ref)
        self.versions.mirror_aliases(version.policy_name)
        if run is not None and run_id is not None:
            self._log_traces(run, run_id, version, sets)  # last: the one that reads from elsewhere

    def _evaluation_recorded(self, payload: dict[str, Any]) -> None:
        for evaluation in self._catalog.evaluations(run_id=payload["run_id"], subject=payload["subject"]):
            if evaluation.run_id:
                self._log_evaluation(self._catalog.run(evaluation.run_id), evaluation)
            if "@" in evaluation.subject:
                self.versions.tag(evaluation.subject, {"ot.evaluation.mean": f"{evaluation.mean:.6g}"})
                self._describe_again(evaluation.subject)

    def _run_finished(self, payload: dict[str, Any]) -> None:
        run = self._catalog.run(payload["run_id"])
        status = RunStatus(payload["status"])
        run_id = self._mlflow_run(run)
        self._set_tags(run_id, self._run_tags(run) | ({"ot.error": run.error} if run.error else {}))
        if status is RunStatus.RUNNING:
            self._client.update_run(run_id, status=_STATUS[status])
            return
        versions = self._catalog.run_versions(run.run_id)
        if versions:
            report = build_report(self._catalog, versions[-1].ref)
            self._client.log_text(run_id, report.model_dump_json(indent=2), "lineage.json")
        self._client.set_terminated(run_id, _STATUS[status], end_time=_milliseconds(run.updated_at))

    # Runs

    def _mlflow_run(self, run: Run) -> str:
        """MLflow's id of `run`, created if needed; a crash right after the creation makes no second one."""
        if run.mlflow_run_id and self._exists(run, run.mlflow_run_id):
            return run.mlflow_run_id
        experiment_id = self._experiment(run)
        same = f"tags.`ot.run_id` = '{run.run_id}'"
        found = self._client.search_runs([experiment_id], same, max_results=1)
        run_id = found[0].info.run_id if found else self._create_run(run, experiment_id)
        self._log_params(run_id, run.config)
        self._catalog.update_run(run.run_id, mlflow_run_id=run_id)
        self._known_runs.add(run_id)
        return run_id

    def _exists(self, run: Run, run_id: str) -> bool:
        """Whether MLflow has the run; one that was ended there and goes on is set to run again."""
        from mlflow.exceptions import MlflowException

        if run_id in self._known_runs:
            return True
        try:
            found = self._client.get_run(run_id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return False
        if run.status is RunStatus.RUNNING and found.info.status != _STATUS[run.status]:
            self._client.update_run(run_id, status=_STATUS[run.status])
            self._set_tags(run_id, self._run_tags(run))
        self._known_runs.add(run_id)
        return True

    def _create_run(self, run: Run, experiment_id: str) -> str:
        created = self._client.create_run(
            experiment_id,
            start_time=_milliseconds(run.created_at),
            tags=self._run_tags(run),
            run_name=run.name,
        )
        run_id: str = created.info.run_id
        return run_id

    def _run_tags(self, run: Run) -> dict[str, str]:
        tags = run_tags(run) | {"ot.policy": self._policy_name(run), "mlflow.source.name": "opentinker"}
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
        for start in range(0, len(params), _PARAMS_PER_BATCH):
            self._client.log_batch(run_id, params=params[start : start + _PARAMS_PER_BATCH])

    def _experiment(self, run: Run) -> str:
        """The experiment `opentinker/<policy>` (`opentinker/<tenant>/<policy>` where there are tenants)."""
        tenant, policy = self._catalog.tenant, self._policy_name(run)
        name = f"opentinker/{policy}" if tenant == "default" else f"opentinker/{tenant}/{policy}"
        if name not in self._experiments:
            known = self._client.get_experiment_by_name(name)
            self._experiments[name] = (
                known.experiment_id
                if known
                else self._client.create_experiment(name, artifact_location=self._artifacts(name))
            )
        return self._experiments[name]

    def _artifacts(self, name: str) -> str | None:
        root = self._target.artifact_uri
        return f"{root.rstrip('/')}/{name}" if root else None

    def _policy_name(self, run: Run) -> str:
        return next(policy.name for policy in self._catalog.policies() if policy.policy_id == run.policy_id)

    # What a run measured and used

    def _log_metrics(self, run_id: str, metrics: dict[str, float], step: int, at: datetime) -> None:
        """One transaction; the catalog's time makes a repeated metric an equal row."""
        from mlflow.entities import Metric

        if metrics:
            time = _milliseconds(at)
            rows = [Metric(key, float(value), time, step) for key, value in metrics.items()]
            self._client.log_batch(run_id, metrics=rows)

    def _log_evaluation(self, run: Run, evaluation: Evaluation) -> None:
        """Metrics `eval/mean` of the run's own policy; `eval/base/mean`, `eval/<other>/mean` of others."""
        own = evaluation.subject.rpartition("@")[0] == self._policy_name(run)
        prefix = "eval" if own else f"eval/{evaluation.subject.replace('@', ':')}"
        values = {"mean": evaluation.mean, "low": evaluation.low, "high": evaluation.high}
        metrics = {f"{prefix}/{key}": value for key, value in values.items()}
        run_id = self._mlflow_run(run)
        episodes = evaluation.trajectory_set
        at = (episodes.created_at if episodes else None) or run.created_at
        self._log_metrics(run_id, metrics, evaluation.step, at)
        if episodes:
            self._client.log_inputs(run_id, [_dataset_input(run, episodes)])

    def _log_traces(
        self, run: Run, run_id: str, version: PolicyVersion, sets: Sequence[TrajectorySet]
    ) -> None:
        """Traces of a sample of the episodes, all spans of a set in one transaction."""
        count = run.config.get("record", {}).get("trace_episodes", 0)
        experiment_id = self._experiment(run)
        first_use = (one for one in sets if self._catalog.consumers(one.set_id)[:1] == [version.ref])
        for one in first_use if count else ():
            spans = []
            trajectories = self._trajectories.load(one.uri, one.digest)
            for trajectory in sample_episodes(trajectories, count, one.set_id):
                info, of_episode = episode_trace(
                    trajectory,
                    one,
                    experiment_id=experiment_id,
                    mlflow_run_id=run_id,
                    trained=version.ref,
                    created_at=one.created_at or version.created_at,
                )
                self._traces.start_trace(info)
                spans += of_episode
            self._traces.log_spans(experiment_id, spans)

    # Pages

    def _describe_again(self, ref: str) -> None:
        """Bring the page of a version that sampled or was evaluated up to date."""
        version = self._catalog.version(ref)
        run = self._catalog.run(version.run_id) if version.run_id else None
        self.versions.refresh(version, self._links(run, run.mlflow_run_id if run else None))

    def _links(self, run: Run | None, run_id: str | None) -> str:
        if run is None or run_id is None:
            return ""
        page = f"#/experiments/{self._experiment(run)}/runs/{run_id}"
        traces = f"[traces of its episodes]({page}/traces{TRAINING_VIEW})"
        links = [f"[run {run.name}]({page}{TRAINING_VIEW})", traces]
        if url := self._prefect_url(run):
            links.append(f"[Prefect flow run]({url})")
        return " · ".join(links)

    def _prefect_url(self, run: Run) -> str:
        if not (self._prefect_ui_url and run.flow_run_id):
            return ""
        return f"{self._prefect_ui_url}/runs/flow-run/{run.flow_run_id}"


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
