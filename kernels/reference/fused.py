"""Two operators in one call, a producer and its quantiser or a norm and its rotation. By definition the composition
of the two, bit for bit; a kernel may fuse them.
"""

from __future__ import annotations

import torch

from precision_kernels.declaration import define, define_fp8
from precision_kernels.reference.activation import silu_mul, silu_mul_backward
from precision_kernels.reference.formats import SCALE_FLOOR, Quantised, ScaleFormat
from precision_kernels.reference.norm import add_rms_norm, rms_norm
from precision_kernels.reference.quantise import quantise_activation, quantise_both, quantise_columns
from precision_kernels.reference.rotary import rotary


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


@define_fp8
def rms_norm_quantise(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    scale_format: ScaleFormat = "fp32",
    scale_floor: float = SCALE_FLOOR,
) -> tuple[Quantised, torch.Tensor]:
    """`rms_norm` then `quantise_activation`: x [M, D] -> (1x128 codes of y, rstd fp32 [M, 1])."""
    y, rstd = rms_norm(_rows(x), weight, eps)
    return quantise_activation(y, scale_format, scale_floor), rstd


@define_fp8
def add_rms_norm_quantise(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    scale_format: ScaleFormat = "fp32",
    scale_floor: float = SCALE_FLOOR,
) -> tuple[Quantised, torch.Tensor, torch.Tensor]:
    """`add_rms_norm` then `quantise_activation`: (1x128 codes of y, new residual [M, D], rstd fp32 [M, 1])."""
    y, summed, rstd = add_rms_norm(_rows(x), _rows(residual), weight, eps)
    return quantise_activation(y, scale_format, scale_floor), summed, rstd


@define_fp8
def rms_norm_quantise_columns(
    x: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    eps: float,
    scale_format: ScaleFormat = "fp32",
    scale_floor: float = SCALE_FLOOR,
) -> Quantised:
    """`rms_norm` then `quantise_columns`: x [M, D] -> 128x1 codes of y. ``rstd``: that of the norm, if at hand, so
    that a kernel need not sum the rows again.
    """
    return quantise_columns(_rows(rms_norm(x, weight, eps)[0]), scale_format, scale_floor)


@define
def norm_rotary(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rms_norm` of each head of q [T, H, D] and k [T, Hkv, D], weights [D], then `rotary`: both like their input."""
    q, k = rotary(rms_norm(q, q_weight, eps)[0], rms_norm(k, k_weight, eps)[0], positions, cos_sin)
    return q, k


@define_fp8
def silu_mul_quantise(
    gate: torch.Tensor, up: torch.Tensor, scale_format: ScaleFormat = "fp32", scale_floor: float = SCALE_FLOOR
) -> Quantised:
    """`silu_mul` then `quantise_activation`: gate, up [M, F] -> 1x128 codes."""
    return quantise_activation(_rows(silu_mul(gate, up)), scale_format, scale_floor)


@define_fp8
def silu_mul_saving(
    gate: torch.Tensor, up: torch.Tensor, scale_format: ScaleFormat = "fp32", scale_floor: float = SCALE_FLOOR
) -> tuple[torch.Tensor, Quantised, Quantised]:
    """(`silu_mul` like gate, `quantise_activation` of gate, of up): what training keeps under `activation.saved: fp8`.

    gate, up [..., F]; the codes are matrices [M, F] of their rows.
    """
    saved = quantise_activation(_rows(gate), scale_format, scale_floor)
    return silu_mul(gate, up), saved, quantise_activation(_rows(up), scale_format, scale_floor)


@define_fp8
def silu_mul_backward_saved(
    dy: torch.Tensor, gate: Quantised, up: Quantised
) -> tuple[torch.Tensor, torch.Tensor]:
    """`silu_mul_backward` at the dequantised gate and up, rounded to dy's dtype; dy [..., F] of as many rows."""
    return silu_mul_backward(
        dy, gate.dequantise(dy.dtype).view(dy.shape), up.dequantise(dy.dtype).view(dy.shape)
    )


@define_fp8
def silu_mul_quantise_both(
    gate: torch.Tensor, up: torch.Tensor, scale_format: ScaleFormat = "fp32", scale_floor: float = SCALE_FLOOR
) -> tuple[Quantised, Quantised]:
    """`silu_mul` then `quantise_both`: gate, up [M, F] -> (1x128 codes, 128x1 codes) of their product."""
    return quantise_both(_rows(silu_mul(gate, up)), scale_format, scale_floor)


@define_fp8
def silu_mul_backward_quantise_both(
    dy: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    scale_format: ScaleFormat = "fp32",
    scale_floor: float = SCALE_FLOOR,
) -> tuple[Quantised, Quantised]:
    """`silu_mul_backward` then `quantise_both` of (dgate | dup): dy, gate, up [M, F] -> (1x128 codes, 128x1 codes) of a
    matrix [M, 2F].
    """
    return quantise_both(_rows(torch.cat(silu_mul_backward(dy, gate, up), -1)), scale_format, scale_floor)


__all__ = [
    "add_rms_norm_quantise",
    "norm_rotary",
    "rms_norm_quantise",
    "rms_norm_quantise_columns",
    "silu_mul_backward_quantise_both",
    "silu_mul_backward_saved",
    "silu_mul_quantise",
    "silu_mul_quantise_both",
    "silu_mul_saving",
]
