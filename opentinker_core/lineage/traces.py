"""Turns a recorded trajectory into an MLflow trace: a root span for the episode, one LLM span a turn.

The trace is built as a whole and written synchronously. MLflow's own tracer writes each span in a
transaction of its own through a queue that drops traces when it is full; it could neither choose
the trace's id, by which writing it again changes nothing.
"""

import base64
import hashlib
import json
from datetime import datetime
from random import Random
from typing import TYPE_CHECKING, Any

from opentinker_core.policies.types import TrajectorySet
from opentinker_core.seeds import derive_seed
from opentinker_core.trajectories.types import EndReason, Trajectory

if TYPE_CHECKING:
    from mlflow.entities import Assessment, Span, TraceInfo

_PREVIEW = 1000
"""Characters of prompt and answer shown in MLflow's list of traces."""


def draw_episodes(episodes: int, count: int, set_id: str) -> list[int]:
    """Rows of `count` of a set's episodes, drawn without bias and always the same ones, in order."""
    return sorted(Random(derive_seed("trace", set_id)).sample(range(episodes), min(count, episodes)))


def trace_hex(set_id: str, trajectory_id: str) -> str:
    """The 128-bit id, as hex, of the trace of one trajectory (ids are unique within their set only)."""
    return hashlib.sha256(f"{set_id}/{trajectory_id}".encode()).hexdigest()[:32]


def episode_trace(
    trajectory: Trajectory,
    trajectory_set: TrajectorySet,
    *,
    experiment_id: str,
    mlflow_run_id: str,
    trained: str,
    created_at: datetime,
) -> tuple["TraceInfo", list["Span"]]:
    """The trace of `trajectory`, part of the run that trained the version `trained` with it.

    Trajectories carry no clock: all spans stand at `created_at` (of the set), in order and without duration.
    """
    from mlflow.entities import TraceInfo
    from mlflow.entities.trace_location import TraceLocation
    from mlflow.entities.trace_state import TraceState

    key = trace_hex(trajectory_set.set_id, trajectory.trajectory_id)
    failed = trajectory.end_reason is EndReason.FAILED
    start_ns = int(created_at.timestamp() * 1000) * 1_000_000
    completions = [_completion(trajectory, position) for position in range(len(trajectory.turns))]
    versions = ",".join(dict.fromkeys(turn.version for turn in trajectory.turns))
    info = TraceInfo(
        trace_id=f"tr-{key}",
        trace_location=TraceLocation.from_experiment_id(experiment_id),
        request_time=start_ns // 1_000_000,
        state=TraceState.ERROR if failed else TraceState.OK,
        request_preview=_text(_prompt(trajectory))[:_PREVIEW],
        response_preview=_text(completions)[:_PREVIEW],
        execution_duration=0,
        trace_metadata={
            "mlflow.sourceRun": mlflow_run_id,
            "ot.group": f"{trajectory_set.set_id}/g{trajectory.group}",
            "ot.policy_version": versions[:250],
            "ot.trained": trained,
            "ot.trajectory_id": trajectory.trajectory_id,
            "ot.set_id": trajectory_set.set_id,
            "ot.set_digest": trajectory_set.digest,
        },
        tags={"mlflow.traceName": "episode", "ot.environment": trajectory.environment},
        assessments=_feedback(trajectory, key),
    )
    return info, _spans(trajectory, key, start_ns)


def _feedback(trajectory: Trajectory, key: str) -> list["Assessment"]:
    """The episode's reward; a missing one gives no feedback."""
    from mlflow.entities import AssessmentSource, Feedback

    if trajectory.reward is None:
        return []
    source = AssessmentSource(source_type="CODE", source_id=trajectory.environment)
    feedback = Feedback(name="reward", value=trajectory.reward, source=source, trace_id=f"tr-{key}")
    feedback.assessment_id = f"a-{key}"
    return [feedback]


def _spans(trajectory: Trajectory, key: str, start_ns: int) -> list["Span"]:
    root = _span(
        key,
        0,
        "episode",
        "AGENT",
        start_ns,
        inputs={"prompt": _prompt(trajectory), "seed": trajectory.seed},
        outputs={"reward": trajectory.reward, "end_reason": str(trajectory.end_reason)},
        failed=trajectory.end_reason is EndReason.FAILED,
        attributes={"ot.group": trajectory.group, "ot.member": trajectory.member, "ot.info": trajectory.info},
    )
    turns = (_turn_span(trajectory, position, key, start_ns) for position in range(len(trajectory.turns)))
    return [root, *turns]


def _turn_span(trajectory: Trajectory, position: int, key: str, start_ns: int) -> "Span":
    turn = trajectory.turns[position]
    sampled = turn.end - turn.start
    usage = {"input_tokens": turn.start, "output_tokens": sampled, "total_tokens": turn.end}
    return _span(
        key,
        position + 1,
        f"turn-{turn.index}",
        "LLM",
        start_ns + position + 1,
        inputs=_turn_input(trajectory, position),
        outputs=_completion(trajectory, position),
        attributes={
            "ot.version": turn.version,
            "ot.agent": turn.agent,
            "ot.reward": turn.reward,
            "ot.stop_reason": str(turn.stop_reason),
            "mlflow.chat.tokenUsage": usage,
        },
    )


def _span(
    key: str,
    index: int,
    name: str,
    kind: str,
    time_ns: int,
    *,
    inputs: Any,
    outputs: Any,
    attributes: dict[str, Any],
    failed: bool = False,
) -> "Span":
    """One finished span; span ids are 1 + index, so that the root of index 0 is everybody's parent."""
    from mlflow.entities import Span

    attributes = attributes | {
        "mlflow.traceRequestId": f"tr-{key}",
        "mlflow.spanType": kind,
        "mlflow.spanInputs": inputs,
        "mlflow.spanOutputs": outputs,
    }
    return Span.from_dict(
        {
            "trace_id": base64.b64encode(bytes.fromhex(key)).decode(),
            "span_id": _span_id(index),
            "parent_span_id": _span_id(0) if index else None,
            "name": name,
            "start_time_unix_nano": time_ns,
            "end_time_unix_nano": time_ns,
            "events": [],
            "status": {"code": "STATUS_CODE_ERROR" if failed else "STATUS_CODE_OK", "message": ""},
            "attributes": {attribute: json.dumps(value) for attribute, value in attributes.items()},
        }
    )


def _span_id(index: int) -> str:
    return base64.b64encode((index + 1).to_bytes(8, "big")).decode()


def _prompt(trajectory: Trajectory) -> Any:
    """The first observation as text, if it was recorded, else as token ids."""
    first = trajectory.turns[0].start if trajectory.turns else len(trajectory.tokens_T)
    return trajectory.info.get("prompt") or trajectory.tokens_T[:first].tolist()


def _turn_input(trajectory: Trajectory, position: int) -> Any:
    """What was new to the agent before this turn; later turns' observations are known as token ids."""
    if position == 0:
        return _prompt(trajectory)
    start, end = trajectory.turns[position - 1].end, trajectory.turns[position].start
    return trajectory.tokens_T[start:end].tolist()


def _completion(trajectory: Trajectory, position: int) -> Any:
    """What was generated in a turn: its text, if it was recorded, else token ids."""
    actions = trajectory.info.get("actions") or []
    if position < len(actions):
        return actions[position]
    turn = trajectory.turns[position]
    return trajectory.tokens_T[turn.start : turn.end].tolist()


def _text(value: Any) -> str:
    """A preview: the text itself, or several texts on lines of their own, or JSON."""
    if isinstance(value, str):
        return value
    if value and all(isinstance(item, str) for item in value):
        return "\n".join(value)
    return json.dumps(value)
