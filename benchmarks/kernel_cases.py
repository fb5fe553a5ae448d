"""What the kernel benchmark runs on: layers of an 8B model, rows, adapters and who uses which."""

from dataclasses import dataclass

import torch
from torch import Tensor

from opentinker_kernels import reference
from opentinker_kernels.plan import NO_SLOT, RoutingPlan

LAYERS = {
    "qkv": (4096, (4096, 1024, 1024)),
    "o": (4096, (4096,)),
    "gate_up": (4096, (14336, 14336)),
    "down": (14336, (4096,)),
}
"""Input features, and the widths of the fused output."""
RANK_BUCKETS = (16, 32, 64, 128)
POPULARITIES = ("distinct", "uniform", "zipf", "identical", "prefill")
"""Row i uses adapter i mod n; any; the k-th as often as 1/k^1.1; the first; two prompts and single rows."""


@dataclass(frozen=True)
class Case:
    """One point of the benchmark."""

    layer: str
    n_rows: int
    n_adapters: int
    rank: int
    """Rank of all adapters; 0: ranks 8, 16 and 64 in turn."""
    popularity: str
    base_fraction: float
    """Share of rows without an adapter."""

    def __str__(self) -> str:
        where = f"{self.layer} T={self.n_rows} n={self.n_adapters} r={self.rank or 'mixed'}"
        return f"{where} {self.popularity} base={self.base_fraction}"

    @property
    def ranks(self) -> list[int]:
        """Rank of each adapter."""
        return [self.rank or (8, 16, 64)[adapter % 3] for adapter in range(self.n_adapters)]

    def adapters_T(self) -> list[int]:
        """The adapter of each row."""
        draw = torch.Generator().manual_seed(0)
        n_rows, n = self.n_rows, self.n_adapters
        weights = torch.arange(1, n + 1, dtype=torch.float64) ** (-1.1 if self.popularity == "zipf" else 0.0)
        adapters = torch.multinomial(weights, n_rows, replacement=True, generator=draw)
        if self.popularity == "distinct":
            adapters = torch.arange(n_rows) % n
        elif self.popularity == "identical":
            adapters = torch.zeros(n_rows, dtype=torch.long)
        elif self.popularity == "prefill":  # 48 rows decode, the rest are two prompts
            half = max(0, n_rows - 48) // 2
            adapters[n_rows - 2 * half : n_rows - half] = 0
            adapters[n_rows - half :] = 1 % n
        adapters[torch.rand(n_rows, generator=draw) < self.base_fraction] = NO_SLOT
        return adapters.tolist()

    def lora_bytes(self) -> float:
        """Bytes that shrink and expand must move, of 2 an element: active factors, x, y twice, u twice."""
        n_in, slices = LAYERS[self.layer]
        adapters = [adapter for adapter in self.adapters_T() if adapter != NO_SLOT]
        active = sum(self.ranks[adapter] for adapter in set(adapters))
        u = sum(self.ranks[adapter] for adapter in adapters) * len(slices)
        factors = active * (len(slices) * n_in + sum(slices))
        return 2.0 * (factors + len(adapters) * (n_in + 2 * sum(slices)) + 2 * u)

    def lora_flops(self) -> float:
        """Floating-point operations of shrink and expand."""
        n_in, slices = LAYERS[self.layer]
        ranks = sum(self.ranks[adapter] for adapter in self.adapters_T() if adapter != NO_SLOT)
        return 2.0 * ranks * (len(slices) * n_in + sum(slices))


@dataclass(frozen=True, eq=False)
class Bucket:
    """The adapters of one rank bucket, as the adapter pool keeps them."""

    plan: RoutingPlan
    A_SRK: Tensor
    Bt_SRN: Tensor


@dataclass(frozen=True, eq=False)
class Arguments:
    """Tensors of one case."""

    adapters_T: list[int]
    slices: tuple[int, ...]
    x_TK: Tensor
    y_TN: Tensor
    dy_TN: Tensor
    dx_TK: Tensor
    base_NK: Tensor
    buckets: list[Bucket]
    A: list[Tensor]
    """(slices, R, K) of each adapter."""
    Bt: list[Tensor]
    """(R, N) of each adapter."""

    def base(self) -> None:
        """The frozen layer's forward pass."""
        torch.mm(self.x_TK, self.base_NK.T, out=self.y_TN)

    def base_backward(self) -> None:
        """The gradient of its input."""
        torch.mm(self.dy_TN, self.base_NK, out=self.dx_TK)

    def padded(self) -> tuple[Tensor, Tensor]:
        """All adapters at the largest rank: (n, slices, R, K) and (n, R, N)."""
        rank = max(Bt.shape[0] for Bt in self.Bt)
        A = [torch.nn.functional.pad(A, (0, 0, 0, rank - A.shape[1])) for A in self.A]
        Bt = [torch.nn.functional.pad(Bt, (0, 0, 0, rank - Bt.shape[0])) for Bt in self.Bt]
        return torch.stack(A), torch.stack(Bt)

    def expected(self) -> Tensor:
        """y after the forward pass, in float32."""
        y_TN = self.x_TK.float() @ self.base_NK.float().T
        for bucket in self.buckets:
            A_SRK, Bt_SRN = bucket.A_SRK.float(), bucket.Bt_SRN.float()
            u_PR = reference.shrink(self.x_TK.float(), A_SRK, bucket.plan)
            reference.expand_add(y_TN, u_PR, Bt_SRN, bucket.plan, self.slices)
        return y_TN


def make_arguments(
    case: Case, device: torch.device, dtype: torch.dtype = torch.bfloat16, *, invariant: bool = False
) -> Arguments:
    """Random tensors for a case."""
    n_in, slices = LAYERS[case.layer]
    draw = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        values = torch.randn(*shape, generator=draw, device=device, dtype=torch.float32)
        return (values / shape[-1] ** 0.5).to(dtype)

    adapters_T = case.adapters_T()
    A = [random(len(slices), rank, n_in) for rank in case.ranks]
    Bt = [random(rank, sum(slices)) for rank in case.ranks]
    buckets = []
    for low, rank in zip((0, *RANK_BUCKETS), RANK_BUCKETS, strict=False):
        members = [adapter for adapter, r in enumerate(case.ranks) if low < r <= rank]
        slots = [members.index(adapter) if adapter in members else NO_SLOT for adapter in adapters_T]
        if not members:
            continue
        routed = RoutingPlan.of(slots, device)
        plan = RoutingPlan(routed.n_rows, routed.segments, routed.rows, invariant)
        A_SsRK = torch.zeros(len(members), len(slices), rank, n_in, device=device, dtype=dtype)
        Bt_SRN = torch.zeros(len(members), rank, sum(slices), device=device, dtype=dtype)
        for slot, adapter in enumerate(members):
            A_SsRK[slot, :, : A[adapter].shape[1]] = A[adapter]
            Bt_SRN[slot, : Bt[adapter].shape[0]] = Bt[adapter]
        buckets.append(Bucket(plan, A_SsRK.flatten(1, 2), Bt_SRN))
    return Arguments(
        adapters_T,
        slices,
        x_TK=random(case.n_rows, n_in),
        y_TN=random(case.n_rows, sum(slices)),
        dy_TN=random(case.n_rows, sum(slices)),
        dx_TK=random(case.n_rows, n_in),
        base_NK=random(sum(slices), n_in),
        buckets=buckets,
        A=A,
        Bt=Bt,
    )
