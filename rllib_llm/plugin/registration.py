"""Makes `tune.run("GRPO-LLM")` and `models:/NAME@ALIAS` work after `import rllib_llm`, without importing Ray or MLflow.

Ray has no entry points for plugins. When Tune meets an unknown name it asks RLlib to register everything in
`ray.rllib.algorithms.registry.ALGORITHMS`, a dict of functions that import an algorithm; ours is one more
entry. Importing that module costs 4 s (all of RLlib), so if nobody has imported it yet, the entry is added
by an import hook right after the module has been executed.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from rllib_llm.models.paths import register_scheme

TRAINABLE_NAME = "GRPO-LLM"
_REGISTRY = "ray.rllib.algorithms.registry"


def announce() -> None:
    """Adds our entry now or when RLlib is imported, and the registry's scheme of model strings. Idempotent."""
    register_scheme("models", _registered_model)
    if _REGISTRY in sys.modules:
        _add_entry(sys.modules[_REGISTRY])
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


def _add_entry(registry: ModuleType) -> None:
    registry.ALGORITHMS.setdefault(TRAINABLE_NAME, _import_grpo)


def _import_grpo() -> tuple[type, Any]:
    """RLlib's convention: (algorithm class, default config)."""
    from rllib_llm.algorithm import GRPO

    return GRPO, GRPO.get_default_config()


def _registered_model(model: str) -> Path:
    from rllib_llm.registry.resolve import local_masters  # imports MLflow

    return local_masters(model)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Lets the other finders find RLlib's registry and adds our entry once it is loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _REGISTRY:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader):
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _add_entry(module)
