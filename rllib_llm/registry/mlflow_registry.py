"""The one place that talks to MLflow's model registry: find, list, fetch and add entries.

Everything goes through clients with an explicit address; MLflow's process-wide one is changed for one call only.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import shutil
import tempfile
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rllib_llm.registry.errors import RegistryError
from rllib_llm.registry.manifest import MANIFEST_FILE
from rllib_llm.registry.reference import SCHEME, Reference, parse_reference
from rllib_llm.tracking.store import MLFLOW_DEFAULTS, open_client, store_address

__all__ = ["MANIFEST_TAG", "Entry", "Registry"]

MANIFEST_TAG = "manifest.sha256"
DATA_FOLDER = "data/model"
"""Folder of an MLflow model that holds ours (`rllib_llm.registry.package`)."""
_CACHE = "RLLIB_LLM_CACHE"


@dataclass(frozen=True)
class Entry:
    """One version of a registered model."""

    name: str
    version: str
    aliases: tuple[str, ...] = ()
    tags: Mapping[str, str] = field(default_factory=dict)
    run_id: str | None = None
    created_ms: int = 0

    @property
    def uri(self) -> str:
        """How MLflow names this version: models:/NAME/VERSION."""
        return f"{SCHEME}{self.name}/{self.version}"


class Registry:
    """A model registry.

    Args:
        tracking_uri: MLflow store; None takes ``MLFLOW_TRACKING_URI``, else ``sqlite:///mlflow.db``. The registry is
            the one of ``MLFLOW_REGISTRY_URI`` where that is set.
        create: whether a sqlite file that does not exist may be made.

    Raises:
        TrackingUnavailableError: MLflow is missing, or knows no such kind of address.
        RegistryError: no such sqlite file, or a database that MLflow cannot open.
    """

    def __init__(self, tracking_uri: str | None = None, *, create: bool = False) -> None:
        self.uri = store_address(tracking_uri)
        file = (
            self.uri.removeprefix("sqlite:///").partition("?")[0]
            if self.uri.startswith("sqlite:///")
            else None
        )
        if file and not create and not Path(file).is_file():
            raise RegistryError(
                f"no MLflow store at {self.uri}: start in the directory of the runs, set MLFLOW_TRACKING_URI, or give "
                "--tracking-uri"
            )
        for name, value in MLFLOW_DEFAULTS.items():
            os.environ.setdefault(name, value)
        self.registry_uri = os.environ.get("MLFLOW_REGISTRY_URI") or self.uri
        try:
            self.client = open_client(self.uri, self.registry_uri)
        except Exception as error:  # of sqlalchemy, alembic or a database's driver, which MLflow passes on
            raise RegistryError(
                f"the MLflow store {self.uri} cannot be opened: {type(error).__name__}: {str(error)[:300]}"
            ) from error

    # ------------------------------------------------------------------ finding

    def find(self, reference: str | Reference) -> Entry:
        """The entry that a reference names.

        Raises:
            RegistryError: no such model, alias or version, with those that exist; a name alone is ambiguous.
        """
        from mlflow.exceptions import MlflowException

        ref = reference if isinstance(reference, Reference) else parse_reference(reference)
        if ref.alias is None and ref.version is None:
            raise RegistryError(
                f"{ref}: say which version, NAME@ALIAS or NAME/VERSION. {self._known(ref.name)}"
            )
        try:
            with self.answering("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                version = ref.version
                if ref.alias is not None:
                    version = self.client.get_model_version_by_alias(ref.name, ref.alias).version
                found = self.client.get_model_version(ref.name, str(version))
        except MlflowException as error:
            raise RegistryError(f"{ref} is not in {self.registry_uri}. {self._known(ref.name)}") from error
        return _entry(found)

    def entries(self, name: str | None = None) -> list[Entry]:
        """All versions of one model, or of all, by name and version."""
        query = None if name is None else "name = '{}'".format(name.replace("'", "\\'"))
        found, token = [], None
        while True:
            with self.answering():
                page = self.client.search_model_versions(query, max_results=200, page_token=token)
            found += [self.find(Reference(v.name, version=str(v.version))) for v in page]
            token = page.token
            if not token:
                return sorted(found, key=lambda e: (e.name, int(e.version)))

    def holding(self, digest: str) -> Entry | None:
        """The entry whose manifest has this sha256, the first registered of several; None if there is none."""
        found = self.client.search_model_versions(f"tags.`{MANIFEST_TAG}` = '{digest}'", max_results=200)
        return min(map(_entry, found), key=lambda entry: entry.created_ms, default=None)

    @contextmanager
    def answering(self, *expected: str) -> Iterator[None]:
        """Turns what MLflow raises into a RegistryError that names the store, all but the `expected` error codes."""
        from mlflow.exceptions import MlflowException

        try:
            yield
        except MlflowException as error:
            if error.error_code in expected:
                raise
            raise RegistryError(
                f"the MLflow store {self.uri} did not answer as it should: {str(error)[:300]}. Is the address right "
                "(--tracking-uri, MLFLOW_TRACKING_URI), and does its server run?"
            ) from error

    def _known(self, name: str) -> str:
        with self.answering():
            names = [m.name for m in self.client.search_registered_models(max_results=200)]
        if name in names:
            shown = [
                f"{e.version}{' (' + ', '.join(e.aliases) + ')' if e.aliases else ''}"
                for e in self.entries(name)
            ]
            return f"Versions of {name!r}: {', '.join(shown) or 'none'}."
        near = difflib.get_close_matches(name, names, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        return f"Registered models: {', '.join(names) or 'none'}.{hint}"

    # ------------------------------------------------------------------ fetching

    def fetch(self, entry: Entry) -> Path:
        """The directory of an entry (`rllib_llm.registry.package`) on this machine.

        Artefacts on a file system are used where they lie. Others are downloaded once, into ``RLLIB_LLM_CACHE`` or
        ``~/.cache/rllib_llm``.

        Raises:
            RegistryError: the entry is not one of ours, or its artefacts are gone.
        """
        if MANIFEST_TAG not in entry.tags:
            raise RegistryError(
                f"{entry.uri} was not made by rllib-llm models register: it has no tag {MANIFEST_TAG}"
            )
        local = self._local_artifacts(entry)
        if local is None:
            return self._download(entry) / DATA_FOLDER
        root = local / DATA_FOLDER
        if not (root / MANIFEST_FILE).is_file():
            raise RegistryError(
                f"{entry.uri}: its artefacts are gone from {root}: restore them, or register it again"
            )
        return root

    def _local_artifacts(self, entry: Entry) -> Path | None:
        """Where an entry's artefacts lie, if that is a file system of this machine."""
        from mlflow.utils.file_utils import local_file_uri_to_path

        location = self.client.get_model_version_download_uri(entry.name, entry.version)
        if location.startswith(SCHEME):
            location = self.client.get_logged_model(location.removeprefix(SCHEME)).artifact_location
        if urllib.parse.urlparse(location).scheme not in ("", "file"):
            return None
        return Path(local_file_uri_to_path(location))

    def _download(self, entry: Entry) -> Path:
        from mlflow.artifacts import download_artifacts

        base = Path(os.environ.get(_CACHE) or "~/.cache/rllib_llm").expanduser() / "models"
        key = hashlib.sha256(f"{self.registry_uri}|{entry.tags[MANIFEST_TAG]}".encode()).hexdigest()[:16]
        target = base / f"{entry.name}-{entry.version}-{key}"
        if not target.is_dir():
            base.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=base) as part, _process_default(self.uri):
                got = download_artifacts(artifact_uri=entry.uri, dst_path=part)
                try:
                    Path(got).rename(target)
                except OSError:  # another process was faster; its copy is complete, because a rename is
                    shutil.rmtree(got, ignore_errors=True)
        return target

    # ------------------------------------------------------------------ adding

    def add(
        self,
        model_directory: Path,
        model_id: str,
        name: str,
        *,
        alias: str | None,
        run_id: str | None,
        tags: Mapping[str, str],
        description: str,
    ) -> Entry:
        """Upload a saved MLflow model as the artefacts of a logged model, and make it a version of `name`.

        The version is made last, so that an upload that fails leaves no version.
        """
        self.client.log_model_artifacts(model_id, str(model_directory))
        self.client.finalize_logged_model(model_id, "READY")
        self._ensure(name)
        with _process_default(self.uri):
            version = self.client.create_model_version(
                name,
                f"{SCHEME}{model_id}",
                run_id=run_id,
                tags=dict(tags),
                description=description,
                model_id=model_id,
            )
        # What mlflow.register_model does: the page of the logged model names its versions by this tag.
        versions = json.dumps([{"name": name, "version": int(version.version)}])
        self.client.set_logged_model_tags(
            model_id, {"mlflow.modelVersions": versions, "mlflow.note.content": description}
        )
        if alias is not None:
            self.client.set_registered_model_alias(name, alias, version.version)
        return self.find(Reference(name, version=str(version.version)))

    def _ensure(self, name: str) -> None:
        from mlflow.exceptions import MlflowException

        try:
            self.client.create_registered_model(
                name, description="Language models trained by reinforcement learning with rllib_llm."
            )
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise


@contextmanager
def _process_default(uri: str) -> Iterator[None]:
    """MLflow's process-wide tracking address, for one call. Two look there, whatever store they are asked (3.17):
    a registry in a database for the logged model of a new version, and `download_artifacts` of ``models:/``.
    """
    import mlflow

    before = os.environ.get("MLFLOW_TRACKING_URI")  # MLflow sets it whenever the address is set
    mlflow.set_tracking_uri(uri)
    try:
        yield
    finally:
        mlflow.set_tracking_uri(before)


def _entry(version: Any) -> Entry:
    return Entry(
        version.name,
        str(version.version),
        tuple(version.aliases or ()),
        dict(version.tags or {}),
        version.run_id or None,
        int(version.creation_timestamp or 0),
    )
