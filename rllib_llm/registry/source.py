"""From what a user names (an MLflow run, a checkpoint, a trial or experiment directory) to a checkpoint and its run."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rllib_llm.registry.errors import RegistryError

__all__ = ["Source", "find_source", "source_problems", "tracking_uri_of"]

_RUN_ID = re.compile(r"[0-9a-f]{32}")
_TRACKING_FILE = "tracking.json"  # written by MLflowCallback into an experiment's directory
_METRICS = (
    "env_runners/episode_return_mean",
    "env_runners/response_length_mean",
    "evaluation/env_runners/episode_return_mean",
    "learners/default_policy/loss",
    "learners/default_policy/entropy",
    "mismatch/k3",
    "mismatch/mean_abs",
    "mismatch/max_abs",
    "mismatch/bit_equal_share",
)
"""What is carried over from a run: where training stood, and how far apart the two sides were."""


@dataclass(frozen=True)
class Source:
    """A checkpoint and the MLflow run that wrote it, where one is known.

    run_tags: tags of that run. attestations: what its learner and engines stated, side -> values.
    """

    checkpoint: Path
    run_id: str | None = None
    run_name: str | None = None
    experiment_id: str | None = None
    run_tags: Mapping[str, str] = field(default_factory=dict)
    attestations: Mapping[str, Any] = field(default_factory=dict)


def source_problems(source: str) -> list[str]:
    """What is wrong with a text that is neither a path that exists nor looks like a run id."""
    path = Path(source).expanduser()
    if path.exists() or _RUN_ID.fullmatch(source):
        return []
    return [f"{source!r}: no such path {path.absolute()}, and not an MLflow run id (32 hexadecimal digits)"]


def tracking_uri_of(source: str) -> str | None:
    """The store that a directory's runs were tracked in, by the file that the callback leaves; else None."""
    path = Path(source).expanduser().absolute()
    for folder in (path, *path.parents) if path.exists() else ():
        file = folder / _TRACKING_FILE
        if file.is_file():
            try:
                return str(json.loads(file.read_text(encoding="utf-8"))["tracking_uri"])
            except (ValueError, KeyError, TypeError):
                return None
    return None


def find_source(source: str, client: Any) -> Source:
    """Resolve a run id or a path.

    Args:
        source: a run id (of a trial, or of an experiment with one trial), or a path: a checkpoint, or a directory whose
            furthest trained checkpoint is taken.
        client: of the MLflow store with the runs.

    Raises:
        RegistryError: no such run, a run without a checkpoint on this machine, or several trials to choose from.
    """
    path = Path(source).expanduser()
    if path.exists():
        checkpoint = _only_checkpoint(path.absolute())
        run = _run_of_trial(client, checkpoint.parent) or _run_of_experiment(client, checkpoint)
        return _with_run(checkpoint, run, client)
    run = _trial_run(client, source)
    checkpoint = Path(run.data.tags["checkpoint"])
    if not checkpoint.is_dir():
        raise RegistryError(
            f"run {run.info.run_id}: its checkpoint {checkpoint} is not on this machine; give the path of a copy"
        )
    return _with_run(checkpoint, run, client)


def _only_checkpoint(path: Path) -> Path:
    from rllib_llm.on_disk.directories import checkpoints, find_checkpoint, find_experiment
    from rllib_llm.on_disk.errors import DirectoryError

    trials = sorted({found.parent for found in checkpoints(path)})
    # a run of `rllib-llm train` has a trial more for each time it was resumed, side by side in its directory
    one_run = {trial.parent for trial in trials} == {find_experiment(path)}
    if len(trials) > 1 and not one_run:
        lines = "\n".join(f"  - {trial}" for trial in trials)
        raise RegistryError(f"{path} holds checkpoints of {len(trials)} trials, name one of them:\n{lines}")
    try:
        return find_checkpoint(path)
    except DirectoryError as error:
        raise RegistryError(str(error)) from error


def _trial_run(client: Any, run_id: str) -> Any:
    """The run itself, or the only one of its children that has a checkpoint."""
    from mlflow.exceptions import MlflowException

    try:
        run = client.get_run(run_id)
    except MlflowException as error:
        raise RegistryError(f"run {run_id}: {error.message}") from error
    if "checkpoint" in run.data.tags:
        return run
    children = client.search_runs(
        [run.info.experiment_id], f"tags.`mlflow.parentRunId` = '{run_id}'", max_results=1000
    )
    trained = [child for child in children if "checkpoint" in child.data.tags]
    if len(trained) == 1:
        return trained[0]
    if not trained:
        raise RegistryError(
            f"run {run_id} ({run.info.run_name}) has written no checkpoint, nor has one of its {len(children)} trials"
        )
    lines = "\n".join(f"  - {child.info.run_id}  {child.info.run_name}" for child in trained)
    raise RegistryError(
        f"run {run_id} is an experiment with {len(trained)} trials that have checkpoints, name one of them:\n{lines}"
    )


def _run_of_trial(client: Any, trial: Path) -> Any | None:
    """The run that the callback opened for a Tune trial's directory."""
    experiments = [e.experiment_id for e in client.search_experiments()]
    if not experiments or "'" in str(trial):
        return None
    found = client.search_runs(experiments, f"tags.`tune.trial_dir` = '{trial}'", max_results=1)
    return found[0] if found else None


def _run_of_experiment(client: Any, checkpoint: Path) -> Any | None:
    """The run of `rllib-llm train`, which goes on in the trials that resume it, by the record in its directory."""
    from mlflow.exceptions import MlflowException

    from rllib_llm.on_disk.directories import earlier_run_ids, find_experiment
    from rllib_llm.on_disk.errors import DirectoryError

    directory = find_experiment(checkpoint)
    if directory is None or directory != checkpoint.parent.parent:
        return None
    try:
        run_id = earlier_run_ids(directory).get("0")
        return client.get_run(run_id) if run_id else None
    except DirectoryError as error:
        raise RegistryError(str(error)) from error
    except MlflowException:  # tracked in another store than this one
        return None


def _with_run(checkpoint: Path, run: Any | None, client: Any) -> Source:
    if run is None:
        return Source(checkpoint)
    attested = _json_artefact(client, run.info.run_id, "policy/attestations.json")
    return Source(
        checkpoint,
        run.info.run_id,
        run.info.run_name,
        run.info.experiment_id,
        dict(run.data.tags),
        attested if isinstance(attested, dict) else {},
    )


def metrics_at(source: Source, client: Any, iteration: int) -> dict[str, float]:
    """Metrics as they stood at a training iteration: the last value up to it.

    Of the run where one is known, else of the curve that `rllib-llm train` keeps in the experiment's directory.
    """
    if source.run_id is None:
        return _metrics_on_disk(source.checkpoint, iteration)
    values = {}
    for key in _METRICS:
        points = [m for m in client.get_metric_history(source.run_id, key) if m.step <= iteration]
        if points:
            values[key] = max(points, key=lambda m: m.step).value
    return values


def _metrics_on_disk(checkpoint: Path, iteration: int) -> dict[str, float]:
    from rllib_llm.on_disk.directories import find_experiment
    from rllib_llm.tracking.history import read_history

    directory = find_experiment(checkpoint)
    values: dict[str, float] = {}
    for row in read_history(directory) if directory is not None else ():
        if row["training_iteration"] <= iteration:
            values |= {key: row[key] for key in _METRICS if key in row}
    return values


def example_prompt(source: Source, client: Any) -> str | None:
    """The first prompt of the samples that a run logged; None where there are none."""
    table = None if source.run_id is None else _json_artefact(client, source.run_id, "samples.json")
    try:
        return str(table["data"][0][table["columns"].index("prompt")]) if table else None
    except (KeyError, IndexError, ValueError, TypeError):
        return None


def _json_artefact(client: Any, run_id: str, file: str) -> Any:
    """A small JSON artefact of a run; None where the run has none of that name."""
    from mlflow.exceptions import MlflowException

    folder = file.rpartition("/")[0] or None
    if file not in [f.path for f in client.list_artifacts(run_id, folder)]:
        return None
    with tempfile.TemporaryDirectory() as temporary:
        try:
            path = client.download_artifacts(run_id, file, temporary)
            return json.loads(Path(path).read_text(encoding="utf-8"))
        except (MlflowException, OSError, ValueError) as error:
            raise RegistryError(f"run {run_id}: its artefact {file} cannot be read: {error}") from error
