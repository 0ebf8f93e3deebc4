"""RMSNorm of training whose result is read by fp8 linears only, and therefore exists as codes only."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.autograd.function import once_differentiable

from precision_kernels.dispatch import implementation
from precision_kernels.prepared import LinearFormats
from precision_kernels.reference.formats import SCALE_FLOOR, Quantised, ScaleFormat
from precision_kernels.weight_gradient import Remake


class Coded(NamedTuple):
    """A matrix x [M, K] that was never written in its own dtype.

    handle: x for autograd, [M, K] of x's dtype; every element is NaN, so that a reader would be noticed.
    codes: its 1x128 codes, for the forward. remake: its values or 128x1 codes, for the weight gradient.
    """

    handle: torch.Tensor
    codes: Quantised
    remake: Remake


def readable_as_codes(formats: LinearFormats) -> bool:
    """Whether a linear of these formats reads nothing of its input but what a `Coded` has."""
    return formats.forward == formats.wgrad == formats.saved == "fp8"


class _CodedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, weight, eps, operand, scale_format, scale_floor):
        scale = (scale_format, scale_floor)
        if residual is None:
            q, rstd = implementation("rms_norm_quantise", x.device.type)(x, operand, eps, *scale)
            summed = x
        else:
            fused = implementation("add_rms_norm_quantise", x.device.type)
            q, summed, rstd = fused(x, residual, operand, eps, *scale)
        ctx.mark_non_differentiable(q.codes, q.scales, rstd)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(summed, operand, rstd)
        handle = torch.full((), float("nan"), dtype=x.dtype, device=x.device).expand(x.shape)
        return handle, q.codes, q.scales, rstd, None if residual is None else summed

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, _codes, _scales, _rstd, dsummed):
        summed, operand, rstd = ctx.saved_tensors
        if dy is None:
            return dsummed, dsummed, None, None, None, None, None
        backward = implementation("rms_norm_backward", summed.device.type)
        dx, dweight = backward(dy, summed, operand, rstd, dsummed)
        return dx, dx if ctx.needs_input_grad[1] else None, dweight, None, None, None, None


def rms_norm_coded(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    operand: torch.Tensor,
    scale_format: ScaleFormat = "fp32",
    scale_floor: float = SCALE_FLOOR,
) -> tuple[Coded, torch.Tensor]:
    """(norm of x + residual as `Coded`, new residual); without a residual x is normalised and returned.

    x, residual [M, K]; ``weight`` gets the gradient, ``operand`` [K] is multiplied by, as in `rms_norm`. Forward bits
    and gradients are those of `add_rms_norm` or `rms_norm` and `quantise_activation`.
    """
    outputs = _CodedNorm.apply(x, residual, weight, eps, operand, scale_format, scale_floor)
    handle, codes, scales, rstd, summed = outputs
    summed = x if summed is None else summed

    def values(rows: torch.Tensor, weight: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return implementation("rms_norm", rows.device.type)(rows, weight, eps)[0]

    def columns(rows, weight, rstd, *scale) -> Quantised:
        return implementation("rms_norm_quantise_columns", rows.device.type)(rows, weight, rstd, eps, *scale)

    remake = Remake(values, (summed.detach(), operand.detach(), rstd), columns)
    return Coded(handle, Quantised(codes, scales, "1x128", scale_format), remake), summed


__all__ = ["Coded", "readable_as_codes", "rms_norm_coded"]
