"""DAPO, decoupled clip and dynamic sampling (arXiv 2503.14476): loss, overlong shaping, dynamic sampling.

The four pieces of the paper and where they are: clip-higher and token-level loss in `DAPOLoss`, overlong
reward shaping in `overlong_penalty`, dynamic sampling in `informative_groups` (a predicate; the algorithm
resamples).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rllib_llm.losses.advantages import constant_groups
from rllib_llm.losses.grpo import GRPOLoss


class DAPOLoss(GRPOLoss):
    """J = E 1/(sum_i |o_i|) sum_i sum_t min[ r_it A_i, clip(r_it, 1-e_low, 1+e_high) A_i ],  A_i as in GRPO

    Clip-higher: e_low = 0.2, e_high = 0.28, so that rare tokens with a good advantage can still grow.
    The paper has no KL term.

    Normaliser: **tokens**; every trained token weighs the same. (The paper's sum is over the tokens of one
    question's group; like its released recipe we take all tokens of the optimiser step.)
    """

    name = "dapo"
    normaliser = "tokens"
    per_sequence_mean = False
    advantage_kind = "grpo"
    default_clip = (0.2, 0.28)


def overlong_penalty(lengths: Tensor, max_tokens: int, buffer: int, factor: float = 1.0) -> Tensor:
    """Soft overlong punishment (eq. 13), fp32 [N] <= 0, to be added to the reward of each response.

    With safe = max_tokens - buffer and length n in tokens:
    0 for n <= safe;  factor (safe - n) / buffer for safe < n <= max_tokens;  -factor for n > max_tokens.
    lengths: int [N]. Raises ValueError unless 0 < buffer <= max_tokens and factor >= 0.
    """
    if not 0 < buffer <= max_tokens or factor < 0:
        raise ValueError(
            f"overlong_penalty: buffer = {buffer} tokens, max_tokens = {max_tokens}, factor = {factor}; "
            "needs 0 < buffer <= max_tokens and factor >= 0 (the paper: 4096, 20480, 1)."
        )
    safe = max_tokens - buffer
    return factor * ((safe - lengths.float()) / buffer).clamp(-1.0, 0.0)


@dataclass(frozen=True)
class GroupSelection:
    """keep: bool [N], samples of informative groups. resample: ids of the other groups, ascending."""

    keep: Tensor
    resample: tuple[int, ...]


def informative_groups(scores: Tensor, group_ids: Tensor) -> GroupSelection:
    """Dynamic sampling (eq. 11): a group teaches something only if its scores are not all equal.

    scores: float [N], the accuracy or the reward that the advantage is made from; group_ids: int [N].
    Equal is what `advantages.is_constant` calls so: exactly the groups whose advantages would be 0. A group of one
    sample is never informative. Scores that are not finite in fp32 are refused: drop failed samples first.
    """
    if not torch.isfinite(scores.float()).all():
        bad = (~torch.isfinite(scores.float())).nonzero().flatten().tolist()
        raise ValueError(
            f"informative_groups: scores {bad[:8]} are not finite; drop failed samples before grouping."
        )
    ids, index = torch.unique(group_ids, return_inverse=True)
    informative = ~constant_groups(scores, index, len(ids))
    return GroupSelection(informative[index], tuple(ids[~informative].tolist()))
