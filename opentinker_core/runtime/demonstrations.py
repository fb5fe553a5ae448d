"""Demonstrations for supervised training, as trajectories: of the environment, or of a JSONL file."""

import json
from pathlib import Path

import numpy as np

from envs.protocol import Action, Observation
from opentinker_core.agents.episodes import AGENT, EpisodeSettings, EpisodeSpec, demonstrate
from opentinker_core.errors import UsageError
from opentinker_core.seeds import derive_seed
from opentinker_core.trajectories.fsm import TrajectoryBuilder
from opentinker_core.trajectories.types import EndReason, StopReason, Trajectory


def from_environment(settings: EpisodeSettings, seed: int, count: int) -> list[Trajectory]:
    """`count` demonstrations of the environment's training problems."""
    specs = [
        EpisodeSpec(derive_seed(seed, "demonstration", index), group=index, member=0, draw_seed=0)
        for index in range(count)
    ]
    return demonstrate(specs, settings)


def from_file(path: Path, settings: EpisodeSettings) -> list[Trajectory]:
    """One trajectory a line of a JSONL file with `prompt` and `completion` strings.

    Raises:
        UsageError: the file is missing or empty, or a line is not such an object.
    """
    if not path.is_file():
        raise UsageError(f"sft.data: {str(path)!r} is not a file; accepted: 'environment' or a JSONL file")
    lines = [line for line in path.read_text().splitlines() if line.strip()]
    if not lines:
        raise UsageError(f"sft.data: {str(path)!r} is empty; accepted: one JSON object a line")
    return [_trajectory(index, *_parse(path, index, line), settings) for index, line in enumerate(lines)]


def _parse(path: Path, index: int, line: str) -> tuple[str, str]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise UsageError(f"{path}:{index + 1}: not JSON: {error.msg}") from error
    prompt, completion = (
        (record.get("prompt"), record.get("completion")) if isinstance(record, dict) else (None, None)
    )
    if not (isinstance(prompt, str) and isinstance(completion, str) and prompt and completion):
        raise UsageError(
            f"{path}:{index + 1}: accepted: an object with non-empty strings 'prompt' and 'completion'"
        )
    return prompt, completion


def _trajectory(index: int, prompt: str, completion: str, settings: EpisodeSettings) -> Trajectory:
    builder = TrajectoryBuilder(
        trajectory_id=f"s{settings.step:05d}-g{index}-m0",
        agent=AGENT,
        environment=settings.environment,
        seed=index,
        group=index,
    )
    builder.observed(settings.renderer.initial(Observation.user(prompt)))
    tokens = np.array(settings.renderer.demonstration(Action(completion)), np.int32)
    builder.generated(tokens, np.zeros(len(tokens), np.float32), "demonstration", StopReason.STOP)
    return builder.terminate(EndReason.DONE, info={"prompt": prompt, "actions": [completion]})


def batch_rows(seed: int, step: int, batch_size: int, count: int) -> list[int]:
    """Which of `count` demonstrations step `step` (1, 2, ...) trains on: shuffled epochs, drawn by seed."""
    rows = []
    for drawn in range((step - 1) * batch_size, step * batch_size):
        epoch, position = divmod(drawn, count)
        order = np.random.Generator(np.random.Philox(derive_seed(seed, "epoch", epoch))).permutation(count)
        rows.append(int(order[position]))
    return rows
