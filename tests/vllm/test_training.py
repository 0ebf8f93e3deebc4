"""The whole loop with vLLM as its engine: GRPO through RLlib, exactly on-policy, and what happens when vLLM dies."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip(
        "vllm is not installed here; `make test` runs this folder in .venv-vllm", allow_module_level=True
    )

from rllib_llm import GRPOConfig
from rllib_llm import metric_names as names
from tests.rllib.toy import CopyDigit, make_model
from tests.vllm.cases import DEVICE


@pytest.fixture
def algorithm(ray_for_engines: None, tmp_path: Path) -> Iterator[Any]:
    """GRPO on the toy model; vLLM in a Ray actor of its own beside one remote env runner.

    On a GPU all three share it: the engine sleeps while the learner computes, and gets its weights by CUDA IPC.
    """
    gpu = DEVICE == "cuda"
    options = {
        "kv_cache_bytes": 64 << 20,
        "max_num_seqs": 16,
        "device": DEVICE,
        "gpu_memory_utilization": 0.05,
    }
    config = (
        GRPOConfig()
        .precision("unified-fp8")
        .model(str(make_model(tmp_path / "model")))
        .environment(CopyDigit)
        .rollout(
            engine="vllm",
            engine_options=options,
            group_size=4,
            prompts_per_iteration=4,
            max_new_tokens=4,
            min_new_tokens=2,
            sleep_while_learning=gpu,
        )
        .training(lr=1e-3)
        .env_runners(num_env_runners=1, num_gpus_per_env_runner=0.5 if gpu else 0)
        .learners(num_gpus_per_learner=1 if gpu else 0)
        .debugging(seed=0, log_level="ERROR")
    )
    algo = config.build_algo()
    yield algo
    algo.stop()


def _kill_engine(runner: Any) -> int:
    pid = int(runner.engine.attest().informational["pid"])
    os.kill(pid, 9)
    return pid


def test_training_is_exactly_on_policy_and_survives_the_death_of_vllm(algorithm: Any) -> None:
    """Mismatch 0 in each iteration, before and after updates, under min_new_tokens; after kill -9 of vLLM the runner
    comes back with the current weights and training goes on, still at 0. Killed while the learner computes, vLLM costs
    no iteration: the push finds it dead and starts another."""
    for _ in range(2):
        mismatch = algorithm.train()[names.MISMATCH]
        assert (mismatch["max_abs"], mismatch["bit_equal_share"]) == (0, 1)
    memory = algorithm.metrics.peek(names.MEMORY)
    assert memory["engine_rss_peak_gib"] != memory["learner_rss_peak_gib"], "vLLM's own process is asked"
    assert set(algorithm.weights.transports.values()) == {"cuda_ipc" if DEVICE == "cuda" else "object_store"}
    algorithm.env_runner_group.foreach_env_runner(_kill_engine, local_env_runner=False)
    assert algorithm.train()[names.NUM_EMPTY_SAMPLES] == 1, "the iteration in which vLLM died has no samples"
    result = algorithm.train()
    if result[names.NUM_EMPTY_SAMPLES]:  # Ray lost the runner once more while it restarted
        result = algorithm.train()
    mismatch = result[names.MISMATCH]
    assert (mismatch["max_abs"], mismatch["bit_equal_share"]) == (0, 1)
    learn = algorithm._learn

    def learn_while_vllm_dies(*arguments: Any) -> None:
        algorithm.env_runner_group.foreach_env_runner(_kill_engine, local_env_runner=False)
        learn(*arguments)

    algorithm._learn = learn_while_vllm_dies
    algorithm.train()
    algorithm._learn = learn
    result = algorithm.train()
    assert result[names.NUM_EMPTY_SAMPLES] == 0
    assert result[names.MISMATCH]["max_abs"] == 0
