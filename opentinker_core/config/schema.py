"""Configs of training and evaluation runs: frozen, unknown keys refused, no heavy imports.

A training config has up to two phases, `sft` and `rl`; which of them are present says what the
run does (SFT, RL, or SFT and then RL of the same policy).
"""

import math
import re
from enum import StrEnum
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt, model_validator

from opentinker_core.agents.coordination.protocol import CoordinationProtocol
from opentinker_core.config.common import Frozen as Frozen
from opentinker_core.config.common import Name as Name
from opentinker_core.config.common import NonNegativeFloat as NonNegativeFloat
from opentinker_core.config.common import Probability as Probability
from opentinker_core.config.credit import Advantage as Advantage
from opentinker_core.config.credit import CreditConfig as CreditConfig
from opentinker_core.config.episodes import EpisodesConfig as EpisodesConfig
from opentinker_core.config.league import OpponentConfig
from opentinker_core.config.tools import ToolsConfig as ToolsConfig


def layer_pattern(pattern: str) -> re.Pattern[str]:
    """What a key of `rank_pattern` or `alpha_pattern` matches: the end of a module's name, from a dot on.

    The rule is PEFT's (`peft.utils.other.get_pattern_key`).
    """
    return re.compile(rf"(.*\.)?({pattern})$")


def _pattern(value: str) -> str:
    try:
        re.compile(value)
        layer_pattern(value)
    except re.error as error:
        raise ValueError(
            f"{value!r} is no regular expression ({error}); accepted: ends of module names, or "
            "regular expressions for them"
        ) from error
    return value


Value = TypeVar("Value")


def _sorted(patterns: dict[str, Value]) -> dict[str, Value]:
    return dict(sorted(patterns.items()))


Rank = Annotated[int, Field(ge=1, le=512)]
Alpha = Annotated[float, Field(gt=0, le=1e6)]
Pattern = Annotated[str, AfterValidator(_pattern)]


class LoRAConfig(Frozen):
    """The adapter of a policy; the words are PEFT's."""

    rank: Rank = 8
    alpha: Alpha = 16.0
    target_modules: Literal["all-linear"] | Annotated[tuple[str, ...], Field(min_length=1)] = "all-linear"
    """`all-linear`: every linear layer of the transformer blocks, not the head; or suffixes of
    module names, `lm_head` among them where the head is to be trained too."""
    rank_pattern: Annotated[dict[Pattern, Rank], AfterValidator(_sorted)] = Field(default_factory=dict)
    """Ranks of single layers, by suffixes of module names or regular expressions for them. Of several
    that match a layer the first in alphabetical order counts, as in a directory that PEFT wrote."""
    alpha_pattern: Annotated[dict[Pattern, Alpha], AfterValidator(_sorted)] = Field(default_factory=dict)
    """Alphas of single layers, likewise."""
    use_rslora: bool = False
    """Scale updates by alpha / sqrt(rank) instead of alpha / rank (rsLoRA, arXiv:2312.03732)."""


class PolicyConfig(Frozen):
    """Which policy a run trains, and from which state."""

    name: Name
    base_model: str = "smollm2-135m"
    """A bundled model's name, a hub id, or the path of a local Hugging Face directory."""
    lora: LoRAConfig = LoRAConfig()
    start: Annotated[str, Field(coerce_numbers_to_str=True)] = "base"
    """`base`: a fresh adapter; else a version to go on from: `latest`, `best`, a number, or
    another policy's `name@version` (a fork)."""


class EnvironmentConfig(Frozen):
    """An environment by id (`arithmetic`, `reasoning_gym/leg_counting`) and its arguments."""

    id: str
    args: dict[str, Any] = Field(default_factory=dict)


class SamplingConfig(Frozen):
    """How tokens are drawn. `top_p`, `top_k` and `min_p` truncate the distribution that logprobs refer to."""

    max_tokens: PositiveInt = 64
    temperature: NonNegativeFloat = 1.0
    top_p: Probability = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    """0: no limit."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """0: no limit; else tokens less likely than this share of the likeliest one are dropped."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    render: Literal["plain", "chat"] = "plain"
    """`chat` renders observations with the model's chat template; `plain` encodes them as text."""


class OptimizerConfig(Frozen):
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101); applied anew at each step."""

    learning_rate: PositiveFloat = 5e-4
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    grad_clip_norm: NonNegativeFloat = 1.0
    """0: no clipping."""


class PhaseOptimizerConfig(OptimizerConfig):
    """The optimizer of a phase, whose learning rate may change from step to step."""

    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: keep the rate, or lower it towards 0 at the end of the phase, along a line or half
    a cosine (Loshchilov and Hutter, arXiv:1608.03983)."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps in which the rate rises to `learning_rate` along a line."""

    def at(self, step: int, steps: int) -> OptimizerConfig:
        """The optimizer of `step` of a phase of `steps`, counted from 1; its rate is above 0."""
        share = step / self.warmup_steps if step <= self.warmup_steps else self._kept(step, steps)
        fixed = {name: getattr(self, name) for name in OptimizerConfig.model_fields}
        return OptimizerConfig(**fixed | {"learning_rate": self.learning_rate * share})

    def _kept(self, step: int, steps: int) -> float:
        """The share of the rate at a step after the warm-up."""
        past = (step - self.warmup_steps - 1) / (steps - self.warmup_steps)
        if self.schedule == "linear":
            return 1 - past
        return (1 + math.cos(math.pi * past)) / 2 if self.schedule == "cosine" else 1.0

    def within(self, steps: int) -> None:
        """Raise `ValueError` if the warm-up takes the whole of a phase of `steps`."""
        if self.warmup_steps >= steps:
            raise ValueError(
                f"optimizer.warmup_steps is {self.warmup_steps}; accepted: below the phase's {steps} steps"
            )


class Normalizer(StrEnum):
    """The one divisor of a summed loss, computed over the global batch."""

    NONE = "none"
    """Keep the sum."""
    TOKENS = "tokens"
    """Number of weighted tokens (token mean, DAPO)."""
    SEQUENCES = "sequences"
    """Mean over trajectories of their token means (original GRPO; biased by length)."""
    CONSTANT = "constant"
    """Trajectories times the sampling limit `max_tokens` (Dr. GRPO)."""


class CorrectionKind(StrEnum):
    """What becomes of importance weights out of bounds."""

    NONE = "none"
    """No correction: the objective's own ratio is to the sampler."""
    TRUNCATE = "truncate"
    """They are set to the nearer bound (truncated importance sampling)."""
    MASK = "mask"
    """They are set to zero: these tokens or sequences give no gradient."""


class CorrectionLevel(StrEnum):
    """What has one importance weight."""

    TOKEN = "token"  # noqa: S105 - no password
    SEQUENCE = "sequence"
    """A trajectory: the product over its trained tokens."""
    GEOMETRIC = "geometric"
    """A trajectory: the geometric mean over its trained tokens."""


_BOUNDS = {
    (CorrectionKind.TRUNCATE, CorrectionLevel.TOKEN): (0.0, 2.0),
    (CorrectionKind.TRUNCATE, CorrectionLevel.SEQUENCE): (0.0, 5.0),
    (CorrectionKind.TRUNCATE, CorrectionLevel.GEOMETRIC): (0.0, 1.01),
    (CorrectionKind.MASK, CorrectionLevel.GEOMETRIC): (0.99, 1.01),
}


class CorrectionConfig(Frozen):
    """How the loss is corrected for trainer and sampler not being quite the same distribution.

    Its weights are pi / mu, trainer over sampler, within bounds; see docs/objectives.md.
    """

    kind: CorrectionKind = CorrectionKind.NONE
    level: CorrectionLevel = CorrectionLevel.TOKEN
    low: NonNegativeFloat | None = None
    """None: 0 where weights are truncated; masked, 0.5 (0.99 for a geometric mean)."""
    high: PositiveFloat | None = None
    """None: 2 (truncated sequences 5; geometric means 1.01)."""

    @model_validator(mode="after")
    def _ordered(self) -> "CorrectionConfig":
        low, high = self.bounds
        if low >= high:
            raise ValueError(f"the bounds are low {low:g} and high {high:g}; accepted: low below high")
        return self

    @property
    def bounds(self) -> tuple[float, float]:
        """`low` and `high`, as given or by default; without a correction, what metrics call out of bounds."""
        low, high = _BOUNDS.get((self.kind, self.level), (0.5, 2.0))
        return low if self.low is None else self.low, high if self.high is None else self.high


class ObjectiveConfig(Frozen):
    """The RL loss: `importance_sampling` or `ppo`, with the KL penalty to a reference policy."""

    name: Literal["importance_sampling", "ppo"] = "ppo"
    clip_low: NonNegativeFloat = 0.2
    clip_high: NonNegativeFloat = 0.28
    correction: CorrectionConfig = CorrectionConfig()
    kl_coefficient: NonNegativeFloat = 0.0
    kl_reference: Literal["base", "start"] = "base"
    """Whom the penalty draws towards: the base model, or the version that the RL phase began with."""
    normalizer: Normalizer = Normalizer.TOKENS

    @model_validator(mode="after")
    def _draws(self) -> "ObjectiveConfig":
        if self.kl_reference != "base" and self.kl_coefficient == 0:
            raise ValueError(
                f"kl_reference is {self.kl_reference!r} and kl_coefficient 0; "
                "accepted: a kl_coefficient above 0, without which there is no penalty"
            )
        return self

    @property
    def needs_start(self) -> bool:
        """Whether the version that the RL phase began with is needed until its end."""
        return self.kl_reference == "start"


class SFTPhase(Frozen):
    """Supervised fine-tuning on demonstrations of the environment or of a JSONL file."""

    steps: PositiveInt
    batch_size: PositiveInt = 16
    data: str = "environment"
    """`environment`: demonstrations of the environment's training problems; else the path of a
    JSONL file with `prompt` and `completion` strings."""
    examples: PositiveInt = 256
    """Demonstrations made of the environment; with a file, all of its lines are used."""
    optimizer: PhaseOptimizerConfig = PhaseOptimizerConfig()
    normalizer: Normalizer = Normalizer.TOKENS
    publish_every: PositiveInt = 25
    """Steps between published versions; a killed run goes on from the last."""

    @model_validator(mode="after")
    def _warms_up(self) -> "SFTPhase":
        self.optimizer.within(self.steps)
        return self


class RLPhase(Frozen):
    """On-policy reinforcement learning: each step samples `groups` x `group_size` episodes."""

    steps: PositiveInt
    groups: PositiveInt = 8
    group_size: PositiveInt = 8
    sampling: SamplingConfig = SamplingConfig()
    advantage: Advantage = Advantage.GRPO
    credit: CreditConfig = CreditConfig()
    """How the rewards of turns become advantages (docs/credit.md)."""
    objective: ObjectiveConfig = ObjectiveConfig()
    optimizer: PhaseOptimizerConfig = PhaseOptimizerConfig()
    max_turns: PositiveInt = 8
    shuffle_rewards: bool = False
    """Negative control: permute the rewards of each step's episodes; nothing should be learned."""

    @model_validator(mode="after")
    def _samples(self) -> "RLPhase":
        if self.sampling.temperature == 0:
            raise ValueError("sampling.temperature is 0 (greedy); accepted: above 0, RL learns from samples")
        self.optimizer.within(self.steps)
        return self


class JointPart(Frozen):
    """What the run of one policy knows of the others that it plays with (see `config.agents`)."""

    name: Name
    """Of the joint run."""
    joint_id: str = ""
    """Given when it starts."""
    members: tuple[Name, ...]
    """The policies that are trained."""
    protocol: CoordinationProtocol
    opponents: dict[Name, OpponentConfig] = Field(default_factory=dict)
    check_every: PositiveInt = 1


class EvaluationConfig(Frozen):
    """Held-out evaluation, before the first and after the last step, and every `every` steps."""

    every: Annotated[int, Field(ge=0)] = 0
    """0: only before and after training."""
    episodes: PositiveInt = 64
    """Number of held-out problems."""
    samples: PositiveInt = 4
    """Samples a problem."""
    sampling: SamplingConfig | None = None
    """None: as in the `rl` phase."""
    environment: EnvironmentConfig | None = None
    """An environment for one agent; None: the run's own."""


class VLLMConfig(Frozen):
    """vLLM's servers, for `runtime.sampler: vllm` (docs/vllm.md)."""

    urls: tuple[Annotated[str, Field(pattern=r"^https?://")], ...] = ()
    """Servers that run already, as started by `opentinker vllm up`; none: servers of the run's own."""
    endpoints: Annotated[int, Field(ge=1, le=64)] = 1
    """Servers to start."""
    max_loras: Annotated[int, Field(ge=0, le=256)] = 8
    """Adapters that a batch may use at once, the zero adapter of base rows included; 0: base model only."""
    max_lora_rank: Rank = 16
    """The largest rank of an adapter. Each row pays for it, whatever its adapter's own rank."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """`auto`: as the trainer."""
    max_model_len: Annotated[int, Field(ge=0)] = 0
    """Tokens of prompt and completion; 0: the model's context."""
    gpu_memory: Probability = 0.4
    """Share of each GPU's memory; the trainer is there too."""
    cpu_kv_cache_gb: PositiveInt = 1
    """On CPU, memory for keys and values of each server, in GiB."""
    threads: Annotated[int, Field(ge=0, le=1024)] = 0
    """On CPU, threads of each server; 0: the cores, or `OMP_NUM_THREADS`, divided between the servers."""
    max_concurrent: Annotated[int, Field(ge=1, le=4096)] = 256
    """Completions that are asked for at once."""
    request_timeout_s: PositiveFloat = 600.0
    """Time for one completion, after which it is asked for again, elsewhere if there is an elsewhere."""
    startup_timeout_s: PositiveFloat = 600.0
    """Time for a server to answer, at first and after it crashed."""
    arguments: tuple[str, ...] = ()
    """Further arguments of vLLM's server, such as `--tensor-parallel-size=2`."""


class RuntimeConfig(Frozen):
    """Where and how the model runs."""

    url: Annotated[str, Field(pattern=r"^https?://\S+$")] | None = None
    """A service that trains and samples instead (`opentinker serve`), by the Tinker API, with the key in
    TINKER_API_KEY; what follows is then the service's to decide."""
    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    threads: Annotated[int, Field(ge=0, le=1024)] = 0
    """CPU threads of torch; 0: the number of physical cores."""
    micro_batch_tokens: PositiveInt = 4096
    """Tokens, padding included, that go through the model at once."""
    share_prefix: bool = True
    """Run the common prompt of a group once in training; changes the speed, not the gradient."""
    pack: bool = False
    """Put several sequences in a row, with block-diagonal attention, instead of padding each."""
    gradient_checkpointing: bool = False
    """Keep only the inputs of the model's blocks in training and run each block again in the backward
    pass: less memory, a third more time, the same gradient to the bit."""
    adapter_slots: Annotated[int, Field(ge=1, le=1024)] = 16
    """Adapters of one rank bucket that a batch may use at once; more policies than that take turns."""
    policy_memory_gb: PositiveFloat = 4.0
    """Memory for policies' training states; those used least recently wait on local disk."""
    packed_weights: bool = True
    """Let the native sampler keep a second copy of the weights, on a CPU, in the order that is fastest."""
    kv_memory_gb: PositiveFloat = 2.0
    """GB for keys and values of the sequences that the native sampler decodes; others wait."""
    prefix_memory_gb: NonNegativeFloat = 0.5
    """GB for keys and values of prompts that were seen, for those that begin alike."""
    snapshot_memory_gb: PositiveFloat = 1.0
    """Memory for the adapters of sampled versions; others are read from their snapshots again."""
    sampler: Literal["native", "vllm"] = "native"
    """What generates tokens: the runtime's own model, or vLLM's servers."""
    vllm: VLLMConfig = VLLMConfig()


class RecordConfig(Frozen):
    """What is recorded of a run beside its lineage, which is always complete."""

    mlflow: bool = True
    trace_episodes: Annotated[int, Field(ge=0)] = 1
    """Episodes a step that are recorded as MLflow traces."""
    artifact_every: PositiveInt = 10
    """Steps between updates of the Prefect artifacts (table of metrics, sampled episodes)."""
    keep_checkpoints: PositiveInt = 2
    """Checkpoints kept a run; sampler snapshots are always kept."""


class CanaryConfig(Frozen):
    """A check after a refresh: sampler and trainer must agree about a few sampled tokens."""

    enabled: bool = True
    every: PositiveInt = 1
    """Refreshes from one check to the next; the first is always checked."""
    threshold: PositiveFloat | None = None
    """Mean |difference of logprobs| for an alarm; None: what fits the sampler and its number format."""
    action: Literal["raise", "warn"] = "raise"
    prompts: Annotated[tuple[str, ...], Field(min_length=1)] = (
        "1+1=",
        "The",
        "def f(",
        "Yes,",
        "2024-",
    )
    """What tokens are sampled after. Prompts like those of the run, and more of them, show smaller
    differences, and cost more."""


class RunConfig(Frozen):
    """What a training run of one policy and a joint run of several both have."""

    name: Name
    seed: Annotated[int, Field(ge=0)] = 0
    environment: EnvironmentConfig
    tools: ToolsConfig | None = None
    """What the agent can call while it answers (docs/tools.md)."""
    episodes: EpisodesConfig = EpisodesConfig()
    sft: SFTPhase | None = None
    rl: RLPhase | None = None
    evaluation: EvaluationConfig = EvaluationConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    canary: CanaryConfig = CanaryConfig()
    record: RecordConfig = RecordConfig()


class TrainConfig(RunConfig):
    """One training run of one policy."""

    policy: PolicyConfig
    joint: JointPart | None = None
    """Of a policy that is trained together with others in one environment; `train` fills it in."""

    @model_validator(mode="after")
    def _has_a_phase(self) -> "TrainConfig":
        if self.sft is None and self.rl is None:
            raise ValueError("give at least one of the phases 'sft' and 'rl'")
        return self

    @model_validator(mode="after")
    def _has_what_renders_histories(self) -> "TrainConfig":
        if self.episodes.history == "template":
            for field, sampling in (
                ("rl.sampling.render", self.rl.sampling if self.rl else SamplingConfig()),
                ("evaluation.sampling.render", self.evaluation_sampling),
            ):
                if sampling.render != "chat":
                    raise ValueError(f"{field}: 'plain'; accepted with episodes.history 'template': 'chat'")
        return self

    @model_validator(mode="after")
    def _suits_a_service(self) -> "TrainConfig":
        """The Tinker API gives a trainer's logprobs at temperature 1 alone, and has no min-p."""
        if self.runtime.url is not None:
            plain = SamplingConfig()
            for name in ("temperature", "top_p", "top_k", "min_p"):
                value = getattr(self.rl.sampling, name) if self.rl else getattr(plain, name)
                if value != getattr(plain, name):
                    raise ValueError(
                        f"rl.sampling.{name}: {value}; accepted with runtime.url: {getattr(plain, name)}"
                    )
            if self.evaluation_sampling.min_p:
                raise ValueError("evaluation.sampling.min_p: accepted with runtime.url: 0")
        return self

    @property
    def sft_steps(self) -> int:
        """Optimizer steps of the SFT phase."""
        return self.sft.steps if self.sft else 0

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.sft_steps + (self.rl.steps if self.rl else 0)

    @property
    def max_turns(self) -> int:
        """Turns after which an episode is cut off, in training and in evaluation."""
        return self.rl.max_turns if self.rl else RLPhase(steps=1).max_turns

    @property
    def evaluation_sampling(self) -> SamplingConfig:
        """How evaluation samples: its own setting, else the RL phase's, else the default."""
        if self.evaluation.sampling is not None:
            return self.evaluation.sampling
        return self.rl.sampling if self.rl else SamplingConfig()
