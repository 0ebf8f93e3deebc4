"""Learner and embedded engine on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rllib_llm import metric_names as names

Make = Callable[..., Any]


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["unified-fp8", "bf16", "mixed-bf16-fp8"])
def test_training_on_a_gpu(build: Make, toy_config: Make, policy: str) -> None:
    """Learner and engine on CUDA: no mismatch where the policy promises none, else a reported one."""
    config = toy_config(policy, engine_options={"device": "cuda"}).learners(num_gpus_per_learner=1)
    algo = build(config.training(num_epochs=2, minibatches_per_epoch=2))
    assert next(algo.learner_group._learner.lm_module.parameters()).device.type == "cuda"
    for _ in range(3):
        result = algo.train()
    if algo.settings.policy.exactly_on_policy:
        assert result[names.MISMATCH]["bit_equal_share"] == 1.0
    else:
        assert result[names.MISMATCH]["max_abs"] > 0.0
    assert result[names.LEARNERS]["default_policy"][names.NUM_SKIPPED_STEPS] == 0
