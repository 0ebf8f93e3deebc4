"""How far the trainer's log-probabilities are from the engine's: pure functions of two tensors and a mask.

Definitions and signs: `registry.METRICS` (shown in docs/mismatch.md). Everything is computed in fp64 from the
fp32 inputs, on their device, with one transfer to the host.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rllib_llm.errors import RllibLLMError
from rllib_llm.losses.terms import LOG_RATIO_BOUND
from rllib_llm.mismatch.registry import BUCKETED, POSITION_BUCKETS, POSITION_EDGES, PROBABILITY_BUCKETS

LARGEST_LOG_PROBABILITY = 1e-2
"""A log-probability is <= 0; fp32 log-softmax may exceed it by rounding (maxtext#5231), raw logits by much
more."""


class MismatchInputError(RllibLLMError, ValueError):
    """The tensors cannot be the log-probabilities of one batch on two sides."""


def metrics(
    train_logp: Tensor,
    rollout_logp: Tensor,
    mask: Tensor,
    sequence_ids: Tensor | None = None,
    *,
    positions: Tensor | None = None,
    buckets: bool = True,
) -> dict[str, float]:
    """Every metric of `registry.METRICS`, plain and per bucket ("by_position/0-31/k3").

    train_logp, rollout_logp: fp32 (or fp64) [T], of the same sampled tokens, of the distribution that was
    sampled (temperature and truncation applied on both sides, see `sampling.require_comparable_sampling`).
    mask: bool or 0/1 [T]; masked values are never read. sequence_ids: int [T]; without it the whole batch is
    one response, and chi2_sequence and by_position are left out. positions: int [T], overrides the counted
    positions. Tokens with a non-finite value on either side are dropped and counted. Metrics that are
    undefined (empty mask, Pearson of one token) are left out instead of NaN. Raises MismatchInputError on
    shapes, dtypes below fp32, and values that are no log-probabilities.
    """
    _check(train_logp, rollout_logp, mask, sequence_ids, positions)
    trained = mask.bool()
    finite = trained & torch.isfinite(train_logp) & torch.isfinite(rollout_logp)
    train, rollout = train_logp[finite].detach(), rollout_logp[finite].detach()
    n = train.numel()
    out = {"num_tokens": float(n), "nonfinite_tokens": float(int(trained.sum()) - n)}
    if n == 0:
        return out
    _refuse_logits(train, rollout)
    terms = _per_token(train, rollout)
    values = _overall(terms, n)
    if sequence_ids is None:
        values["ppl_ratio"] = terms["k1"].mean().clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    else:
        values |= _per_sequence(terms["delta"], sequence_ids[finite])
    out |= _to_floats(values)
    if buckets and positions is None and sequence_ids is not None:
        positions = response_positions(trained, sequence_ids)
    if buckets:
        out |= _all_buckets(terms, None if positions is None else positions[finite])
    return out


def _refuse_logits(train: Tensor, rollout: Tensor) -> None:
    highest = float(torch.maximum(train.max(), rollout.max()))
    if highest > LARGEST_LOG_PROBABILITY:
        raise MismatchInputError(
            f"mismatch.metrics: the largest value is {highest:.4g}, but a log-probability is <= 0. Pass "
            "log-softmax values of the sampled tokens, not logits or probabilities."
        )


def response_positions(mask: Tensor, sequence_ids: Tensor) -> Tensor:
    """int64 [T]: 0, 1, 2, ... over the trained tokens of each sequence, in packed order; where mask is 0, any."""
    order = torch.argsort(sequence_ids, stable=True)
    kept = mask.bool()[order].long()
    before = kept.cumsum(0) - kept
    ids = sequence_ids[order]
    first = torch.ones_like(ids, dtype=torch.bool)
    first[1:] = ids[1:] != ids[:-1]
    start = before[first][first.long().cumsum(0) - 1]
    return torch.empty_like(before).scatter_(0, order, before - start)


def _per_token(train: Tensor, rollout: Tensor) -> dict[str, Tensor]:
    """fp64 [n] terms whose means are the metrics. expm1(x) - x keeps its digits down to |x| ~ 1e-8."""
    delta = train.double() - rollout.double()
    bounded = delta.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio_minus_one = torch.expm1(bounded)
    return {
        "delta": delta,
        "k1": -delta,
        "k3": ratio_minus_one - bounded,
        "mean_abs": delta.abs(),
        "ratio_minus_one": ratio_minus_one,
        "ratio": bounded.exp(),  # not expm1 + 1, which keeps 8 digits of exp(-20)
        "bit_equal_share": (train == rollout).double(),
        "train_p": train.double().exp(),
        "rollout_p": rollout.double().exp(),
    }


def _overall(t: dict[str, Tensor], n: int) -> dict[str, Tensor]:
    ratio = t["ratio"]
    values = {
        "k1": t["k1"].mean(),
        "k2": 0.5 * t["delta"].square().mean(),
        "k3": t["k3"].mean(),
        "mean_abs": t["mean_abs"].mean(),
        "max_abs": t["mean_abs"].max(),
        "p99_abs": t["mean_abs"].kthvalue(max(1, math.ceil(0.99 * n))).values,
        "bit_equal_share": t["bit_equal_share"].mean(),
        "train_higher_share": (t["delta"] > 0).double().mean(),
        # rho^2 - 1 = (rho - 1)(rho + 1): no cancellation for small deltas
        "chi2": (t["ratio_minus_one"] * (ratio + 1.0)).mean(),
        "ess": ratio.sum().square() / (n * ratio.square().sum()),
        "multiplicative_error": t["mean_abs"].clamp(max=LOG_RATIO_BOUND).exp().mean(),
    }
    p, q = t["train_p"], t["rollout_p"]
    if n > 1 and bool((p.max() > p.min()) & (q.max() > q.min())):
        p, q = p - p.mean(), q - q.mean()
        values["pearson"] = ((p * q).sum() / (p.square().sum() * q.square().sum()).sqrt()).clamp(-1.0, 1.0)
    return values


def _per_sequence(delta: Tensor, sequence_ids: Tensor) -> dict[str, Tensor]:
    """Metrics that average over responses; a response without a usable token does not count."""
    ids, index = torch.unique(sequence_ids, return_inverse=True)
    length = torch.bincount(index, minlength=len(ids))
    total = torch.bincount(index, weights=delta, minlength=len(ids))
    mean = (total / length).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return {
        "ppl_ratio": (-mean).exp().mean(),
        "chi2_sequence": torch.expm1(2.0 * total.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)).mean(),
    }


def _all_buckets(terms: dict[str, Tensor], positions: Tensor | None) -> dict[str, float]:
    out = {}
    if positions is not None:
        edges = torch.tensor(POSITION_EDGES[1:], device=positions.device)
        out = _bucketed("by_position", POSITION_BUCKETS, torch.bucketize(positions, edges, right=True), terms)
    tenth = (terms["rollout_p"] * 10).long().clamp(0, 9)
    return out | _bucketed("by_probability", PROBABILITY_BUCKETS, tenth, terms)


def _bucketed(family: str, names: tuple[str, ...], index: Tensor, t: dict[str, Tensor]) -> dict[str, float]:
    """The bucketed metrics of every non-empty bucket."""
    size = len(names)
    count = torch.bincount(index, minlength=size)
    divisor = count.clamp(min=1)
    columns = {"num_tokens": count.double()}
    for name in ("k1", "k3", "mean_abs", "bit_equal_share"):
        columns[name] = torch.bincount(index, weights=t[name], minlength=size) / divisor
    columns["max_abs"] = t["mean_abs"].new_zeros(size).scatter_reduce(0, index, t["mean_abs"], "amax")
    table = torch.stack([columns[name] for name in BUCKETED]).tolist()
    return {
        f"{family}/{bucket}/{metric}": table[row][column]
        for column, bucket in enumerate(names)
        if table[BUCKETED.index("num_tokens")][column] > 0
        for row, metric in enumerate(BUCKETED)
    }


def _to_floats(values: dict[str, Tensor]) -> dict[str, float]:
    return dict(zip(values, torch.stack(list(values.values())).tolist(), strict=True))


def _check(
    train: Tensor, rollout: Tensor, mask: Tensor, sequence_ids: Tensor | None, positions: Tensor | None
) -> None:
    wrong = []
    named = {"rollout_logp": rollout, "mask": mask, "sequence_ids": sequence_ids, "positions": positions}
    if train.ndim != 1:
        wrong.append(f"train_logp {tuple(train.shape)}: must be packed, [T]")
    wrong += [
        f"{name} {tuple(t.shape)}: must have the shape of train_logp, {tuple(train.shape)}"
        for name, t in named.items()
        if t is not None and t.shape != train.shape
    ]
    for name, t in (("train_logp", train), ("rollout_logp", rollout)):
        if t.dtype not in (torch.float32, torch.float64):
            wrong.append(
                f"{name} is {t.dtype}: log-probabilities are compared in fp32 (policy.logprobs.dtype)"
            )
    if wrong:
        raise MismatchInputError("mismatch.metrics:\n  " + "\n  ".join(wrong))
