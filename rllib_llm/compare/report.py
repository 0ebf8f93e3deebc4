"""The HTML report of a comparison: one file, no network, made from raw results only (same results, same bytes)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rllib_llm.compare import findings, sections, verdicts
from rllib_llm.compare.curves import Curves, CurvesError, read_curves
from rllib_llm.compare.figures import require_matplotlib
from rllib_llm.compare.statistics import Ranking, estimate_mean, rank
from rllib_llm.on_disk.atomic import write_whole

__all__ = ["REPORT_FILE", "Options", "Report", "build_report", "write_report"]

REPORT_FILE = "report.html"


@dataclass(frozen=True)
class Options:
    """metric: what is compared, higher is better. baseline: arm that others are measured against; None takes that of
    `compare.json`, else "bf16", else the first. target: reward for the cost; None: RULES["cost"]. margin: relative
    difference to the baseline that counts as equal. last: values of a final reward and of a trailing mean."""

    metric: str = verdicts.REWARD
    baseline: str | None = None
    target: float | None = None
    margin: float = 0.01
    last: int = 5

    def problems(self) -> list[str]:
        """What is wrong with the values themselves, whatever the results."""
        found = []
        if self.last < 1:
            found.append(f"last = {self.last} must be at least 1.")
        if not 0 < self.margin < 1:
            found.append(f"margin = {self.margin} must be above 0 and below 1 (0.01 is one per cent).")
        if self.target is not None and not math.isfinite(self.target):
            found.append(f"target = {self.target} must be a finite number.")
        return found


@dataclass(frozen=True)
class Report:
    """html: the page. summary: its opening sentences as plain text. ranking, finals, health: what they rest on."""

    html: str
    summary: tuple[str, ...]
    ranking: Ranking
    finals: verdicts.Finals
    health: tuple[verdicts.Health, ...]


def write_report(directory: str | Path, options: Options | None = None) -> tuple[Path, Report]:
    """Read DIR's raw results and write ``DIR/report.html``.

    Raises CurvesError for results that cannot be read or options that name what is not in them;
    FiguresUnavailableError without matplotlib.
    """
    folder = Path(directory).expanduser()
    curves = read_curves(folder)
    report = build_report(curves, options or Options(), folder)
    file = folder / REPORT_FILE
    try:
        write_whole(file, report.html)
    except OSError as error:
        raise CurvesError(folder, [f"{REPORT_FILE} cannot be written here ({error.strerror})."]) from error
    return file, report


def build_report(curves: Curves, options: Options, source: Path) -> Report:
    """The report of results that are in memory; `source` is named in errors."""
    require_matplotlib()
    baseline = _baseline(curves, options)
    _check(curves, options, baseline, source)
    finals = verdicts.final_rewards(curves, options.metric, options.last)
    values = {arm: list(by_seed.values()) for arm, by_seed in finals.values.items()}
    means = {arm: estimate_mean(found) for arm, found in values.items()}
    ranking = rank(values)
    health = tuple(verdicts.health(run, options.metric, options.last) for run in curves.runs)
    target = options.target
    if target is None:
        target = verdicts.default_target(curves, finals, baseline, options.metric)
    found = findings.Findings(curves, options, baseline, finals, values, means, ranking, health, target)
    summary = tuple(findings.summary(found))
    return Report(_render(found, summary), summary, ranking, finals, health)


def _baseline(curves: Curves, options: Options) -> str:
    wished = options.baseline or curves.description.get("baseline")
    return wished or ("bf16" if "bf16" in curves.arms else curves.arms[0])


def _check(curves: Curves, options: Options, baseline: str, source: Path) -> None:
    problems = options.problems()
    if baseline not in curves.arms:
        problems.append(f"baseline = {baseline!r} is no arm of these results ({', '.join(curves.arms)}).")
    if not curves.measured(options.metric):
        names = sorted({name for run in curves.runs for row in run.rows.values() for name in row})
        rewards = [name for name in names if "return" in name or "reward" in name]
        problems.append(
            f"metric = {options.metric!r} is in no row. Measured: {', '.join(rewards or names) or 'nothing'}."
        )
    if problems:
        raise CurvesError(source, problems)


def _render(found: findings.Findings, summary: tuple[str, ...]) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    pages = Environment(
        loader=PackageLoader("rllib_llm.compare", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    description: dict[str, Any] = found.curves.description
    return pages.get_template("report.html.j2").render(
        title=description.get("title") or "Comparison of precision policies",
        subtitle=findings.subtitle(found),
        notes=description.get("notes") or [],
        summary=summary,
        sections=sections.all_sections(found),
        rules=[text.format(last=found.options.last) for text in verdicts.RULES.values()],
        environment=sorted((description.get("environment") or {}).items()),
        config=description.get("config") or "",
    )
