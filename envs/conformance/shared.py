"""What environments of one agent and of several are checked for alike."""

import gc
import json
import math
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice, zip_longest
from typing import Any

from envs.conformance.subject import Event, NotCheckableError, Subject, global_random_kept
from envs.draws import stable_hash
from envs.playing import BrokenError, Check, call, play_elsewhere
from envs.protocol import Action, Closes

_AT_ONCE = 64
"""Instances that play at the same time."""
_INSTANCES = 5
"""That are made and closed, to see whether something of each stays."""
_PLAYS = 3
"""In each of which a fault must show that something else in this process could have caused."""


def _rewards(subject: Subject) -> None:
    for name, events in subject.episodes.items():
        for reward in (reward for event in events for reward in event.rewards):
            if not math.isfinite(reward):
                raise BrokenError(Check.REWARDS, f"seed and script {name!r}: a reward is {reward}")


def _info(subject: Subject) -> None:
    for name, events in subject.episodes.items():
        for event in events:
            try:
                json.dumps(event.info, allow_nan=False)
            except (TypeError, ValueError) as error:
                raise BrokenError(Check.INFO, f"seed and script {name!r}: {error}") from error
            if odd := [key for key in event.info if not isinstance(key, str)]:
                raise BrokenError(Check.INFO, f"seed and script {name!r}: the key {odd[0]!r} is not text")


def _ends(subject: Subject) -> None:
    if getattr(subject.instance, "unlimited", False):
        raise NotCheckableError("declared unlimited")
    for name, events in subject.episodes.items():
        if not events[-1].done:
            raise BrokenError(
                Check.ENDS,
                f"seed and script {name!r}: not done after {subject.plan.max_turns} turns, "
                "and the class does not declare `unlimited = True`",
            )


def _order(subject: Subject) -> None:
    environment = subject.new()
    _must_refuse(subject, environment, "before reset")
    events = list(subject.turns(environment, subject.plan.seeds[0], "talk"))
    if events[-1].done:
        _must_refuse(subject, environment, "after the end of the episode")


def _must_refuse(subject: Subject, environment: Any, when: str) -> None:
    action = Action("7")
    try:
        environment.step({environment.agents[0]: action} if subject.several else action)
    except RuntimeError:
        return
    except Exception as error:
        raise BrokenError(Check.ORDER, f"step {when} raised {error!r:.80}, not RuntimeError") from error
    raise BrokenError(Check.ORDER, f"step {when} did not raise RuntimeError")


def _same_instance(subject: Subject) -> None:
    environment = subject.new()
    subject.play(environment)
    next(subject.turns(environment, subject.plan.seeds[-1], "talk"))  # an abandoned one
    for name, events in subject.play(environment).items():
        subject.compare(name, events)


def _fresh_instance(subject: Subject) -> None:
    for name in reversed(subject.episodes):
        subject.compare(name, list(subject.again(subject.new(), name)))


def _new_process(subject: Subject) -> None:
    if subject.id is None:
        raise NotCheckableError("it cannot be imported by name (a local or interactive class or function)")
    request = {"id": subject.id, "args": subject.args, "plan": subject.plan}
    try:
        (answer,) = play_elsewhere([request])
    except RuntimeError as error:
        raise BrokenError(Check.NEW_PROCESS, str(error)) from error
    # demonstrations that call tools are not played there
    played = answer.get("episodes", subject.episodes)
    compare_elsewhere({name: subject.episodes[name] for name in played}, answer)


def compare_elsewhere(episodes: Mapping[str, Sequence[Event]], answer: dict[str, Any]) -> None:
    """Raise `BrokenError` unless another process played the same."""
    if "violated" in answer:
        raise BrokenError(Check.NEW_PROCESS, answer["violated"])
    for name, events in episodes.items():
        if [event.written() for event in events] != answer["episodes"].get(name):
            raise BrokenError(
                Check.NEW_PROCESS, f"seed and script {name!r}: another process played another episode"
            )


def _isolation(subject: Subject) -> None:
    names = list(subject.episodes)[:_AT_ONCE]
    plays = [subject.again(subject.new(), name) for name in names]
    together = list(zip_longest(*plays))
    for name, events in zip(names, zip(*together, strict=True), strict=True):
        subject.compare(name, [event for event in events if event is not None])


def _threads(subject: Subject) -> None:
    names = list(subject.episodes)[:_AT_ONCE]
    with ThreadPoolExecutor(4, "conformance") as pool:
        plays = [pool.submit(list, subject.again(subject.new(), name)) for name in names]
        for name, played in zip(names, plays, strict=True):
            subject.compare(name, played.result())
    events: list[Event] = []
    handed_over = subject.again(subject.new(), names[0])
    more = True
    while more:
        with ThreadPoolExecutor(1, "conformance") as one_turn:
            taken = one_turn.submit(lambda: list(islice(handed_over, 1))).result()
        events, more = events + taken, bool(taken)
    subject.compare(names[0], events)


def _splits(subject: Subject) -> None:
    shown: dict[str, dict[str, int]] = {}
    for split in ("train", "held_out"):
        environment = call(f"making the split {split!r}", subject.new, split)
        seeds = (stable_hash("split seed", index) >> 1 for index in range(4 * len(subject.plan.seeds)))
        shown[split] = {next(subject.turns(environment, seed, "talk")).shown: seed for seed in seeds}
    if len(shown["train"].keys() | shown["held_out"].keys()) == 1:
        raise NotCheckableError("all problems look the same at reset")
    if common := shown["train"].keys() & shown["held_out"].keys():
        text = min(common)
        seeds_of = f"train seed {shown['train'][text]}, held_out seed {shown['held_out'][text]}"
        raise BrokenError(
            Check.SPLITS, f"{len(common)} problems are in both, such as {text!r:.80} ({seeds_of})"
        )


def _global_random(subject: Subject) -> None:
    with global_random_kept():
        # other threads of this process may draw meanwhile; an environment that draws does so in every play
        if all(_moves_global_random(subject) for _ in range(_PLAYS)):
            raise BrokenError(Check.GLOBAL_RANDOM, "a global random generator was seeded or drawn from")


def _moves_global_random(subject: Subject) -> bool:
    numpy = sys.modules.get("numpy")
    # a state that no environment arrives at, so that seeding is seen as well as drawing
    random.seed("conformance")
    if numpy:
        numpy.random.seed(20_240_229)
    before = _global_state()
    subject.play(subject.new())
    return _global_state() != before


def _global_state() -> list[Any]:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return [random.getstate()]
    _, key, position, *_ = numpy.random.get_state()
    return [random.getstate(), key.tolist(), position]


def _teardown(subject: Subject) -> None:
    name = next(iter(subject.episodes))
    other = subject.new()
    playing = subject.again(other, name)
    seen = [next(playing)]
    for played in (0, 1, len(subject.episodes[name])):
        environment = subject.new(keep=False)
        list(islice(subject.again(environment, name), played))
        _close(environment, f"after {played} events")
        _close(environment, f"a second time after {played} events")
    subject.compare(name, [*seen, *playing])
    for what, count in _left_behind(subject, name).items():
        if count >= _INSTANCES:
            raise BrokenError(
                Check.TEARDOWN,
                f"{_INSTANCES} instances left {count} {what} behind; "
                "accepted: to give them back in `close()`",
            )


def _left_behind(subject: Subject, name: str) -> dict[str, int]:
    """How many more things are open after instances were made, played and closed than before.

    Garbage may hold things open, and is not the environment's fault. To collect it takes long where much is
    imported, and so is done only if there are more at all.
    """
    with _no_automatic_collection():
        before = _open_things()
        _play_and_close(subject, name)
        if not any(count > before[what] for what, count in _open_things().items()):
            return {}
        gc.collect()
        before = _open_things()
        _play_and_close(subject, name)
        gc.collect()
        return {what: count - before[what] for what, count in _open_things().items()}


def _play_and_close(subject: Subject, name: str) -> None:
    for _ in range(_INSTANCES):
        environment = subject.new(keep=False)
        list(subject.again(environment, name))
        _close(environment, "after an episode")


@contextmanager
def _no_automatic_collection() -> Iterator[None]:
    """Older garbage must not give back meanwhile as much as instances leave behind."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _close(environment: Any, when: str) -> None:
    if isinstance(environment, Closes):
        call(f"close() {when}", environment.close)


def _open_things() -> dict[str, int]:
    """What this process has open: an instance that keeps something makes it more."""
    folder = next((path for path in ("/proc/self/fd", "/dev/fd") if os.path.isdir(path)), None)  # noqa: PTH112
    return {
        "files or connections": len(os.listdir(folder)) if folder else 0,  # noqa: PTH208
        "threads": threading.active_count(),
    }


CHECKS: dict[Check, Callable[[Subject], None]] = {
    Check.REWARDS: _rewards,
    Check.INFO: _info,
    Check.ENDS: _ends,
    Check.ORDER: _order,
    Check.SAME_INSTANCE: _same_instance,
    Check.FRESH_INSTANCE: _fresh_instance,
    Check.NEW_PROCESS: _new_process,
    Check.ISOLATION: _isolation,
    Check.THREADS: _threads,
    Check.SPLITS: _splits,
    Check.GLOBAL_RANDOM: _global_random,
    Check.TEARDOWN: _teardown,
}
