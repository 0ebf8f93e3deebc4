"""What an iteration reports of its samples, and which results of earlier iterations it must not repeat."""

from __future__ import annotations

import logging
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np
from ray.rllib.utils.metrics import ENV_RUNNER_RESULTS, EVALUATION_RESULTS

from rllib_llm import metric_names as names
from rllib_llm.algorithm.sampling import Collected, groups_without_signal

if TYPE_CHECKING:
    from ray.rllib.utils.metrics.metrics_logger import MetricsLogger

__all__ = ["drop_unmeasured", "log_sampling"]

logger = logging.getLogger(__name__)

# Results whose keys depend on what the iteration met: buckets, environments, rewards by name.
_SOMETIMES_MEASURED = (
    (names.MISMATCH,),
    (names.CORRECTION,),
    (ENV_RUNNER_RESULTS, names.REWARDS),
    (EVALUATION_RESULTS, ENV_RUNNER_RESULTS, names.REWARDS),
)


def log_sampling(metrics: MetricsLogger, collected: Collected, empty_before: int, advantage: str) -> None:
    """Log what the runners counted and what came of their answers; warn of errors and lost samples.

    Args:
        empty_before: iterations in a row, before this one, that gave no usable sample.
        advantage: one of `losses.advantages.ADVANTAGE_KINDS`; it decides what a group without signal is.
    """
    if collected.metrics:
        metrics.aggregate(collected.metrics, key=ENV_RUNNER_RESULTS)
        tokens = metrics.peek((ENV_RUNNER_RESULTS, names.NUM_TOKENS_SAMPLED), default=0)
        metrics.log_value(
            (ENV_RUNNER_RESULTS, names.TOKENS_PER_S), tokens / max(collected.seconds, 1e-9), window=1
        )
    for name, value in (
        (names.NUM_SAMPLES_REFUSED, collected.refused),
        (names.NUM_PROMPTS_LOST, len(collected.lost)),
        (names.NUM_SAMPLE_ROUNDS, collected.rounds),
        (names.NUM_EMPTY_SAMPLES, empty_before + (not collected.episodes)),
        (
            names.NUM_GROUPS_WITHOUT_SIGNAL,
            collected.uninformative + groups_without_signal(collected.episodes, advantage),
        ),
    ):
        metrics.log_value(name, value, window=1)
    if collected.errors:
        logger.warning(
            "%d env runner error(s) this iteration, the last: %s",
            len(collected.errors),
            collected.errors[-1],
        )
    if collected.lost_samples:
        lost = metrics.peek((ENV_RUNNER_RESULTS, names.NUM_REWARD_ERRORS), default=0)
        logger.warning(
            "%d sample(s) lost to errors of the environment, the last: %s",
            lost,
            collected.lost_samples[-1],
        )


def drop_unmeasured(results: dict[str, Any]) -> None:
    """Take out, in place, the metrics that this iteration did not measure: RLlib reports them as NaN."""
    for path in _SOMETIMES_MEASURED:
        *parents, last = path
        parent = reduce(lambda tree, key: tree.get(key, {}), parents, results)
        if last in parent:
            parent[last] = _measured(parent[last])


def _measured(tree: dict[str, Any]) -> dict[str, Any]:
    """Without the NaN that RLlib reports for a metric of earlier iterations, and without what is then empty."""
    kept = {k: _measured(v) if isinstance(v, dict) else v for k, v in tree.items()}
    return {k: v for k, v in kept.items() if (bool(v) if isinstance(v, dict) else not np.isnan(v))}
