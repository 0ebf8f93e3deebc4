"""One comparison from start to end: Ray, the cells, Ctrl-C, and what is tracked of it."""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray import tune

from rllib_llm.cli.interrupt import Interrupt
from rllib_llm.cli.progress import status_text, time_left
from rllib_llm.cli.ray_loss import end_process
from rllib_llm.cli.shell import command_line
from rllib_llm.compare.curves import CurveWriter
from rllib_llm.compare.experiment import (
    TRIALS,
    CellCallback,
    ComparisonPlan,
    arm_and_seed,
    describe_plan,
    run_cells,
)
from rllib_llm.on_disk.atomic import write_whole
from rllib_llm.on_disk.directories import EXPERIMENT_FILE, earlier_run_ids
from rllib_llm.tracking.entries import metrics_of

if TYPE_CHECKING:
    from rllib_llm.algorithm.config import GRPOConfig
    from rllib_llm.compare.report import Report
    from rllib_llm.process.ray_head import RayWatch
    from rllib_llm.tracking import MLflowCallback

_TRACKING_WITHIN_S = 10.0
_SECONDS_BETWEEN_LINES = 10.0


@dataclass
class ComparisonOutcome:
    """text: how it ended. exit_status: 0 when every cell finished, 130 after an interrupt, 1 when cells failed."""

    text: str
    exit_status: int
    tracking: MLflowCallback | None
    problems: list[str] = field(default_factory=list)

    def attach(self, file: Path, report: Report) -> None:
        """Make the report an artefact of the MLflow parent run, with final rewards as its metrics."""
        if self.tracking is None:
            return
        from rllib_llm.tracking.attach import attach_report

        means = {arm: statistics.fmean(values.values()) for arm, values in report.finals.values.items()}
        found = attach_report(self.tracking, file, means, report.finals.horizon, report.summary)
        if not found.complete:
            self.problems.append(str(found))


def run_comparison(
    plan: ComparisonPlan,
    config: GRPOConfig,
    directory: Path,
    baseline: str | None,
    *,
    resume: bool,
    watch: RayWatch | None = None,
) -> ComparisonOutcome:
    """Run, or go on with, all cells of `plan` in `directory`, on a Ray that runs. config: of any cell."""
    tracking = _tracking(plan, directory)
    writer = CurveWriter(directory)
    if not resume:
        write_whole(directory / EXPERIMENT_FILE, plan.experiment.to_yaml())
        describe_plan(plan, writer, baseline)
    _announce(plan, directory, tracking)
    # without such a file the comparison was ended before Tune had written any
    saved = any((directory / TRIALS).glob("experiment_state-*.json"))
    # entered after Ray's start, which puts signal handlers of its own in place
    interrupt = Interrupt()

    def ray_is_lost(what: str) -> int:
        if tracking is not None:
            tracking.end("KILLED" if interrupt.requested else "FAILED", _TRACKING_WITHIN_S)
        outcome = _outcome(plan, writer, interrupt.requested, tracking)
        _say("\n".join([f"{what}: no checkpoint of this moment can be written.", *outcome.problems]))
        return outcome.exit_status

    if watch is not None:
        watch.on_lost = end_process(ray_is_lost, watch.head)
    try:
        with interrupt:
            callbacks = [
                CellCallback(plan, writer, interrupt),
                _Progress(plan),
                *([tracking] if tracking else []),
            ]
            run_cells(plan, config, directory, callbacks, resume=resume and saved)
    except KeyboardInterrupt:
        interrupt.requested = True
    if watch is not None:
        watch.hand_over()
    if tracking is not None and tracking.report is None:
        tracking.end("KILLED" if interrupt.requested else "FAILED", _TRACKING_WITHIN_S)
    return _outcome(plan, writer, interrupt.requested, tracking)


def _outcome(
    plan: ComparisonPlan, writer: CurveWriter, interrupted: bool, tracking: MLflowCallback | None
) -> ComparisonOutcome:
    cells, states = len(plan.arms) * len(plan.seeds), writer.states
    finished = sum(status == "finished" for status, _ in states.values())
    problems = [
        f"{arm} seed {seed} {status}: {reason}"
        for (arm, seed), (status, reason) in states.items()
        if status in ("failed", "halted")
    ]
    if tracking is not None:
        problems += [f"tracking problem: {problem}" for problem in tracking.problems]
        if tracking.report is not None and not tracking.report.complete:
            problems.append(str(tracking.report))
    if finished < cells:
        problems.append(f"Go on with:  {command_line('rllib-llm', 'compare', '--resume', writer.directory)}")
    status = 130 if interrupted and finished < cells else int(finished < cells)
    return ComparisonOutcome(f"{finished} of {cells} cells finished", status, tracking, problems)


def _announce(plan: ComparisonPlan, directory: Path, tracking: MLflowCallback | None) -> None:
    run = plan.experiment.run
    _say(
        f"comparing {', '.join(plan.arms)} × seeds {', '.join(map(str, plan.seeds))}, {plan.iterations} iterations each"
    )
    _say(f"  results   {directory}")
    _say(
        f"  tracking  {tracking.tracking_uri + ', experiment ' + tracking.experiment_name if tracking else 'off'}"
    )
    if run.stop or run.max_minutes is not None:
        _say("  run.stop and run.max_minutes do not apply: cells are compared at equal iterations")


def _tracking(plan: ComparisonPlan, directory: Path) -> MLflowCallback | None:
    settings = plan.experiment.tracking
    if not settings.enabled:
        return None
    from rllib_llm.tracking import MLflowCallback

    return MLflowCallback(
        settings.uri,
        settings.experiment,
        run_name=directory.name,
        tags={**settings.tags, "compare.policies": ", ".join(plan.arms)},
        samples_every=settings.samples_every,
        experiment=plan.experiment.to_dict(),
        run_ids=earlier_run_ids(directory / TRIALS),
        detail=settings.detail,
    )


class _Progress(tune.Callback):
    """A line now and then per comparison, and one when a cell ends."""

    def __init__(self, plan: ComparisonPlan) -> None:
        self._cells, self._iterations = len(plan.arms) * len(plan.seeds), plan.iterations
        self._last_line = 0.0
        self._done: dict[str, int] = {}  # trial -> iterations
        self._began = 0.0  # when the first result came
        self._first: int | None = None  # iterations of all cells by then

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        done = int(result["training_iteration"])
        self._done[trial.trial_id] = done
        for other in trials:  # of a comparison that goes on, also those that ended before
            known = int((other.run_metadata.last_result or {}).get("training_iteration", 0))
            self._done[other.trial_id] = max(self._done.get(other.trial_id, 0), known)
        of_all = sum(self._done.values())
        if self._first is None:
            self._began, self._first = time.monotonic(), of_all
        if time.monotonic() - self._last_line >= _SECONDS_BETWEEN_LINES or done == self._iterations:
            self._last_line = time.monotonic()
            ended = sum(t.status in ("TERMINATED", "ERROR") for t in trials)
            arm, seed = arm_and_seed(trial)
            left = time_left(self._began, self._first, of_all, self._cells * self._iterations)
            where = (
                f"[{ended}/{self._cells} cells{left}] {arm} seed {seed}, iteration {done}/{self._iterations}"
            )
            _say(f"{where}  {status_text(metrics_of(result))}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
