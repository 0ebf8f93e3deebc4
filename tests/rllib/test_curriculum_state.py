"""Mixtures with a curriculum under RLlib: every runner has its own progress, and a checkpoint keeps each."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from rllib_llm import GRPO, GRPOConfig
from rllib_llm import metric_names as names
from rllib_llm.algorithm.fleet import call_runners
from rllib_llm.on_disk.checkpoint import CheckpointError
from rllib_llm.rollout.env_runner import Reply

Make = Callable[..., Any]
MIXTURE = {
    "tasks": [{"task": "chain_sum", "weight": 1.0}, {"task": "basic_arithmetic", "weight": 1.0}],
    "rewards": {"correctness": 1.0, "format": 0.1},
    "curriculum": {"window": 1000},
}


def curriculum(runner: Any) -> Reply:
    return Reply(runner.worker_index, runner.factories["train"].get_state())


def states(algo: Any) -> dict[int, Any]:
    return {i: r.value for i, r in call_runners(algo.env_runner_group, curriculum).answers.items()}


def config(env_config: dict[str, Any], runners: int) -> GRPOConfig:
    return (
        GRPOConfig()
        .precision("unified-fp8")
        .model("tiny-chain")
        .environment("reasoning_gym", env_config=env_config)
        .rollout(group_size=2, prompts_per_iteration=7, max_new_tokens=4)
        .env_runners(num_env_runners=runners)
        .debugging(seed=0, log_level="ERROR")
    )


def test_each_runner_continues_its_own_curriculum(build: Make, tmp_path: pathlib.Path) -> None:
    """Two runners counted different answers; after a restore each has its own counts, and the tasks are in results."""
    algo = build(config(MIXTURE, 2))
    result = algo.train()
    saved = states(algo)
    assert saved[1] != saved[2]
    assert sum(asked for s in saved.values() for _, asked, _ in s["curriculum"].values()) == 14
    assert set(result[names.MISMATCH]["by_environment"]) == {"chain_sum", "basic_arithmetic"}
    assert set(result[names.ENV_RUNNERS][names.REWARDS]) == {"correctness", "format"}
    other = GRPO.from_checkpoint(algo.save_to_path(tmp_path / "c"))
    try:
        assert states(other) == saved
    finally:
        other.stop()


def test_a_curriculum_of_other_tasks_is_refused_by_remote_runners_too(
    build: Make, tmp_path: pathlib.Path
) -> None:
    """A checkpoint of another mixture is an error, not a run that quietly starts its curriculum again."""
    path = build(config(MIXTURE, 0)).save_to_path(tmp_path / "c")
    other = build(config(MIXTURE | {"tasks": [{"task": "chain_sum", "weight": 1.0}]}, 1))
    with pytest.raises(CheckpointError, match="saved curriculum is of the tasks"):
        other.restore_from_path(path)
