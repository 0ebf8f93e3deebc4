"""What a comparison found, in sentences: the opening of the report and of the command's output."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rllib_llm.compare import verdicts
from rllib_llm.compare.curves import Curves, Run, finite
from rllib_llm.compare.statistics import ALPHA, Estimate, Pair, Ranking

if TYPE_CHECKING:
    from rllib_llm.compare.report import Options

__all__ = ["Findings", "number", "span", "subtitle", "summary"]


ENOUGH_RUNS = 5  # with fewer a percentile bootstrap's interval is too narrow (RULES["ranking"])


@dataclass(frozen=True)
class Findings:
    """Everything the report is written from. values: final rewards of each arm, means: their estimates."""

    curves: Curves
    options: Options
    baseline: str
    finals: verdicts.Finals
    values: Mapping[str, list[float]]
    means: Mapping[str, Estimate]
    ranking: Ranking
    health: tuple[verdicts.Health, ...]
    target: float | None

    def all_values(self, arm: str, metric: str) -> list[float]:
        """Finite values of a metric over all runs and iterations of an arm."""
        return [v for run in self.curves.of(arm) for v in finite(run.series(metric).values())]

    def costs(self, arm: str) -> list[verdicts.Cost]:
        """What each run of an arm spent until it reached the target."""
        if self.target is None:
            return []
        options = self.options
        return [
            verdicts.cost_to_reach(run, options.metric, self.target, options.last)
            for run in self.curves.of(arm)
        ]


def subtitle(found: Findings) -> str:
    """``3 arms × 5 seeds, compared at iteration 60 by env_runners/episode_return_mean``."""
    counts = sorted({len(found.curves.of(arm)) for arm in found.curves.arms})
    seeds = f"{counts[0]} seed{'s' if counts[-1] != 1 else ''}"
    if len(counts) > 1:
        seeds = f"{counts[0]} to {counts[-1]} seeds"
    arms = len(found.curves.arms)
    return (
        f"{arms} arm{'s' if arms != 1 else ''} × {seeds}, compared at iteration {found.finals.horizon} "
        f"by {found.options.metric}; baseline {found.baseline}"
    )


def summary(found: Findings) -> Iterator[str]:
    """The sentences, the most important first."""
    yield from _ranking(found)
    yield from _against_baseline(found)
    yield from _divergence(found)
    yield from _mismatch(found)
    yield from _cost(found)
    yield from _incomplete(found)


def number(value: float | None, digits: int = 3) -> str:
    """``0.842``; ``1.2e-05`` for what that would hide; an en dash for None."""
    if value is None or math.isnan(value):
        return "–"
    if value == 0:
        return "0"
    if not 10.0**-digits <= abs(value) < 1e9:
        return f"{value:.2e}"
    return f"{value:.{digits}f}" if abs(value) < 100 else f"{value:,.0f}"


def span(estimate: Estimate, digits: int = 3) -> str:
    """``0.81 to 0.86``; "one run" without an interval."""
    if estimate.low is None or estimate.high is None:
        return "one run"
    return f"{number(estimate.low, digits)} to {number(estimate.high, digits)}"


def _percent(share: float) -> str:
    """``+1.3``; never ``-0.0``."""
    return f"{round(100 * share, 1) + 0.0:+.1f}"


# ---- the sentences ---------------------------------------------------------------------------------------------------


def _ranking(found: Findings) -> Iterator[str]:
    ranking, arms = found.ranking, len(found.values)
    missing = [arm for arm in found.curves.arms if arm not in found.values]
    if missing:
        yield f"Not ranked, because no run of it has a finite reward that counts: {', '.join(missing)}."
    if not ranking.pairs:
        count = f"{'one' if arms else 'no'} arm{' with a final reward' if missing else ''}"
        yield f"There is {count}: nothing to rank."
        return
    if not ranking.enough:
        fewest = min(len(values) for values in found.values.values())
        yield (
            f"Too few seeds to rank {arms} arms: with {fewest} per arm even the most extreme outcome has "
            f"p = {ranking.smallest:.2g} > {ALPHA} (permutation test, Holm over {len(ranking.pairs)} "
            f"pair{'s' if len(ranking.pairs) != 1 else ''}). At least {ranking.needed} seeds per arm are needed; no "
            "order is given, and differences below may be chance."
        )
        return
    for pair in ranking.told_apart:
        yield _order(pair, found)
    if not ranking.told_apart:
        yield f"No two arms can be told apart by final reward (every adjusted p > {ALPHA})."


def _order(pair: Pair, found: Findings) -> str:
    up = pair.difference.value >= 0
    upper, lower = (pair.first, pair.second) if up else (pair.second, pair.first)
    better = pair.better.value if up else 1 - pair.better.value
    return (
        f"{upper} ends above {lower}: {number(found.means[upper].value)} against {number(found.means[lower].value)} "
        f"(adjusted p = {pair.adjusted:.2g}; a run of {upper} ends above one of {lower} with probability {better:.2f})."
    )


def _against_baseline(found: Findings) -> Iterator[str]:
    base, margin = found.means.get(found.baseline), found.options.margin
    for pair in found.ranking.pairs:
        if found.baseline not in (pair.first, pair.second) or base is None or not base.value:
            continue
        sign = 1 if pair.second == found.baseline else -1
        other = pair.first if sign == 1 else pair.second
        scale = sign / abs(base.value)
        shift = pair.difference.value * scale
        text = f"{other} against {found.baseline}: {_percent(shift)} %"
        if pair.difference.low is None or pair.difference.high is None:
            yield f"{text}; one run of an arm gives no interval."
            continue
        low, high = sorted((pair.difference.low * scale, pair.difference.high * scale))
        fewest = min(len(found.values[arm]) for arm in (pair.first, pair.second))
        caution = f", as far as {fewest} runs can say" if fewest < ENOUGH_RUNS else ""
        if -margin <= low and high <= margin:
            verdict = f"within {100 * margin:g} %{caution}"
        elif high < -margin or low > margin:
            verdict = f"a difference of more than {100 * margin:g} %{caution}"
        else:
            verdict = f"whether it is within {100 * margin:g} % these runs cannot say"
        yield f"{text} (95 % interval {_percent(low)} to {_percent(high)} %): {verdict}."


def _divergence(found: Findings) -> Iterator[str]:
    bad = [h for h in found.health if h.kind != "sound"]
    if not any(h.diverged for h in bad):
        yield "No run diverged."
    for arm in found.curves.arms:
        own = [h for h in bad if h.run.arm == arm]
        if own:
            what = "; ".join(f"seed {h.run.seed} {h.kind} at iteration {h.iteration}" for h in own)
            diverged = sum(h.diverged for h in own)
            yield f"{arm}: {diverged} of {len(found.curves.of(arm))} runs diverged ({what})."


def _mismatch(found: Findings) -> Iterator[str]:
    for arm in found.curves.arms:
        largest = found.all_values(arm, "mismatch/max_abs")
        k3 = found.all_values(arm, "mismatch/k3")
        lost = sum(len(run.series("mismatch/k3")) for run in found.curves.of(arm)) - len(k3)
        if lost:
            yield f"{arm}: mismatch k3 was not finite in {lost} iteration{'s' if lost != 1 else ''}."
        if largest and max(largest) == 0:
            yield f"{arm}: train–rollout mismatch exactly 0 in all {len(largest)} measured iterations."
        elif k3:
            first, end = ends(found.curves.of(arm), "mismatch/k3", found.options.last)
            yield (
                f"{arm}: mismatch k3 {number(float(np.mean(k3)), 5)} on average, {number(first, 5)} in the first "
                f"{found.options.last} iterations, {number(end, 5)} in the last."
            )


def ends(runs: tuple[Run, ...], metric: str, last: int) -> tuple[float, float]:
    """Means over runs of the first and of the last `last` finite values; NaN where there are none."""
    series = [finite(run.series(metric).values()) for run in runs]
    first = [float(np.mean(values[:last])) for values in series if values]
    end = [float(np.mean(values[-last:])) for values in series if values]
    return (float(np.mean(first)), float(np.mean(end))) if first else (math.nan, math.nan)


def _cost(found: Findings) -> Iterator[str]:
    if found.target is None:
        return
    parts = []
    for arm in found.curves.arms:
        costs = found.costs(arm)
        reached = [c for c in costs if c.iteration is not None]
        text = f"{arm} {len(reached)} of {len(costs)} runs"
        tokens = [c.tokens for c in reached if c.tokens is not None]
        seconds = [c.seconds for c in reached if c.seconds is not None]
        if tokens:
            text += f", median {number(float(np.median(tokens)))} tokens"
        if seconds:
            text += f", {number(float(np.median(seconds)), 1)} s"
        parts.append(text)
    yield f"Reward {number(found.target)} was reached by {'; '.join(parts)}."


def _incomplete(found: Findings) -> Iterator[str]:
    running = [run for run in found.curves.runs if run.status == "running"]
    planned = found.curves.description.get("planned") or {}
    stated = bool(found.curves.description.get("runs") or planned.get("iterations"))
    wanted = {(arm, seed) for arm in planned.get("arms", ()) for seed in planned.get("seeds", ())}
    missing = wanted - {(run.arm, run.seed) for run in found.curves.runs}
    if running and not stated:
        yield "Whether the runs are complete is not known: compare.json states neither runs nor planned iterations."
    elif running or missing:
        parts = [f"{len(running)} under way"] if running else []
        parts += [f"{len(missing)} of those planned not begun"] if missing else []
        yield f"Not all runs are complete: {', '.join(parts)}."
    if found.finals.left_out:
        names = ", ".join(f"{run.arm} seed {run.seed}" for run in found.finals.left_out)
        yield f"Left out of the final reward because they have only begun: {names}."
