"""Statistics over a handful of seeds: bootstrap intervals, probability of improvement, whether seeds suffice to rank.

The bootstrap is stratified as in Agarwal et al., "Deep RL at the Edge of the Statistical Precipice"
(arXiv 2108.13264): runs are drawn with replacement within each arm. The random seed is fixed: the same data give the
same report.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

__all__ = [
    "ALPHA",
    "Estimate",
    "Pair",
    "Ranking",
    "band",
    "compare_pair",
    "estimate_mean",
    "rank",
    "seeds_needed",
    "smallest_p",
]

ALPHA = 0.05
RESAMPLES = 10_000
_BAND_RESAMPLES = 2_000
_MOST_SPLITS = 20_000  # exact permutation test up to here: 8 seeds against 8 have 12 870


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % interval; without one where a single run leaves nothing to resample."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Pair:
    """Arm `first` against arm `second`.

    difference: of the means, first minus second. better: probability that a run of `first` ends above a run of
    `second` (ties count half). p: two-sided permutation test of the means; adjusted: by Holm over all pairs; None where
    an arm has one run.
    """

    first: str
    second: str
    difference: Estimate
    better: Estimate
    p: float | None
    adjusted: float | None = None


@dataclass(frozen=True)
class Ranking:
    """enough: whether some outcome of these seed counts could have told every pair apart at ALPHA.

    needed: seeds per arm from which that is so. smallest: the smallest adjusted p that these counts can give.
    """

    pairs: tuple[Pair, ...]
    enough: bool
    needed: int
    smallest: float

    @property
    def told_apart(self) -> tuple[Pair, ...]:
        """Pairs whose order is supported; none when the seeds are too few."""
        if not self.enough:
            return ()
        return tuple(p for p in self.pairs if p.adjusted is not None and p.adjusted <= ALPHA)


def estimate_mean(values: Sequence[float]) -> Estimate:
    """Mean and 95 % percentile-bootstrap interval of the mean over runs."""
    data = np.asarray(values, dtype=np.float64)
    if len(data) < 2:
        return Estimate(float(data.mean()))
    return Estimate(float(data.mean()), *_interval(_draw(data, RESAMPLES, 0).mean(axis=1)))


def band(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(mean, low, high), each float64 [T], of runs' curves float64 [runs, T]; runs are drawn as wholes."""
    mean = values.mean(axis=0)
    if len(values) < 2:
        return mean, mean, mean
    picks = np.random.default_rng(0).integers(len(values), size=(_BAND_RESAMPLES, len(values)))
    weights = np.stack([(picks == run).mean(axis=1) for run in range(len(values))], axis=1)
    low, high = np.quantile(weights @ values, [ALPHA / 2, 1 - ALPHA / 2], axis=0)
    return mean, low, high


def compare_pair(first: str, second: str, a: Sequence[float], b: Sequence[float]) -> Pair:
    """Difference, probability of improvement and p-value of two arms; one value per run."""
    x, y = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    difference, better = float(x.mean() - y.mean()), float(_wins(x[None], y[None])[0])
    if min(len(x), len(y)) < 2:
        return Pair(first, second, Estimate(difference), Estimate(better), None)
    xs, ys = _draw(x, RESAMPLES, 1), _draw(y, RESAMPLES, 2)
    return Pair(
        first,
        second,
        Estimate(difference, *_interval(xs.mean(axis=1) - ys.mean(axis=1))),
        Estimate(better, *_interval(_wins(xs, ys))),
        _permutation_p(x, y),
    )


def rank(finals: Mapping[str, Sequence[float]]) -> Ranking:
    """All pairs of arms, with p-values adjusted for their number; `finals` has one value per run."""
    pairs = [compare_pair(a, b, finals[a], finals[b]) for a, b in combinations(finals, 2)]
    adjusted = _holm([pair.p for pair in pairs])
    pairs = [Pair(**{**p.__dict__, "adjusted": q}) for p, q in zip(pairs, adjusted, strict=True)]
    least = [smallest_p(len(finals[p.first]), len(finals[p.second])) for p in pairs]
    smallest = min(1.0, max(least, default=1.0) * max(1, len(pairs)))
    return Ranking(tuple(pairs), bool(pairs) and smallest <= ALPHA, seeds_needed(len(pairs)), smallest)


def smallest_p(n: int, m: int) -> float:
    """The two-sided p of the most extreme outcome: every one of n runs above every one of m."""
    return min(1.0, 2.0 / math.comb(n + m, n))


def seeds_needed(pairs: int) -> int:
    """Fewest seeds per arm with which the most extreme outcome passes ALPHA after adjusting for `pairs` tests."""
    seeds = 2
    while smallest_p(seeds, seeds) * max(1, pairs) > ALPHA:
        seeds += 1
    return seeds


# ---- inner workings --------------------------------------------------------------------------------------------------


def _draw(data: np.ndarray, resamples: int, stream: int) -> np.ndarray:
    """float64 [resamples, runs]: runs of one arm, drawn with replacement."""
    picks = np.random.default_rng(stream).integers(len(data), size=(resamples, len(data)))
    return data[picks]


def _interval(samples: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(samples, [ALPHA / 2, 1 - ALPHA / 2])
    return float(low), float(high)


def _wins(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Share of pairs (run of x, run of y) with x above y, ties half: [B, n] and [B, m] -> [B]."""
    above = x[:, :, None] - y[:, None, :]
    return (np.sign(above).mean(axis=(1, 2)) + 1) / 2


def _permutation_p(x: np.ndarray, y: np.ndarray) -> float:
    from scipy import stats

    test = stats.permutation_test(
        (x, y),
        lambda a, b, axis: a.mean(axis=axis) - b.mean(axis=axis),
        permutation_type="independent",
        vectorized=True,
        n_resamples=_MOST_SPLITS,
        rng=np.random.default_rng(0),
    )
    return float(test.pvalue)


def _holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's step-down adjustment over the tests that could be made."""
    order = sorted((p, i) for i, p in enumerate(p_values) if p is not None)
    out: list[float | None] = [None] * len(p_values)
    highest = 0.0
    for position, (p, index) in enumerate(order):
        highest = max(highest, min(1.0, p * (len(order) - position)))
        out[index] = highest
    return out
