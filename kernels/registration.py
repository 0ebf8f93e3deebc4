"""Registers the functions that launch kernels as operators of the library ``precision_kernels``.

torch.compile, CUDA graphs and profilers see operators, not what is in them. `torch.library.custom_op` would register
the same ones, and puts Python wrappers for autograd, devices and aliasing around every call: they cost 5 to 9 us of
host time, the dispatcher alone 1 to 3 (one core of an EPYC). What the wrappers would ensure, the functions keep:
results are new tensors, no views of arguments; gradients come from the autograd functions that call them, and
an operator that is to be differentiated itself raises (torch alone would warn, in the backward, and leave it out).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

_LIBRARY = torch.library.Library("precision_kernels", "FRAGMENT")
_DEVICES = ("CPU", "CUDA")
"""On a CPU, Triton kernels run under Triton's interpreter."""


def operator(name: str, mutates: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: the function becomes ``torch.ops.precision_kernels.<name>``, and is called by that.

    Its annotations are the schema; arguments are passed by position. ``mutates``: tensors that it writes to.
    """

    def register(function: Callable[..., Any]) -> Any:
        schema = torch.library.infer_schema(function, mutates_args=mutates)
        _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        chosen = getattr(torch.ops.precision_kernels, name).default
        names = [argument.name for argument in chosen._schema.arguments]
        kernel = _counting(function, [names.index(written) for written in mutates]) if mutates else function
        kernel = _without_gradient(chosen.name(), kernel)
        for device in _DEVICES:
            _LIBRARY.impl(name, kernel, device)
        return chosen

    return register


def fake(registered: torch._ops.OpOverload) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: the function gives shapes and dtypes of what an operator returns, for torch.compile.

    It names the operator's parameters and no types: those are the operator's. Raises TypeError for other names.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        given = list(inspect.signature(function).parameters)
        wanted = [argument.name for argument in registered._schema.arguments]
        if given != wanted:
            raise TypeError(f"fake of {registered.name()}: it takes {given}, the operator takes {wanted}")
        checked = _without_gradient(registered.name(), function)
        torch.library.register_fake(registered.name(), checked, lib=_LIBRARY)
        return function

    return register


def _without_gradient(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Raises RuntimeError where autograd would take the results for differentiable."""

    def call(*arguments: Any) -> Any:
        if torch.is_grad_enabled() and any(
            isinstance(given, torch.Tensor) and given.requires_grad for given in arguments
        ):
            raise RuntimeError(
                f"{name} has no gradient of its own, and an argument requires one: call the function "
                "of precision_kernels that differentiates it, or this one under torch.no_grad()"
            )
        return function(*arguments)

    return call


def _counting(function: Callable[..., Any], written: Sequence[int]) -> Callable[..., Any]:
    """Raises the version counters of what was written, by which autograd notices that a saved tensor changed."""

    def call(*arguments: Any) -> Any:
        result = function(*arguments)
        for index in written:
            if not arguments[index].is_inference():
                torch.autograd.graph.increment_version(arguments[index])
        return result

    return call


__all__ = ["fake", "operator"]
