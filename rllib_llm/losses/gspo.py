"""GSPO, group sequence policy optimisation (arXiv 2507.18071)."""

from __future__ import annotations

from torch import Tensor

from rllib_llm.losses import terms
from rllib_llm.losses.base import Loss, LossInputs


class GSPOLoss(Loss):
    """J = E 1/G sum_i min[ s_i A_i, clip(s_i, 1-e_low, 1+e_high) A_i ]

    s_i = (pi(o_i | q) / pi_old(o_i | q))^(1/|o_i|) = exp( 1/|o_i| sum_t (logp_it - old_logp_it) )

    One ratio and one clip decision per response, its log clamped before exp. Written in the paper's token
    form (GSPO-token), s_it = sg[s_i] pi_it / sg[pi_it], averaged over the response: same value and gradient
    when advantage and weight are constant over the response, and both may vary per token otherwise.
    Paper's range: e_low = 3e-4, e_high = 4e-4; ranges made for token ratios (0.2) would hardly ever clip.

    Normaliser: mean over a response's tokens, then **sequences**.
    """

    name = "gspo"
    normaliser = "sequences"
    per_sequence_mean = True
    advantage_kind = "grpo"
    ratio_level = "sequence_mean"
    default_clip = (3e-4, 4e-4)

    def policy_terms(self, batch: LossInputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        layout = (batch.mask, batch.sequence_ids, batch.num_sequences)
        lengths = terms.sequence_lengths(*layout).clamp(min=1)
        log_s = terms.sequence_sums((batch.logp - batch.old_logp).detach(), *layout) / lengths
        ratio = terms.bounded_exp(log_s[batch.sequence_ids]) * (batch.logp - batch.logp.detach()).exp()
        loss, cut_low, cut_high = self.clipped(ratio, batch.advantages)
        return loss, ratio, cut_low, cut_high
