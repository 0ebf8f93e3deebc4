"""Run one experiment as one Tune trial, on a local or an existing Ray, with progress, history and tracking."""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray import tune

from rllib_llm.cli.cluster import running_ray
from rllib_llm.cli.interrupt import Interrupt, RunStopper
from rllib_llm.cli.progress import ProgressCallback
from rllib_llm.cli.ray_loss import end_process
from rllib_llm.cli.shell import command_line
from rllib_llm.cli.summary import closing_table
from rllib_llm.cli.warm import warm_for_training
from rllib_llm.experiment.resume import new_directory
from rllib_llm.experiment.rules import usable_configs
from rllib_llm.experiment.sections import Experiment
from rllib_llm.on_disk.atomic import write_whole
from rllib_llm.on_disk.directories import EXPERIMENT_FILE, checkpoints, earlier_run_ids, only_here
from rllib_llm.tracking.history import HistoryCallback, read_history

if TYPE_CHECKING:
    from precision_policies import PrecisionPolicy
    from rllib_llm.algorithm.config import GRPOConfig
    from rllib_llm.process.ray_head import RayWatch
    from rllib_llm.tracking import MLflowCallback

_TRACKING_WITHIN_S = 10.0
"""For the last writes to MLflow of a run that is being ended: schedulers give 30 s, docker 10, before SIGKILL."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended. status: "finished", "stopped: why", "interrupted" or "failed"."""

    status: str
    directory: Path
    checkpoint: Path | None
    error: str
    tracking: MLflowCallback | None

    @property
    def exit_status(self) -> int:
        """0 for success only; 130 after Ctrl-C, as shells count it."""
        return {"failed": 1, "interrupted": 130}.get(self.status, 0)


def launch(experiment: Experiment, directory: Path | None = None, checkpoint: Path | None = None) -> Outcome:
    """Train. With `checkpoint`, go on from it in the same `directory`.

    Raises ExperimentError for a config that cannot run, PlacementError for one that asks for more than Ray has,
    RayUnavailableError for a cluster that cannot be joined, EnvConfigError, EngineUnavailableError, CheckpointError and
    TrackingUnavailableError for an environment, engine, model or tracking store that cannot be used. Nothing was
    trained then: no directory was made, and one to resume is as it was.
    """
    if checkpoint is not None:
        from rllib_llm.on_disk.checkpoint import verify_files

        verify_files(str(checkpoint))
    experiment = experiment.pinned()
    [config] = usable_configs(experiment, lambda: [experiment.to_grpo_config()])
    policy = config.settings().policy
    with ExitStack() as held:
        if directory is not None:
            held.enter_context(only_here(directory))
        watch = held.enter_context(running_ray(experiment.run.resources, config))
        if experiment.run.compile_ahead:
            warm_for_training(config)
        if directory is None:  # Ray has not refused
            directory = new_directory(experiment, policy.name)
            held.enter_context(only_here(directory))
        outcome = _run(experiment, config, policy, directory, checkpoint, watch)
    _report(outcome, policy.name, policy.fingerprint)
    return outcome


def _run(
    experiment: Experiment,
    config: GRPOConfig,
    policy: PrecisionPolicy,
    directory: Path,
    checkpoint: Path | None,
    watch: RayWatch | None,
) -> Outcome:
    """Train in a directory that nobody else works in, on a Ray that runs."""
    interrupt = Interrupt()
    tracking = _tracking(experiment, directory)
    write_whole(directory / EXPERIMENT_FILE, experiment.to_yaml())
    _say(f"training {experiment.name!r} under policy {policy.name} (fingerprint {policy.fingerprint[:16]})")
    _say(f"  results   {directory}")
    _say(
        f"  tracking  {tracking.tracking_uri + ', experiment ' + tracking.experiment_name if tracking else 'off'}"
    )
    if checkpoint is not None:
        _say(f"  resuming  {checkpoint}")
    if tracking is not None:
        tracking.interrupted = lambda: interrupt.requested

    def ended(status: str, error: str) -> Outcome:
        found = checkpoints(directory)
        return Outcome(status, directory, found[-1] if found else None, error, tracking)

    def ray_is_lost(what: str) -> int:
        """Everything that the end of a run needs and that needs no Ray; the exit status."""
        status = "interrupted" if interrupt.requested else "failed"
        if tracking is not None:
            tracking.end("KILLED" if interrupt.requested else "FAILED", _TRACKING_WITHIN_S)
        outcome = ended(status, f"RayLostError: {what}, and nothing that runs on it goes on without it.")
        _report(outcome, policy.name, policy.fingerprint)
        return outcome.exit_status

    if watch is not None:
        watch.on_lost = end_process(ray_is_lost, watch.head)
    status, error = _train(experiment, config, directory, checkpoint, tracking, interrupt)
    if watch is not None:
        watch.hand_over()
    if tracking is not None and tracking.report is None:  # a second Ctrl-C leaves Tune without its last hooks
        tracking.end("KILLED" if status == "interrupted" else "FAILED", _TRACKING_WITHIN_S)
    return ended(status, error)


def _train(
    experiment: Experiment,
    config: GRPOConfig,
    directory: Path,
    checkpoint: Path | None,
    tracking: MLflowCallback | None,
    interrupt: Interrupt,
) -> tuple[str, str]:
    """(status, error text) of the trial."""
    from rllib_llm.algorithm.held_out import HeldOutAtBothEnds

    run = experiment.run
    progress = ProgressCallback(run.iterations)
    try:
        with interrupt:  # after Ray's start, which puts signal handlers of its own in place
            _say("  building model, engine and environment; the first iteration takes longest")
            stopper = RunStopper(run.iterations, run.stop, run.max_minutes, interrupt)
            interrupt.nothing_to_keep = True
            callbacks = [
                _Built(interrupt),
                HistoryCallback(directory),
                progress,
                *([tracking] if tracking else []),
            ]
            if experiment.evaluation.interval is not None:
                callbacks.insert(0, HeldOutAtBothEnds())
            trial = _run_trial(experiment, config, directory, checkpoint, stopper, callbacks)
            if trial.status == "TERMINATED":
                return stopper.reason, ""
            error = _trial_error(trial)
            return ("interrupted", error) if interrupt.requested else ("failed", error)
    except KeyboardInterrupt:
        return "interrupted", ""
    finally:
        progress.close()


class _Built(tune.Callback):
    """Tells when a trial has been built: from then on there is an iteration to finish."""

    def __init__(self, interrupt: Interrupt) -> None:
        self._interrupt = interrupt

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._interrupt.nothing_to_keep = False


def _run_trial(
    experiment: Experiment,
    config: GRPOConfig,
    directory: Path,
    checkpoint: Path | None,
    stopper: RunStopper,
    callbacks: list[Any],
) -> Any:
    """Tune's trial object after its end."""
    from ray.tune import CheckpointConfig

    from rllib_llm.algorithm.grpo import GRPO

    analysis = tune.run(
        GRPO,
        name=directory.name,
        config=config,
        stop=stopper,
        storage_path=str(directory.parent),
        checkpoint_config=CheckpointConfig(
            num_to_keep=experiment.run.keep_checkpoints,
            checkpoint_frequency=experiment.run.checkpoint_every,
            checkpoint_at_end=True,
        ),
        restore=str(checkpoint) if checkpoint else None,
        max_failures=experiment.run.max_failures,
        callbacks=callbacks,
        raise_on_failed_trial=False,
        verbose=0,
    )
    return analysis.trials[0]


def _tracking(experiment: Experiment, directory: Path) -> MLflowCallback | None:
    settings = experiment.tracking
    if not settings.enabled:
        return None
    from rllib_llm.tracking import MLflowCallback

    return MLflowCallback(
        settings.uri,
        settings.experiment,
        run_name=directory.name,
        tags=settings.tags,
        samples_every=settings.samples_every,
        experiment=experiment.to_dict(),
        run_ids=earlier_run_ids(directory),
        one_run=True,
        detail=settings.detail,
    )


def _trial_error(trial: Any) -> str:
    """What the trial raised, without the frames of Ray that wrap it."""
    file = getattr(trial, "error_file", None)
    text = Path(file).read_text(encoding="utf-8", errors="replace") if file and Path(file).is_file() else ""
    return text.strip() or f"the trial ended as {trial.status} without an error text; see {trial.path}"


def _report(outcome: Outcome, policy: str, fingerprint: str) -> None:
    tracking = outcome.tracking
    print(
        closing_table(
            read_history(outcome.directory),
            policy=policy,
            fingerprint=fingerprint,
            run_id=tracking.run_ids.get("0") if tracking else None,
            tracking=tracking.tracking_uri if tracking else "tracking off",
            checkpoint=str(outcome.checkpoint or "none"),
            status=outcome.status,
        )
    )
    if tracking is not None:
        if tracking.report is not None and not tracking.report.complete:
            print(tracking.report)
        for problem in tracking.problems:
            print(f"tracking problem: {problem}")
        if tracking.tracking_uri.startswith("sqlite"):
            print(how_to_look(tracking.tracking_uri))
    if outcome.status == "failed":
        _say(f"\nThe trial failed:\n{outcome.error}")
    elif outcome.error:
        _say(
            f"\nThe run ended before it could write a checkpoint of this moment: {outcome.error.splitlines()[-1]}"
        )
    if outcome.status in ("failed", "interrupted"):
        if outcome.checkpoint is not None:
            _say(
                "\nGo on from the checkpoint with:  "
                + command_line(_tool("rllib-llm"), "train", "--resume", outcome.directory)
            )
        else:
            _say("\nThere is no checkpoint yet to go on from.")


def how_to_look(store: str) -> str:
    """The command that shows a local store, and the page (MLflow 3 opens on one for traces, which shows no runs)."""
    page = "http://127.0.0.1:5000/#/experiments?workflowType=machine_learning"
    command = command_line(_tool("mlflow"), "ui", "--backend-store-uri", store)
    return f"look at it:  {command}\n        then  {page}"


def _tool(name: str) -> str:
    """How a command of this Python environment is called from the current directory: ``.venv/bin/mlflow``."""
    path = Path(sys.executable).parent / name
    if shutil.which(name) == str(path) or not path.exists():
        return name
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
