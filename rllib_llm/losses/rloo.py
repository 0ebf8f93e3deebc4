"""RLOO, REINFORCE with a leave-one-out baseline (arXiv 2402.14740)."""

from __future__ import annotations

from torch import Tensor

from rllib_llm.losses import terms
from rllib_llm.losses.base import Loss, LossInputs


class RLOOLoss(Loss):
    """grad J = E 1/k sum_i [ R_i - 1/(k-1) sum_{j != i} R_j ] grad log pi(o_i | q)

    The whole response is one action, so its log-probability is the *sum* over its tokens. The paper is
    on-policy; for several updates per batch we multiply by the response's ratio and drop a clipped response,
    which gives the gradient of PPO's surrogate on whole responses:

    loss_i = -A_i sg[ s_i 1{s_i not clipped} ] sum_t w_it logp_it,  s_i = exp( sum_t (logp_it - old_logp_it) )

    with the log of s_i clamped before exp and s_i = 1 before the first update. Products of ratios leave the
    range (default 0.2, as TRL) quickly on long responses: use one update per batch there.

    Normaliser: tokens summed, divided by **sequences**.
    """

    name = "rloo"
    normaliser = "sequences"
    per_sequence_mean = False
    advantage_kind = "rloo"
    ratio_level = "sequence_sum"

    def policy_terms(self, batch: LossInputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        layout = (batch.mask, batch.sequence_ids, batch.num_sequences)
        log_s = terms.sequence_sums((batch.logp - batch.old_logp).detach(), *layout)
        ratio = terms.bounded_exp(log_s[batch.sequence_ids])
        _, cut_low, cut_high = self.clipped(ratio, batch.advantages)
        coefficient = batch.advantages * ratio * ~(cut_low | cut_high)
        return -coefficient * batch.logp, ratio, cut_low, cut_high
