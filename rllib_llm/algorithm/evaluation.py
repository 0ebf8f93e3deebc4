"""`algo.evaluate()`: every problem of the evaluation set once, whatever the number of runners."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tree
from ray.rllib.utils.metrics import ENV_RUNNER_RESULTS, EVALUATION_RESULTS

from rllib_llm.algorithm.sampling import NoSamplesError, dispatch

if TYPE_CHECKING:
    from ray.rllib.env.env_runner_group import EnvRunnerGroup

    from rllib_llm.algorithm.grpo import GRPO

__all__ = ["evaluate_text"]


def evaluate_text(algorithm: GRPO, eval_group: EnvRunnerGroup | None) -> tuple[dict, int, int]:
    """RLlib's `custom_evaluation_function`: problems 0..evaluation_duration-1 of the evaluation split.

    Runs on the evaluation runners, or, without any, on the training runners (local or remote): an engine
    costs the memory of a model, and it idles during evaluation anyway. RLlib's own evaluation gives each
    runner a number of episodes, not problems, so its result depends on how many runners there are.
    """
    group = eval_group or algorithm.env_runner_group
    config = algorithm.config
    algorithm.weights.push(group)
    found = dispatch(
        group,
        range(config.evaluation_duration),
        algorithm.weights.version,
        config.evaluation_sample_timeout_s or algorithm.settings.rollout.sample_timeout_s,
        evaluation=True,
    )
    if not found.episodes:
        raise NoSamplesError("evaluation got no sample from any env runner.\n" + "\n".join(found.errors[-2:]))
    # Of an evaluation that no result has reported yet, RLlib would give the mean over it and this one.
    earlier = algorithm.metrics.stats.get(EVALUATION_RESULTS, {}).get(ENV_RUNNER_RESULTS, {})
    tree.map_structure(lambda stats: stats.reduce(), earlier)
    algorithm.metrics.aggregate(found.metrics, key=(EVALUATION_RESULTS, ENV_RUNNER_RESULTS))
    steps = len(found.episodes)
    results: dict[str, Any] = algorithm.metrics.peek((EVALUATION_RESULTS, ENV_RUNNER_RESULTS), default={})
    return results, steps, steps
