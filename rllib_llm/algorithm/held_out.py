"""Held-out rewards of the two ends of a run: before the first update, and with the last weights, however it ends."""

from __future__ import annotations

import logging
from typing import Any

import ray
from ray import tune
from ray.rllib.utils.metrics import EVALUATION_RESULTS

from rllib_llm import metric_names as names

__all__ = ["HeldOutAtBothEnds"]

logger = logging.getLogger(__name__)


class HeldOutAtBothEnds(tune.Callback):
    """Evaluates a trial of `GRPO` when it starts from nothing, and when its last result has no evaluation.

    Put it before the callbacks that read results. A trial's first result gets the group ``evaluation_at_start``; the
    result that ends the trial (its iterations, a stopper: time, a metric, an interrupt) gets ``evaluation`` like any
    other. A trial that goes on from a checkpoint was evaluated before. An evaluation that fails costs its numbers, not
    the run.
    """

    def __init__(self) -> None:
        self._at_start: dict[str, ray.ObjectRef[Any]] = {}

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Queued in the trial's process before its first iteration; nothing waits here."""
        done = int((trial.last_result or {}).get("training_iteration", 0))
        if done == 0 and trial.checkpoint is None and trial.restore_path is None:
            self._at_start[trial.trial_id] = trial.temporary_state.ray_actor.evaluate.remote()

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        at_start = self._at_start.pop(trial.trial_id, None)
        if at_start is not None:
            _measure(at_start, result, names.EVALUATION_AT_START)
        if result.get("done") and not result.get(EVALUATION_RESULTS):
            _measure(trial.temporary_state.ray_actor.evaluate.remote(), result, EVALUATION_RESULTS)

    def __getstate__(self) -> dict[str, Any]:
        """Tune pickles callbacks; a reference of this process means nothing to another."""
        return {"_at_start": {}}


def _measure(evaluation: ray.ObjectRef[Any], result: dict[str, Any], group: str) -> None:
    try:
        result[group] = ray.get(evaluation)
    except ray.exceptions.RayError as error:
        logger.warning("no held-out reward for %r: the evaluation failed: %s", group, error)
