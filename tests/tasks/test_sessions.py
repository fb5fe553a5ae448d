"""Sessions by run id: found by tasks, one process a run, and a retried flow run goes on with its run."""

import pytest

from opentinker_core.config.schema import TrainConfig
from opentinker_core.errors import OpenTinkerError
from tasks.sessions import courier_of, end_session, session_of, start_session


def test_a_session_is_found_until_it_ends(small: TrainConfig) -> None:
    session = start_session(small, None, None)
    run_id = session.run.run_id
    assert session_of(run_id) is session
    end_session(run_id)
    with pytest.raises(OpenTinkerError, match=f"run {run_id} is not open in this process"):
        session_of(run_id)


def test_a_run_that_is_being_trained_is_left_alone(small: TrainConfig) -> None:
    run_id = start_session(small, None, None).run.run_id
    with pytest.raises(OpenTinkerError, match=f"run {run_id} is being trained by another process"):
        start_session(small, run_id, None)
    end_session(run_id)
    start_session(None, run_id, None)
    end_session(run_id)


def test_a_retried_flow_run_goes_on_from_the_last_published_version(small: TrainConfig) -> None:
    first = start_session(small, None, "flow-run-1")
    metrics = first.sft(1, 2)
    first.publish(2, metrics)
    first.sft(3, 3)  # lost: not published
    end_session(first.run.run_id)

    retried = start_session(small, None, "flow-run-1")
    assert retried.run.run_id == first.run.run_id
    assert retried.next_step == 3
    end_session(retried.run.run_id)

    another = start_session(small, None, "flow-run-2")
    assert another.run.run_id != first.run.run_id
    assert another.next_step == 1
    end_session(another.run.run_id)


@pytest.mark.processes
def test_runs_that_go_on_at_once_share_what_delivers_to_mlflow(small: TrainConfig) -> None:
    recorded = small.model_copy(update={"record": small.record.model_copy(update={"mlflow": True})})
    first, second = (start_session(recorded, None, None) for _ in range(2))
    silent = start_session(small, None, None)
    courier = courier_of(first.run.run_id)
    assert courier is courier_of(second.run.run_id) is not None
    assert courier_of(silent.run.run_id) is None
    end_session(first.run.run_id)
    second.publish(2, second.sft(1, 2))
    end_session(second.run.run_id)
    end_session(silent.run.run_id)
    catalog = second.workspace.catalog
    assert catalog.pending_events() == []
    assert None not in {catalog.run(one.run.run_id).mlflow_run_id for one in (first, second)}
