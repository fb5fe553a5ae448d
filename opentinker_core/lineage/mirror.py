"""What outbox events become in MLflow: one run a training run, one registered model a policy.

Events are taken many at a time: most of what a call to MLflow costs does not depend on how much it
carries. Every write is one that can be repeated (`runs`, `registry`, `traces` say how).
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from opentinker_core.lineage.errors import EventError
from opentinker_core.lineage.registry import Registration, VersionRegistry
from opentinker_core.lineage.report import build_report
from opentinker_core.lineage.runs import Measured, RunMirror
from opentinker_core.lineage.traces import draw_episodes, episode_trace
from opentinker_core.lineage.tracking import Tracking
from opentinker_core.policies.catalog import Catalog
from opentinker_core.policies.outbox import (
    EVALUATION_RECORDED,
    RUN_FINISHED,
    RUN_STARTED,
    VERSION_PUBLISHED,
    OutboxEvent,
)
from opentinker_core.policies.types import Evaluation, Run, RunStatus, VersionLineage
from opentinker_core.trajectories.store import TrajectoryStore

if TYPE_CHECKING:
    from mlflow.entities import Span

_Payload = Mapping[str, Any]


class Mirror:
    """The handlers of the outbox's event kinds, writing through one connection to MLflow."""

    def __init__(
        self, tracking: Tracking, catalog: Catalog, trajectories: TrajectoryStore, prefect_ui_url: str
    ) -> None:
        self._traces = tracking.traces
        self._catalog = catalog
        self._trajectories = trajectories
        self._runs = RunMirror(tracking, catalog, prefect_ui_url)
        self.versions = VersionRegistry(tracking, catalog)
        self._handlers: dict[str, Callable[[list[_Payload]], None]] = {
            RUN_STARTED: self._runs_started,
            VERSION_PUBLISHED: self._versions_published,
            EVALUATION_RECORDED: self._evaluations_recorded,
            RUN_FINISHED: self._runs_finished,
        }

    def handle(self, events: Sequence[OutboxEvent]) -> None:
        """Mirror events in order, those of a kind that follow one another together.

        Raises:
            EventError: a kind is unknown.
        """
        try:
            for kind, group in groupby(events, key=lambda event: event.kind):
                if kind not in self._handlers:
                    raise EventError(f"event kind {kind!r} is unknown; known: {', '.join(self._handlers)}")
                self._handlers[kind]([event.payload for event in group])
        except BaseException:
            self.versions.forget()  # what is remembered of MLflow may be why it failed
            raise

    def _runs_started(self, payloads: list[_Payload]) -> None:
        for payload in payloads:
            self._runs.ensure(self._catalog.run(payload["run_id"]))

    def _runs_finished(self, payloads: list[_Payload]) -> None:
        for payload in payloads:
            run, status = self._catalog.run(payload["run_id"]), RunStatus(payload["status"])
            lineage = None
            if status is not RunStatus.RUNNING and (versions := self._catalog.run_versions(run.run_id)):
                lineage = build_report(self._catalog, versions[-1].ref).model_dump_json(indent=2)
            self._runs.finish(run, status, lineage)
            self.versions.mirror_aliases(self._runs.policy_name(run))  # `best` moves after its evaluation

    def _versions_published(self, payloads: list[_Payload]) -> None:
        published = self._catalog.lineages([payload["version"] for payload in payloads])
        runs = {
            run_id: self._catalog.run(run_id)
            for run_id in dict.fromkeys(one.version.run_id for one in published if one.version.run_id)
        }
        of_run = {run_id: [one for one in published if one.version.run_id == run_id] for run_id in runs}
        ids = {run_id: self._log_steps(run, of_run[run_id]) for run_id, run in runs.items()}
        registrations = []
        for one in published:
            run, mlflow_id = runs.get(one.version.run_id or ""), ids.get(one.version.run_id or "")
            registrations.append(Registration(one, run, mlflow_id, self._runs.links(run, mlflow_id)))
        self.versions.register(registrations)
        self._describe_samplers(published)
        for policy_name in dict.fromkeys(one.version.policy_name for one in published):
            self.versions.mirror_aliases(policy_name)
        for run_id, run in runs.items():  # last: what reads from elsewhere
            self._log_traces(run, ids[run_id], of_run[run_id])

    def _log_steps(self, run: Run, published: Sequence[VersionLineage]) -> str:
        """Metrics and training sets of versions of a run; returns MLflow's id of the run."""
        mlflow_id = self._runs.ensure(run)
        versions = [one.version for one in published]
        self._runs.log_metrics(mlflow_id, [Measured(v.metrics, v.step, v.created_at) for v in versions])
        self._runs.log_sets(run, mlflow_id, [item for one in published for item in one.trained_on])
        return mlflow_id

    def _describe_samplers(self, published: Sequence[VersionLineage]) -> None:
        """The pages of those who sampled what trained these versions now have more to show."""
        described = {one.version.ref for one in published}
        samplers = [item.sampled_by for one in published for item in one.trained_on]
        self._describe([ref for ref in dict.fromkeys(samplers) if "@" in ref and ref not in described])

    def _describe(self, refs: Sequence[str]) -> None:
        """Bring the pages of versions up to date."""
        for lineage in self._catalog.lineages(refs) if refs else ():
            run_id = lineage.version.run_id
            run = self._catalog.run(run_id) if run_id else None
            self.versions.describe(lineage, self._runs.links(run, run.mlflow_run_id if run else None))

    def _evaluations_recorded(self, payloads: list[_Payload]) -> None:
        for payload in payloads:
            run_id, subject = payload["run_id"], payload["subject"]
            for evaluation in self._catalog.evaluations(run_id=run_id, subject=subject):
                if evaluation.run_id:
                    self._log_evaluation(self._catalog.run(evaluation.run_id), evaluation)
                if "@" in evaluation.subject:
                    self.versions.tag(evaluation.subject, {"ot.evaluation.mean": f"{evaluation.mean:.6g}"})
                    self._describe([evaluation.subject])

    def _log_evaluation(self, run: Run, evaluation: Evaluation) -> None:
        """Metrics `eval/mean` of the run's own policy; `eval/base/mean`, `eval/<other>/mean` of others."""
        own = evaluation.subject.rpartition("@")[0] == self._runs.policy_name(run)
        prefix = "eval" if own else f"eval/{evaluation.subject.replace('@', ':')}"
        values = {"mean": evaluation.mean, "low": evaluation.low, "high": evaluation.high}
        metrics = {f"{prefix}/{key}": value for key, value in values.items()}
        episodes = evaluation.trajectory_set
        at = (episodes.created_at if episodes else None) or run.created_at
        mlflow_id = self._runs.ensure(run)
        self._runs.log_metrics(mlflow_id, [Measured(metrics, evaluation.step, at)])
        if episodes:
            self._runs.log_sets(run, mlflow_id, [episodes])

    def _log_traces(self, run: Run, mlflow_id: str, published: Sequence[VersionLineage]) -> None:
        """Traces of a sample of the episodes of each set, where it was used first; all spans in one call."""
        count = run.config.get("record", {}).get("trace_episodes", 0)
        experiment_id = self._runs.experiment(run)
        spans: list[Span] = []
        for lineage in published if count else ():
            version = lineage.version
            for one in lineage.trained_on:
                if lineage.consumers[one.set_id][0] != version.ref:
                    continue
                rows = draw_episodes(one.episodes, count, one.set_id)
                for trajectory in self._trajectories.load(one.uri, one.digest, rows):
                    info, of_episode = episode_trace(
                        trajectory,
                        one,
                        experiment_id=experiment_id,
                        mlflow_run_id=mlflow_id,
                        trained=version.ref,
                        created_at=one.created_at or version.created_at,
                    )
                    self._traces.start_trace(info)
                    spans += of_episode
        if spans:
            self._traces.log_spans(experiment_id, spans)
