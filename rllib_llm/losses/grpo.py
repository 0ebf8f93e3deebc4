"""GRPO, group relative policy optimisation (DeepSeekMath, arXiv 2402.03300, eq. 3)."""

from __future__ import annotations

from torch import Tensor

from rllib_llm.losses import terms
from rllib_llm.losses.base import Loss, LossInputs


class GRPOLoss(Loss):
    """J = E_q 1/G sum_i 1/|o_i| sum_t { min[ r_it A_i, clip(r_it, 1-e, 1+e) A_i ] - beta D_KL_it }

    r_it = pi(o_it | q, o_i<t) / pi_old(o_it | q, o_i<t);  A_i = (R_i - mean R) / std R over the group;
    D_KL_it: the k3 estimate of KL(pi || pi_ref).  The loss is -J.  Paper's range: e = 0.2.

    Normaliser: mean over a response's tokens first, then **sequences** (1/G and the mean over questions are
    one mean over all responses). A token of a long response therefore weighs less than one of a short
    response, which Dr.GRPO and DAPO object to.
    """

    name = "grpo"
    normaliser = "sequences"
    per_sequence_mean = True
    advantage_kind = "grpo"

    def policy_terms(self, batch: LossInputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        ratio = terms.bounded_exp(batch.logp - batch.old_logp)
        loss, cut_low, cut_high = self.clipped(ratio, batch.advantages)
        return loss, ratio, cut_low, cut_high
