"""The hash of the sources that decide an implementation's numbers: part of its name in an attestation."""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_PACKAGE = __name__.split(".")[0]
_UNHASHED = tuple(f"{_PACKAGE}.{name}" for name in ("bindings", "declaration", "dispatch", "sources"))
"""These modules choose and name implementations, and compute nothing."""


def source_hash(function: Callable[..., Any]) -> str:
    """First 16 hex digits of the sha256 over the function's module and all of precision_kernels that it imports."""
    return modules_hash(inspect.unwrap(function).__module__)


@functools.cache
def modules_hash(*modules: str) -> str:
    """`source_hash` of several modules together, given by their full names."""
    sources = {name: source for module in modules for name, source in closure(module).items()}
    digest = hashlib.sha256()
    for name in sorted(sources):
        digest.update(f"{name}\0".encode() + sources[name] + b"\0")
    return digest.hexdigest()[:16]


def closure(module: str) -> dict[str, bytes]:
    """Sources of ``module`` and of the modules of precision_kernels that it imports, transitively, by full name."""
    pending, sources = [module], dict[str, bytes]()
    while pending:
        name = pending.pop()
        if name in sources or name in _UNHASHED:
            continue
        spec = find_spec(name)
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            continue
        sources[name] = Path(spec.origin).read_bytes()
        pending += _imports(sources[name])
    return sources


def _imports(source: bytes) -> list[str]:
    """Modules of precision_kernels that a source names in imports, whether at its top or in a function."""
    names: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.append(node.module)
            names += [
                f"{node.module}.{alias.name}" for alias in node.names if _is_module(node.module, alias.name)
            ]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return [name for name in names if name.split(".")[0] == _PACKAGE and name != _PACKAGE]


def _is_module(package: str, name: str) -> bool:
    if package.split(".")[0] != _PACKAGE:
        return False
    try:
        return find_spec(f"{package}.{name}") is not None
    except ModuleNotFoundError:
        return False


__all__ = ["closure", "modules_hash", "source_hash"]
