"""A small model in float64 for tests that no layout of the rows changes what an objective gives."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from opentinker_core.objectives.types import Objective, SignalBatch, combine_metrics, finalize_metrics
from opentinker_core.trajectories.packing import MicroBatch, micro_batches
from opentinker_core.trajectories.types import Datum, Trajectory


class Model(torch.nn.Module):
    """A small causal model in float64 that sees exactly what the batch's attention lets it see."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def parameter(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(shape, dtype=torch.float64, generator=generator))

        self.tokens, self.positions, self.head = parameter(10, 6), parameter(64, 6), parameter(6, 10)

    def logprobs(self, batch: MicroBatch, datums: list[Datum]) -> Tensor:
        hidden_BTH = self.tokens[batch.tokens_BT] + self.positions[batch.positions_BT]
        seen_BTT = batch.attention_BTT
        if seen_BTT is None:
            seen_BTT = np.tri(batch.tokens_BT.shape[1], dtype=bool)[None]
        weights_BTT = torch.from_numpy(seen_BTT).double()
        mixed_BTH = torch.tanh(weights_BTT @ hidden_BTH / weights_BTT.sum(-1, keepdim=True))
        logprobs_BTV = (mixed_BTH @ self.head).log_softmax(-1)
        targets_M = batch.gather([datum.target_tokens_N for datum in datums])
        return logprobs_BTV[batch.row_M, batch.column_M, targets_M]


@dataclass(frozen=True)
class Layout:
    budget: int = 10_000
    share_prefix: bool = False
    pack: bool = False


PLAIN = Layout()


def loss_and_gradient(
    objective: Objective,
    datums: list[Datum],
    scales: list[np.ndarray],
    layout: Layout = PLAIN,
    *,
    old: bool = False,
) -> tuple[dict[str, float], Tensor]:
    """Metrics and gradient of a fresh `Model`; `old`: its logprobs of all datums are computed first."""
    model, metrics = Model(), []
    reference = [np.full(len(datum), -2.0) for datum in datums]
    before = _logprobs(model, datums) if old else None
    for batch in micro_batches(datums, layout.budget, share_prefix=layout.share_prefix, pack=layout.pack):
        signal = SignalBatch.of(batch, datums, scales, reference, before, dtype=torch.float64)
        loss, part = objective(model.logprobs(batch, datums), signal)
        loss.backward()
        metrics.append(part)
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])  # type: ignore[union-attr]
    return finalize_metrics(combine_metrics(metrics)), gradient


@torch.no_grad()
def _logprobs(model: Model, datums: list[Datum]) -> list[np.ndarray]:
    logprobs = [np.zeros(len(datum)) for datum in datums]
    for batch in micro_batches(datums, 10_000):
        for d, n, value in zip(
            batch.datum_M, batch.position_M, model.logprobs(batch, datums).tolist(), strict=True
        ):
            logprobs[d][n] = value
    return logprobs


def assert_same(left: tuple[dict[str, float], Tensor], right: tuple[dict[str, float], Tensor]) -> None:
    assert left[0] == pytest.approx(right[0], rel=1e-9, abs=1e-9)
    torch.testing.assert_close(left[1], right[1], rtol=1e-9, atol=1e-9)


def one_row_a_turn(trajectory: Trajectory, advantage: float) -> list[Datum]:
    """The rows of an episode whose turns were recorded one by one: each with its whole context."""
    rows = []
    for turn in trajectory.turns:
        mask_N = np.zeros(turn.end - 1, bool)
        mask_N[turn.start - 1 :] = True
        rows.append(
            Datum(
                input_tokens_N=trajectory.tokens_T[: turn.end - 1].astype(np.int64),
                target_tokens_N=trajectory.tokens_T[1 : turn.end].astype(np.int64),
                mask_N=mask_N,
                advantages_N=np.where(mask_N, np.float32(advantage), np.float32(0)),
                sampler_logprobs_N=np.where(mask_N, trajectory.logprobs_T[1 : turn.end], np.float32(0)),
                trajectory_id=trajectory.trajectory_id,
            )
        )
    return rows
