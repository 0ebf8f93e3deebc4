"""The directory of an experiment: made for a new one, found again for one that was interrupted."""

from __future__ import annotations

import time
from pathlib import Path

from precision_policies.errors import Violation
from rllib_llm.experiment.errors import ExperimentError
from rllib_llm.experiment.file import load_experiment
from rllib_llm.experiment.sections import Experiment
from rllib_llm.on_disk.directories import EXPERIMENT_FILE, find_checkpoint, find_experiment

__all__ = ["find_resumable", "new_directory"]


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
                problem = f"cannot make {path}: {error.strerror}"
                violation = Violation("run.directory", experiment.run.directory, problem, "name another one")
                raise ExperimentError(f"experiment {experiment.name!r}", [violation]) from error
            number += 1  # another training that started in the same second
            path = parent / f"{stem}-{number}"


def find_resumable(path: str | Path, overrides: list[str]) -> tuple[Experiment, Path, Path]:
    """(experiment, its directory, checkpoint) of an interrupted run.

    path: the experiment directory, or anything below it (a trial's directory; a checkpoint, which is then taken
        itself).

    Raises ExperimentError where there is no experiment, or no complete checkpoint to go on from;
    PrecisionChangeError where the overrides would go on under another policy without allow_precision_change.
    """
    from precision_policies import load_policy
    from rllib_llm.on_disk.checkpoint import read_metadata, refuse_precision_change

    directory = find_experiment(path)
    if directory is None:
        problem = f"no {EXPERIMENT_FILE} here or above"
        violation = Violation("", None, problem, "give a directory made by rllib-llm train")
        raise ExperimentError(str(path), [violation])
    experiment, checkpoint = load_experiment(directory / EXPERIMENT_FILE, overrides), find_checkpoint(path)
    precision, saved = experiment.precision, read_metadata(str(checkpoint))
    refuse_precision_change(
        saved, load_policy(precision.policy), precision.allow_precision_change, str(checkpoint)
    )
    return experiment, directory, checkpoint
