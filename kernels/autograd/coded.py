"""RMSNorm of training whose result is read by fp8 linears only, and therefore exists as codes only."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from precision_kernels import reference
from precision_kernels.autograd.prepared import LinearFormats
from precision_kernels.autograd.weight_gradient import Recompute
from precision_kernels.dispatch import implementation
from precision_kernels.reference.formats import SCALE_FLOOR, Quantised, ScaleFormat


class Coded(NamedTuple):
    """A matrix x [M, K] that was never written in its own dtype.

    handle: x for autograd, [M, K] of x's dtype; every element is NaN, so that a reader would be noticed.
    codes: its 1x128 codes, for the forward. recompute: its values or 128x1 codes, for the weight gradient.
    """

    handle: torch.Tensor
    codes: Quantised
    recompute: Recompute


def readable_as_codes(formats: LinearFormats) -> bool:
    """Whether a linear of these formats reads nothing of its input but what a `Coded` has."""
    return formats.forward == formats.wgrad == formats.saved == "fp8"


class _CodedNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        operand: torch.Tensor,
        scale_format: ScaleFormat,
        scale_floor: float,
    ) -> tuple[torch.Tensor | None, ...]:
        scale = (scale_format, scale_floor)
        if residual is None:
            q, rstd = implementation(reference.rms_norm_quantise, x.device.type)(x, operand, eps, *scale)
            summed = x
        else:
            fused = implementation(reference.add_rms_norm_quantise, x.device.type)
            q, summed, rstd = fused(x, residual, operand, eps, *scale)
        ctx.mark_non_differentiable(q.codes, q.scales, rstd)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(summed, operand, rstd)
        handle = torch.full((), float("nan"), dtype=x.dtype, device=x.device).expand(x.shape)
        return handle, q.codes, q.scales, rstd, None if residual is None else summed

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        dy: torch.Tensor | None,
        _codes: None,
        _scales: None,
        _rstd: None,
        dsummed: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, ...]:
        summed, operand, rstd = ctx.saved_tensors
        if dy is None:
            return dsummed, dsummed, None, None, None, None, None
        backward = implementation(reference.rms_norm_backward, summed.device.type)
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
        return implementation(reference.rms_norm, rows.device.type)(rows, weight, eps)[0]

    def columns(
        rows: torch.Tensor,
        weight: torch.Tensor,
        rstd: torch.Tensor,
        scale_format: ScaleFormat,
        scale_floor: float,
    ) -> Quantised:
        again = implementation(reference.rms_norm_quantise_columns, rows.device.type)
        return again(rows, weight, rstd, eps, scale_format, scale_floor)

    recompute = Recompute(values, (summed.detach(), operand.detach(), rstd), columns)
    return Coded(handle, Quantised(codes, scales, "1x128", scale_format), recompute), summed


__all__ = ["Coded", "readable_as_codes", "rms_norm_coded"]
