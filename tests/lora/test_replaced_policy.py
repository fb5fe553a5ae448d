"""A policy that is created anew, with other targets and ranks, keeps nothing of the old one."""

import numpy as np

from opentinker_core.config.schema import LoRAConfig
from tests.lora.families import CONFIGS, Family, random_datums


def test_a_replaced_policy_computes_what_it_would_alone() -> None:
    datums = random_datums((9, 14))
    config = LoRAConfig(rank=3, target_modules=("q_proj", "up_proj"))
    alone, reused = Family.of(CONFIGS["llama"]), Family.of(CONFIGS["llama"])
    reused.random_policy("p", LoRAConfig(rank=7), seed=1)
    reused.trainer.forward("p", datums)
    for family in (alone, reused):
        family.random_policy("p", config)
    for ours, theirs in zip(*(f.trainer.forward("p", datums) for f in (reused, alone)), strict=True):
        np.testing.assert_array_equal(ours, theirs)
