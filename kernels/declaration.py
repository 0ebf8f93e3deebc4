"""What an operator is: a function of `reference`, which declares its name and signature; and what implements it.

    @define                                     @implements("triton", VERSION)
    def silu_mul(gate, up): ...  (reference)    def silu_mul(gate, up): ...  (an implementation's own file)

An implementation with other parameters than the definition is refused where it is written, not where it is called.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from precision_kernels.sources import source_hash


@dataclass(frozen=True)
class Implementation:
    """One implementation: ``name`` ("reference.rms_norm"), ``version`` ("torch-2.13.0") and the callable."""

    name: str
    version: str
    function: Callable[..., Any]

    @functools.cached_property
    def identity(self) -> str:
        """``name@version#hash``, the hash over the sources of this package that the function's module imports."""
        return f"{self.name}@{self.version}#{source_hash(self.function)}"


_Function = TypeVar("_Function", bound=Callable[..., Any])

DEFINITIONS: dict[str, Callable[..., Any]] = {}
"""Every dispatched operator by name: the function of `reference` that defines it. `define` fills it."""
FP8_OPERATORS: set[str] = set()
"""Those that only fp8 formats need."""
IMPLEMENTATIONS: dict[tuple[str, str], Implementation] = {}
"""By (library, operator); `define` and `implements` fill it when an implementation's file is imported."""


def define(function: _Function) -> _Function:
    """Decorator of a definition in `reference`: declares the operator of the function's name and signature."""
    name = function.__name__
    if name in DEFINITIONS:
        raise ValueError(f"define: operator {name!r} is defined in {DEFINITIONS[name].__module__} already")
    DEFINITIONS[name] = function
    return implements("reference", f"torch-{torch.__version__}")(function)


def define_fp8(function: _Function) -> _Function:
    """`define` for an operator that makes or reads FP8 codes: a policy without fp8 does not need it."""
    FP8_OPERATORS.add(function.__name__)
    return define(function)


def implements(library: str, version: str) -> Callable[[_Function], _Function]:
    """Decorator: the function is what ``library`` offers for the operator of its name.

    ``version``: what of the installed software decides its bits. Raises ValueError for an unknown operator or one that
    the library offers already, TypeError for parameters that are not those of the definition.
    """

    def register(function: _Function) -> _Function:
        name = function.__name__
        known = DEFINITIONS.get(name)
        if known is None:
            raise ValueError(
                f"{function.__module__}: there is no operator {name!r}; define it in reference, or name one of "
                f"{sorted(DEFINITIONS)}"
            )
        if (library, name) in IMPLEMENTATIONS:
            raise ValueError(f"{function.__module__}: {library!r} offers operator {name!r} already")
        given, wanted = _parameters(function), _parameters(known)
        if given != wanted:
            raise TypeError(
                f"{function.__module__}.{name} takes {given}, its definition {known.__module__}.{name} takes {wanted}"
            )
        IMPLEMENTATIONS[library, name] = Implementation(f"{library}.{name}", version, function)
        return function

    return register


def _parameters(function: Callable[..., Any]) -> list[tuple[str, str, object]]:
    """(name, kind, default) of each: an implementation may annotate narrower types."""
    return [(p.name, p.kind.description, p.default) for p in inspect.signature(function).parameters.values()]


__all__ = [
    "DEFINITIONS",
    "FP8_OPERATORS",
    "IMPLEMENTATIONS",
    "Implementation",
    "define",
    "define_fp8",
    "implements",
]
