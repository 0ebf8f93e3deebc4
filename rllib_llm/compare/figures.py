"""Figures of a comparison as SVG text that stands inside an HTML page and takes its colours from the page.

matplotlib draws with place-holder colours, which are replaced by CSS variables: one figure is legible on a light and
on a dark page. Text stays text, in the page's font.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from rllib_llm.compare.curves import Curves, Run, finite
from rllib_llm.compare.statistics import Estimate, band
from rllib_llm.errors import InputError, RllibLLMError

__all__ = [
    "FiguresUnavailableError",
    "Plot",
    "bars",
    "by_position",
    "curves_plot",
    "dots",
    "require_matplotlib",
    "run_series",
]

ITERATION = "training iteration"
_INK = "#010203"  # place-holder of the page's text colour
_ARMS = tuple(f"#0a0b{i:02x}" for i in range(8))  # place-holders of --arm-0 … --arm-7
_PARTS = tuple(
    f"#0c0d{i:02x}" for i in range(5)
)  # of --part-0 … --part-4: what is no arm has no arm's colour
_DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1, 1, 1)), (0, (1, 1)), (0, (7, 2, 1, 2)))
_MARKERS = "osD^vPX*"
_STYLE = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # names of arms are texts
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.18,
    "grid.color": _INK,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "legend.frameon": False,
    "axes.unicode_minus": True,
}


class FiguresUnavailableError(RllibLLMError, InputError, RuntimeError):
    """matplotlib, which draws the figures, is not installed."""


def require_matplotlib() -> None:
    """Raise FiguresUnavailableError, with what to do, where matplotlib cannot be imported."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise FiguresUnavailableError(
            f"the report's figures need matplotlib ({error}): pip install 'rllib-llm[compare]'."
        ) from error


@dataclass(frozen=True)
class Plot:
    """title and axis texts of one figure; logarithmic keeps exact zeros visible, at the foot of the axis."""

    title: str
    ylabel: str
    xlabel: str = ITERATION
    logarithmic: bool = False


def curves_plot(curves: Curves, plot: Plot, series: Mapping[tuple[str, int], Mapping[float, float]]) -> str:
    """Thin lines for runs, a thick line and a band for an arm's mean over the x where all its runs have a value.

    series: (arm, seed) -> x -> y. The mean ends where the first run of an arm ends: what is left is not the same runs.
    """
    with _drawing(plot) as (axes, out):
        _scale(axes, plot, [y for points in series.values() for y in points.values()])
        for index, arm in enumerate(curves.arms):
            own = [series[arm, r.seed] for r in curves.of(arm) if series.get((arm, r.seed))]
            if not own:
                continue
            colour, dash = _ARMS[index % 8], _DASHES[index % 8]
            for points in own:
                axes.plot(*_xy(points), color=colour, linewidth=0.7, alpha=0.45)
            shared = sorted(set.intersection(*(set(points) for points in own)))
            if shared:
                mean, low, high = band(np.array([[points[x] for x in shared] for points in own]))
                axes.plot(shared, mean, color=colour, linestyle=dash, linewidth=2.0, label=arm)
                if len(own) > 1:
                    axes.fill_between(shared, low, high, color=colour, alpha=0.16, linewidth=0)
            else:
                axes.plot([], [], color=colour, linestyle=dash, linewidth=2.0, label=arm)
        _legend(axes)
    return out.getvalue()


def dots(
    arms: Sequence[str], plot: Plot, values: Mapping[str, Sequence[float]], means: Mapping[str, Estimate]
) -> str:
    """One row per arm: its runs as dots, the mean as a bar, its interval as a line."""
    with _drawing(plot, height=0.9 + 0.55 * len(values)) as (axes, out):
        shown = [arm for arm in arms if arm in values]
        for row, arm in enumerate(shown):
            colour, estimate = _ARMS[arms.index(arm) % 8], means[arm]
            axes.plot(
                values[arm], [row] * len(values[arm]), _MARKERS[arms.index(arm) % 8], color=colour, alpha=0.75
            )
            if estimate.low is not None:
                axes.plot([estimate.low, estimate.high], [row + 0.28] * 2, color=colour, linewidth=2.5)
            axes.plot([estimate.value], [row + 0.28], "|", color=_INK, markersize=12, markeredgewidth=2)
        axes.set_yticks(range(len(shown)), shown)
        axes.set_ylim(len(shown) - 0.4, -0.5)
        axes.grid(axis="y", alpha=0)
    return out.getvalue()


def by_position(
    arms: Sequence[str], plot: Plot, buckets: Sequence[str], values: Mapping[str, Sequence[float]]
) -> str:
    """A line per arm over the buckets of a token's position; NaN where a bucket has no token."""
    with _drawing(plot) as (axes, out):
        _scale(axes, plot, [v for row in values.values() for v in row])
        for index, arm in enumerate(arms):
            if arm in values:
                style = {
                    "color": _ARMS[index % 8],
                    "linestyle": _DASHES[index % 8],
                    "marker": _MARKERS[index % 8],
                }
                axes.plot(range(len(buckets)), values[arm], linewidth=2.0, label=arm, **style)
        axes.set_xticks(range(len(buckets)), buckets, rotation=20)
        axes.set_xlim(-0.3, len(buckets) - 0.7)
        _legend(axes)
    return out.getvalue()


def bars(arms: Sequence[str], plot: Plot, parts: Mapping[str, Mapping[str, float]]) -> str:
    """Stacked horizontal bars: arm -> part -> length. Parts are told apart by shade and by their name in the legend."""
    with _drawing(plot, height=1.5 + 0.5 * len(parts)) as (axes, out):
        names = list(dict.fromkeys(name for row in parts.values() for name in row))
        left = np.zeros(len(parts))
        for index, name in enumerate(names):
            lengths = np.array([row.get(name, 0.0) for row in parts.values()])
            axes.barh(range(len(parts)), lengths, left=left, height=0.6, color=_PARTS[index % 5], label=name)
            left += lengths
        axes.set_yticks(range(len(parts)), list(parts))
        axes.set_ylim(len(parts) - 0.5, -0.5)
        axes.grid(axis="y", alpha=0)
        _legend(axes)
    return out.getvalue()


def run_series(run: Run, metric: str) -> dict[float, float]:
    """Iteration -> value of a metric, what is not finite left out: a line has no place for it."""
    return {float(i): v for i, v in run.series(metric).items() if math.isfinite(v)}


# ---- inner workings --------------------------------------------------------------------------------------------------


@contextmanager
def _drawing(plot: Plot, height: float = 3.2) -> Iterator[tuple[Any, io.StringIO]]:
    """(axes, text): draw on the axes; the text holds the SVG afterwards."""
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    out = io.StringIO()
    with mpl.rc_context({**_STYLE, "svg.hashsalt": plot.title}):
        figure = Figure(figsize=(5.2, height), layout="constrained")
        figure.patch.set_alpha(0.0)
        axes = figure.subplots()
        axes.patch.set_alpha(0.0)
        axes.set(xlabel=plot.xlabel, ylabel=plot.ylabel)
        if plot.xlabel == ITERATION:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        yield axes, out
        raw = io.StringIO()
        figure.savefig(
            raw, format="svg", metadata={"Date": None, "Creator": None, "Type": None, "Format": None}
        )
    out.write(_for_page(raw.getvalue(), plot.title))


def _for_page(svg: str, title: str) -> str:
    """Only the <svg> element, without size (the page sets it), with CSS colours and coordinates of one decimal."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{title}"', 1)
    svg = re.sub(r' d="([^"]*)"', lambda m: f' d="{_short(m[1])}"', svg)
    svg = re.sub(r"(font(?:-family)?: [^;\"]*?)'[^;\"]*", r"\1var(--font)", svg)
    svg = svg.replace(_INK, "currentColor")
    for index, colour in enumerate(_ARMS):
        svg = svg.replace(colour, f"var(--arm-{index})")
    for index, colour in enumerate(_PARTS):
        svg = svg.replace(colour, f"var(--part-{index})")
    return svg


def _short(path: str) -> str:
    return re.sub(r"-?\d+\.\d+", lambda m: f"{float(m[0]):.1f}", " ".join(path.split()))


def _scale(axes: Any, plot: Plot, values: Sequence[float]) -> None:
    """Logarithmic down to the smallest positive value, linear from there to an exact zero."""
    positive = [v for v in finite(values) if v > 0]
    if not plot.logarithmic:
        return
    if positive:
        axes.set_yscale("symlog", linthresh=10 ** np.floor(np.log10(min(positive))), linscale=0.5)
        axes.yaxis.set_major_formatter(_power)  # after the scale, which brings its own
        top = 10 ** np.ceil(np.log10(max(positive)) + 1e-9)
        axes.set_ylim(0 if min(finite(values)) >= 0 else None, top)
    else:
        axes.set_ylim(-0.05, 1.0)


def _power(value: float, position: int | None = None) -> str:
    """``1e-03``; matplotlib's own labels are TeX, which would stand as such beside texts that are not parsed."""
    return f"{value:.0e}" if value else "0"


def _xy(points: Mapping[float, float]) -> tuple[list[float], list[float]]:
    ordered = sorted(points.items())
    return [x for x, _ in ordered], [y for _, y in ordered]


def _legend(axes: Any) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        axes.figure.legend(
            handles, labels, loc="outside upper left", ncols=2 if len(labels) == 4 else 3, fontsize=9
        )
