"""Where a model string points: a directory of the user's, a registered model, or one shipped inside the package.

No model hub is contacted, ever: a name that is neither a directory, nor ``models:/…`` in the MLflow registry, nor a
shipped asset is an error that says so.
"""

from __future__ import annotations

import importlib.resources
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rllib_llm.errors import InputError, RllibLLMError

CONFIG_FILE = "config.json"
ASSETS_PACKAGE = "rllib_llm.assets"


_SCHEMES: dict[str, Callable[[str], Path]] = {}


class ModelPathError(RllibLLMError, InputError, FileNotFoundError):
    """A model string that resolves to nothing we can load, or a file of a model directory that cannot be read."""


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file of a model directory.

    Raises:
        ModelPathError: it cannot be read, is cut off, or is not one JSON object; names the file and the place.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelPathError(f"{file}: not readable as JSON ({error}): copy it again") from error
    if not isinstance(found, dict):
        raise ModelPathError(f"{file}: holds a {type(found).__name__}, not a JSON object: copy it again")
    return found


def register_scheme(scheme: str, resolve: Callable[[str], Path]) -> None:
    """Let ``scheme:…`` be a model string; `resolve` gives the model's directory, or raises.

    So what fetches models (the registry) can stand above what loads them.
    """
    _SCHEMES[scheme] = resolve


_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""ORGANISATION/MODEL."""


def _assets_root() -> Path | None:
    try:
        root = importlib.resources.files(ASSETS_PACKAGE)
    except ModuleNotFoundError:
        return None
    return Path(str(root))


def shipped_models() -> tuple[str, ...]:
    """Names of the models inside the package, e.g. ``("tiny-chain",)``; each is a directory with a
    config.json."""
    root = _assets_root()
    if root is None or not root.is_dir():
        return ()
    return tuple(sorted(child.name for child in root.iterdir() if (child / CONFIG_FILE).is_file()))


def resolve_model_path(model: str | os.PathLike[str]) -> Path:
    """The directory that `model` names.

    A directory with a ``config.json`` wins over a shipped name, so a user can shadow ``tiny-chain`` by a
    local folder. ``models:/NAME@ALIAS`` and ``models:/NAME/VERSION`` name the masters of a registered model,
    looked up in the MLflow store of ``MLFLOW_TRACKING_URI`` (see docs/registry.md).

    Raises:
        ModelPathError: neither a model directory nor a shipped name; lists what was looked at.
        RegistryError, TrackingUnavailableError: no such registered model, or no registry.
    """
    scheme, colon, _ = str(model).partition(":")
    if colon and scheme in _SCHEMES:
        return _SCHEMES[scheme](str(model))
    path = Path(model).expanduser()
    if (path / CONFIG_FILE).is_file():
        return path.resolve()
    if str(model) in shipped_models():
        root = _assets_root()
        assert root is not None  # shipped_models() returned a name, so the package is there
        return root / str(model)
    if path.is_dir():
        found = f"{path.resolve()} is a directory without {CONFIG_FILE}"
    elif path.suffix == ".gguf" or path.is_file():
        found = f"{path.resolve()} is a file"
    else:
        found = f"no directory {path.absolute()}"
    raise ModelPathError(
        f"model={str(model)!r}: {found}. Give a directory in Hugging Face format ({CONFIG_FILE} + *.safetensors) or a "
        f"shipped model: {', '.join(shipped_models()) or '(none found)'}. {_download_of(str(model))}; GGUF files are "
        f"converted with examples/make_smollm2.py."
    )


def _download_of(model: str) -> str:
    """What to do for a model that may be one of the hub's, which nothing here contacts."""
    if not _HUB_NAME.fullmatch(model):
        return "Model hubs are not contacted"
    name = model.partition("/")[2]
    return (
        f"Model hubs are not contacted: if this is a name of Hugging Face's, download it first with "
        f"`hf download {model} --local-dir {name}`, then give model.path={name}"
    )
