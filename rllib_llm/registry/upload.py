"""A package as a logged model in MLflow, linked to the run that trained it, and as a version of a registered model."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rllib_llm.registry.mlflow_registry import DATA_FOLDER, MANIFEST_TAG, Entry, Registry
from rllib_llm.registry.signature import model_signature, requirements
from rllib_llm.registry.source import Source
from rllib_llm.tracking.store import artifact_root

__all__ = ["Upload", "upload"]

EXPERIMENT = "rllib_llm"
"""MLflow experiment of models whose run is not known."""
# What `mlflow.pyfunc.load_model(..., model_config=...)` may change: MLflow ignores keys that are not here.
MODEL_CONFIG: dict[str, Any] = {
    "policy": None,
    "allow_other_policy": False,
    "device": None,
    "engine_options": {},
}


@dataclass(frozen=True)
class Upload:
    """What goes to MLflow beside the package.

    prompt: of the input example. tags, description: of the version and the logged model. metrics, step: at the
    checkpoint's iteration.
    """

    name: str
    alias: str | None
    source: Source
    prompt: str
    tags: Mapping[str, str]
    metrics: Mapping[str, float]
    description: str
    step: int


def upload(registry: Registry, package: Path, what: Upload) -> Entry:
    """Move `package` (written by `rllib_llm.registry.package`) into an MLflow model beside it, and register that.

    A failure leaves a logged model marked as failed, and no version.
    """
    client, run_id = registry.client, what.source.run_id
    params = {} if run_id is None else client.get_run(run_id).data.params
    logged = client.create_logged_model(
        what.source.experiment_id or _experiment(registry),
        name=what.name,
        source_run_id=run_id,
        tags=dict(what.tags),
        params=dict(params),
        model_type="rllib_llm",
    )
    target = package.parent / "mlflow"
    try:
        _write_mlflow_model(package, target, logged, what)
        entry = registry.add(
            target,
            logged.model_id,
            what.name,
            alias=what.alias,
            run_id=run_id,
            tags=what.tags,
            description=what.description,
        )
    except BaseException:
        with contextlib.suppress(Exception):  # a store that is gone must not hide why
            client.finalize_logged_model(logged.model_id, "FAILED")
        raise
    if run_id is not None:
        _link(client, logged.model_id, what)
    return entry


def _write_mlflow_model(package: Path, target: Path, logged: Any, what: Upload) -> None:
    """An MLflow model directory whose data folder is `package`, which is moved, not copied: it may be large."""
    from mlflow import pyfunc
    from mlflow.models import Model
    from mlflow.models.model import MLMODEL_FILE_NAME

    model = Model(
        artifact_path=logged.artifact_location,
        run_id=what.source.run_id,
        model_uuid=logged.model_id,
        model_id=logged.model_id,
        metadata={key: what.tags[key] for key in ("policy.name", "policy.fingerprint", MANIFEST_TAG)},
    )
    placeholder = target.parent / "placeholder" / package.name
    placeholder.mkdir(parents=True)
    pyfunc.save_model(
        path=str(target),
        mlflow_model=model,
        loader_module="rllib_llm.registry.pyfunc",
        data_path=str(placeholder),
        signature=model_signature(),
        input_example=([what.prompt], {"max_tokens": 32, "temperature": 0.0}),
        pip_requirements=requirements(),
        model_config=dict(MODEL_CONFIG),
    )
    (target / DATA_FOLDER).rmdir()
    shutil.move(str(package), target / DATA_FOLDER)
    model.model_size_bytes = sum(f.stat().st_size for f in target.rglob("*") if f.is_file())
    model.save(str(target / MLMODEL_FILE_NAME))


def _link(client: Any, model_id: str, what: Upload) -> None:
    """Name the model among the run's outputs, and the run's metrics among the model's. The run's status stays."""
    from mlflow.entities import LoggedModelOutput, Metric

    run_id, step = what.source.run_id, what.step
    client.log_outputs(run_id, [LoggedModelOutput(model_id, step)])
    now = int(time.time() * 1000)
    points = [
        Metric(key, value, now, step, model_id=model_id, run_id=run_id) for key, value in what.metrics.items()
    ]
    if points:
        client.log_batch(run_id, metrics=points)


def _experiment(registry: Registry) -> str:
    found = registry.client.get_experiment_by_name(EXPERIMENT)
    if found is not None:
        return str(found.experiment_id)
    return str(registry.client.create_experiment(EXPERIMENT, artifact_root(registry.uri)))
