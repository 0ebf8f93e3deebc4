"""REINFORCE++ (arXiv 2501.03262)."""

from __future__ import annotations

from rllib_llm.losses.grpo import GRPOLoss


class ReinforcePPLoss(GRPOLoss):
    """J = E 1/|o| sum_t min[ r_t A_t, clip(r_t, 1-e, 1+e) A_t ],  A = (A' - mean_batch A') / std_batch A'

    PPO's clipped objective without a critic. What is new is the advantage, normalised over the whole batch
    instead of over the group: A'_t = R - beta sum_{u >= t} KL_u with the KL in the reward
    (`advantages.kl_to_go`, `standardised`), or A' = R - mean of the group when a question has several samples
    ("reinforce++_baseline").

    Normaliser: mean over a response's tokens, then **sequences**, as in GRPO.
    """

    name = "reinforce++"
    advantage_kind = "reinforce++"
