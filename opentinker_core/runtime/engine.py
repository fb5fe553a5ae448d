"""The embedded engine: one base model in this process, which trains and samples for all who open it.

Whoever opens the same base model with the same settings shares it: operations of several runs meet in one
queue and go through the model together.
"""

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from transformers import PreTrainedTokenizerBase

from opentinker_core.config.schema import LoRAConfig, RuntimeConfig
from opentinker_core.lora.layer import install
from opentinker_core.lora.layout import HEAD, ModelLayout, target_names
from opentinker_core.lora.pool import AdapterPool
from opentinker_core.lora.routing import same_routing
from opentinker_core.models.decoder import Decoder
from opentinker_core.models.loading import load_model, load_tokenizer
from opentinker_core.models.placement import placement
from opentinker_core.models.source import ModelSource, resolve
from opentinker_core.runtime.batching import BatchLimits
from opentinker_core.runtime.clients import SamplerClient, TrainerClient
from opentinker_core.runtime.executor import EngineExecutor
from opentinker_core.runtime.residency_statistics import Residency, Tier
from opentinker_core.runtime.scheduler import Scheduler
from opentinker_core.runtime.scheduler_statistics import Statistics
from opentinker_core.runtime.served_versions import ServedVersions
from opentinker_core.sampling.generation import Limits
from opentinker_core.sampling.native import NativeSampler
from opentinker_core.sampling.protocol import Sampler
from opentinker_core.sampling.vllm.opening import open_sampler
from opentinker_core.sampling.vllm.sampler import VLLMSampler
from opentinker_core.training.residency import states_on_disk
from opentinker_core.training.trainer import LayoutSettings, Trainer

FetchSnapshot = Callable[[str, str], Path]


class SharedEngine:
    """A loaded base model with its queue. The weights are shared; policies only add adapters."""

    def __init__(self, source: ModelSource, config: RuntimeConfig, home: Path, fetch: FetchSnapshot) -> None:
        place = placement(config)
        model = load_model(source, place.device, place.dtype)
        self.source = source
        self.tokenizer = load_tokenizer(source)
        self.linears: ModelLayout = install(model, packs=config.packed_weights)
        decoder = Decoder.of(model)
        if config.gradient_checkpointing:
            decoder = decoder.with_checkpoints(same_routing)
        self.max_context = decoder.max_context
        self.dtype = str(place.dtype).removeprefix("torch.")
        pool = AdapterPool(self.linears, place.device, place.dtype, config.adapter_slots)
        layout = LayoutSettings(config.micro_batch_tokens, config.share_prefix, config.pack)
        scratch = TemporaryDirectory(prefix="opentinker-states-", ignore_cleanup_errors=True)
        states = states_on_disk(
            Path(scratch.name), int(config.policy_memory_gb * 1e9), self.linears, decoder.device, source.name
        )
        trainer = Trainer(decoder, pool, source.name, layout, states)
        sampler = NativeSampler(
            decoder,
            pool,
            self.tokenizer,
            fetch,
            trainer.read_adapter,
            memory=int(config.snapshot_memory_gb * 1e9),
            limits=Limits(
                kv_bytes=int(config.kv_memory_gb * 1e9), prefix_bytes=int(config.prefix_memory_gb * 1e9)
            ),
        )
        self.longest = sampler.longest
        """Tokens of the longest sequence that can be sampled."""
        self.vllm: VLLMSampler | None = None
        """What samples instead, for all tenants: its servers have queues of their own."""
        if config.sampler == "vllm":
            self.vllm = open_sampler(
                source,
                config.vllm,
                home,
                device=place.device,
                dtype=self.dtype,
                layout=self.linears,
                max_context=self.max_context,
                fetch=fetch,
                read_adapter=trainer.read_adapter,
            )
            self.max_context = self.longest = self.vllm.max_context
        self.versions = ServedVersions()
        self.residency: Callable[[], Residency] = lambda: Residency(
            Tier.of_pool(pool), Tier.of_host(states), Tier.of_host(sampler.adapters)
        )
        """What the tiers hold; any thread may ask."""
        limits = BatchLimits(slots=config.adapter_slots)
        self.scheduler = Scheduler(EngineExecutor(trainer, sampler), limits)
        # The thread keeps the model alive, not this object: it ends with the last who holds it.
        self.close = weakref.finalize(self, _close, self.scheduler, scratch, self.vllm)


def _close(scheduler: Scheduler, scratch: "TemporaryDirectory[str]", vllm: VLLMSampler | None) -> None:
    scheduler.close()
    scratch.cleanup()
    if vllm is not None:
        vllm.close()


@dataclass(frozen=True, eq=False)
class Engine:
    """A tenant's view of an engine."""

    shared: SharedEngine
    trainer: TrainerClient
    sampler: Sampler

    @property
    def source(self) -> ModelSource:
        return self.shared.source

    @property
    def versions(self) -> ServedVersions:
        """What runs have in the sampler."""
        return self.shared.versions

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.shared.tokenizer

    @property
    def max_context(self) -> int:
        return self.shared.max_context

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that can be sampled."""
        return self.shared.longest

    @property
    def dtype(self) -> str:
        """`float32` or `bfloat16`."""
        return self.shared.dtype

    @property
    def attempt(self) -> str:
        """See `runtime.protocol.RunEngine`."""
        return ""

    @property
    def vocabulary(self) -> int:
        """Tokens that the base model gives logits of."""
        return next(
            outputs for name, (_, outputs) in self.shared.linears.shapes.items() if _own(name) == HEAD
        )

    @property
    def linear_names(self) -> frozenset[str]:
        """The linear layers that can carry an adapter, each by the last part of its module's name."""
        return frozenset(_own(name) for name in self.shared.linears.shapes)

    @property
    def has_own_head(self) -> bool:
        """Whether the head has weights of its own, not those of the embedding."""
        tables = self.shared.linears.tables
        heads = {weight.data_ptr() for name, weight in tables.items() if _own(name) == HEAD}
        return not any(weight.data_ptr() in heads for name, weight in tables.items() if _own(name) != HEAD)

    def forget(self, snapshot_uri: str, digest: str) -> None:
        """See `runtime.protocol.RunEngine`: there is no other copy."""

    def check_targets(self, lora: LoRAConfig) -> None:
        """Raise UsageError if a LoRA config does not fit the base model."""
        target_names(lora, self.shared.linears)

    def statistics(self) -> Statistics:
        """What waits, runs and ran in the engine, of all tenants."""
        return replace(self.shared.scheduler.statistics(), residency=self.shared.residency())


def _own(name: str) -> str:
    return name.rpartition(".")[2]


_shared: "weakref.WeakValueDictionary[tuple[str, str, str], SharedEngine]" = weakref.WeakValueDictionary()
_opening = threading.Lock()


def open_engine(
    base_model: str, config: RuntimeConfig, home: Path, fetch: FetchSnapshot, tenant: str = "local"
) -> Engine:
    """An engine for `base_model` where `config` says: the one that this process has open already, if it has.

    Args:
        fetch: gives the verified local directory of a snapshot, from its URI and digest.
        tenant: whose operations these will be; the queue is fair between tenants.

    Raises:
        UsageError: the model or the device is unknown, or its architecture has no separate head.
    """
    source = resolve(base_model, home)
    key = (str(source.path), config.model_dump_json(), str(home))
    with _opening:
        shared = _shared.get(key)
        if shared is None or not shared.close.alive:
            shared = _shared[key] = SharedEngine(source, config, home, fetch)
    sampler = shared.vllm or SamplerClient(shared.scheduler, tenant)
    return Engine(shared, TrainerClient(shared.scheduler, tenant), sampler)
