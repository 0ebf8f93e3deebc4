"""What a linear keeps for its weight gradient, how the gradient is made of it, and where it goes.

It goes to autograd as a new fp32 matrix, or is added to the ``.grad`` of an earlier micro-batch by the GEMM itself
(`accumulate_in_place`): autograd would read both, and write the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

import torch
from torch.autograd.graph import get_gradient_edge
from torch.utils.weak import WeakTensorKeyDictionary

from precision_kernels import reference
from precision_kernels.autograd.prepared import DTYPES, Codes, LinearFormats, dequantise, rows_of_one
from precision_kernels.dispatch import implementation
from precision_kernels.reference.formats import Quantised

_accumulating = WeakTensorKeyDictionary()
"""Leaves of `accumulate_in_place`. An attribute of the tensor would travel with its copies and pickles."""


class Recompute(NamedTuple):
    """How the input of a linear can be made again from tensors that are kept anyway: then its codes need not be.

    ``function(*tensors)`` gives the input with the same bits; no gradient flows through it.
    ``columns(*tensors, scale_format, scale_floor)``, if given, its 128x1 codes, without writing it.
    """

    function: Callable[..., torch.Tensor]
    tensors: tuple[torch.Tensor, ...]
    columns: Callable[..., Quantised] | None = None

    @classmethod
    def of_saved(cls, x: torch.Tensor) -> Recompute:
        """The input itself, which the operator that made it saves."""
        return cls(lambda rows: rows, (x.detach(),))

    def codes(self, tensors: Sequence[torch.Tensor], formats: LinearFormats) -> Quantised:
        """The 128x1 codes of the input, from the saved ``tensors``."""
        if self.columns is not None:
            return self.columns(*tensors, *formats.scale)
        made = self.function(*tensors)
        quantise = implementation(reference.quantise_columns, made.device.type)
        return quantise(made.reshape(-1, made.shape[-1]), *formats.scale)


class SavedInput(NamedTuple):
    """What a linear keeps of its input x [M, K] between forward and backward, without the tensors themselves.

    kind: "128x1" or "1x128" if codes and scales of x in such blocks are saved, "values" if x itself is.
    recompute: how x is made of the saved tensors, if it is not among them (fp8 wgrad only).
    """

    kind: Literal["128x1", "1x128", "128x128", "values"]
    recompute: Recompute | None = None


def save_input(
    x: torch.Tensor, formats: LinearFormats, codes: Codes, recompute: Recompute | None
) -> tuple[SavedInput, tuple[torch.Tensor, ...]]:
    """What the wgrad will need of x [M, K], in the format of the policy, and the tensors to save.

    ``codes``: those of x that are at hand.
    """
    if recompute is not None and formats.saved == formats.wgrad == "fp8":
        return SavedInput("values", recompute._replace(tensors=())), recompute.tensors
    if formats.saved != "fp8":
        return SavedInput("values"), (x.to(DTYPES[formats.saved]),)
    device = x.device.type
    if formats.wgrad == "fp8":
        saved = codes.columns or implementation(reference.quantise_columns, device)(x, *formats.scale)
    else:
        saved = codes.rows or implementation(reference.quantise_activation, device)(x, *formats.scale)
    return SavedInput(saved.kind), (saved.codes, saved.scales)


class WeightGradient:
    """dW = dy^T x of one input x, which was saved by `save_input`: as its GEMMs read it, for every linear of x."""

    def __init__(self, saved: SavedInput, tensors: tuple[torch.Tensor, ...], formats: LinearFormats) -> None:
        self.formats = formats
        self.codes: Quantised | None = None
        self.values: torch.Tensor | None = None
        if formats.wgrad == "fp8":
            self.codes = _input_codes(saved, tensors, formats)
        elif saved.kind == "values":
            self.values = tensors[0]
        else:
            x = Quantised(tensors[0], tensors[1], "1x128", formats.scale_format)
            self.values = dequantise(x, DTYPES[formats.wgrad])

    def __call__(
        self, dy: torch.Tensor, dy_columns: Quantised | None, target: torch.Tensor | None
    ) -> torch.Tensor | None:
        """dW fp32 [N, K] of dy [M, N]; None after adding it to ``target``. dy_columns: its 128x1 codes, if at hand."""
        device = dy.device.type
        if self.codes is not None:
            if dy_columns is None:
                dy_columns = implementation(reference.quantise_columns, device)(dy, *self.formats.scale)
            # wgrad, fp8: dW [N, K] = dy [M, N]^T . x [M, K], both 128x1 (blocks of 128 tokens), fp32 out.
            product = implementation(reference.wgrad_fp8_matmul, device)(dy_columns, self.codes, target)
        else:
            assert self.values is not None  # one of the two is there
            dtype = DTYPES[self.formats.wgrad]
            # wgrad, library GEMM: dW [N, K] = dy [M, N]^T . x [M, K], both in the wgrad's dtype, fp32 out.
            product = implementation(reference.wgrad_matmul, device)(
                dy.to(dtype), self.values.to(dtype), target
            )
        return product if target is None else None


def _input_codes(saved: SavedInput, tensors: tuple[torch.Tensor, ...], formats: LinearFormats) -> Quantised:
    """The 128x1 codes of the input: kept, of the input made again, or made of the input that was kept."""
    if saved.recompute is not None:
        return saved.recompute.codes(tensors, formats)
    if saved.kind == "128x1":
        return Quantised(tensors[0], tensors[1], "128x1", formats.scale_format)
    return implementation(reference.quantise_columns, tensors[0].device.type)(tensors[0], *formats.scale)


def accumulate_in_place(parameters: Iterable[torch.Tensor]) -> None:
    """Let a linear's weight gradient be added to these leaves' ``.grad`` by its GEMM, where that is there and fp32.

    The first backward pass after ``.grad`` became None goes through autograd. From the second on autograd sees no
    gradient of such a parameter, so the caller promises to have no `DistributedDataParallel` or other listener to its
    accumulation. Autograd accumulates as ever for a parameter with hooks, in `torch.autograd.grad` and in ``backward``
    for other inputs, for a ``.grad`` that is not fp32, not contiguous or part of a graph (create_graph), and for one of
    several that are one GEMM (q, k, v) whose ``.grad`` do not lie below each other. Copies of a parameter, pickled
    ones too, are not affected.
    Raises ValueError for a tensor that is no leaf that requires grad.
    """
    for parameter in parameters:
        if not (parameter.is_leaf and parameter.requires_grad):
            raise ValueError(
                "accumulate_in_place: only leaves that require grad have a .grad to add to, got a tensor of shape "
                f"{tuple(parameter.shape)} with is_leaf={parameter.is_leaf}, requires_grad={parameter.requires_grad}"
            )
        _accumulating[parameter] = True


def if_accumulating(weight: torch.Tensor | None) -> torch.Tensor | None:
    """The weight, if `accumulate_in_place` was called for it."""
    return weight if weight is not None and weight in _accumulating else None


def main_gradient(weights: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """The fp32 matrix [N1 + N2 + ..., K] that the running backward pass adds to, the rows of all ``.grad``.

    None if autograd is to accumulate. Takes the weights that `if_accumulating` gave in the forward.
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
