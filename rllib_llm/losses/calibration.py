"""Clip range calibrated by the measured noise of the ratio, for low-precision policies. Off by default.

Idea of arXiv 2609.22870: in low precision the log-ratio carries quantisation noise, which pushes tokens out
of the clip range although the policy has not moved; the tokens lost are mostly those with a negative
advantage at the lower end. We have not read the paper: the formula is our own,
only the claim above is theirs.

With D = train_logp - rollout_logp measured before the update, where both sides hold the same weights and
any D is noise: b = mean D, s = standard deviation of D, both at the level of the loss's ratio (token; GSPO:
mean over the response; RLOO: sum over it), each D clamped to +-1 because more than a factor e is a fault
for the guard, not noise.

    1 - clip_low'  = (1 - clip_low)  exp(b - strength s)        exponents limited to +-0.5,
    1 + clip_high' = (1 + clip_high) exp(b + strength s)        and no end crosses ratio 1

b counts only if the ratio is taken against the rollout's log-probs; against the trainer's own it cancels. A
policy whose two sides are bit-equal has b = s = 0 and keeps its range exactly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rllib_llm.losses import terms
from rllib_llm.losses.base import Loss

LARGEST_NOISE = 1.0
LARGEST_SHIFT = 0.5


@dataclass(frozen=True)
class RatioNoise:
    """bias and sigma of the log-ratio's noise, and the number of ratios they were measured on."""

    bias: float
    sigma: float
    count: int

    @classmethod
    def from_sums(cls, sums: Tensor) -> RatioNoise:
        """From `noise_sums`, added over micro-batches and ranks first; no ratio at all means no noise."""
        count, total, squares = sums.tolist()
        if count == 0:
            return cls(0.0, 0.0, 0)
        bias = total / count
        return cls(bias, math.sqrt(max(0.0, squares / count - bias * bias)), int(count))


def noise_sums(
    ratio_level: str,
    train_logp: Tensor,
    rollout_logp: Tensor,
    mask: Tensor,
    sequence_ids: Tensor,
    num_sequences: int,
) -> Tensor:
    """fp64 [3]: number, sum and sum of squares of the clamped log-ratios between the two sides.

    ratio_level: `Loss.ratio_level`. Tensors [T] as in `LossInputs`; tokens with a non-finite side are left
    out. All ranks must calibrate from the same numbers: all-reduce (sum) this tensor before
    `RatioNoise.from_sums`.
    """
    kept = mask.bool() & torch.isfinite(train_logp) & torch.isfinite(rollout_logp)
    delta = torch.where(kept, train_logp.double() - rollout_logp.double(), 0.0).detach()
    if ratio_level == "token":
        noise = delta[kept]
    else:
        lengths = terms.sequence_lengths(kept, sequence_ids, num_sequences).double()
        noise = terms.sequence_sums(delta, kept, sequence_ids, num_sequences)
        if ratio_level == "sequence_mean":
            noise = noise / lengths.clamp(min=1)
        noise = noise[lengths > 0]
    noise = noise.clamp(-LARGEST_NOISE, LARGEST_NOISE)
    return torch.stack([noise.new_tensor(float(noise.numel())), noise.sum(), noise.square().sum()])


def calibrated(loss: Loss, noise: RatioNoise, strength: float, old_is_rollout: bool) -> Loss:
    """The same loss with the calibrated clip range; start from the uncalibrated one each time.

    strength: `policy.clip_calibration.strength` >= 0. old_is_rollout: whether LossInputs.old_logp are the
    engine's.
    """
    if not strength >= 0:
        raise ValueError(f"policy.clip_calibration.strength = {strength}: must be >= 0")
    bias, width = (noise.bias if old_is_rollout else 0.0), strength * noise.sigma
    low = 1.0 - (1.0 - loss.clip_low) * math.exp(_limited(bias - width))
    high = (1.0 + loss.clip_high) * math.exp(_limited(bias + width)) - 1.0
    if bias == 0.0 and width == 0.0:
        return loss
    return loss.with_clip(max(0.0, low), max(0.0, high))


def _limited(shift: float) -> float:
    return min(LARGEST_SHIFT, max(-LARGEST_SHIFT, shift))
