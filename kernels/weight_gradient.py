"""What a linear keeps for its weight gradient, how the gradient is made of it, and where it goes.

It goes to autograd as a new fp32 matrix, or is added to the ``.grad`` of an earlier micro-batch by the GEMM itself
(`accumulate_in_place`): autograd would read both, and write the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch.autograd.graph import get_gradient_edge
from torch.utils.weak import WeakTensorKeyDictionary

from precision_kernels.dispatch import implementation
from precision_kernels.prepared import DTYPES, LinearFormats, dequantise, rows_of_one
from precision_kernels.reference.formats import Quantised

_marked = WeakTensorKeyDictionary()
"""Leaves of `accumulate_in_place`. An attribute of the tensor would travel with its copies and pickles."""


class Remake(NamedTuple):
    """How the input of a linear can be made again from tensors that are kept anyway: then its codes need not be.

    ``function(*tensors)`` gives the input with the same bits; no gradient flows through it.
    ``columns(*tensors, scale_format, scale_floor)``, if given, its 128x1 codes, without writing it.
    """

    function: Callable[..., torch.Tensor]
    tensors: tuple[torch.Tensor, ...]
    columns: Callable[..., Quantised] | None = None

    @classmethod
    def kept(cls, x: torch.Tensor) -> Remake:
        """The input itself is kept, by the operator that made it."""
        return cls(lambda rows: rows, (x.detach(),))

    def codes(self, tensors: Sequence[torch.Tensor], formats: LinearFormats) -> Quantised:
        """The 128x1 codes of the input, from the saved ``tensors``."""
        scale = (formats.scale_format, formats.scale_floor)
        if self.columns is not None:
            return self.columns(*tensors, *scale)
        made = self.function(*tensors)
        quantise = implementation("quantise_columns", made.device.type)
        return quantise(made.reshape(-1, made.shape[-1]), *scale)


def kept(
    x: torch.Tensor, formats: LinearFormats, quantised: Quantised | None, columns: Quantised | None
) -> tuple[str, tuple[torch.Tensor, ...]]:
    """What the wgrad will need of x [M, K], in the format of the policy: (kind, tensors).

    ``quantised``, ``columns``: its 1x128 and 128x1 codes where they are at hand.
    """
    if formats.saved != "fp8":
        return "values", (x.to(DTYPES[formats.saved]),)
    scale = (formats.scale_format, formats.scale_floor)
    if formats.wgrad == "fp8":
        codes = columns or implementation("quantise_columns", x.device.type)(x, *scale)
    else:
        codes = quantised or implementation("quantise_activation", x.device.type)(x, *scale)
    return codes.kind, (codes.codes, codes.scales)


def weight_gradient(
    kind: str, tensors: tuple[torch.Tensor, ...], formats: LinearFormats, remake: Remake | None = None
):
    """The function (dy, its 128x1 codes if at hand, target) -> dW fp32 [N, K] for the input that was `kept`.

    ``remake``: how it is made of ``tensors``, if it was not kept itself (fp8 only).
    With a target dW is added to it, and autograd gets None.
    """
    device = tensors[0].device.type
    scale = (formats.scale_format, formats.scale_floor)
    if formats.wgrad == "fp8":
        quantise = implementation("quantise_columns", device)
        if remake is not None:
            x = remake.codes(tensors, formats)
        elif kind == "128x1":
            x = Quantised(tensors[0], tensors[1], "128x1", formats.scale_format)
        else:
            x = quantise(tensors[0], *scale)

        def multiply(dy: torch.Tensor, codes: Quantised | None, target: torch.Tensor | None) -> torch.Tensor:
            return implementation("wgrad_fp8_matmul", device)(codes or quantise(dy, *scale), x, target)

    else:
        dtype = DTYPES[formats.wgrad]
        values = (
            tensors[0]
            if kind == "values"
            else dequantise(Quantised(tensors[0], tensors[1], "1x128", formats.scale_format), dtype)
        )

        def multiply(dy: torch.Tensor, codes: Quantised | None, target: torch.Tensor | None) -> torch.Tensor:
            return implementation("wgrad_matmul", device)(dy.to(dtype), values.to(dtype), target)

    def gradient(
        dy: torch.Tensor, codes: Quantised | None, target: torch.Tensor | None
    ) -> torch.Tensor | None:
        product = multiply(dy, codes, target)
        return product if target is None else None

    return gradient


def accumulate_in_place(parameters: Iterable[torch.Tensor]) -> None:
    """Let a linear's weight gradient be added to these leaves' ``.grad`` by its GEMM, where that is there and fp32.

    The first backward pass after ``.grad`` became None goes through autograd. From the second on autograd sees no
    gradient of such a parameter, so the caller promises to have no `DistributedDataParallel` or other listener to its
    accumulation. Autograd's road stays for a parameter with hooks, in `torch.autograd.grad` and in ``backward`` for
    other inputs, for a ``.grad`` that is not fp32, not contiguous or part of a graph (create_graph), and for one of
    several that are one GEMM (q, k, v) whose ``.grad`` do not lie below each other. Copies of a parameter, pickled
    ones too, are not marked.
    Raises ValueError for a tensor that is no leaf that requires grad.
    """
    for parameter in parameters:
        if not (parameter.is_leaf and parameter.requires_grad):
            raise ValueError(
                "accumulate_in_place: only leaves that require grad have a .grad to add to, got a tensor of shape "
                f"{tuple(parameter.shape)} with is_leaf={parameter.is_leaf}, requires_grad={parameter.requires_grad}"
            )
        _marked[parameter] = True


def marked(weight: torch.Tensor | None) -> torch.Tensor | None:
    """The weight if `accumulate_in_place` was called for it."""
    return weight if weight is not None and weight in _marked else None


def main_gradient(weights: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """The fp32 matrix [N1 + N2 + ..., K] that a backward pass adds to, rows of all ``.grad``; None: autograd's road.

    To be called in that pass.
    """
    grads = []
    for weight in weights:
        if weight is None or weight._backward_hooks or weight._post_accumulate_grad_hooks:
            return None
        grad = weight.grad
        if grad is None or grad.dtype != torch.float32 or grad.shape != weight.shape or grad.requires_grad:
            return None
        if not _accumulates(weight):
            return None
        grads.append(grad)
    return rows_of_one(grads)


def _accumulates(leaf: torch.Tensor) -> bool:
    """Whether the running backward pass ends in ``leaf.grad``: not so in `torch.autograd.grad`, or for other inputs."""
    try:
        return torch._C._will_engine_execute_node(get_gradient_edge(leaf).node)
    except RuntimeError as error:  # torch's answer for a leaf of which autograd.grad was asked
        if "autograd.grad" not in str(error):
            raise
        return False
