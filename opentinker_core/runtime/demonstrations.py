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
    return demonstrate(specs(seed, count), settings)


def specs(seed: int, count: int) -> list[EpisodeSpec]:
    """Which training problems are demonstrated."""
    return [
        EpisodeSpec(derive_seed(seed, "demonstration", index), group=index, member=0, draw_seed=0)
        for index in range(count)
    ]


def from_file(path: Path, settings: EpisodeSettings) -> list[Trajectory]:
    """One trajectory a line of a JSONL file with `prompt` and `completion` strings.

    Raises:
        UsageError: the file is missing or empty, or a line is not such an object.
    """
    if not path.is_file():
        raise UsageError(f"sft.data: {str(path)!r} is not a file; accepted: 'environment' or a JSONL file")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"sft.data: {str(path)!r} is not UTF-8 (byte {error.start})") from error
    # Not splitlines(): JSON strings may hold other line separators of Unicode.
    lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not lines:
        raise UsageError(f"sft.data: {str(path)!r} is empty; accepted: one JSON object a line")
    trajectories = []
    for index, (number, line) in enumerate(lines):
        trajectory = _trajectory(index, *_parse(f"{path}:{number}", line), settings)
        if len(trajectory.tokens_T) > settings.max_context:
            raise UsageError(
                f"{path}:{number}: {len(trajectory.tokens_T)} tokens; "
                f"accepted: at most the model's context of {settings.max_context}"
            )
        trajectories.append(trajectory)
    return trajectories


def _parse(place: str, line: str) -> tuple[str, str]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{place}: not JSON: {error}") from error
    prompt, completion = (
        (record.get("prompt"), record.get("completion")) if isinstance(record, dict) else (None, None)
    )
    if not (isinstance(prompt, str) and isinstance(completion, str) and prompt and completion):
        raise UsageError(f"{place}: accepted: an object with non-empty strings 'prompt' and 'completion'")
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
