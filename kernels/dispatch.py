"""The implementation that runs an operator on a device, and how it is named in an attestation.

`bindings` decides which library that is; here it is imported, at the first call or by `require`, and stays bound for
the life of the process. An operator whose library is missing raises an error that names the library, why it cannot be
imported and what to install. Running the definition on an accelerator has to be asked for (`bind_reference`).
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any, ParamSpec, TypeVar, cast, overload

from precision_kernels.bindings import LIBRARIES, library_of
from precision_kernels.declaration import DEFINITIONS, FP8_OPERATORS, IMPLEMENTATIONS, Implementation
from precision_kernels.sources import modules_hash
from precision_policies.errors import Violation

logger = logging.getLogger(__name__)
OPERATORS = DEFINITIONS.keys()
"""Names of all operators; the signature of each is that of the function of this name in `reference`."""

_P = ParamSpec("_P")
_R = TypeVar("_R")


class UnboundOperatorError(NotImplementedError):
    """Operators that cannot be bound on a device: each of ``violations`` names some (``value``), why, and a remedy."""

    def __init__(self, device_type: str, violations: Iterable[Violation]) -> None:
        self.device_type, self.violations = device_type, tuple(violations)
        listed = "; ".join(
            f"{', '.join(cast(tuple[str, ...], v.value))}: {v.problem} -> {v.remedy}" for v in self.violations
        )
        super().__init__(
            f"precision_kernels: no implementation on {device_type!r} of {listed}. The slow definitions run on any "
            f"device, if asked for: precision_kernels.bind_reference({device_type!r})"
        )

    def __reduce__(self) -> tuple[type[UnboundOperatorError], tuple[str, tuple[Violation, ...]]]:
        return type(self), (self.device_type, self.violations)


Observer = Callable[[str, Implementation, tuple[Any, ...], Any], None]
"""Called with (operator, its implementation, positional arguments, result) after a dispatched call."""

_observers: list[Observer] = []
_bound: dict[str, dict[str, Implementation]] = {}


@functools.cache
def _load(module: str) -> str | None:
    """Import the implementations of a library; None, or why that cannot be done. Asked once in a process."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        logger.warning("the operators of %s are not available: %s", module, error)
        return str(error)
    return None


def _bind_decided(operators: Iterable[str], device_type: str) -> list[Violation]:
    """Bind what `bindings` names for each operator that is not bound yet; what cannot be bound, by its cause."""
    bound = _bound.setdefault(device_type, {})
    missing: dict[tuple[str, str], list[str]] = {}
    for operator in operators:
        if operator in bound:
            continue
        if operator not in DEFINITIONS:
            raise ValueError(f"there is no operator {operator!r}; known: {sorted(DEFINITIONS)}")
        name = library_of(operator, device_type)
        failure = None if name is None else _load(LIBRARIES[name].module)
        if name is None:
            cause = f"no library serves devices of type {device_type!r}", "run on 'cpu' or 'cuda'"
            missing.setdefault(cause, []).append(operator)
        elif failure is not None:
            missing.setdefault((failure, LIBRARIES[name].remedy), []).append(operator)
        else:
            bound[operator] = IMPLEMENTATIONS[name, operator]
    return [
        Violation(f"operators on {device_type}", tuple(names), problem, remedy)
        for (problem, remedy), names in missing.items()
    ]


def table(device_type: str) -> MutableMapping[str, Implementation]:
    """{operator: what is bound} on a device; operators whose library is missing are left out (a warning names it)."""
    _bind_decided(DEFINITIONS, device_type)
    return _bound[device_type]


def require(device_type: str, formats: Collection[str]) -> None:
    """Bind every operator that a model with GEMMs in these formats ("fp8", "bf16", ...) needs on a device.

    Raises UnboundOperatorError naming all that cannot be bound, so that a run ends before its first step. Without "fp8"
    among the formats, operators on FP8 codes may be missing.
    """
    needed = [name for name in DEFINITIONS if "fp8" in formats or name not in FP8_OPERATORS]
    missing = _bind_decided(needed, device_type)
    if missing:
        raise UnboundOperatorError(device_type, missing)


@overload
def implementation(operator: str, device_type: str) -> Callable[..., Any]: ...
@overload
def implementation(operator: Callable[_P, _R], device_type: str) -> Callable[_P, _R]: ...
def implementation(operator: str | Callable[..., Any], device_type: str) -> Callable[..., Any]:
    """The function bound to an operator, given by its definition or by name, on ``device_type`` ("cpu", "cuda").

    Raises UnboundOperatorError if there is none.
    """
    name = operator if isinstance(operator, str) else operator.__name__
    try:
        chosen = _bound[device_type][name]
    except KeyError:
        missing = _bind_decided([name], device_type)
        if missing:
            raise UnboundOperatorError(device_type, missing) from None
        chosen = _bound[device_type][name]
    return _reporting(name, chosen) if _observers else chosen.function


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """While open, reports every dispatched call of this process to ``observer``, in order of completion.

    What is bound stays bound, and the attestation stays as it is. Calls that a CUDA graph replays or that
    torch.compile has traced are not dispatched, so they are not seen. Observers may read results, never write.
    """
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def _reporting(operator: str, chosen: Implementation) -> Callable[..., Any]:
    def call(*arguments: Any, **keywords: Any) -> Any:
        result = chosen.function(*arguments, **keywords)
        for observer in tuple(_observers):
            observer(operator, chosen, arguments, result)
        return result

    return call


def bind(operator: str, device_type: str, chosen: Implementation) -> None:
    """Bind an implementation by hand, before anything ran with another one: for tests and experiments."""
    if operator not in DEFINITIONS:
        raise ValueError(f"bind: unknown operator {operator!r}, known: {sorted(DEFINITIONS)}")
    _bound.setdefault(device_type, {})[operator] = chosen


def bind_library(library: str, device_type: str, operators: Iterable[str] | None = None) -> None:
    """Run ``operators`` (default: all that it offers) by a library of `bindings.LIBRARIES`, whatever the table says.

    For machines without DeepGEMM, for tests and experiments; `bound_implementations` then says so. Raises ValueError
    for a name that is not known or not offered, UnboundOperatorError if the library cannot be imported.
    """
    if library not in LIBRARIES:
        raise ValueError(f"bind_library: unknown library {library!r}, known: {sorted(LIBRARIES)}")
    failure = _load(LIBRARIES[library].module)
    if failure is not None:
        wanted = tuple(operators or [library])
        missing = Violation(f"operators on {device_type}", wanted, failure, LIBRARIES[library].remedy)
        raise UnboundOperatorError(device_type, [missing])
    offered = {name: found for (owner, name), found in IMPLEMENTATIONS.items() if owner == library}
    names = list(offered if operators is None else operators)
    unknown = [name for name in names if name not in offered]
    if unknown:
        raise ValueError(f"bind_library: {library!r} does not offer {unknown}; it offers {sorted(offered)}")
    for name in names:
        bind(name, device_type, offered[name])


def bind_reference(device_type: str) -> None:
    """Run every operator on ``device_type`` by its definition. `bound_implementations` then says so."""
    bind_library("reference", device_type)


def bound_implementations(device_type: str) -> dict[str, str]:
    """``{operator: "name@version#sourcehash"}`` for everything bound on a device: goes into the attestation.

    The entry "composition" names the code that puts operators together (`autograd`).
    """
    identities = {operator: chosen.identity for operator, chosen in table(device_type).items()}
    modules = ("linear", "low_rank", "feed_forward", "heads", "coded", "operators", "distributions")
    composition = modules_hash(*(f"precision_kernels.autograd.{module}" for module in modules))
    identities["composition"] = f"precision_kernels@{version('rllib-llm')}#{composition}"
    return dict(sorted(identities.items()))
