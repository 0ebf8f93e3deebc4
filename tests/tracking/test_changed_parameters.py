"""A parameter that a scheduler changes: its history as a metric, without a server and without Tune."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mlflow import MlflowClient

from rllib_llm.tracking import MLflowCallback


def trial_in(folder: Path, config: dict[str, Any]) -> SimpleNamespace:
    """What the callback reads of a Tune trial."""
    storage = SimpleNamespace(
        experiment_driver_staging_path=str(folder),
        storage_filesystem=SimpleNamespace(type_name="local"),
        experiment_fs_path=str(folder),
        experiment_dir_name="experiment",
    )
    return SimpleNamespace(
        trial_id="a", config=config, storage=storage, path=str(folder), evaluated_params={}, last_result=None,
        error_file=None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("values", "points"),
    [
        ([1e-4, 5e-5, 7e-5], [(0, 1e-4), (2, 5e-5), (3, 7e-5)]),
        ([1.0, 2.0, 1.0, 2.0], [(0, 1.0), (2, 2.0), (3, 1.0), (4, 2.0)]),
        ([3.0, 3.0, 4.0], [(0, 3.0), (3, 4.0)]),
        ([3.0, 3.0], []),
    ],
)
def test_the_value_at_the_start_is_the_only_point_at_step_0(tmp_path, values, points):
    """However often a value changes, step 0 has what the trial began with and each change its own iteration."""
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    trial = trial_in(tmp_path, {"train": {"lr": values[0]}})
    callback = MLflowCallback(uri, "test")
    callback.on_trial_start(0, [trial], trial)
    for step, value in enumerate(values, start=1):
        trial.config = {"train": {"lr": value}}
        callback.on_trial_result(step, [trial], trial, {"training_iteration": step})
    callback.on_trial_complete(len(values), [trial], trial)
    callback.on_experiment_end([trial])
    history = MlflowClient(uri).get_metric_history(callback.run_id_of("a"), "config/train/lr")
    assert sorted((point.step, point.value) for point in history) == points
