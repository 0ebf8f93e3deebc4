"""The pieces the losses are written from: ratio, clipped surrogate, KL estimators, per-sequence sums.

All in fp32, in log space, and bounded before exp: exp overflows fp32 at 88.7 and a sequence's log-ratio grows
with its length (4 000 tokens of mean 0.01 give e^40; huggingface/trl#4772).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from rllib_llm.losses.base import LossInputs

LOG_RATIO_BOUND = 20.0
"""|log ratio| is clamped here before exp, e^20 = 4.85e8. The field's habit (verl: 20, torchtitan: 10)."""

KL_ESTIMATORS = ("k1", "k2", "k3")


def bounded_exp(log_value: Tensor) -> Tensor:
    """exp of a log-ratio after clamping to +-LOG_RATIO_BOUND; the gradient is zero outside."""
    return log_value.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def kl_estimate(logp: Tensor, ref_logp: Tensor, estimator: str) -> Tensor:
    """Per-token estimate of KL(policy || reference) from tokens sampled by the policy, nats, same shape.

    With d = ref_logp - logp (J. Schulman, "Approximating KL divergence", 2020):
    k1 = -d               unbiased, may be negative. As a *loss* its expected gradient is zero: it regularises
                          only as part of the reward.
    k2 = d^2 / 2          biased, >= 0. Its gradient is the gradient of the KL on on-policy samples.
    k3 = e^d - 1 - d      unbiased, >= 0; the one GRPO writes.
    """
    d = (ref_logp - logp).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return 0.5 * d.square()
    if estimator == "k3":
        # expm1: for |d| < 1e-4, exp(d) - 1 - d in fp32 is rounding noise of either sign.
        return torch.expm1(d) - d
    raise ValueError(f"KL estimator {estimator!r} is unknown; one of {', '.join(KL_ESTIMATORS)}")


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """PPO's pessimistic surrogate as a loss, -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), per token.

    dual_clip = c additionally bounds the loss of A < 0 by c |A| (Ye et al. 2019, arXiv 1912.09729).
    Returns (loss [T], cut_low [T] bool, cut_high [T] bool): where the lower / the upper bound removes the
    gradient. cut_low can only happen for A < 0; cut_high for A > 0, or for A < 0 through dual_clip.
    """
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    cut_low = (advantages < 0) & (ratio < 1.0 - clip_low)
    cut_high = (advantages > 0) & (ratio > 1.0 + clip_high)
    if dual_clip is not None:
        capped = (advantages < 0) & (ratio > dual_clip)
        loss = torch.where(capped, -dual_clip * advantages, loss)
        cut_high = cut_high | capped
    return loss, cut_low, cut_high


def sequence_sums(values: Tensor, mask: Tensor, sequence_ids: Tensor, num_sequences: int) -> Tensor:
    """[S]: sum of values [T] over the trained tokens of each sequence; differentiable."""
    kept = torch.where(mask.bool(), values, torch.zeros_like(values))
    return torch.zeros(num_sequences, dtype=values.dtype, device=values.device).index_add(
        0, sequence_ids, kept
    )


def sequence_lengths(mask: Tensor, sequence_ids: Tensor, num_sequences: int) -> Tensor:
    """fp32 [S]: trained tokens of each sequence, zeros included."""
    return sequence_sums(torch.ones_like(mask, dtype=torch.float32), mask, sequence_ids, num_sequences)


def without_masked_values(inputs: LossInputs) -> LossInputs:
    """The inputs with fp32 floats, a bool mask, and zero wherever the mask is false (0 * NaN would be
    NaN)."""
    mask = inputs.mask.bool()

    def clean(value: Tensor) -> Tensor:
        return torch.where(mask, value.float(), 0.0)

    def maybe(value: Tensor | None) -> Tensor | None:
        return None if value is None else clean(value)

    return replace(
        inputs,
        mask=mask,
        logp=clean(inputs.logp),
        old_logp=clean(inputs.old_logp).detach(),
        rollout_logp=clean(inputs.rollout_logp),
        advantages=clean(inputs.advantages).detach(),
        ref_logp=maybe(inputs.ref_logp),
        entropy=maybe(inputs.entropy),
        correction_weights=maybe(inputs.correction_weights),
    )
