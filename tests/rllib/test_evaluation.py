"""Evaluation in the loop: other problems, the current weights, and no trace in training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rllib_llm import metric_names as names

Make = Callable[..., Any]


def test_evaluation_is_greedy_on_the_other_split_and_leaves_training_alone(
    build: Make, toy_config: Make
) -> None:
    """evaluate() plays each evaluation problem once, greedily, with the current weights; training goes on unchanged."""
    config = toy_config().evaluation(evaluation_duration=6)
    with_eval, without = build(config), build(config)
    with_eval.train(), without.train()
    first, second = with_eval.evaluate()[names.ENV_RUNNERS], with_eval.evaluate()[names.ENV_RUNNERS]
    assert first["num_episodes"] == second["num_episodes"] == 6
    assert first[names.EPISODE_RETURN_MEAN] == second[names.EPISODE_RETURN_MEAN]
    episodes = with_eval.env_runner.sample(prompt_indices=range(6), evaluation=True)
    assert {e.info["id"] for e in episodes} == {f"eval-{i}" for i in range(6)}
    assert np.mean([e.reward for e in episodes]) == pytest.approx(first[names.EPISODE_RETURN_MEAN])
    with_eval.env_runner.get_metrics()  # forget what sampling by hand logged
    a, b = with_eval.train(), without.train()
    assert a[names.ENV_RUNNERS][names.EPISODE_RETURN_MEAN] == b[names.ENV_RUNNERS][names.EPISODE_RETURN_MEAN]
    assert (
        a[names.LEARNERS]["default_policy"][names.GRAD_NORM]
        == b[names.LEARNERS]["default_policy"][names.GRAD_NORM]
    )


def test_an_evaluation_is_not_mixed_with_an_earlier_one(build: Make, toy_config: Make) -> None:
    """Between two results RLlib averages what is measured twice: evaluate() reports the current weights alone."""
    algo = build(toy_config(eval_temperature=1.0).evaluation(evaluation_duration=6))
    before = algo.evaluate()[names.ENV_RUNNERS]
    [changed] = algo.learner_group.foreach_learner(_forget_all)
    assert changed.get()
    algo.weights.learner_changed()
    after = algo.evaluate()[names.ENV_RUNNERS]
    assert before[names.TRUNCATED_SHARE] < after[names.TRUNCATED_SHARE] == 1.0


def _forget_all(learner: Any) -> bool:
    """All weights 0: any token is as likely as any other, so none of these answers ends."""
    with torch.no_grad():
        for parameter in learner.lm_module.lm.parameters():
            parameter.mul_(0.0)
    return True


def test_sampled_evaluation(build: Make, toy_config: Make) -> None:
    """With eval_temperature > 0 every evaluation problem gets eval_samples answers; explore=False is greedy again."""
    algo = build(toy_config(eval_temperature=1.0, eval_samples=3).evaluation(evaluation_duration=4))
    assert algo.evaluate()[names.ENV_RUNNERS]["num_episodes"] == 12
    episodes = algo.env_runner.sample(prompt_indices=[0], evaluation=True, explore=False)
    assert len({tuple(e.completion_ids) for e in episodes}) == 1


def test_evaluation_interval_reports_in_results(build: Make, toy_config: Make) -> None:
    """evaluation_interval works without an evaluation group of its own, in the training runner's engine."""
    algo = build(toy_config().evaluation(evaluation_interval=2, evaluation_duration=4))
    assert algo.eval_env_runner_group is None
    assert names.EVALUATION not in algo.train()
    assert algo.train()[names.EVALUATION][names.ENV_RUNNERS]["num_episodes"] == 4
