"""What a learner works out for the whole batch before its first update: the ratio's noise, and the KL as reward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from rllib_llm.losses import Loss, RatioNoise, noise_sums
from rllib_llm.losses.advantages import kl_to_go, moments, standardised
from rllib_llm.losses.terms import kl_estimate

if TYPE_CHECKING:
    from rllib_llm.learner.collective import Collective
    from rllib_llm.learner.micro_batch import MicroBatch

__all__ = ["advantages_with_kl", "measured_noise"]


def measured_noise(
    loss: Loss, micro_batches: Sequence[MicroBatch], train_logp: torch.Tensor, collective: Collective
) -> RatioNoise:
    """Noise of all learners' log-ratios under equal weights, at the level of the loss's ratio.

    train_logp: fp32, flat, indexed by `MicroBatch.slots`: the log-probs under the weights that sampled.
    """
    sums = torch.zeros(3, dtype=torch.float64, device=train_logp.device)
    for m in micro_batches:
        pair = (train_logp[m.slots], m.rollout_logprobs)
        sums += noise_sums(loss.ratio_level, *pair, m.mask, m.sequence_ids, m.num_sequences)
    collective.sum_([sums])
    return RatioNoise.from_sums(sums)


@torch.no_grad()
def advantages_with_kl(
    micro_batches: Sequence[MicroBatch],
    train_logp: torch.Tensor,
    reference: Callable[[MicroBatch], torch.Tensor],
    kl_coeff: float,
    kl_estimator: str,
    normalise: bool,
    collective: Collective,
) -> torch.Tensor:
    """Advantages (or rewards) minus kl_coeff times the KL to the reference from each token to the end; fp32, flat.

    reference: log-probs [N] of a micro-batch under the frozen model. normalise: standardise over the trained tokens
    of all learners afterwards (REINFORCE++, whose micro-batches then carry plain rewards).
    """
    values = torch.zeros_like(train_logp, dtype=torch.float64)
    used = torch.zeros_like(train_logp, dtype=torch.bool)
    for m in micro_batches:
        kl = kl_estimate(train_logp[m.slots], reference(m), kl_estimator)
        to_go = kl_to_go(kl, m.mask, m.sequence_ids, m.num_sequences)
        values[m.slots] = m.advantages.double() - kl_coeff * to_go
        used[m.slots] = True
    if not normalise:
        return values.float()
    sums = moments(values, used)
    collective.sum_([sums])
    return standardised(values, used, sums)
