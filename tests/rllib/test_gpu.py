"""Learner and embedded engine on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

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


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["unified-fp8", "bf16"])
def test_a_process_that_has_touched_cuda_trains(build: Make, toy_config: Make, policy: str) -> None:
    """As a notebook does: a tensor on the GPU and TF32 before the algorithm is built; no mismatch all the same."""
    torch.zeros(1, device="cuda")
    torch.set_float32_matmul_precision("high")
    x = torch.randn(64, 64, device="cuda")
    assert (x @ x).isfinite().all()
    config = toy_config(policy, engine_options={"device": "cuda"}).learners(num_gpus_per_learner=1)
    algo = build(config)
    assert torch.backends.cuda.matmul.fp32_precision == "ieee"
    result = algo.train()
    assert result[names.MISMATCH]["bit_equal_share"] == 1.0


@pytest.mark.gpu
@pytest.mark.parametrize("moments", ["bfloat16_stochastic", "blockwise_8bit"])
def test_split_masters_and_narrow_moments_train_on_a_gpu(build: Make, toy_config: Make, moments: str) -> None:
    """Learner and engine agree in every bit while weights are updated in two halves by the kernel."""
    policy = {"extends": "unified-fp8", "master_dtype": "split_float32", "optimizer_state_dtype": moments}
    config = toy_config(policy, engine_options={"device": "cuda"}).learners(num_gpus_per_learner=1)
    algo = build(config.training(num_epochs=2, minibatches_per_epoch=2))
    before = algo.learner_group._learner.digest()
    for _ in range(3):
        result = algo.train()
        assert result[names.MISMATCH]["bit_equal_share"] == 1.0
    assert algo.learner_group._learner.digest() != before


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["unified-fp8", "bf16"])
def test_adapters_train_on_a_gpu(build: Make, toy_config: Make, policy: str) -> None:
    """Adapters on a frozen base: no mismatch before and after updates, of which the engine gets the adapters alone."""
    config = toy_config(policy, engine_options={"device": "cuda"}).learners(num_gpus_per_learner=1)
    algo = build(
        config.model(adapter={"rank": 16, "alpha": 32}).training(num_epochs=2, minibatches_per_epoch=2)
    )
    before = algo.learner_group._learner.digest()
    for _ in range(4):
        result = algo.train()
        assert result[names.MISMATCH]["bit_equal_share"] == 1.0
    assert algo.learner_group._learner.digest() != before
