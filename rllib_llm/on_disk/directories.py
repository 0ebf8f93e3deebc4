"""Experiment directories: where they are made, what lies in them, and how a resume finds its checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rllib_llm.on_disk.errors import CheckpointError, DirectoryError

EXPERIMENT_FILE = "experiment.yaml"
TRACKING_FILE = "tracking.json"


@contextmanager
def only_here(directory: Path) -> Iterator[None]:
    """Holds `directory` for this process: two that trained in it would write into each other's curves and checkpoints.

    Raises DirectoryError where another process holds it, and where nothing can be written. The hold ends with the
    process, however that ends.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(directory / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        problem = "another process is at work here; wait for its end, or end it."
        raise DirectoryError(str(directory), problem) from None
    except OSError as error:
        problem = f"the directory cannot be worked in: {error}."
        raise DirectoryError(str(directory), problem) from error
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
    try:
        return _checked_iteration(path)
    except CheckpointError:
        return None


def _checked_iteration(path: Path) -> int:
    """Training iteration of a checkpoint that was written to its end; its contents are compared when it is opened."""
    from rllib_llm.on_disk.checkpoint import read_metadata, verify_files

    verify_files(str(path), contents=False)
    try:
        return int(read_metadata(str(path))["training_iteration"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} is damaged: its metadata has no training_iteration ({error!r})"
        ) from error


def find_checkpoint(path: str | Path) -> Path:
    """`path` itself where it is a checkpoint, else the furthest trained one below it.

    Raises DirectoryError where there is none.
    """
    start = Path(path).expanduser().absolute()
    if _iteration(start) is not None:
        return start
    for experiment in (start, start.parent):  # `start` is an experiment directory, or one of its trials
        if found := [path for path in checkpoints(experiment) if start in path.parents]:
            return found[-1]
    problem = f"no complete checkpoint at or below {start}."
    for place in (start, *sorted(start.glob("**/checkpoint_*"))):
        if place.name.startswith("checkpoint_") and place.is_dir():
            try:
                _checked_iteration(place)
            except CheckpointError as error:
                problem += f"\n  - {error}"
    raise DirectoryError(str(path), problem)


def find_experiment(path: str | Path) -> Path | None:
    """The experiment directory that `path` is or lies in; None outside one."""
    start = Path(path).expanduser().absolute()
    return next((place for place in (start, *start.parents) if (place / EXPERIMENT_FILE).is_file()), None)


def earlier_run_ids(directory: Path) -> dict[str, str]:
    """MLflow run ids of the earlier part of a resumed experiment; empty where it was not tracked.

    Raises DirectoryError where the file that holds them is damaged.
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
    raise DirectoryError(str(file), problem)
