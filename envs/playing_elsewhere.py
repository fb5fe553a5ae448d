"""Plays in a process of its own what it reads from stdin, for `envs.playing.play_elsewhere`."""

import json
import os
import sys
from typing import Any

from envs import multi_playing, playing
from envs.multi import MultiEnvironment
from envs.protocol import Closes
from envs.registry import make_any


def _main() -> None:
    answers: list[dict[str, Any]] = []
    for request in json.load(sys.stdin):
        seeds, max_turns = request["plan"]
        plan = playing.Plan(tuple(seeds), max_turns)
        made = make_any(request["id"], **request["args"])
        try:
            if isinstance(made, MultiEnvironment):
                answers.append({"episodes": multi_playing.written(multi_playing.play(made, plan))})
            else:
                answers.append({"episodes": playing.written(playing.play(made, plan))})
        except playing.BrokenError as violated:
            answers.append({"violated": str(violated)})
        finally:
            if isinstance(made, Closes):
                made.close()
    # environments may print: the answer must be alone on stdout
    json.dump(answers, _answers_to)


if __name__ == "__main__":
    _answers_to = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    with _answers_to:
        _main()
