import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from envs import reasoning_gym_process
from envs.conformance import check_environment, compare_elsewhere
from envs.playing import Plan, play, play_elsewhere
from envs.protocol import Action, Demonstrates, Observation
from envs.reasoning_gym_adapter import WITHOUT_ANSWER, extract_answer
from envs.reasoning_gym_catalog import tasks
from envs.registry import make
from tests.waiting import wait_until

FAST = ("gcd", "knights_knaves", "word_ladder", "ransom_note", "polynomial_multiplication", "list_functions")
EVALUATING = (
    *("n_queens", "binary_matrix", "spiral_matrix", "string_insertion", "puzzle24", "countdown"),
    *("simple_integration", "intermediate_integration", "polynomial_multiplication"),
)
PARTS = 4
"""Into which all tasks are divided, for several processes to share."""
EASIER: dict[str, dict[str, int]] = {
    "futoshiki": {"max_board_size": 5},
    "knight_swap": {"min_pieces": 1, "max_pieces": 1},
    "zebra_puzzles": {"num_people": 3, "num_characteristics": 3},
}
"""Arguments of tasks whose default problems take seconds to find."""
COMPOSITE = {"datasets": [{"name": name, "weight": 1.0, "config": {}} for name in ("gcd", "leg_counting")]}


def answered(task: str, text: str, **args: object) -> tuple[float, dict]:
    environment = make(f"reasoning_gym/{task}", **args)
    environment.reset(1)
    result = environment.step(Action(text))
    return result.reward, result.info


def helper() -> reasoning_gym_process.HelperProcess:
    make("reasoning_gym/gcd").reset(0)
    assert reasoning_gym_process._process is not None
    return reasoning_gym_process._process


def seen_elsewhere(names: list[str]) -> None:
    """Another process, whose helper is another one, plays the same episodes."""
    plan = Plan((0, 12345), 2)
    ids = [f"reasoning_gym/{name}" for name in names]
    args = [EASIER.get(name, {}) for name in names]
    asked = [{"id": id, "args": own, "plan": plan} for id, own in zip(ids, args, strict=True)]
    for id, own, answer in zip(ids, args, play_elsewhere(asked), strict=True):
        compare_elsewhere(play(make(id, **own), plan), answer)


@pytest.mark.parametrize("task", FAST)
def test_tasks_conform(task: str) -> None:
    report = check_environment(f"reasoning_gym/{task}", seeds=3, new_process=False)
    assert report.ok, report


def test_tasks_that_depend_on_hash_order_play_the_same_in_another_process() -> None:
    seen_elsewhere(
        ["isomorphic_strings", "ransom_note", "word_ladder", "polynomial_multiplication", "codeio"]
    )


@pytest.mark.every_task
@pytest.mark.parametrize("part", range(PARTS))
def test_every_task_conforms_and_its_demonstrations_are_right(part: int) -> None:
    names = [name for name in tasks() if name != "composite"][part::PARTS]
    reports = [
        check_environment(f"reasoning_gym/{name}", EASIER.get(name), seeds=2, new_process=False)
        for name in names
    ]
    assert [str(report) for report in reports if not report.ok] == []
    seen_elsewhere(names)
    for name in names:
        environment = make(f"reasoning_gym/{name}", "held_out", **EASIER.get(name, {}))
        assert isinstance(environment, Demonstrates) == (name not in WITHOUT_ANSWER)
        environment.reset(7)
        if isinstance(environment, Demonstrates):
            assert environment.step(environment.demonstration()).reward == 1.0, name


def test_data_that_is_kept_is_that_of_the_arguments() -> None:
    """One after the other and in turn, each time in a helper that knows nothing yet."""
    asked: list[dict[str, Any]] = [{}, {"difficulty": 9}]
    seeds, alone = range(5, 8), []
    for args in asked:
        helper().close()
        environment = make("reasoning_gym/codeio", **args)
        alone.append([environment.reset(seed).text for seed in seeds])
    helper().close()
    environments = [make("reasoning_gym/codeio", **args) for args in asked]
    in_turn = [[environment.reset(seed).text for environment in environments] for seed in seeds]
    assert in_turn == [list(texts) for texts in zip(*alone, strict=True)]
    assert alone[0] != alone[1]


def test_a_mixture_of_tasks_is_a_task_too() -> None:
    environment = make("reasoning_gym/composite", **COMPOSITE)
    for seed in range(4):
        environment.reset(seed)
        assert isinstance(environment, Demonstrates)
        assert environment.step(environment.demonstration()).reward == 1.0


def test_arguments_reach_the_task() -> None:
    question = make("reasoning_gym/leg_counting", min_animals=1, max_animals=1).reset(0).text
    assert question.count(",") <= 1


@pytest.mark.parametrize(
    ("text", "extract", "answer"),
    [
        (" 7\n", "auto", "7"),
        ("so <answer>6</answer> no, <answer> 7 </answer>.", "auto", "7"),
        ("1 2\n3 4", "auto", "1 2\n3 4"),
        ("<answer>1 2\n3 4</answer>", "tag", "1 2\n3 4"),
        ("7", "tag", None),
        ("think\n\n 7 \n\n", "last_line", "7"),
        ("", "last_line", None),
        ("<answer>7</answer>", "whole", "<answer>7</answer>"),
    ],
)
def test_the_answer_is_extracted(text: str, extract: str, answer: str | None) -> None:
    assert extract_answer(text, extract) == answer  # type: ignore[arg-type]


def test_the_question_asks_for_a_tag_only_if_one_is_needed() -> None:
    def ends(observation: Observation) -> bool:
        return observation.text.endswith("<answer> and </answer>.\n")

    assert ends(make("reasoning_gym/gcd", extract="tag").reset(0))
    assert not ends(make("reasoning_gym/gcd").reset(0))


def test_partial_scores_can_be_turned_off() -> None:
    assert answered("palindrome_generation", "x")[0] > 0
    assert answered("palindrome_generation", "x", partial=False)[0] == 0


def test_an_answer_that_the_scorer_cannot_read_is_worth_nothing() -> None:
    reward, info = answered("prime_factorization", "no idea")
    assert (reward, info["scorer"]) == (0.0, "ValueError")


def test_a_task_whose_own_scorer_takes_anything_is_scored_exactly() -> None:
    environment = make("reasoning_gym/game_of_life_halting")
    environment.reset(1)
    assert isinstance(environment, Demonstrates)
    right = environment.demonstration().text
    for text, reward in ((right, 1.0), ({"True": "False", "False": "True"}[right], 0.0), ("banana", 0.0)):
        assert answered("game_of_life_halting", text)[0] == reward


@pytest.mark.parametrize("task", EVALUATING)
def test_what_the_model_wrote_is_never_run(task: str, tmp_path: Path) -> None:
    target = tmp_path / "written"
    pid = helper()._popen.pid
    reward, _ = answered(task, f"__import__('pathlib').Path({str(target)!r}).touch()")
    assert reward < 0.1
    assert not target.exists()
    assert helper()._popen.pid == pid


def test_a_scorer_that_takes_for_ever_is_killed_and_the_next_episode_plays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("envs.reasoning_gym_adapter._SCORE_SECONDS", 1.0)
    start = time.monotonic()
    reward, info = answered("coin_flip", "1e99999999")
    assert (reward, info["scorer"]) == (0.0, "timeout")
    assert time.monotonic() - start < 10
    assert answered("gcd", "x")[0] == 0.0


def test_an_episode_goes_on_after_its_helper_was_killed() -> None:
    environment = make("reasoning_gym/gcd")
    environment.reset(4)
    os.kill(helper()._popen.pid, signal.SIGKILL)
    assert isinstance(environment, Demonstrates)
    assert environment.step(environment.demonstration()).reward == 1.0


def test_the_helper_ends_with_its_process() -> None:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:  # a child that plays, tells the pid of its own helper, and is killed
        own = helper()._popen.pid
        os.write(write, str(own).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    grandchild = int(os.read(read, 32))
    assert grandchild != helper()._popen.pid

    def ended() -> bool:
        if not (status := Path(f"/proc/{grandchild}/stat")).exists():
            return True
        return status.read_text().rpartition(")")[2].split()[0] == "Z"

    wait_until(ended, "the end of the helper")


def test_info_is_json_and_names_problem_answer_and_correctness() -> None:
    _, info = answered("gcd", "no idea")
    assert {"problem", "answer", "correct", "given"} <= json.loads(json.dumps(info)).keys()


def test_a_split_without_problems_is_refused() -> None:
    with pytest.raises(ValueError, match="no problem of the split 'held_out' came"):
        make("reasoning_gym/gcd", "held_out", held_out=0.0).reset(0)
