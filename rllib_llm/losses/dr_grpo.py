"""Dr.GRPO, "GRPO done right" (arXiv 2503.20783)."""

from __future__ import annotations

from rllib_llm.losses.grpo import GRPOLoss


class DrGRPOLoss(GRPOLoss):
    """J = E_q 1/G sum_i 1/L sum_t min[ r_it A_i, clip(r_it, 1-e, 1+e) A_i ],  A_i = R_i - mean R

    GRPO without its two biases: no division by the response's own length |o_i| (it spares long wrong answers)
    and none by the group's standard deviation (it favours questions that are too easy or too hard).

    Normaliser: the **constant** L = max_tokens per sequence, so it does not depend on what was sampled.
    The paper drops the KL term; kl_coeff adds it back, summed over tokens like the rest.
    """

    name = "dr_grpo"
    normaliser = "constant"
    per_sequence_mean = False
    advantage_kind = "dr_grpo"
