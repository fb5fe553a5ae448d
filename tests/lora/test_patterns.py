"""Ranks and scalings of single layers follow PEFT's patterns."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft.utils.other import get_pattern_key
from pydantic import ValidationError

from opentinker_core.config.schema import LoRAConfig
from opentinker_core.digests import digest_json
from opentinker_core.errors import UsageError
from opentinker_core.lora.layout import AdapterLayout, ModelLayout

SHAPES = {
    f"model.layers.{layer}.{name}": (8, 12)
    for layer in (0, 1, 11)
    for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
} | {"lm_head": (8, 20)}
MODEL = ModelLayout.of(SHAPES)
PATTERNS = (
    "q_proj",
    "self_attn.v_proj",
    "proj",
    "down_proj",
    r"layers\.1\.self_attn\.q_proj",
    r"1\.mlp\.down_proj",
    r"layers\.[01]\..*",
    ".*_proj",
    "^model.layers.0.mlp.down_proj",
    "model.layers.11.self_attn.v_proj",
    "lm_head",
    "(q|v)_proj",
)


@settings(max_examples=60, deadline=None)
@given(
    ranks=st.dictionaries(st.sampled_from(PATTERNS), st.integers(1, 64), max_size=3),
    alphas=st.dictionaries(st.sampled_from(PATTERNS), st.floats(0.5, 64), max_size=3),
    use_rslora=st.booleans(),
)
def test_each_layer_has_the_rank_and_scaling_that_peft_gives_it(
    ranks: dict[str, int], alphas: dict[str, float], use_rslora: bool
) -> None:
    config = LoRAConfig(
        rank=5,
        alpha=7.0,
        target_modules=tuple(SHAPES),
        rank_pattern=ranks,
        alpha_pattern=alphas,
        use_rslora=use_rslora,
    )
    keys = [{name: get_pattern_key(sorted(own), name) for name in SHAPES} for own in (ranks, alphas)]
    unused = [set(own) - set(key.values()) for own, key in zip((ranks, alphas), keys, strict=True)]
    if any(unused):
        with pytest.raises(UsageError, match=r"(rank|alpha)_pattern: .* (matches no|is never used)"):
            AdapterLayout.of(config, MODEL)
        return
    for name, factors in AdapterLayout.of(config, MODEL).factors.items():
        rank, alpha = ranks.get(keys[0][name], 5), alphas.get(keys[1][name], 7.0)
        assert factors.rank == rank
        assert factors.scaling == alpha / (math.sqrt(rank) if use_rslora else rank)


@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern"])
def test_a_pattern_that_matches_no_targeted_layer_is_refused(field: str) -> None:
    config = LoRAConfig(target_modules=("q_proj", "lm_head"), **{field: {"q_proj": 4, "down_proj": 4}})
    with pytest.raises(UsageError, match=rf"lora\.{field}: 'down_proj' matches no .*lm_head, q_proj"):
        AdapterLayout.of(config, MODEL)


def test_a_pattern_that_others_hide_is_refused() -> None:
    config = LoRAConfig(rank_pattern={"mlp.down_proj": 4, "down_proj": 2})
    with pytest.raises(UsageError, match=r"'mlp.down_proj' is never used: down_proj comes first"):
        AdapterLayout.of(config, MODEL)


def test_the_order_of_patterns_in_a_config_means_nothing() -> None:
    ranks = {"q_proj": 4, r"layers\.1\..*": 8}
    one, other = (LoRAConfig(rank_pattern=dict(items)) for items in (ranks.items(), reversed(ranks.items())))
    assert one == other
    assert digest_json(one.model_dump(mode="json")) == digest_json(other.model_dump(mode="json"))
    assert list(one.rank_pattern) == list(other.rank_pattern)
    layouts = [AdapterLayout.of(config, MODEL) for config in (one, other)]
    assert layouts[0].factors == layouts[1].factors


@pytest.mark.parametrize(
    ("field", "value"),
    [("rank_pattern", {"*": 4}), ("rank_pattern", {"q_proj": 0}), ("alpha_pattern", {"(": 1.0})],
)
def test_what_is_no_pattern_or_no_rank_is_refused(field: str, value: dict[str, float]) -> None:
    with pytest.raises(ValidationError, match=field):
        LoRAConfig.model_validate({field: value})


@pytest.mark.parametrize("target", ["embed_tokens", "model.embed_tokens"])
def test_an_embedding_is_loudly_refused_as_a_target(target: str) -> None:
    with pytest.raises(UsageError, match=rf"target_modules: '{target}' is an embedding.*not supported yet"):
        AdapterLayout.of(LoRAConfig(target_modules=("q_proj", target)), MODEL)


def test_factors_of_all_ranks_lie_in_the_row_without_gap_or_overlap() -> None:
    config = LoRAConfig(rank=3, target_modules=tuple(SHAPES), rank_pattern={"v_proj": 7, "lm_head": 1})
    layout = AdapterLayout.of(config, MODEL)
    at = 0
    for _, start, (rank, width) in sorted(layout.views(), key=lambda view: view[1]):
        assert start == at
        at += rank * width
    assert at == layout.numel
    assert layout.rank == 7
