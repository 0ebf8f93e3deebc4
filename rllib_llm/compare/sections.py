"""The sections of the report: figures and tables, each only where its metrics were measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rllib_llm.compare import figures, verdicts
from rllib_llm.compare.curves import Run, finite
from rllib_llm.compare.figures import Plot
from rllib_llm.compare.findings import Findings, ends, number, span
from rllib_llm.mismatch.registry import POSITION_BUCKETS

__all__ = ["Figure", "ReportSection", "Table", "all_sections"]


@dataclass(frozen=True)
class Figure:
    """A picture as SVG text, with title and caption."""

    title: str
    svg: str
    caption: str = ""


@dataclass(frozen=True)
class Table:
    """Cells are texts, or ``{"arm": index, "text": …}`` for a text with the arm's colour."""

    header: tuple[str, ...]
    rows: list[list[Any]]
    caption: str = ""


@dataclass
class ReportSection:
    """One part of the report: texts, then figures, then tables."""

    title: str
    texts: list[str] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        """Whether there is neither a figure nor a table."""
        return not (self.figures or self.tables)


def all_sections(found: Findings) -> list[ReportSection]:
    """In the order of reading; a section without content is left out."""
    makers = (_final, _curves, _runs, _mismatch, _health, _throughput, _cost, _memory, _arms)
    return [section for maker in makers if not (section := maker(found)).empty]


# ---- reward ----------------------------------------------------------------------------------------------------------


def _final(found: Findings) -> ReportSection:
    section = ReportSection("Final reward")
    plot = Plot("Final reward of each run", "", "reward")
    svg = figures.dots(found.curves.arms, plot, found.values, found.means)
    caption = "Symbols: runs. Upright bar: their mean; line: its 95 % bootstrap interval."
    section.figures.append(Figure(plot.title, svg, caption))
    rows = [
        [
            _name(found, arm),
            str(len(values)),
            number(found.means[arm].value),
            span(found.means[arm]),
            _spread(values),
        ]
        for arm, values in found.values.items()
    ]
    section.tables.append(Table(("arm", "runs", "mean", "95 % interval", "smallest to largest"), rows))
    pairs = [
        [
            f"{p.first} − {p.second}",
            f"{p.difference.value:+.4f}",
            span(p.difference, 4),
            f"{p.better.value:.2f}",
            span(p.better, 2),
            number(p.p),
            number(p.adjusted),
        ]
        for p in found.ranking.pairs
    ]
    header = ("pair", "difference", "95 % interval", "P(first ends above)", "95 % interval", "p", "p, Holm")
    if pairs:
        section.tables.append(Table(header, pairs, "P counts pairs of runs, ties as one half."))
    return section


def _curves(found: Findings) -> ReportSection:
    section = ReportSection("Reward over training")
    metric = found.options.metric
    _add_curve(section, found, Plot("Reward", "reward"), metric)
    if metric != verdicts.HELD_OUT:
        _add_curve(section, found, Plot("Held-out reward", "reward"), verdicts.HELD_OUT)
    for title, unit, of in (
        ("Reward against sampled tokens", "sampled tokens", lambda run: run.series(verdicts.TOKENS)),
        ("Reward against training time", "seconds", verdicts.seconds_of),
    ):
        series = _against_cost(found, metric, of)
        if series:
            svg = figures.curves_plot(found.curves, Plot(title, "reward", unit), series)
            section.figures.append(Figure(title, svg, f"x: mean over the arm's runs of all {unit} so far."))
    section.texts.append(
        "Thin lines are runs; the thick line is their mean over the iterations that all of them reached, the band its "
        "95 % bootstrap interval."
    )
    return section


def _against_cost(found: Findings, metric: str, of: Any) -> dict[tuple[str, int], dict[float, float]]:
    out: dict[tuple[str, int], dict[float, float]] = {}
    for arm in found.curves.arms:
        runs = found.curves.of(arm)
        spent = [dict(zip(of(run), np.cumsum(list(of(run).values())), strict=True)) for run in runs]
        shared = set.intersection(*(set(one) for one in spent))
        x = {i: float(np.mean([one[i] for one in spent])) for i in shared}
        for run in runs:
            points = {x[i]: v for i, v in run.series(metric).items() if i in x and math.isfinite(v)}
            if points:
                out[arm, run.seed] = points
    return out


def _runs(found: Findings) -> ReportSection:
    rows = []
    for state in found.health:
        run = state.run
        final = found.finals.values.get(run.arm, {}).get(run.seed)
        at = "" if state.iteration is None else f" at iteration {state.iteration}"
        rows.append(
            [
                _name(found, run.arm),
                str(run.seed),
                run.status,
                str(run.last_iteration),
                number(final),
                f"{state.kind}{at}",
                state.detail,
            ]
        )
    header = ("arm", "seed", "status", "iterations", "final reward", "divergence", "detail")
    return ReportSection("Runs and divergence", tables=[Table(header, rows)])


# ---- mismatch --------------------------------------------------------------------------------------------------------


def _mismatch(found: Findings) -> ReportSection:
    section = ReportSection("Mismatch between learner and engine")
    section.texts.append(
        "Of every trained token: the log-probability that the learner computes, minus the one it was sampled with, "
        "under the same weights. On logarithmic axes an exact 0 lies on the foot of the axis."
    )
    for plot, metric in (
        (Plot("k3, an estimate of KL(rollout ‖ train)", "nats", logarithmic=True), "mismatch/k3"),
        (Plot("Largest |Δ log-prob|", "nats", logarithmic=True), "mismatch/max_abs"),
        (Plot("Share of bit-equal tokens", "share"), "mismatch/bit_equal_share"),
    ):
        _add_curve(section, found, plot, metric)
    _add_positions(section, found)
    rows = []
    for arm in found.curves.arms:
        k3, largest = found.all_values(arm, "mismatch/k3"), found.all_values(arm, "mismatch/max_abs")
        equal, tokens = (
            found.all_values(arm, f"mismatch/{name}") for name in ("bit_equal_share", "num_tokens")
        )
        if k3 or largest:
            first, end = ends(found.curves.of(arm), "mismatch/k3", found.options.last)
            row = [_mean(k3), first, end, max(largest, default=None)]
            share = f"{100 * min(equal):.6g} %" if equal else "–"
            count = f"{sum(tokens):,.0f}" if tokens else "–"
            rows.append([_name(found, arm), *(number(v, 6) for v in row), share, count])
    last = found.options.last
    header = (
        "arm",
        "k3, mean",
        f"first {last}",
        f"last {last}",
        "largest |Δ|",
        "bit-equal, smallest",
        "tokens",
    )
    if rows:
        section.tables.append(Table(header, rows))
    return section


def _add_positions(section: ReportSection, found: Findings) -> None:
    values = {}
    for arm in found.curves.arms:
        row = [_at_position(found.curves.of(arm), bucket) for bucket in POSITION_BUCKETS]
        if not all(math.isnan(v) for v in row):
            values[arm] = row
    if not values:
        return
    used = max(i for row in values.values() for i, v in enumerate(row) if not math.isnan(v)) + 1
    plot = Plot("k3 against a token's position", "nats", "position in the answer, tokens", logarithmic=True)
    values = {arm: row[:used] for arm, row in values.items()}
    svg = figures.by_position(found.curves.arms, plot, POSITION_BUCKETS[:used], values)
    section.figures.append(Figure(plot.title, svg, "Mean over all iterations and runs, weighted by tokens."))


def _at_position(runs: Sequence[Run], bucket: str) -> float:
    total = weight = 0.0
    for run in runs:
        for row in run.rows.values():
            value = row.get(f"mismatch/by_position/{bucket}/k3", math.nan)
            if math.isfinite(value):
                tokens = row.get(f"mismatch/by_position/{bucket}/num_tokens", 1.0)
                total, weight = total + tokens * value, weight + tokens
    return total / weight if weight else math.nan


# ---- training and cost -----------------------------------------------------------------------------------------------


def _health(found: Findings) -> ReportSection:
    section = ReportSection("Training")
    for plot, metric in (
        (Plot("Gradient norm before clipping", "L2 norm"), verdicts.GRAD_NORM),
        (Plot("Entropy", "nats"), "learners/default_policy/entropy"),
        (Plot("Length of an answer", "tokens"), "env_runners/response_length_mean"),
        (Plot("Answers cut off by the length limit", "share"), "env_runners/truncated_share"),
        (Plot("Clipped share of tokens", "share"), "learners/default_policy/clip_fraction"),
    ):
        _add_curve(section, found, plot, metric)
    return section


def _throughput(found: Findings) -> ReportSection:
    section = ReportSection("Throughput by phase")
    seconds: dict[str, dict[str, float]] = {}
    for arm in found.curves.arms:
        phases = {
            name: v for name in verdicts.TIMERS if (v := _steady(found, arm, f"timers/{name}")) is not None
        }
        if phases:
            seconds[arm] = phases
    if not seconds:
        return section
    plot = Plot("Seconds of an iteration", "", "seconds")
    caption = "Median over iterations and runs; the first iteration of a run, which starts up, is left out."
    section.figures.append(Figure(plot.title, figures.bars(found.curves.arms, plot, seconds), caption))
    rows = []
    for arm, phases in seconds.items():
        sampled = _rate(found, arm, verdicts.TOKENS, "sample")
        learnt = _rate(found, arm, "learners/default_policy/num_tokens", "learn")
        shown = [number(phases.get(name)) for name in ("sample", "learn", "push_weights")]
        rows.append([_name(found, arm), shown[0], number(sampled), shown[1], number(learnt), shown[2]])
    header = ("arm", "sample, s", "sampled tokens/s", "learn, s", "trained tokens/s", "push weights, s")
    section.tables.append(Table(header, rows))
    return section


def _cost(found: Findings) -> ReportSection:
    section = ReportSection("Cost to reach a reward")
    if found.target is None:
        return section
    section.texts.append(f"Target: {number(found.target)}.")
    rows = []
    for arm in found.curves.arms:
        costs = found.costs(arm)
        reached = [c for c in costs if c.iteration is not None]
        cells = [
            _median_range([v for c in reached if (v := getattr(c, name)) is not None], digits)
            for name, digits in (("iteration", 0), ("tokens", 0), ("seconds", 1))
        ]
        rows.append([_name(found, arm), f"{len(reached)} of {len(costs)}", *cells])
    header = ("arm", "runs that reached it", "iterations, median (range)", "sampled tokens", "seconds")
    section.tables.append(Table(header, rows))
    return section


def _memory(found: Findings) -> ReportSection:
    names = [f"{who}_{what}_peak_gib" for who in ("learner", "engine") for what in ("rss", "cuda")]
    rows = []
    for arm in found.curves.arms:
        peaks = [max(found.all_values(arm, f"memory/{name}"), default=None) for name in names]
        if any(peak is not None for peak in peaks):
            rows.append([_name(found, arm), *(number(peak, 2) for peak in peaks)])
    header = ("arm", "learner, main memory", "learner, GPU", "engine, main memory", "engine, GPU")
    caption = "Largest peak of any run, GiB. Learner and engine in one process share its main memory and both show it."
    return ReportSection("Memory", tables=[Table(header, rows, caption)] if rows else [])


def _arms(found: Findings) -> ReportSection:
    said: Mapping[str, Any] = found.curves.description.get("arms") or {}
    rows = []
    for arm in found.curves.arms:
        entry = said.get(arm) or {}
        lines = [str(entry.get("note", "")), *map(str, entry.get("differences") or ())]
        keys = ("policy", "fingerprint", "plan_hash")
        cells = [
            str(entry.get(key, "–"))[:16] if key != "policy" else str(entry.get(key, "–")) for key in keys
        ]
        rows.append([_name(found, arm), *cells, "; ".join(line for line in lines if line) or "–"])
    header = ("arm", "policy", "fingerprint", "plan", f"what it is; differences to {found.baseline}")
    return ReportSection("Arms", tables=[Table(header, rows)])


# ---- small parts -----------------------------------------------------------------------------------------------------


def _add_curve(section: ReportSection, found: Findings, plot: Plot, metric: str) -> None:
    series = {(run.arm, run.seed): figures.run_series(run, metric) for run in found.curves.runs}
    series = {cell: points for cell, points in series.items() if points}
    if series:
        section.figures.append(Figure(plot.title, figures.curves_plot(found.curves, plot, series), metric))


def _name(found: Findings, arm: str) -> dict[str, Any]:
    return {"arm": found.curves.arms.index(arm) % 8, "text": arm}


def _spread(values: Sequence[float], digits: int = 3) -> str:
    return f"{number(min(values), digits)} to {number(max(values), digits)}"


def _median_range(values: Sequence[float], digits: int) -> str:
    return f"{number(float(np.median(values)), digits)} ({_spread(values, digits)})" if values else "–"


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _steady(found: Findings, arm: str, metric: str) -> float | None:
    """Median of a metric without each run's first iteration (with it where there is no other)."""
    later = [v for run in found.curves.of(arm) for v in finite(run.series(metric).values())[1:]]
    values = later or found.all_values(arm, metric)
    return float(np.median(values)) if values else None


def _rate(found: Findings, arm: str, tokens: str, phase: str) -> float | None:
    """Tokens per second of a phase, over all iterations that have both, first ones left out."""
    amount = time = 0.0
    for run in found.curves.of(arm):
        for row in list(run.rows.values())[1:] or list(run.rows.values()):
            if tokens in row and f"timers/{phase}" in row:
                amount, time = amount + row[tokens], time + row[f"timers/{phase}"]
    return amount / time if time > 0 else None
