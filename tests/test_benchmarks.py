"""Benchmarks are run by their path, from anywhere; what they let be sampled and compared."""

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.rollouts import TURNS, Rollouts, Text, one_by_one
from tests.forked import Forks, forks

FOLDER = Path(__file__).parents[1] / "benchmarks"
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.py") if '__name__ == "__main__"' in path.read_text())


LIBRARIES = (
    "torch",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint",
    "torch.nn.attention.flex_attention",
    "torch._dynamo",
    "accelerate",
    "huggingface_hub.hf_api",
    "mlflow",
    "PIL.Image",
    "scipy.optimize",
    "sqlalchemy",
    "tinker",
    "tokenizers",
)
"""Of those that scripts import, those that do not import transformers."""


@pytest.fixture(scope="module")
def python() -> Iterator[Forks]:
    with forks(*LIBRARIES, environment={**os.environ, "OMP_NUM_THREADS": "1"}) as python:
        yield python


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_benchmark_runs_by_its_path(script: str, python: Forks, tmp_path: Path) -> None:
    """And transformers does not take `kernels.py` beside it for the package `kernels`, and runs it."""
    watched = ("transformers", "benchmarks.kernel_cases")
    done = python.run(FOLDER / script, "--help", directory=tmp_path, watched=watched)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: {script}")
    assert ("benchmarks.kernel_cases" in done.imported) == (script == "kernels.py")


def _json_of(python: Forks, script: str, *options: str) -> dict[str, Any]:
    done = python.run(FOLDER / script, "--json", "--turns", "1", *options)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_handing_over_an_adapter_is_compared_with_a_full_model(python: Forks) -> None:
    result = _json_of(python, "refresh.py", "--models", "tiny")
    measured = result["measured"]
    assert measured["tiny local: adapter"]["value"] < measured["tiny local: full"]["value"] / 10
    assert result["ratios"].keys() == {
        "adapter_vs_full_tiny",
        "adapter_vs_full_saved_tiny",
        "bytes_adapter_vs_full_tiny",
    }


def test_sampling_without_vllm_leaves_its_ratios_out(python: Forks) -> None:
    sizes = ("--adapters", "2", "--longest", "3", "--exchanges", "2")
    result = _json_of(python, "sampling.py", "--model", "tiny", *sizes)
    assert result["ratios"].keys() == {"native_vs_generate", "native_vs_generate_2", "multiturn_reuse"}
    assert all(ratio > 0 for ratio in result["ratios"].values())


def test_missing_vllm_is_told_with_the_way_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.sampling_peers import vllm_is_missing

    monkeypatch.setenv("OPENTINKER_HOME", str(tmp_path))
    assert "`opentinker vllm setup`" in (vllm_is_missing() or "")


@pytest.mark.parametrize("count", [1, 8, 64])
def test_group_rollouts_are_64_completions_shared_evenly_by_the_adapters(count: int) -> None:
    rollouts = Rollouts(Text(np.arange(1000), (0,)))
    requests = rollouts.groups([f"p{index}@1" for index in range(count)], longest=9)
    lengths = [[1 + seed % 9 for seed in request.seeds] for request in requests]
    alone = one_by_one(requests, lengths)
    assert Counter(request.version for request in alone) == {f"p{i}@1": 64 // count for i in range(count)}
    assert len({request.prompt_tokens for request in alone}) == 8
    assert [request.params.max_tokens for request in alone] == [1 + request.seeds[0] % 9 for request in alone]


def test_an_episodes_prompts_grow_by_what_was_said_and_told() -> None:
    episode = Rollouts(Text(np.arange(1000), ())).episodes("p@1")[0]
    actions = [[turn] * 3 for turn in range(TURNS)]
    prompts = [episode.request(turn, actions).prompt_tokens for turn in range(TURNS)]
    for turn in range(1, TURNS):
        said = (*prompts[turn - 1], *actions[turn - 1], *episode.observations[turn])
        assert prompts[turn] == said


def test_tenants_of_a_server_are_compared_with_one_after_the_other(python: Forks) -> None:
    result = _json_of(python, "service.py", "--tenants", "2", "--steps", "2", "--many", "3", "--no-start")
    assert set(result["ratios"]) == {"tenants_2_vs_serial"}
    assert all(one["value"] > 0 for one in result["measured"].values())
