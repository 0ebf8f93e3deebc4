"""Reward and mismatch curves of one trial as PNG files, for the artefacts of its run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

History = Sequence[tuple[int, dict[str, float]]]

# file -> (title, logarithmic, metrics); a curve is drawn where its metric was measured
_PLOTS: dict[str, tuple[str, bool, tuple[str, ...]]] = {
    "reward.png": (
        "Mean reward of an iteration",
        False,
        ("env_runners/episode_return_mean", "evaluation/env_runners/episode_return_mean"),
    ),
    "mismatch.png": (
        "Train-rollout mismatch (zero is not drawn on a logarithmic axis)",
        True,
        ("mismatch/k3", "mismatch/mean_abs", "mismatch/max_abs"),
    ),
}


def save_plots(history: History, folder: Path) -> list[Path]:
    """Draw the plots that have at least two points; returns the files written."""
    from matplotlib.figure import Figure

    written = []
    for file, (title, logarithmic, names) in _PLOTS.items():
        curves = {
            name: [(step, values[name]) for step, values in history if name in values] for name in names
        }
        curves = {name: points for name, points in curves.items() if len(points) > 1}
        if not curves:
            continue
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        for name, points in curves.items():
            axes.plot(*zip(*points, strict=True), label=name)
        if logarithmic and any(value > 0 for points in curves.values() for _, value in points):
            axes.set_yscale("log")
        axes.set(title=title, xlabel="training iteration")
        axes.legend()
        axes.grid(alpha=0.3)
        folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(folder / file, dpi=110)
        written.append(folder / file)
    return written
