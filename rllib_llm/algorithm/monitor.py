"""Measures, after every update, how far the two sides are apart, and asks the policy's guard what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rllib_llm.errors import RllibLLMError
from rllib_llm.losses.corrections import correction_weights
from rllib_llm.mismatch import MismatchMonitor
from rllib_llm.mismatch.guard import Evidence, Guard, GuardVerdict, changed_sides

if TYPE_CHECKING:
    from precision_policies import PrecisionPolicy
    from rllib_llm.rollout.episode import TextEpisode

__all__ = ["Observation", "PrecisionHalt", "PrecisionMonitor"]


_UNNAMED = "unnamed"


def _environment(episode: TextEpisode) -> str:
    """The task that the environment names in `info`, as one part of a metric's name."""
    return str(episode.info.get("task") or _UNNAMED).replace("/", "_")


class PrecisionHalt(RllibLLMError, RuntimeError):
    """The guard stopped training; the message says which side changed and where the checkpoint is."""


@dataclass(frozen=True)
class Observation:
    """mismatch: see rllib_llm/mismatch/registry.py. correction: statistics of its weights, empty without."""

    mismatch: dict[str, float]
    correction: dict[str, float]
    verdict: GuardVerdict


class PrecisionMonitor:
    """Compares the log-probabilities of all trained tokens of an iteration, on the driver, exactly.

    The pairs of all learners come together here (8 bytes per token), so maxima, percentiles and
    correlations are those of the whole iteration and do not depend on sharding.
    """

    def __init__(self, policy: PrecisionPolicy):
        self.guard = Guard(policy.guard)

    def observe(
        self, episodes: Sequence[TextEpisode], train_logprobs: dict[int, np.ndarray], correction: Any | None
    ) -> Observation:
        """train_logprobs: index of the episode -> float32 [trained tokens], under the weights that sampled it."""
        order = sorted(train_logprobs)
        train = torch.from_numpy(np.concatenate([train_logprobs[i] for i in order]))
        rollout = torch.from_numpy(
            np.concatenate([episodes[i].logprobs[episodes[i].loss_mask] for i in order])
        )
        lengths = torch.tensor([len(train_logprobs[i]) for i in order])
        sequence_ids = torch.repeat_interleave(torch.arange(len(order)), lengths)
        mask = torch.ones(len(train), dtype=torch.bool)
        names = [_environment(episodes[i]) for i in order]
        monitor = MismatchMonitor()
        monitor.add(train, rollout, mask, sequence_ids, names if set(names) != {_UNNAMED} else None)
        mismatch = monitor.metrics()
        statistics: dict[str, float] = {}
        if correction is not None:
            _, values = correction_weights(correction, train, rollout, mask, sequence_ids, len(order))
            statistics = {name: float(value) for name, value in values.items()}
        return Observation(mismatch, statistics, self.guard.check(mismatch))

    def explain(self, verdict: GuardVerdict, evidence: Evidence) -> str:
        """The verdict's message with what fresh attestations say about who changed."""
        baseline = self.guard.get_state()["baseline"]
        first, *more = verdict.message.split("\n  ")
        hints = [line for line in more if line.startswith("hint:")]
        return "\n  ".join([first, *changed_sides(baseline, evidence), *hints])
