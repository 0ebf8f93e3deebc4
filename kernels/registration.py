"""Registers the functions that launch kernels as operators of the library ``precision_kernels``.

torch.compile, CUDA graphs and profilers see operators, not what is in them. `torch.library.custom_op` would register
the same ones, and puts Python wrappers for autograd, devices and aliasing around every call: they cost 5 to 9 us of
host time, the dispatcher alone 1 to 3 (one core of an EPYC). What the wrappers would ensure, the functions keep:
results are new tensors, no views of arguments; gradients come from the autograd functions that call them (a gradient
that reaches an operator itself makes torch warn).
"""

from __future__ import annotations

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
        for device in _DEVICES:
            _LIBRARY.impl(name, kernel, device)
        return chosen

    return register


def fake(registered: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: the function gives shapes and dtypes of what an operator returns, for torch.compile."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        torch.library.register_fake(registered.name(), function, lib=_LIBRARY)
        return function

    return register


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
