"""The public cookbook, unmodified and offline, as client of `opentinker serve`: recipes run and learn."""

from statistics import fmean
from typing import Any

import pytest

from tests.forked import Forks
from tests.service.cookbook.workspace import MODEL, Run, Workspace

pytestmark = [pytest.mark.cookbook, pytest.mark.processes, pytest.mark.learning]

ARITHMETIC = {
    "model_name": MODEL,
    "env": "arithmetic",
    "max_tokens": 6,
    "eval_every": 0,
    "loss_fn": "importance_sampling",
    "behavior_if_log_dir_exists": "delete",
}
SMALL = {**ARITHMETIC, "groups_per_batch": 4, "group_size": 4, "max_steps": 3, "save_every": 1}


def arithmetic(python: Forks, workspace: Workspace, name: str, **config: Any) -> Run:
    """A run of `math_rl.train`."""
    return workspace.run(python, "math_rl.train", name, **config)


def test_the_supervised_loop_learns(python: Forks, workspace: Workspace) -> None:
    config = {"batch_size": 8, "max_steps": 12, "learning_rate": 5e-3, "save_every": 4}
    run = workspace.run(python, "sl_loop", "sl", model_name=MODEL, **config)
    nll = run.series("train_mean_nll")
    assert len(nll) == 12
    assert nll[-1] < nll[0] / 2
    assert [saved["name"] for saved in run.checkpoints()] == ["000004", "000008", "final"]


def test_chats_are_learned_on_from_a_checkpoint(python: Forks, workspace: Workspace) -> None:
    config = {"model_name": MODEL, "batch_size": 8, "learning_rate": 5e-3}
    config |= {"eval_every": 0, "lora_rank": 8, "max_steps": 4}
    first = workspace.run(python, "chat_sl.train", "chat", **config)
    start = first.checkpoints()[-1]["state_path"]
    config |= {"load_checkpoint_path": start, "rolling_save_every": 1, "save_every": 2}
    second = workspace.run(python, "chat_sl.train", "chat_on", **config)
    before, after = first.series("train_mean_nll"), second.series("train_mean_nll")
    assert max(after) < before[0]
    assert after[-1] < before[-1]
    assert [saved["name"] for saved in second.checkpoints() if "sampler_path" in saved] == ["000002", "final"]


def test_preferences_are_learned(python: Forks, workspace: Workspace) -> None:
    config = {"model_name": MODEL, "batch_size": 8, "max_steps": 6, "learning_rate": 1e-3}
    run = workspace.run(python, "preference.dpo.train", "dpo", **config)
    loss = run.series("dpo_loss")
    assert loss[0] == pytest.approx(0.6931, abs=1e-3)  # ln 2: sampler and trainer agree
    assert loss[-1] < loss[0] / 2
    assert "test/nll" in run.metrics()[0]
    assert run.checkpoints()[-1]["name"] == "final"


def test_arithmetic_is_learned(python: Forks, workspace: Workspace) -> None:
    config = {"groups_per_batch": 16, "group_size": 8, "max_steps": 14, "learning_rate": 3e-4}
    run = arithmetic(python, workspace, "learned", **ARITHMETIC, **config, save_every=0)
    reward = run.series("env/all/reward/total")
    assert len(reward) == 14
    assert fmean(reward[-6:]) > 1.5 * reward[0] + 0.03, reward
    assert max(map(abs, run.series("optim/kl_sample_train_v1"))) < 0.01  # sampler and trainer agree


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"max_steps_off_policy": 2},
        {"stream_minibatch_config.groups_per_batch": 4, "stream_minibatch_config.num_minibatches": 2},
        {"loss_fn": "ppo", "num_substeps": 2, "compute_post_kl": True},
    ],
    ids=["in_step", "off_policy", "minibatches", "substeps"],
)
def test_arithmetic_runs(
    python: Forks, workspace: Workspace, config: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    run = arithmetic(python, workspace, request.node.callspec.id, **{**SMALL, **config})
    assert len(run.series("env/all/reward/total")) == 3
    saved = run.checkpoints()
    assert saved[-1]["name"] == "final"
    assert all(row["sampler_path"].startswith("tinker://") for row in saved)


def test_a_run_goes_on_from_its_checkpoint(python: Forks, workspace: Workspace) -> None:
    arithmetic(python, workspace, "resumed", **SMALL)
    further = {**SMALL, "max_steps": 5, "behavior_if_log_dir_exists": "resume"}
    run = arithmetic(python, workspace, "resumed", **further)
    steps = [row["step"] for row in run.metrics() if "env/all/reward/total" in row]
    assert steps == [0, 1, 2, 3, 4]


def test_the_loop_of_reinforcement_learning_runs(python: Forks, workspace: Workspace) -> None:
    config = {"batch_size": 4, "group_size": 4, "max_tokens": 12, "max_steps": 3, "save_every": 2}
    config |= {"model_name": MODEL, "loss_fn": "importance_sampling"}
    run = workspace.run(python, "rl_loop", "rl", **config)
    assert len(run.series("reward/total")) == 3
    assert [saved["name"] for saved in run.checkpoints()] == ["000002", "final"]


def test_guessing_over_many_turns_runs(python: Forks, workspace: Workspace) -> None:
    config = {"batch_size": 2, "group_size": 2, "max_tokens": 16, "max_steps": 2, "eval_every": 0}
    config |= {"model_name": MODEL, "renderer_name": "qwen3_disable_thinking"}
    run = workspace.run(python, "multiplayer_rl.guess_number.train", "guess", **config)
    assert len(run.series("env/all/reward/total")) == 2
    assert max(run.series("env/all/turns_per_episode")) > 1
    assert run.checkpoints()[-1]["name"] == "final"


def test_a_loss_that_is_not_served_is_refused_at_once(python: Forks, workspace: Workspace) -> None:
    config = {"model_name": MODEL, "batch_size": 2, "group_size": 2, "max_steps": 1}
    done = workspace.attempt(python, "rl_loop", "refused", **config)
    assert done.returncode == 1
    for said in (
        "record_stability_info: not supported",
        "another loss_fn: cross_entropy, importance_sampling",
    ):
        assert said in done.stdout + done.stderr
