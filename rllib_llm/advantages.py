"""Advantages of group-sampled responses, and the reference KL as part of the reward.

Call these once on the whole batch of an iteration, before it is cut into learner shards and micro-batches:
group and batch statistics must not depend on the number of learners.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ADVANTAGE_KINDS = ("grpo", "dr_grpo", "rloo", "reinforce++", "reinforce++_baseline")
STD_EPSILON = 1e-6
"""Added to a standard deviation before dividing by it (verl: 1e-6, TRL: 1e-4; the papers write none)."""


@dataclass(frozen=True)
class GroupStatistics:
    """num_groups; uninformative_groups: all rewards equal, so no gradient; singleton_groups: one sample
    left."""

    num_groups: int
    uninformative_groups: int
    singleton_groups: int


def group_advantages(rewards: Tensor, group_ids: Tensor, kind: str = "grpo") -> Tensor:
    """One advantage per response, fp32 [N], from rewards [N] (any float) and group ids [N] (any integers).

    "grpo"                  (R - mean_g) / (std_g + 1e-6)                        arXiv 2402.03300
    "dr_grpo"               R - mean_g                                           arXiv 2503.20783
    "rloo"                  R - mean of the group's other rewards                arXiv 2402.14740
    "reinforce++"           (R - mean_batch) / (std_batch + 1e-6)                arXiv 2501.03262
    "reinforce++_baseline"  (R - mean_g) / (std_batch(R - mean_g) + 1e-6)        the same, groups of samples

    std is the sample deviation (n - 1), as in TRL and verl. A group whose rewards are all equal, and a group
    of one sample, gets exactly 0 (except "reinforce++", which has no groups): rounding would otherwise be
    divided by 1e-6. Computed in fp64. Raises ValueError for an unknown kind, shapes, non-finite rewards, or a
    batch in which no group has two samples although the kind compares within groups.
    """
    _check(rewards, group_ids, kind)
    r = rewards.double()
    if r.numel() == 0:
        return r.float()
    if kind == "reinforce++":
        return _standardise(r).float()
    ids, index = torch.unique(group_ids, return_inverse=True)
    groups = len(ids)
    size = _group_sum(torch.ones_like(r), index, groups)
    if size.max() < 2:
        raise ValueError(
            f"group_advantages(kind={kind!r}): all {groups} groups have one sample, so nothing can be "
            "compared within a group. Set rollout.group_size >= 2 or training.loss = 'reinforce++'."
        )
    centred = r - (_group_sum(r, index, groups) / size)[index]
    centred = torch.where(_constant_groups(r, index, groups)[index], torch.zeros_like(r), centred)
    if kind == "dr_grpo":
        return centred.float()
    if kind == "rloo":  # R - (sum - R) / (n - 1) = (R - mean) n / (n - 1)
        return (centred * (size / (size - 1).clamp(min=1))[index]).float()
    if kind == "reinforce++_baseline":
        return _standardise(centred).float()
    variance = _group_sum(centred.square(), index, groups) / (size - 1).clamp(min=1)
    return (centred / (variance.sqrt() + STD_EPSILON)[index]).float()


def group_statistics(rewards: Tensor, group_ids: Tensor) -> GroupStatistics:
    """How many groups there are and how many cannot teach anything."""
    ids, index = torch.unique(group_ids, return_inverse=True)
    size = torch.bincount(index, minlength=len(ids))
    constant = _constant_groups(rewards.double(), index, len(ids))
    return GroupStatistics(len(ids), int(constant.sum()), int((size == 1).sum()))


def rewards_with_kl(
    rewards: Tensor, kl: Tensor, mask: Tensor, sequence_ids: Tensor, kl_coeff: float
) -> Tensor:
    """Reference KL as reward, one number per response: R_i - beta sum_t KL_it, fp32 [N].

    rewards [N] in the order of sequence_ids 0..N-1; kl [T]: `losses.terms.kl_estimate(old_logp, ref_logp,
    "k1")` (any estimator), no grad; mask [T]; sequence_ids int64 [T].
    """
    per_response = _group_sum(torch.where(mask.bool(), kl.double(), 0.0), sequence_ids, len(rewards))
    return (rewards.double() - kl_coeff * per_response).float()


def token_advantages(
    rewards: Tensor, kl: Tensor | None, mask: Tensor, sequence_ids: Tensor, kl_coeff: float
) -> Tensor:
    """REINFORCE++ with the KL in each token's reward, fp32 [T], normalised over the batch's trained tokens.

    A'_t = R - beta sum_{u >= t, same response} KL_u, then (A' - mean) / (std + 1e-6) over all trained
    tokens; 0 where mask is false. kl None (or kl_coeff 0): A'_t = R. This is the whole batch in one
    process; a learner that holds a shard composes it from `kl_to_go`, `moments` (summed over ranks) and
    `standardised`.
    """
    value = rewards.double()[sequence_ids]
    if kl is not None and kl_coeff:
        value = value - kl_coeff * kl_to_go(kl, mask, sequence_ids, len(rewards))
    return standardised(value, mask, moments(value, mask))


def kl_to_go(kl: Tensor, mask: Tensor, sequence_ids: Tensor, num_sequences: int) -> Tensor:
    """fp64 [T]: for each token the sum of its own and all later KL terms of its response, masked ones as 0.

    Subtract kl_coeff times this from any advantage or reward [T] to have the KL as reward. kl [T] without
    grad: `losses.terms.kl_estimate(old_logp, ref_logp, "k1")`. Raises ValueError unless sequence_ids is
    ascending.
    """
    if (sequence_ids.diff() < 0).any():
        raise ValueError(
            "kl_to_go: sequence_ids must be ascending (tokens of a response adjacent, in order)."
        )
    values = torch.where(mask.bool(), kl.double(), 0.0)
    total = _group_sum(values, sequence_ids, num_sequences)
    before = values.cumsum(0) - values
    start = total.cumsum(0) - total
    return total[sequence_ids] - (before - start[sequence_ids])


def moments(values: Tensor, mask: Tensor) -> Tensor:
    """fp64 [3]: number, sum and sum of squares of the trained tokens' values; add over micro-batches and
    ranks."""
    kept = values.double()[mask.bool()]
    return torch.stack([kept.new_tensor(float(kept.numel())), kept.sum(), kept.square().sum()])


def standardised(values: Tensor, mask: Tensor, sums: Tensor) -> Tensor:
    """fp32 [T]: (value - mean) / (sample deviation + 1e-6) by the (global) `moments`; 0 where mask is false.

    Fewer than two tokens, or a variance below 1e-12 of the mean square (equal values up to rounding), give 0.
    """
    count, total, squares = sums.tolist()
    mean = total / max(count, 1.0)
    variance = (squares - count * mean * mean) / max(count - 1.0, 1.0)
    if count < 2 or variance <= 1e-12 * squares / count:
        return torch.zeros_like(values, dtype=torch.float32)
    result = (values.double() - mean) / (variance**0.5 + STD_EPSILON)
    return torch.where(mask.bool(), result, 0.0).float()


def _standardise(values: Tensor) -> Tensor:
    if values.numel() < 2 or bool((values == values[0]).all()):
        return torch.zeros_like(values)
    return (values - values.mean()) / (values.std() + STD_EPSILON)


def _group_sum(values: Tensor, index: Tensor, groups: int) -> Tensor:
    return torch.zeros(groups, dtype=values.dtype, device=values.device).index_add(0, index, values)


def _constant_groups(values: Tensor, index: Tensor, groups: int) -> Tensor:
    """Bool [groups]: all values of the group are the same number (true for one sample)."""
    low = values.new_full((groups,), float("inf")).scatter_reduce(0, index, values, "amin")
    high = values.new_full((groups,), float("-inf")).scatter_reduce(0, index, values, "amax")
    return high <= low


def _check(rewards: Tensor, group_ids: Tensor, kind: str) -> None:
    wrong = []
    if kind not in ADVANTAGE_KINDS:
        wrong.append(f"kind = {kind!r}: one of {', '.join(ADVANTAGE_KINDS)}")
    if rewards.ndim != 1 or rewards.shape != group_ids.shape:
        wrong.append(
            f"rewards {tuple(rewards.shape)} and group_ids {tuple(group_ids.shape)} must both be [N]"
        )
    bad = (~torch.isfinite(rewards)).nonzero().flatten().tolist()
    if bad:
        wrong.append(
            f"rewards at {bad[:8]} ({len(bad)} in all) are not finite: drop failed samples before grouping"
        )
    if wrong:
        raise ValueError("group_advantages:\n  " + "\n  ".join(wrong))
