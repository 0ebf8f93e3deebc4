"""Advantages of group-sampled responses, and the reference KL as part of the reward.

Call these once on the whole batch of an iteration, before it is cut into learner shards and micro-batches:
group and batch statistics must not depend on the number of learners.
"""

from __future__ import annotations

import torch
from torch import Tensor

ADVANTAGE_KINDS = ("grpo", "grpo_batch", "dr_grpo", "rloo", "reinforce++", "reinforce++_baseline")
STD_EPSILON = 1e-6
"""Added to a standard deviation before dividing by it (verl: 1e-6, TRL: 1e-4; the papers write none)."""
RELATIVE_ROUNDING = 2.0**-20
"""Of the root mean square: sixteen roundings to fp32, of a reward that is a sum of some terms (`is_constant`)."""
ABSOLUTE_ROUNDING = 2.0**-24
"""One rounding to fp32 of a term near 1: what is left of terms that cancel, as in 0.1 + 0.2 - 0.3."""


def group_advantages(rewards: Tensor, group_ids: Tensor, kind: str = "grpo") -> Tensor:
    """One advantage per response, fp32 [N], from rewards [N] (any float) and group ids [N] (any integers).

    "grpo"                  (R - mean_g) / (std_g + 1e-6)                        arXiv 2402.03300
    "grpo_batch"            (R - mean_g) / (std_batch(R) + 1e-6)                 TRL's scale_rewards="batch"
    "dr_grpo"               R - mean_g                                           arXiv 2503.20783
    "rloo"                  R - mean of the group's other rewards                arXiv 2402.14740
    "reinforce++"           (R - mean_batch) / (std_batch + 1e-6)                arXiv 2501.03262
    "reinforce++_baseline"  (R - mean_g) / (std_batch(R - mean_g) + 1e-6)        the same, groups of samples

    std is the sample deviation (n - 1), as in TRL and verl. A group whose rewards differ by no more than
    rounding (`is_constant`), and a group of one sample, gets exactly 0: rounding would otherwise be divided by
    1e-6, or trained on. "reinforce++" has no groups; its batch is judged as one. Computed in fp64. Raises
    ValueError for an unknown kind, shapes, rewards that no finite fp32 number holds, or a batch in which no
    group has two samples although the kind compares within groups.
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
    centred = torch.where(constant_groups(r, index, groups)[index], torch.zeros_like(r), centred)
    if kind == "dr_grpo":
        return centred.float()
    if kind == "rloo":  # R - (sum - R) / (n - 1) = (R - mean) n / (n - 1)
        return (centred * (size / (size - 1).clamp(min=1))[index]).float()
    if kind == "grpo_batch":
        return (centred / (r.std() + STD_EPSILON)).float()
    if kind == "reinforce++_baseline":
        return _standardise(centred).float()
    variance = _group_sum(centred.square(), index, groups) / (size - 1).clamp(min=1)
    return (centred / (variance.sqrt() + STD_EPSILON)[index]).float()


def uninformative_groups(rewards: Tensor, group_ids: Tensor) -> int:
    """Number of groups whose rewards are equal up to rounding (`is_constant`), or that have one sample: no gradient.

    rewards [N]; group_ids int64 [N].
    """
    ids, index = torch.unique(group_ids, return_inverse=True)
    return int(constant_groups(rewards, index, len(ids)).sum())


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

    Values that differ by no more than rounding (`is_constant`), and fewer than two, give 0.
    """
    count, total, squares = sums.unbind()
    mean = total / count.clamp(min=1)
    variance = (squares - count * mean * mean) / (count - 1).clamp(min=1)
    if is_constant(count, variance, squares / count.clamp(min=1)):
        return torch.zeros_like(values, dtype=torch.float32)
    result = (values.double() - mean) / (variance.sqrt() + STD_EPSILON)
    return torch.where(mask.bool(), result, 0.0).float()


def is_constant(count: Tensor, variance: Tensor, mean_square: Tensor) -> Tensor:
    """Whether numbers count as equal: bool, elementwise over sets of numbers. THE definition for all kinds.

    True for fewer than two numbers, and where the sample deviation is at most 2^-20 of the root mean square, or
    at most 2^-24: a difference of that size is what rounding to fp32 leaves of equal rewards (0.1 + 0.2 and 0.3,
    fp32's smallest denormal and 0), not a preference. A sum over ranks is enough to decide it (`moments`).

    count, variance (n - 1), mean_square: fp64, of one shape; finite where the numbers are finite in fp32.
    """
    limit = (RELATIVE_ROUNDING**2 * mean_square).clamp(min=ABSOLUTE_ROUNDING**2)
    return (count < 2) | (variance <= limit)


def constant_groups(values: Tensor, index: Tensor, groups: int) -> Tensor:
    """Bool [groups]: the values of the group count as equal (`is_constant`).

    values [N] finite in fp32, any float dtype; index int64 [N]: the group of each value, 0 .. groups - 1.
    """
    v = values.double()
    size = _group_sum(torch.ones_like(v), index, groups)
    at_least_one = size.clamp(min=1)
    centred = v - (_group_sum(v, index, groups) / at_least_one)[index]
    variance = _group_sum(centred.square(), index, groups) / (size - 1).clamp(min=1)
    return is_constant(size, variance, _group_sum(v.square(), index, groups) / at_least_one)


def _standardise(values: Tensor) -> Tensor:
    if constant_groups(values, torch.zeros(len(values), dtype=torch.int64, device=values.device), 1):
        return torch.zeros_like(values)
    return (values - values.mean()) / (values.std() + STD_EPSILON)


def _group_sum(values: Tensor, index: Tensor, groups: int) -> Tensor:
    return torch.zeros(groups, dtype=values.dtype, device=values.device).index_add(0, index, values)


def _check(rewards: Tensor, group_ids: Tensor, kind: str) -> None:
    wrong = []
    if kind not in ADVANTAGE_KINDS:
        wrong.append(f"kind = {kind!r}: one of {', '.join(ADVANTAGE_KINDS)}")
    if rewards.ndim != 1 or rewards.shape != group_ids.shape:
        wrong.append(
            f"rewards {tuple(rewards.shape)} and group_ids {tuple(group_ids.shape)} must both be [N]"
        )
    bad = (~torch.isfinite(rewards.float())).nonzero().flatten().tolist()
    if bad:
        wrong.append(
            f"rewards at {bad[:8]} ({len(bad)} in all) are not finite in fp32: drop failed samples before grouping"
        )
    if wrong:
        raise ValueError("group_advantages:\n  " + "\n  ".join(wrong))
