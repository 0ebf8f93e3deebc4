"""What a learner knows during one iteration, and what it hands to its module for one forward pass."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from rllib_llm.learner.tally import Tally

if TYPE_CHECKING:
    from rllib_llm.learner.micro_batch import MicroBatch, Shard
    from rllib_llm.losses import Loss
    from rllib_llm.models.sampling_distribution import SamplingDistribution

__all__ = ["Iteration", "Scores", "TrainInput"]


@dataclass(frozen=True)
class TrainInput:
    """One forward pass of training."""

    micro_batch: MicroBatch
    distribution: SamplingDistribution
    """what the tokens of the micro-batch were sampled from"""
    entropy_with_grad: bool
    """whether the loss differentiates the entropy"""
    count: float
    """what the loss of the optimiser step is divided by: tokens or sequences of all learners (1 where none is made)"""


@dataclass(frozen=True)
class Scores:
    """Of the N trained tokens of a micro-batch, fp32 [N] each."""

    logp: torch.Tensor
    entropy: torch.Tensor


@dataclass
class Iteration:
    """The update of one learner, from the arrival of its samples until the driver has taken their log-probs."""

    shard: Shard
    loss: Loss
    """with the clip range of this iteration, where the policy calibrates it"""
    old_is_fixed: bool
    """True: `train_logp` is filled before the first step. False: there is one step, whose own forward fills it"""
    advantages: torch.Tensor | None = None
    """fp32, flat over the shard's tokens, where they are not those of the driver (KL as reward)"""
    tally: Tally = field(default_factory=Tally)
    kept_count: float = 0.0
    """of the optimiser step: what a correction with divisor "kept" divides by, on this learner"""
    train_logp: torch.Tensor = field(init=False)
    """fp32, flat over the shard's tokens: log-probs under the weights that sampled; 0 where nothing is trained"""

    def __post_init__(self) -> None:
        self.train_logp = torch.zeros_like(self.shard.rollout_logprobs, dtype=torch.float32)

    def advantages_of(self, micro: MicroBatch) -> torch.Tensor:
        """fp32 [N]."""
        return micro.advantages if self.advantages is None else self.advantages[micro.slots]

    def train_logprobs(self) -> list[tuple[int, np.ndarray]]:
        """(sequence index, float32 [C] log-probs of its C trained tokens under the weights that sampled)."""
        shard, out = self.shard, []
        for row, (start, length) in enumerate(
            zip(shard.starts.tolist(), shard.lengths.tolist(), strict=True)
        ):
            part = slice(start, start + length)
            trained = shard.trained[part].bool()
            out.append((int(shard.sequence_index[row]), self.train_logp[part][trained].cpu().numpy()))
        return out
