"""Experiment directories: where they are made, what lies in them, and how a resume finds its checkpoint."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rllib_llm.experiment import Experiment, ExperimentError
from rllib_llm.experiment_file import load_experiment

EXPERIMENT_FILE = "experiment.yaml"
TRACKING_FILE = "tracking.json"


def new_directory(experiment: Experiment, policy: str) -> Path:
    """Make an absolute directory that did not exist yet: ``results/quickstart-unified-fp8-20260101-120000``.

    Raises ExperimentError where it cannot be made.
    """
    stem = f"{experiment.name}-{policy}-{time.strftime('%Y%m%d-%H%M%S')}"
    parent = Path(experiment.run.directory).expanduser().absolute()
    number, path = 1, parent / stem
    while True:
        try:
            path.mkdir(parents=True)
            return path
        except OSError as error:
            if not path.exists():
                problem = (
                    f"run.directory = {experiment.run.directory!r}: cannot make {path}: {error.strerror}."
                )
                raise ExperimentError(f"experiment {experiment.name!r}", [problem]) from error
            number += 1  # another training that started in the same second
            path = parent / f"{stem}-{number}"


@contextmanager
def only_here(directory: Path) -> Iterator[None]:
    """Holds `directory` for this process: two that trained in it would write into each other's curves and checkpoints.

    Raises ExperimentError where another process holds it, and where nothing can be written. The hold ends with the
    process, however that ends.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(directory / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        problem = "another process is at work here; wait for its end, or end it."
        raise ExperimentError(str(directory), [problem]) from None
    except OSError as error:
        problem = f"the directory cannot be worked in: {error}."
        raise ExperimentError(str(directory), [problem]) from error
    try:
        yield
    finally:
        lock.release()


def checkpoints(directory: Path) -> list[Path]:
    """Complete checkpoints in the trials of an experiment directory, the furthest trained last."""
    found = [
        (iteration, path)
        for path in directory.glob("*/checkpoint_*")
        if (iteration := _iteration(path)) is not None
    ]
    return [path for _, path in sorted(found, key=lambda item: (item[0], item[1].stat().st_mtime))]


def _iteration(path: Path) -> int | None:
    """Training iteration of a checkpoint; None where it is not a complete one (a run killed while writing it)."""
    from rllib_llm.algorithm.checkpoint import CheckpointError, read_metadata, verify_files

    try:
        verify_files(str(path))
        return int(read_metadata(str(path))["training_iteration"])
    except (CheckpointError, KeyError, TypeError, ValueError):
        return None


def find_checkpoint(path: str | Path) -> Path:
    """`path` itself where it is a checkpoint, else the furthest trained one below it.

    Raises ExperimentError where there is none.
    """
    start = Path(path).expanduser().absolute()
    if _iteration(start) is not None:
        return start
    for experiment in (start, start.parent):  # `start` is an experiment directory, or one of its trials
        if found := [path for path in checkpoints(experiment) if start in path.parents]:
            return found[-1]
    raise ExperimentError(str(path), [f"no complete checkpoint at or below {start}."])


def find_experiment(path: str | Path) -> Path | None:
    """The experiment directory that `path` is or lies in; None outside one."""
    start = Path(path).expanduser().absolute()
    return next((place for place in (start, *start.parents) if (place / EXPERIMENT_FILE).is_file()), None)


def find_resumable(path: str | Path, overrides: list[str]) -> tuple[Experiment, Path, Path]:
    """(experiment, its directory, checkpoint) of an interrupted run.

    path: the experiment directory, or anything below it (a trial's directory; a checkpoint, which is then taken
        itself).

    Raises ExperimentError where there is no experiment, or no complete checkpoint to go on from;
    PrecisionChangeError where the overrides would go on under another policy without allow_precision_change.
    """
    from precision_policies import load_policy
    from rllib_llm.algorithm.checkpoint import read_metadata, refuse_other_policy

    directory = find_experiment(path)
    if directory is None:
        problem = f"no {EXPERIMENT_FILE} here or above; give a directory made by rllib-llm train."
        raise ExperimentError(str(path), [problem])
    experiment, checkpoint = load_experiment(directory / EXPERIMENT_FILE, overrides), find_checkpoint(path)
    precision, saved = experiment.precision, read_metadata(str(checkpoint))
    refuse_other_policy(
        saved, load_policy(precision.policy), precision.allow_precision_change, str(checkpoint)
    )
    return experiment, directory, checkpoint


def earlier_run_ids(directory: Path) -> dict[str, str]:
    """MLflow run ids of the earlier part of a resumed experiment; empty where it was not tracked.

    Raises ExperimentError where the file that holds them is damaged.
    """
    file = directory / TRACKING_FILE
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))["run_ids"]
        if isinstance(found, dict) and all(isinstance(run_id, str) for run_id in found.values()):
            return found
        reason = f"run_ids = {str(found)[:80]}"
    except (OSError, ValueError, TypeError, KeyError) as error:
        reason = f"{type(error).__name__}: {error}"
    problem = f"holds no MLflow run ids ({reason}). Delete it to go on in new MLflow runs."
    raise ExperimentError(str(file), [problem])
