"""The canary passes what is right and catches every wrong thing a sampler may serve, after one small step."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from opentinker_core.config.schema import CanaryConfig, LoRAConfig, OptimizerConfig
from opentinker_core.errors import UsageError
from opentinker_core.lora.adapter import Adapter
from opentinker_core.objectives.importance_sampling import importance_sampling
from opentinker_core.objectives.normalizers import token_scales
from opentinker_core.sampling.canary import Canary, CanaryError
from opentinker_core.sampling.protocol import BASE, SampledSequence, Sampler, SampleRequest, SamplingParams
from opentinker_core.trajectories.types import Datum
from tests.tiny import TinyEngine, requests, rl_datums

LORA = LoRAConfig(rank=8, alpha=16.0)


class Run:
    """A policy that is trained by small RL steps; `served` is the sampler that its canary looks at."""

    def __init__(self, engine: TinyEngine, policy: str, rate: float, seed: int = 1) -> None:
        self.engine, self.policy, self.rate = engine, policy, rate
        engine.trainer.create(policy, LORA, seed)
        self.version = engine.publish(policy)

    def step(self) -> str:
        engine = self.engine
        asked = requests(engine, self.version, SamplingParams(max_tokens=4))
        datums = rl_datums(asked, engine.sampler.sample(asked))
        scales = token_scales("tokens", datums, 4)  # type: ignore[arg-type]
        engine.trainer.forward_backward(self.policy, datums, importance_sampling, scales)
        engine.trainer.optim_step(self.policy, OptimizerConfig(learning_rate=self.rate))
        self.version = engine.publish(self.policy)
        return self.version

    def score(self, version: str, datums: Sequence[Datum]) -> list[np.ndarray]:
        return self.engine.trainer.forward(None if version == BASE else self.policy, datums)

    def canary(self, sampler: Sampler, **options: object) -> Canary:
        config = CanaryConfig.model_validate(options)
        return Canary(config, sampler, self.score, self.engine.tokenizer)


@pytest.fixture
def engine(tiny_home: Path, tmp_path: Path) -> TinyEngine:
    return TinyEngine.open(tiny_home, tmp_path)


class Served:
    """A sampler that serves, for the version asked for and for the base, what it was told to."""

    def __init__(self, engine: TinyEngine, instead: dict[str, str] | None = None) -> None:
        self.engine, self.instead, self.asked = engine, instead or {}, 0

    def refresh(self, version: str, snapshot_uri: str, digest: str) -> None:
        self.engine.sampler.refresh(version, snapshot_uri, digest)

    def release(self, version: str) -> None:
        pass

    def sample(self, requests: Sequence[SampleRequest]) -> list[list[SampledSequence]]:
        wanted = [replace(r, version=self.instead.get(r.version, r.version)) for r in requests]
        self.asked += sum(len(r.prompt_tokens) + len(r.seeds) * r.params.max_tokens for r in requests)
        return self.engine.sampler.sample(wanted)


def published(run: Run, change: Callable[[Adapter], None]) -> str:
    """A version that holds the weights of `run` after a change that its trainer does not have."""
    state = run.engine.state(run.policy)
    before = state.adapter.row_P.clone()
    with torch.no_grad():
        change(state.adapter)
        version = run.engine.publish(run.policy)
        state.adapter.row_P.copy_(before)
    return version


def doubled(adapter: Adapter) -> None:
    for factors in adapter.factors.values():
        factors.Bt_RN.mul_(2)


def without(layer: str) -> Callable[[Adapter], None]:
    def zero(adapter: Adapter) -> None:
        adapter.factors[next(name for name in adapter.factors if name.endswith(layer))].Bt_RN.zero_()

    return zero


@pytest.mark.parametrize("rate", [1e-4, 5e-4, 1e-2])
def test_what_is_right_passes_at_every_step(engine: TinyEngine, rate: float) -> None:
    run = Run(engine, "p", rate)
    canary = run.canary(engine.sampler)
    canary.check(run.version)
    for _ in range(8):
        metrics = canary.check(run.step())
        assert metrics["sampler/canary_alarm"] == 0
        assert 0 < metrics["sampler/canary_mean"] <= metrics["sampler/canary_max"] < 2e-5


@pytest.mark.parametrize("rate", [1e-4, 5e-4])
@pytest.mark.parametrize("steps", [1, 3])
def test_every_planted_fault_is_caught(engine: TinyEngine, rate: float, steps: int) -> None:
    run, other = Run(engine, "p", rate), Run(engine, "q", rate, seed=2)
    for _ in range(steps):
        before, now, theirs = run.version, run.step(), other.step()
    layers = ["layers.0.self_attn.v_proj", "layers.0.mlp.down_proj", "layers.1.self_attn.o_proj"]
    faults = {
        "not loaded": {now: BASE},
        "another policy's": {now: theirs},
        "the version before": {now: before},
        "scale doubled": {now: published(run, doubled)},
        "base rows with the adapter": {BASE: now},
        **{f"{layer} zeroed": {now: published(run, without(layer))} for layer in layers},
    }
    caught = {}
    for name, instead in faults.items():
        with pytest.raises(CanaryError) as error:
            run.canary(Served(engine, instead)).check(now)
        caught[name] = str(error.value)
    assert f"disagree about {now}: its rows" in caught["the version before"]
    assert "rows of the base model" in caught["base rows with the adapter"]
    assert run.canary(Served(engine)).check(now)["sampler/canary_alarm"] == 0


@pytest.mark.parametrize(
    ("fault", "words"),
    [("before", "the version before"), ("base", "the base model"), ("doubled", "another scale")],
)
def test_it_says_what_seems_to_be_served_instead(engine: TinyEngine, fault: str, words: str) -> None:
    run, served = Run(engine, "p", 5e-4), Served(engine)
    run.step()
    canary = run.canary(served)
    canary.check(run.version)
    before, now = run.version, run.step()
    served.instead = {now: {"before": before, "base": BASE, "doubled": published(run, doubled)}[fault]}
    with pytest.raises(CanaryError, match=f"nearer to those of .*{words}"):
        canary.check(now)


class Rounding(Served):
    """A sampler that rounds as bfloat16 does on both sides: an error of 0.05 a token."""

    def __init__(self, engine: TinyEngine, instead: dict[str, str] | None = None, seed: int = 0) -> None:
        super().__init__(engine, instead)
        self.generator = np.random.default_rng(seed)

    def sample(self, requests: Sequence[SampleRequest]) -> list[list[SampledSequence]]:
        def rounded(one: SampledSequence) -> SampledSequence:
            error_T = self.generator.normal(0, 0.05, len(one.logprobs)).astype(np.float32)
            return replace(one, logprobs=one.logprobs + error_T)

        return [[rounded(one) for one in answer] for answer in super().sample(requests)]


def test_with_coarse_rounding_it_is_quiet_and_still_tells_policies_apart(engine: TinyEngine) -> None:
    run, other = Run(engine, "p", 5e-3), Run(engine, "q", 5e-3, seed=2)
    for _ in range(6):
        before, now, theirs = run.version, run.step(), other.step()
    faults = [{now: BASE}, {now: theirs}, {now: published(run, doubled)}, {BASE: now}]
    coarse = {"threshold": 0.15, "prompts": ["1+1=", "12+34=", "7*8+9-1=", "5-2=", "9*9=", "(3+4)*2="]}
    for seed in range(30):
        right = run.canary(Rounding(engine, seed=seed), **coarse)
        metrics = right.check(now)
        assert 0.02 < metrics["sampler/canary_mean"] < 0.1
        for instead in faults:
            with pytest.raises(CanaryError):
                run.canary(Rounding(engine, instead, seed), **coarse).check(now)
    # One small step changes less than such rounding: this much it cannot see, nor does it make it up.
    small = Run(engine, "small", 5e-5)
    before = small.version
    canary = small.canary(Rounding(engine), **coarse)
    canary.check(before)
    for _ in range(10):
        assert canary.check(small.step())["sampler/canary_alarm"] == 0


def test_a_warning_goes_on_and_is_measured(engine: TinyEngine, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(engine, "p", 5e-4)
    now = run.step()
    with caplog.at_level(logging.WARNING):
        metrics = run.canary(Served(engine, {now: BASE}), action="warn").check(now)
    assert metrics["sampler/canary_alarm"] == 1
    assert metrics["sampler/canary_max"] > metrics["sampler/canary_mean"] > 1e-4
    assert f"disagree about {now}" in caplog.text


def test_it_takes_few_tokens_and_the_trainer_scores_the_base_once(engine: TinyEngine) -> None:
    run, served, scored = Run(engine, "p", 5e-4), Served(engine), list[str]()

    def score(version: str, datums: Sequence[Datum]) -> list[np.ndarray]:
        scored.append(version)
        return run.score(version, datums)

    canary = Canary(CanaryConfig(prompts=("1+1=", "2+2=")), served, score, engine.tokenizer)
    canary.check(first := run.version)
    assert served.asked == 4 * (4 + 8)  # two prompts, of the version and of the base; a token a seed
    canary.check(second := run.step())
    assert scored == [first, BASE, second]


def test_a_prompt_without_tokens_is_refused(engine: TinyEngine) -> None:
    with pytest.raises(UsageError, match=r"canary.prompts: '' has no tokens"):
        Run(engine, "p", 5e-4).canary(engine.sampler, prompts=["1+1=", ""])
