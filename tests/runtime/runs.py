"""Small training runs for tests: the tiny model, a few steps, everything through the real session."""

from pathlib import Path
from typing import Any

from opentinker_core.config.schema import TrainConfig
from opentinker_core.config.settings import Settings
from opentinker_core.policies.types import RunStatus
from opentinker_core.runtime.session import RunSession, open_session
from opentinker_core.runtime.workspace import Workspace

CONFIG: dict[str, Any] = {
    "name": "small",
    "policy": {
        "name": "adder",
        "base_model": "tiny",
        "lora": {"rank": 4, "target_modules": ["q_proj", "v_proj", "down_proj", "lm_head"]},
    },
    "environment": {"id": "arithmetic", "args": {"operations": "+", "digits": 1, "shots": 0}},
    "sft": {
        "steps": 6,
        "batch_size": 64,
        "examples": 80,
        "publish_every": 4,
        "optimizer": {"learning_rate": 2e-2},
    },
    "rl": {
        "steps": 3,
        "groups": 8,
        "group_size": 8,
        "sampling": {"max_tokens": 3},
        "objective": {"kl_coefficient": 0.01},
        "optimizer": {"learning_rate": 1e-3},
    },
    "evaluation": {"episodes": 4, "samples": 2},
    "runtime": {"threads": 1},
    "record": {"mlflow": False},
}


def small_config(**changes: Any) -> TrainConfig:
    """The small config with top-level keys replaced."""
    return TrainConfig.model_validate(CONFIG | changes)


def workspace_at(home: Path) -> Workspace:
    return Workspace(Settings(home=home))


def imitate(session: RunSession) -> None:
    """What remains of the SFT phase."""
    phase = session.config.sft
    while phase is not None and session.next_step <= session.sft_steps:
        start = session.next_step
        stop = min(start + phase.publish_every - 1, session.sft_steps)
        session.publish(stop, session.sft(start, stop))
        session.refresh(session.version)


def learn(session: RunSession, step: int) -> None:
    """One RL step."""
    session.build_batch(step, session.rollout(step))
    session.publish(step, session.update(step))
    session.refresh(session.version)


def run_to_the_end(session: RunSession) -> RunSession:
    """All remaining phases, in the order of the flows."""
    imitate(session)
    for step in range(session.next_step, session.config.steps + 1):
        learn(session, step)
        if session.evaluates_at(step):
            session.evaluate(session.version.ref)
    session.finish(RunStatus.COMPLETED)
    return session


def train(home: Path, config: TrainConfig) -> RunSession:
    return run_to_the_end(open_session(config, workspace_at(home)))
