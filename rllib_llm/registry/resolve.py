"""``models:/NAME@ALIAS`` as the model of an experiment: pinned to a version, then to a directory."""

from __future__ import annotations

import functools
from pathlib import Path

from rllib_llm.on_disk.owner import OWNER_FILE
from rllib_llm.registry.errors import RegistryError
from rllib_llm.registry.manifest import Manifest
from rllib_llm.registry.mlflow_registry import Registry
from rllib_llm.registry.reference import is_registered

__all__ = ["local_masters", "local_path", "pinned"]


def pinned(model: str | None, tracking_uri: str | None = None) -> str | None:
    """A registered model by its version, so that an alias that moves later does not change a run; others as they are.

    Raises:
        RegistryError: no such registered model.
    """
    if model is None or not is_registered(model):
        return model
    return Registry(tracking_uri).find(model).uri


def local_path(model: str | None, tracking_uri: str | None = None) -> str | None:
    """The directory of a registered model on this machine; other model strings as they are.

    What is handed to Ray's workers: their working directory is another one, so a relative store is another one too.
    """
    if model is None or not is_registered(model):
        return model
    return str(local_masters(model, tracking_uri))


def local_masters(model: str, tracking_uri: str | None = None) -> Path:
    """The directory with the masters of a registered model, in Hugging Face format.

    Raises:
        RegistryError: no such model, or it is not one of ours.
    """
    registry = Registry(tracking_uri)
    root = registry.fetch(registry.find(model))
    return _masters(root)


@functools.lru_cache(maxsize=64)
def _masters(root: Path) -> Path:
    directory = root / Manifest.read(root).masters
    if not (directory / OWNER_FILE).is_file():
        raise RegistryError(f"{directory} lacks {OWNER_FILE}: see rllib-llm models verify")
    return directory
