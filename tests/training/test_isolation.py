"""A policy's results do not depend, in a single bit, on who trains beside it."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from opentinker_core.config.schema import LoRAConfig, OptimizerConfig
from opentinker_core.evaluation.isolation import (
    FIELDS,
    Bench,
    Record,
    Setting,
    Training,
    comparisons,
    idling,
    together,
    verdicts,
)
from opentinker_core.evaluation.participants import Data, Participant, participants
from opentinker_core.lora import rowwise
from opentinker_core.lora.rowwise import Elementwise, Rowwise
from opentinker_core.models.loading import load_model
from opentinker_core.models.source import resolve
from opentinker_core.training.trainer import LayoutSettings

NARROW = LayoutSettings(micro_batch_tokens=96, pack=True)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets torch's number of threads for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def _open(home: Path) -> Bench:
    return Bench(load_model(resolve("tiny", home), "cpu", torch.float32), "tiny")


@pytest.fixture(scope="module")
def bench(tiny_home: Path) -> Bench:
    return _open(tiny_home)


def _trained(bench: Bench, steps: int = 2, **changes: object) -> Setting:
    return replace(Setting(tuple(participants(8, bench.layout)), steps), **changes)


def _assert_isolated(bench: Bench, setting: Setting) -> None:
    found = verdicts(bench, comparisons(setting))
    assert len(found) == 8
    assert all(verdict.compared == 8 for verdict in found)
    assert {v.change: v.differing for v in found if not v.isolated} == {}


@pytest.mark.parametrize(
    ("count", "layout"),
    [
        (1, LayoutSettings()),
        (1, NARROW),
        (2, LayoutSettings(share_prefix=False, micro_batch_tokens=256)),
        (3, LayoutSettings()),
    ],
    ids=["wide", "narrow", "2 threads, plain rows", "3 threads"],
)
def test_nothing_that_others_do_changes_a_bit(
    tiny_home: Path, threads: Callable[[int], None], count: int, layout: LayoutSettings
) -> None:
    """Data, rows, presence, order, interleaving, slots: see `comparisons`."""
    threads(count)
    bench = _open(tiny_home)
    _assert_isolated(bench, _trained(bench, layout=layout))


def test_nor_where_products_are_made_in_tiles(tiny_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on devices whose products of few rows are not those of many."""
    monkeypatch.setattr(rowwise, "_is_invariant", lambda *_: False)
    bench = _open(tiny_home)
    assert bench.layout.groups
    _assert_isolated(bench, _trained(bench, steps=1))


def test_the_policies_are_unlike_each_other(bench: Bench) -> None:
    trained = participants(8, bench.layout)
    assert {1, 2, 3, 4, 8, 16, 32, 64} == {p.lora.rank for p in trained}
    for what in (
        {p.lora.target_modules for p in trained},
        {p.lora.alpha for p in trained},
        {p.objective_name for p in trained},
        {p.normalizer for p in trained},
        {p.optimizer.weight_decay for p in trained},
        {p.optimizer.grad_clip_norm for p in trained},
    ):
        assert len(what) >= 3
    assert any("lm_head" in p.lora.target_modules for p in trained)


def test_one_changed_token_shows_in_everything_but_the_step(bench: Bench) -> None:
    """The measure can fail: what is a policy's own business changes its record."""
    setting = _trained(bench)
    batch = bench.batch(setting.participants[0], 0)
    datum = batch.datums[0]
    tokens = np.append(datum.input_tokens_N, datum.target_tokens_N[-1:])
    tokens[0] = (tokens[0] + 1) % 90
    changed = replace(datum, input_tokens_N=tokens[:-1], target_tokens_N=tokens[1:])
    records = []
    for datums in (batch.datums, [changed, *batch.datums[1:]]):
        training = Training(bench.trainer(), setting.participants[:1])
        together(training, [replace(batch, datums=datums)])
        records.append(training.finish()[batch.policy])
    assert records[0].differing(records[1]) == set(FIELDS) - {"step"}


def test_idle_policies_keep_every_bit_for_100_steps_of_others(bench: Bench) -> None:
    """Weight decay is on in several of them, and all have moments that a step would move."""
    verdict = verdicts(bench, [idling(_trained(bench), 100)])[0]
    assert verdict.compared == 4
    assert verdict.isolated, verdict.differing


def test_a_gradient_that_waits_for_its_step_is_left_alone(bench: Bench) -> None:
    waiting, active = participants(2, bench.layout)
    active = replace(active, optimizer=OptimizerConfig(weight_decay=0.5, learning_rate=1e-2))
    training = Training(bench.trainer(), [waiting, active])
    together(training, [bench.batch(waiting, 0), bench.batch(active, 0)])
    training.forward_backward([bench.batch(waiting, 1)])
    state = training.trainer.state_of(waiting.name)
    assert state.gradient is not None
    before = state.gradient.row_P.clone()
    weights = state.adapter.row_P.clone()
    for step in range(1, 6):
        together(training, [bench.batch(active, step)])
    state = training.trainer.state_of(waiting.name)
    assert state.gradient is not None
    assert torch.equal(state.gradient.row_P, before)
    assert torch.equal(state.adapter.row_P, weights)


LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")

others = st.lists(
    st.builds(
        lambda rank, targets, data: (rank, tuple(sorted(targets)), data),
        st.sampled_from([1, 5, 8, 9, 40, 128]),
        st.sets(st.sampled_from(LINEARS), min_size=1),
        st.builds(Data, st.integers(0, 99), st.integers(1, 3), st.integers(1, 3), st.integers(1, 30)),
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=12, deadline=None)
@given(who=st.integers(0, 7), beside=others, first=st.booleans(), narrow=st.booleans())
def test_whoever_trains_beside_a_policy_its_record_is_the_same(
    bench: Bench, who: int, beside: list[tuple[int, tuple[str, ...], Data]], first: bool, narrow: bool
) -> None:
    subject = participants(8, bench.layout)[who]
    company = [
        Participant(
            f"other-{i}", LoRAConfig(rank=rank, target_modules=targets), OptimizerConfig(), None, data
        )
        for i, (rank, targets, data) in enumerate(beside)
    ]
    alone = Setting((subject,), 2, layout=NARROW if narrow else LayoutSettings())
    crowded = replace(alone, participants=(subject, *company) if first else (*company, subject))
    name = subject.name
    assert bench.train(alone)[name].differing(bench.train(crowded)[name]) == set()


def _long(name: str, lengths: list[int], seed: int = 0) -> tuple[Participant, list[int]]:
    lora = LoRAConfig(rank=8, target_modules=("lm_head", "q_proj"))
    return Participant(name, lora, OptimizerConfig(), None, Data(seed)), lengths


def _record(bench: Bench, asked: list[tuple[Participant, list[int]]], name: str) -> Record:
    """One step on datums of the given lengths, all positions of which are trained."""
    training = Training(bench.trainer(), [participant for participant, _ in asked])
    training.trainer.layout = LayoutSettings(micro_batch_tokens=2048, share_prefix=False)
    batches = []
    for participant, lengths in asked:
        batch = bench.batch(participant, 0)
        generator = np.random.default_rng(participant.data.seed)
        datums = []
        for length in lengths:
            tokens = generator.integers(90, size=length + 1)
            mask_N = np.ones(length, bool)
            weights_N = generator.uniform(0.5, 1.5, length).astype(np.float32)
            datums.append(
                replace(
                    batch.datums[0],
                    input_tokens_N=tokens[:-1],
                    target_tokens_N=tokens[1:],
                    mask_N=mask_N,
                    weights_N=weights_N,
                )
            )
        scales = [np.full(length, 1e-3, np.float32) for length in lengths]
        batches.append(replace(batch, datums=datums, scales=scales))
    together(training, batches)
    return training.finish()[name]


def test_gradients_of_several_passes_are_added_in_one_order(bench: Bench) -> None:
    """Three micro-batches, and more positions in a pass than the head takes at once.

    Beside other rows the last of them lands in another pass, or in another call of the head.
    """
    subject = _long("subject", [500] * 4 + [440] * 4 + [240])
    alone = _record(bench, [subject], "subject")
    beside = _record(bench, [subject, _long("other", [96], 1)], "subject")
    assert alone.differing(beside) == set()


def test_gradients_of_shared_positions_are_added_in_one_order(
    tiny_home: Path, threads: Callable[[int], None]
) -> None:
    """A prompt's last position predicts the first token of each completion; threads must not race for it."""
    threads(2)
    bench = _open(tiny_home)
    setting = _trained(bench, 1)
    shared = tuple(
        replace(p, data=Data(i, groups=4, group_size=4, prompt=20, completion=60))
        for i, p in enumerate(setting.participants[:4])
    )
    setting = replace(setting, participants=shared)
    for subject in shared:
        alone = bench.train(replace(setting, participants=(subject,)))
        crowded = bench.train(setting)
        assert alone[subject.name].differing(crowded[subject.name]) == set()


@pytest.mark.parametrize("function", [nn.SiLU(), nn.GELU(approximate="tanh")], ids=["silu", "gelu"])
def test_activation_functions_do_not_see_how_many_rows_there_are(
    threads: Callable[[int], None], function: nn.Module
) -> None:
    x_TD = torch.randn(4096, 96, generator=torch.Generator().manual_seed(0)).requires_grad_()
    dy_TD = torch.randn(4096, 96, generator=torch.Generator().manual_seed(1))
    threads(1)
    y_TD = function(x_TD)
    (dx_TD,) = torch.autograd.grad(y_TD, x_TD, dy_TD)
    for count in (1, 2, 3, 5):
        threads(count)
        for rows in (8, 344, 1000, 1096, 2056, 4096):
            part = x_TD[:rows].detach().requires_grad_()
            y = Elementwise(function)(part)
            (dx,) = torch.autograd.grad(y, part, dy_TD[:rows])
            assert torch.equal(y, y_TD[:rows]), (count, rows)
            assert torch.equal(dx, dx_TD[:rows]), (count, rows)


def test_tiles_give_the_products_of_the_whole(bench: Bench) -> None:
    layer = nn.Linear(24, 40, bias=False)
    generator = torch.Generator().manual_seed(0)
    x_TK, dy_TN = torch.randn(200, 24, generator=generator), torch.randn(200, 40, generator=generator)
    tiled = Rowwise(rowwise.TILE)
    torch.testing.assert_close(tiled(layer, x_TK), layer(x_TK))
    torch.testing.assert_close(tiled.back(layer, dy_TN), dy_TN @ layer.weight)
    into = x_TK.clone()
    torch.testing.assert_close(tiled.back(layer, dy_TN, into), x_TK + dy_TN @ layer.weight)
    assert torch.equal(tiled(layer, x_TK)[:8], tiled(layer, x_TK[:8]))
