import json
from pathlib import Path

import pytest

from opentinker_core.agents.coordination.log import EventLog, Kind
from opentinker_core.errors import OpenTinkerError


@pytest.fixture
def log() -> EventLog:
    log = EventLog()
    log.append(Kind.OPENED, 0, episode="e", round=0, detail={"seed": 3, "to_act": ["a"]})
    log.append(Kind.ASKED, 0, episode="e", round=0, agent="a", attempt=1, version="p@1")
    log.append(Kind.ENDED, 0, episode="e", round=0, detail={"reason": "done"})
    return log


def test_what_is_written_is_read_again(log: EventLog, tmp_path: Path) -> None:
    log.write(tmp_path / "log.jsonl")
    again = EventLog.read((tmp_path / "log.jsonl").read_text().splitlines())
    assert list(again) == list(log)
    assert again.digest == log.digest
    assert [event.number for event in again] == [0, 1, 2]


def test_the_digest_runs_over_all_that_was_logged(log: EventLog) -> None:
    before = log.digest
    log.append(Kind.ENDED, 0)
    assert len({before, log.digest, EventLog().digest}) == 3


@pytest.mark.parametrize("field", ["kind", "generation", "episode", "round", "agent", "attempt", "version"])
def test_a_changed_field_is_noticed(log: EventLog, field: str) -> None:
    lines = [json.loads(line) for line in log.lines()]
    value = lines[1][field]
    lines[1][field] = "acted" if field == "kind" else value + (1 if isinstance(value, int) else "x")
    with pytest.raises(OpenTinkerError, match=r"^log: line 2 was changed"):
        EventLog.read(json.dumps(line) for line in lines)


@pytest.mark.parametrize("order", [(0, 2), (1, 2), (0, 2, 1), (0, 0, 1)])
def test_missing_and_moved_lines_are_noticed(log: EventLog, order: tuple[int, ...]) -> None:
    lines = list(log.lines())
    with pytest.raises(OpenTinkerError, match="was changed, or lines before it are missing"):
        EventLog.read(lines[number] for number in order)


def test_what_is_no_event_is_refused(log: EventLog) -> None:
    with pytest.raises(OpenTinkerError, match=r"^log: line 1 is no event: 'nonsense'$"):
        EventLog.read(["nonsense"])
    with pytest.raises(OpenTinkerError, match=r"^log: line 1 is no event"):
        EventLog.read(['{"kind": "sneezed"}'])


def test_later_changes_of_what_was_logged_do_not_reach_the_log(log: EventLog) -> None:
    detail = {"rewards": {"a": 1.0}}
    log.append(Kind.STEPPED, 0, detail=detail)
    detail["rewards"]["a"] = 2.0
    assert list(log)[-1].detail == {"rewards": {"a": 1.0}}


def test_rewards_that_are_no_numbers_are_not_logged(log: EventLog) -> None:
    with pytest.raises(ValueError, match="JSON"):
        log.append(Kind.STEPPED, 0, detail={"rewards": {"a": float("nan")}})
