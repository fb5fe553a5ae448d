"""What an engine holds in its tiers: Tier, Residency."""

from dataclasses import dataclass
from typing import Any

from opentinker_core.lora.pool import AdapterPool
from opentinker_core.policies.residency.host import HostTier


@dataclass(frozen=True)
class Tier:
    """One tier: what is in it now, and how often something was brought in or sent away since the start."""

    entries: int
    bytes: int
    """0 where all entries have one place each of the same size."""
    loads: int
    evictions: int

    @classmethod
    def of_host(cls, tier: HostTier[Any]) -> "Tier":
        """Values in memory."""
        counts = tier.statistics()
        return cls(len(tier.resident()), counts.bytes, counts.loads, counts.evictions)

    @classmethod
    def of_pool(cls, pool: AdapterPool) -> "Tier":
        """Adapters in slots of the model's device."""
        return cls(pool.occupied, 0, pool.stats.loads, pool.stats.evictions)


@dataclass(frozen=True)
class Residency:
    """The tiers of an engine."""

    slots: Tier
    """Adapters on the model's device."""
    states: Tier
    """Policies' training states in memory; the others are on local disk."""
    snapshots: Tier
    """Adapters of sampled versions in memory; the others are in the snapshot store."""
