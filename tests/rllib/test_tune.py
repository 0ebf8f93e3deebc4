"""Under Ray Tune: by class and by name, searching any key, and checkpoints that restore."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from rllib_llm import GRPO
from rllib_llm import metric_names as names

Make = Callable[..., Any]


@pytest.fixture(scope="module")
def trials(ray_session: Any, toy_model: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two trials by name, a grid over the policy's name, with checkpoints; a nested key set for both."""
    from ray import tune

    return tune.run(
        "GRPO-LLM",
        config={
            "model": toy_model,
            "precision": tune.grid_search(["unified-fp8", "mixed-bf16-fp8"]),
            "env": "tests.rllib.toy:CopyDigit",
            "rollout": {
                "group_size": 4,
                "prompts_per_iteration": 4,
                "max_new_tokens": tune.choice([3]),
            },
            "rollout/temperature": tune.uniform(0.89, 0.91),
            "train/lr": 1e-3,
        },
        stop={"training_iteration": 2},
        storage_path=str(tmp_path_factory.mktemp("tune")),
        checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=True),
        verbose=0,
    )


def test_grid_over_policy_name_and_nested_keys(trials: Any) -> None:
    """tune.run by name searches the policy and keys inside groups; each trial trains under what it was given."""
    results = [t.last_result for t in trials.trials]
    assert [t.status for t in trials.trials] == ["TERMINATED", "TERMINATED"]
    assert {r["precision_policy"] for r in results} == {"unified-fp8", "mixed-bf16-fp8"}
    assert len({r["precision_fingerprint"] for r in results}) == 2
    for result in results:
        exact = result["precision_policy"] == "unified-fp8"
        assert (result[names.MISMATCH]["max_abs"] == 0.0) == exact
        assert result[names.ENV_RUNNERS][names.RESPONSE_LENGTH_MEAN] <= 3


def test_a_tune_checkpoint_restores_outside_tune(trials: Any) -> None:
    """GRPO.from_checkpoint continues a trial: next iteration, same prompts stream, settings of the trial."""
    [trial] = [t for t in trials.trials if t.last_result["precision_policy"] == "unified-fp8"]
    algo = GRPO.from_checkpoint(trial.checkpoint.path)
    try:
        drawn = trial.config["rollout/temperature"]
        assert trial.config["rollout"]["temperature"] == algo.settings.rollout.temperature == drawn
        assert algo.next_prompt == 8
        result = algo.train()
        assert result["training_iteration"] == 3
        assert result[names.MISMATCH]["bit_equal_share"] == 1.0
    finally:
        algo.stop()


def test_tuner_takes_the_config_object(toy_config: Make, ray_session: Any, tmp_path: pathlib.Path) -> None:
    """tune.Tuner(GRPO, param_space=config) with remote runner and learner: resources are counted, it runs."""
    from ray import tune

    config = toy_config().env_runners(num_env_runners=1).learners(num_learners=1)
    run = tune.RunConfig(stop={"training_iteration": 1}, storage_path=str(tmp_path), verbose=0)
    [result] = tune.Tuner(GRPO, param_space=config, run_config=run).fit()
    assert result.error is None
    assert result.metrics[names.MISMATCH]["bit_equal_share"] == 1.0


def test_misspelt_keys_are_refused_before_a_trial_starts(
    toy_model: str, ray_session: Any, tmp_path: pathlib.Path
) -> None:
    """A wrong key in a Tune dict never trains with the default in silence."""
    from ray import tune

    with pytest.raises(Exception, match=r"closest: rollout\.temperature"):
        tune.run(
            "GRPO-LLM",
            config={
                "model": toy_model,
                "env": "tests.rllib.toy:CopyDigit",
                "rollout": {"temprature": 0.9},
            },
            stop={"training_iteration": 1},
            storage_path=str(tmp_path),
            verbose=0,
        )
