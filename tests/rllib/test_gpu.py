"""Learner and embedded engine on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rllib_llm import metric_names as names
from rllib_llm.process.kernel_cache import compiled_kernels, kernel_cache
from rllib_llm.warming.ahead import compile_ahead
from tests.rllib.toy import make_model

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


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["unified-fp8", "bf16"])
def test_a_warmed_run_compiles_no_matrix_product(
    build: Make, toy_config: Make, tmp_path: Path, policy: str
) -> None:
    """A shape that no other test has: compiled ahead, no number of rows of four iterations meets a new kernel."""
    config = toy_config(policy, engine_options={"device": "cuda"}, max_new_tokens=12)
    config.model(str(make_model(tmp_path / "model", hidden=384))).learners(num_gpus_per_learner=1)
    config.training(micro_batch_tokens=96)
    compiled = compile_ahead(config.settings(), products_only=True)
    assert compiled.parts == ("products",)
    assert compiled.kernels > 0
    assert compile_ahead(config.settings(), products_only=True).parts == ()
    before = compiled_kernels(kernel_cache())
    algo = build(config)
    for _ in range(4):
        algo.train()
    assert compiled_kernels(kernel_cache()) == before
