"""Which implementation runs an operator on a device, and how it is named in an attestation.

A provider is a module with ``implementations() -> dict[str, Implementation]``. Providers of a device are
asked in the order of `PROVIDERS`; the first that offers an operator is bound, for the life of the process.
A provider that cannot be loaded is named in a warning, with the reason: a later one may serve its operators.
An operator that no provider offers raises on its first call, with all these reasons. Running the reference
on an accelerator is possible, but has to be asked for (`bind_reference`).
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

PROVIDERS: dict[str, tuple[str, ...]] = {
    "cpu": ("precision_kernels.reference.provider",),
    "cuda": (
        "precision_kernels.cublaslt",
        "precision_kernels.deepgemm",
        "precision_kernels.flash_attention",
        "precision_kernels.triton",
    ),
}

OPERATORS: tuple[str, ...] = (
    "quantise_activation",
    "quantise_columns",
    "quantise_both",
    "quantise_weight",
    "dequantise",
    "block_fp8_matmul",
    "dgrad_fp8_matmul",
    "wgrad_fp8_matmul",
    "invariant_matmul",
    "pack_weight",
    "dgrad_matmul",
    "wgrad_matmul",
    "rms_norm",
    "add_rms_norm",
    "rms_norm_backward",
    "rms_norm_quantise",
    "add_rms_norm_quantise",
    "rms_norm_quantise_columns",
    "silu_mul",
    "silu_mul_backward",
    "silu_mul_quantise",
    "silu_mul_quantise_both",
    "silu_mul_saving",
    "silu_mul_backward_saved",
    "silu_mul_backward_quantise_both",
    "rotary_cos_sin",
    "rotary",
    "rotary_backward",
    "rotary_backward_joint",
    "norm_rotary",
    "allocate_kv_cache",
    "attention",
    "attention_backward",
    "token_logprobs",
    "token_logprobs_backward",
    "log_softmax",
    "log_softmax_backward",
    "tensor_digest",
)
"""Every dispatched operator; signatures are those of the functions of the same name in `reference`."""


class UnboundOperatorError(NotImplementedError):
    """No implementation of an operator is bound on a device."""


@dataclass(frozen=True)
class Implementation:
    """One implementation: ``name`` ("reference.rms_norm"), ``version`` ("torch-2.13.0") and the callable."""

    name: str
    version: str
    function: Callable[..., Any]

    @functools.cached_property
    def identity(self) -> str:
        """``name@version#hash``, the hash over the sources of this package that the function's module
        imports.
        """
        return f"{self.name}@{self.version}#{source_hash(self.function)}"


Observer = Callable[[str, Implementation, tuple[Any, ...], Any], None]
"""Called with (operator, its implementation, positional arguments, result) after a dispatched call."""

_observers: list[Observer] = []
_bound: dict[str, dict[str, Implementation]] = {}
_failures: dict[str, list[str]] = {}


def source_hash(function: Callable[..., Any]) -> str:
    """First 16 hex digits of the sha256 of the function's module and everything of precision_kernels that
    it imports.
    """
    return _modules_hash(inspect.unwrap(function).__module__)


@functools.cache
def _modules_hash(*modules: str) -> str:
    sources = {name: source for module in modules for name, source in _closure(module).items()}
    digest = hashlib.sha256()
    for name in sorted(sources):
        digest.update(f"{name}\0".encode() + sources[name] + b"\0")
    return digest.hexdigest()[:16]


def _closure(module: str) -> dict[str, bytes]:
    """Sources of ``module`` and of the precision_kernels modules it imports, transitively (dispatch itself
    excluded).
    """
    pending, sources = [module], {}
    while pending:
        name = pending.pop()
        if name in sources or name == __name__:
            continue
        spec = find_spec(name)
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            continue
        sources[name] = Path(spec.origin).read_bytes()
        pending += _imports(sources[name])
    return sources


def _imports(source: bytes) -> list[str]:
    names: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.append(node.module)
            names += [
                f"{node.module}.{alias.name}" for alias in node.names if _is_module(node.module, alias.name)
            ]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return [
        name for name in names if name.split(".")[0] == "precision_kernels" and name != "precision_kernels"
    ]


def _is_module(package: str, name: str) -> bool:
    if package.split(".")[0] != "precision_kernels":
        return False
    try:
        return find_spec(f"{package}.{name}") is not None
    except ModuleNotFoundError:
        return False


def _table(device_type: str) -> dict[str, Implementation]:
    if device_type not in _bound:
        table: dict[str, Implementation] = {}
        failures = (
            [] if device_type in PROVIDERS else [f"there is no provider for device type {device_type!r}"]
        )
        for provider in PROVIDERS.get(device_type, ()):
            try:
                offered = importlib.import_module(provider).implementations()
            except ImportError as error:
                failures.append(f"{provider}: {error}")
                logger.warning("on %s this provider of operators is not used: %s", device_type, failures[-1])
                continue
            unknown = sorted(set(offered) - set(OPERATORS))
            if unknown:
                raise ValueError(
                    f"{provider}.implementations() offers unknown operators {unknown}; known: {OPERATORS}"
                )
            for operator, implementation in offered.items():
                table.setdefault(operator, implementation)
        _bound[device_type], _failures[device_type] = table, failures
    return _bound[device_type]


def implementation(operator: str, device_type: str) -> Callable[..., Any]:
    """The function bound to ``operator`` on ``device_type`` ("cpu", "cuda"); UnboundOperatorError if there
    is none.
    """
    try:
        chosen = _table(device_type)[operator]
        return _reporting(operator, chosen) if _observers else chosen.function
    except KeyError:
        reasons = "; ".join(_failures[device_type]) or "its providers do not offer it"
        raise UnboundOperatorError(
            f"precision_kernels: operator {operator!r} has no implementation on {device_type!r} ({reasons}). "
            "Install what is missing, or ask for the slow definition with "
            f"precision_kernels.bind_reference({device_type!r})."
        ) from None


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
    if operator not in OPERATORS:
        raise ValueError(f"bind: unknown operator {operator!r}, known: {OPERATORS}")
    _table(device_type)[operator] = chosen


def bind_reference(device_type: str) -> None:
    """Run every operator on ``device_type`` by its definition. `bound_implementations` then says so."""
    from precision_kernels.reference import provider

    for operator, chosen in provider.implementations().items():
        bind(operator, device_type, chosen)


def bound_implementations(device_type: str) -> dict[str, str]:
    """``{operator: "name@version#sourcehash"}`` for everything bound on a device: goes into the attestation.

    The entry "composition" names the code that puts operators together (`linear`, `feed_forward`, `heads`,
    `coded`, `operators`, `distributions`).
    """
    identities = {operator: chosen.identity for operator, chosen in _table(device_type).items()}
    modules = ("linear", "feed_forward", "heads", "coded", "operators", "distributions")
    composition = _modules_hash(*(f"precision_kernels.{module}" for module in modules))
    identities["composition"] = f"precision_kernels@{version('rllib-llm')}#{composition}"
    return dict(sorted(identities.items()))
