"""The one place that talks to MLflow: plain-data operations, and what each does to a tracking store."""

from __future__ import annotations

import hashlib
import os
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rllib_llm.errors import InputError, RllibLLMError
from rllib_llm.tracking import entries

DEFAULT_STORE = "sqlite:///mlflow.db"
_SQLITE = b"SQLite format 3\0"  # how such a file begins (sqlite.org/fileformat.html, 1.3); an empty one is a new one
_CONTACTED_LATER = ("sqlite", "postgresql", "mysql", "mssql", "http", "https")
# MLflow's own retries keep a request up for minutes; ours come from the delivery thread, which can be stopped. Its
# progress bar for artefacts would be drawn over ours.
MLFLOW_DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}


class TrackingUnavailableError(RllibLLMError, InputError, RuntimeError):
    """Tracking is switched on, and MLflow is not installed or knows no store of the address given."""


@dataclass(frozen=True)
class Operation:
    """One write to the store, as plain data, so that it can wait in a queue or in a file.

    run: our own name of the MLflow run ("experiment", or a Tune trial id); the store's id is known only once the
        server has answered.
    kind: "create" {name, parent, tags, start_ms} · "params" {key: value} · "tags" {key: value} ·
        "inputs" {datasets: [{name, digest, source_type, source, context}]} ·
        "metrics" {step, time_ms, values} · "text" {file, text} · "table" {file, columns} · "file" {path, folder} ·
        "finish" {status, end_ms}.
    """

    run: str
    kind: str
    payload: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as it is written to a file of unsent operations."""
        return asdict(self)


class MLflowStore:
    """Applies operations to a tracking store; knows which MLflow run each of our runs is.

    Raises TrackingUnavailableError when MLflow is missing. ``apply`` raises whatever MLflow raises; ``is_permanent``
    tells whether trying again can help.
    """

    def __init__(self, tracking_uri: str, experiment: str, run_ids: dict[str, str] | None = None) -> None:
        self.uri = resolve_uri(tracking_uri)
        self.experiment = experiment
        self.run_ids: dict[str, str] = dict(run_ids or {})
        self._experiment_id: str | None = None
        require_mlflow()
        for name, value in MLFLOW_DEFAULTS.items():
            os.environ.setdefault(name, value)

    def apply(self, op: Operation) -> None:
        """Carry out one operation. A run of an unknown name raises KeyError: its creation was refused for good."""
        if op.kind == "create":
            self._create(op)
            return
        getattr(self, f"_{op.kind}")(self.run_ids[op.run], op.payload)

    @staticmethod
    def is_permanent(error: Exception) -> bool:
        """True where the store has answered and refused (HTTP 4xx but 429), or the operation itself is wrong."""
        status = getattr(error, "get_http_status_code", None)
        if status is not None:
            code = status()
            return 400 <= code < 500 and code != 429
        return isinstance(error, (KeyError, TypeError, ValueError, AttributeError, FileNotFoundError))

    def _client(self) -> Any:
        return open_client(self.uri)

    def _experiment(self) -> str:
        if self._experiment_id is None:
            client = self._client()
            found = client.get_experiment_by_name(self.experiment)
            if found is not None:
                self._experiment_id = found.experiment_id
            else:
                self._experiment_id = client.create_experiment(self.experiment, artifact_root(self.uri))
        return self._experiment_id

    def _create(self, op: Operation) -> None:
        if op.run in self.run_ids:  # continues a run of an earlier process
            self._client().update_run(self.run_ids[op.run], status="RUNNING")
            return
        tags = dict(op.payload.get("tags", {}))
        parent = op.payload.get("parent")
        if parent:
            tags["mlflow.parentRunId"] = self.run_ids[parent]
        run = self._client().create_run(
            self._experiment(),
            start_time=op.payload.get("start_ms"),
            tags=tags,
            run_name=op.payload.get("name"),
        )
        self.run_ids[op.run] = run.info.run_id

    def _params(self, run_id: str, values: dict[str, str]) -> None:
        from mlflow.entities import Param

        for chunk in entries.chunks(values.items(), entries.PARAMS_PER_BATCH):
            self._client().log_batch(run_id, params=[Param(key, value) for key, value in chunk])

    def _tags(self, run_id: str, values: dict[str, str]) -> None:
        from mlflow.entities import RunTag

        for chunk in entries.chunks(values.items(), entries.PARAMS_PER_BATCH):
            self._client().log_batch(run_id, tags=[RunTag(key, value) for key, value in chunk])

    def _inputs(self, run_id: str, payload: dict[str, Any]) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        datasets = [
            DatasetInput(
                Dataset(one["name"], one["digest"], one["source_type"], one["source"]),
                [InputTag("mlflow.data.context", one["context"])],
            )
            for one in payload["datasets"]
        ]
        self._client().log_inputs(run_id, datasets=datasets)

    def _metrics(self, run_id: str, payload: dict[str, Any]) -> None:
        from mlflow.entities import Metric

        at, step = payload["time_ms"], payload["step"]
        for chunk in entries.chunks(payload["values"].items(), entries.METRICS_PER_BATCH):
            self._client().log_batch(run_id, metrics=[Metric(key, value, at, step) for key, value in chunk])

    def _text(self, run_id: str, payload: dict[str, Any]) -> None:
        self._client().log_text(run_id, payload["text"], payload["file"])

    def _table(self, run_id: str, payload: dict[str, Any]) -> None:
        self._client().log_table(run_id, payload["columns"], payload["file"])

    def _file(self, run_id: str, payload: dict[str, Any]) -> None:
        self._client().log_artifact(run_id, payload["path"], payload.get("folder"))

    def _finish(self, run_id: str, payload: dict[str, Any]) -> None:
        self._client().set_terminated(run_id, payload["status"], payload.get("end_ms"))


def require_mlflow() -> None:
    """Raise TrackingUnavailableError, with what to do, where MLflow cannot be imported."""
    try:
        import mlflow  # noqa: F401
    except ImportError as error:
        raise TrackingUnavailableError(
            "tracking is switched on but MLflow cannot be imported "
            f"({error}). Install it with `pip install 'rllib-llm[mlflow]'`, or set tracking.enabled=false."
        ) from error


def store_address(uri: str | None) -> str:
    """The address to use for `uri`; None takes ``MLFLOW_TRACKING_URI``, else DEFAULT_STORE.

    Databases and servers are not contacted: one that is down now may be up when the first write is delivered. Raises
    TrackingUnavailableError for an address of any other kind that MLflow cannot use, for a database whose driver is not
    installed, and for a sqlite file where none can be written: no later write could succeed.
    """
    require_mlflow()
    address = resolve_uri(uri or os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT_STORE)
    scheme = address.partition("://")[0] if "://" in address else ""
    try:
        if scheme.partition("+")[0] not in _CONTACTED_LATER:
            open_client(address)
        elif not scheme.startswith("http"):
            import sqlalchemy

            sqlalchemy.create_engine(address)  # looks for the database's driver, contacts nothing
    except Exception as error:
        raise TrackingUnavailableError(
            f"tracking.uri = {address!r}: MLflow cannot use it ({str(error).strip().splitlines()[0][:300]}). Give a "
            "database (sqlite:///mlflow.db) or a server (http://host:port), or set tracking.enabled=false."
        ) from error
    _require_writable_database(address)
    return address


def _require_writable_database(address: str) -> None:
    if not address.startswith("sqlite:///"):
        return
    file = Path(address.removeprefix("sqlite:///").partition("?")[0])
    place = next(path for path in (file, *file.parents) if path.exists())
    if place == file and place.is_file() and os.access(place, os.W_OK):
        with place.open("rb") as opened:
            if opened.read(len(_SQLITE)) not in (b"", _SQLITE):
                raise TrackingUnavailableError(
                    f"tracking.uri = {address!r}: {file} is not a sqlite database. Name another file, or set "
                    "tracking.enabled=false."
                )
        return
    if place == file or not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise TrackingUnavailableError(
            f"tracking.uri = {address!r}: {file} cannot be written, because {place} is not a directory that takes your "
            "files. Name another file, or set tracking.enabled=false."
        )


_opened: set[str] = set()  # databases whose tables this process has seen


def open_client(uri: str, registry_uri: str | None = None) -> Any:
    """An `MlflowClient`; one process at a time opens a sqlite file for the first time.

    MLflow (3.17) makes the tables of a new file without a lock: of two runs that begin together one fails, and the file
    is unusable from then on (a half-made `_alembic_tmp_latest_metrics`).
    """
    from filelock import FileLock
    from mlflow import MlflowClient

    if uri in _opened or not uri.startswith("sqlite"):
        return MlflowClient(tracking_uri=uri, registry_uri=registry_uri)
    name = hashlib.sha256(uri.encode()).hexdigest()[:16]
    with FileLock(Path(tempfile.gettempdir()) / f"rllib_llm_mlflow_{os.getuid()}_{name}.lock"):
        client = MlflowClient(tracking_uri=uri, registry_uri=registry_uri)
    _opened.add(uri)
    return client


def resolve_uri(uri: str) -> str:
    """An absolute form of a store address: a relative sqlite file is taken from the current directory, now.

    Tune's workers have other working directories, so a relative file would be another store in each process. What
    follows a ``?`` in `uri` is SQLAlchemy's query and stays.

    Raises:
        TrackingUnavailableError: the path holds a ``?``, which a URL would take for its query and open another file, or
            a ``%``, which MLflow decodes.
    """
    if not uri.startswith("sqlite:///"):
        return uri
    given, mark, query = uri.removeprefix("sqlite:///").partition("?")
    path = str(Path(given).absolute())
    wrong = [character for character in "?%" if character in path]
    if wrong:
        raise TrackingUnavailableError(
            f"tracking.uri = {uri!r}: the database would lie at {path}, and an address cannot hold the character "
            f"{' or '.join(map(repr, wrong))} of that path. Name a file in a directory without it, for example "
            "sqlite:////absolute/path/mlflow.db, or set tracking.enabled=false."
        )
    return f"sqlite:///{path}{mark}{query}"


def artifact_root(uri: str) -> str | None:
    """Where artefacts of a local sqlite store go: ``mlartifacts/`` beside the database; None lets a server decide."""
    if not uri.startswith("sqlite:///"):
        return None
    database = uri.removeprefix("sqlite:///").split("?")[0]
    return str(Path(database).parent / "mlartifacts")
