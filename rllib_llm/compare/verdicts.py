"""What a comparison says about its runs: final reward, divergence, cost to reach a reward.

Each rule is stated once, here: the sentences in RULES are shown in the report and in docs/experiments.md (tested).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from rllib_llm.compare.curves import Curves, Run, finite

__all__ = [
    "RULES",
    "Cost",
    "Finals",
    "Health",
    "cost_to_reach",
    "default_target",
    "final_rewards",
    "health",
    "trailing",
]

REWARD = "env_runners/episode_return_mean"
HELD_OUT = "evaluation/env_runners/episode_return_mean"
LOSS = "learners/default_policy/loss"
GRAD_NORM = "learners/default_policy/grad_norm"
TOKENS = "env_runners/num_tokens_sampled"
SECONDS = "time_this_iter_s"
TIMERS = ("sample", "advantages", "learn", "mismatch", "push_weights")
_LOST_SHARE = 0.5  # of the gain
_NOISE_FACTOR = 6.0
_TARGET_SHARE = 0.9

RULES = {
    "final": "Final reward of a run: mean of its last {last} finite values up to the horizon. The horizon is "
    "the largest iteration that every run reached which has not failed; runs that are still under way "
    "with less than half of the longest run are left out and named. A run that failed or was halted "
    "counts with its own last values.",
    "divergence": "A run diverged when (1) its reward, loss or gradient norm was not finite, (2) an error or the "
    "guard ended it, or (3) it collapsed: the trailing mean of {last} rewards lies below its best by "
    "more than half of what it had gained and by more than 6 standard errors of such a mean, and stays "
    "there to the end. When it comes back it dipped.",
    "cost": "Cost to reach a reward: sampled tokens and seconds of training up to the first iteration at which "
    "the trailing mean of {last} rewards reaches the target. Unless given, the target lies 90 % of the "
    "way from the mean first reward to the baseline's final reward.",
    "ranking": "Arms are ranked only where an exact permutation test of the mean final rewards, adjusted by Holm "
    "over all pairs, gives p ≤ 0.05. Where even the most extreme outcome could not reach that, the "
    "seeds are too few, and no order is given. Intervals are 95 % percentile bootstrap intervals over "
    "runs; with fewer than 5 runs they are too narrow.",
}


@dataclass(frozen=True)
class Finals:
    """Final reward by arm and seed; `left_out` are runs too short to count, `horizon` the iteration compared at."""

    horizon: int
    values: dict[str, dict[int, float]]
    left_out: tuple[Run, ...]


@dataclass(frozen=True)
class Health:
    """kind: "sound", "dipped", or a divergence: "collapsed", "non-finite", "failed", "halted"."""

    run: Run
    kind: str
    iteration: int | None = None
    detail: str = ""

    @property
    def diverged(self) -> bool:
        """Whether the run diverged by one of the three rules."""
        return self.kind not in ("sound", "dipped")


@dataclass(frozen=True)
class Cost:
    """What a run spent until it reached the target; all None where it never did."""

    run: Run
    iteration: int | None = None
    tokens: float | None = None
    seconds: float | None = None


def final_rewards(curves: Curves, metric: str, last: int) -> Finals:
    """See RULES["final"]. An arm without any value of `metric` is left out."""
    longest = max(run.last_iteration for run in curves.runs)
    under_way = [run for run in curves.runs if run.status in ("finished", "running")]
    left_out = tuple(r for r in under_way if r.status == "running" and r.last_iteration < longest / 2)
    counted = [run.last_iteration for run in under_way if run not in left_out]
    horizon = min(counted, default=longest)
    values: dict[str, dict[int, float]] = {}
    for run in curves.runs:
        if run in left_out:
            continue
        upto = horizon if run in under_way else run.last_iteration
        tail = finite(v for i, v in run.series(metric).items() if i <= upto)[-last:]
        if tail:
            values.setdefault(run.arm, {})[run.seed] = float(np.mean(tail))
    return Finals(horizon, values, left_out)


def health(run: Run, metric: str, last: int) -> Health:
    """See RULES["divergence"]."""
    for name in (metric, LOSS, GRAD_NORM):
        bad = next((i for i, v in run.series(name).items() if not math.isfinite(v)), None)
        if bad is not None:
            return Health(run, "non-finite", bad, f"{name} = {run.rows[bad][name]}")
    if run.status in ("failed", "halted"):
        return Health(run, run.status, run.last_iteration, run.reason)
    return _fallen(run, metric, last)


def _fallen(run: Run, metric: str, last: int) -> Health:
    series = run.series(metric)
    if len(series) < 2 * last:
        return Health(run, "sound", detail=f"fewer than {2 * last} rewards: collapse cannot be told")
    iterations, mean = trailing(series, last)
    best = np.maximum.accumulate(mean)
    differences = np.diff(np.array(list(series.values())))
    noise = _NOISE_FACTOR * float(np.std(differences)) / math.sqrt(2 * last)  # of the mean of `last` rewards
    fallen = best - mean > np.maximum(_LOST_SHARE * (best - mean[0]), noise)
    if not fallen.any():
        return Health(run, "sound")
    from_here = int(np.argmax(fallen))
    kind = "collapsed" if fallen[-1] else "dipped"
    if kind == "collapsed":
        from_here = len(fallen) - int(np.argmin(fallen[::-1])) if not fallen.all() else 0
    worst = from_here + int(np.argmin(mean[from_here:]))
    detail = f"trailing mean from {best[worst]:.3f} down to {mean[worst]:.3f}"
    return Health(run, kind, int(iterations[from_here]), detail)


def trailing(series: Mapping[int, float], last: int) -> tuple[np.ndarray, np.ndarray]:
    """(iterations int64 [T], means float64 [T]) of each value and the `last` - 1 before it; starts at the `last`-th."""
    iterations, values = np.array(list(series)), np.array(list(series.values()), dtype=np.float64)
    width = min(last, len(values))
    return iterations[width - 1 :], np.convolve(values, np.ones(width) / width, mode="valid")


def default_target(curves: Curves, finals: Finals, baseline: str, metric: str) -> float | None:
    """See RULES["cost"]; None where the baseline did not gain anything."""
    firsts = [next(iter(series.values())) for run in curves.runs if (series := run.series(metric))]
    if baseline not in finals.values or not finite(firsts):
        return None
    first, end = float(np.mean(finite(firsts))), float(np.mean(list(finals.values[baseline].values())))
    return first + _TARGET_SHARE * (end - first) if end > first else None


def cost_to_reach(run: Run, metric: str, target: float, last: int) -> Cost:
    """See RULES["cost"]. tokens or seconds are None where no row has them."""
    out = Cost(run)
    if not run.series(metric):
        return out
    iterations, mean = trailing(run.series(metric), last)
    reached = np.flatnonzero(mean >= target)
    if not len(reached):
        return out
    at = int(iterations[reached[0]])
    out = replace(out, iteration=at)
    tokens = finite(v for i, v in run.series(TOKENS).items() if i <= at)
    seconds = finite(v for i, v in seconds_of(run).items() if i <= at)
    return replace(out, tokens=sum(tokens) if tokens else None, seconds=sum(seconds) if seconds else None)


def seconds_of(run: Run) -> dict[int, float]:
    """Seconds of each iteration; the sum of its phases where it was not measured as a whole."""
    out = {}
    for iteration, row in run.rows.items():
        phases = [row[f"timers/{name}"] for name in TIMERS if f"timers/{name}" in row]
        if SECONDS in row:
            out[iteration] = row[SECONDS]
        elif phases:
            out[iteration] = sum(phases)
    return out
