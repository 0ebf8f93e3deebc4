"""SiLU(gate) * up and its backward, quantised in both directions: what training's GEMMs read of them.

The product of bf16 in whole blocks of 128 columns takes one launch (`packed_activation`); anything else, and the
gradients, the kernels of both steps one after the other. The bits are the same.

The gradients in one launch were slower, 0.70 ms where both steps take 0.58 (8192 x 14336, H200): two tiles of codes in
one program need 247 registers.
"""

from __future__ import annotations

import torch

from precision_kernels.reference.activation import _check
from precision_kernels.reference.formats import FP8, SCALE_FLOOR, Quantised, ScaleFormat, blocks
from precision_kernels.reference.quantise import _check as _quantise_check
from precision_kernels.triton import packed_activation
from precision_kernels.triton.activation import _matrix, silu_mul_backward_op, silu_mul_op
from precision_kernels.triton.quantise import _words, aligned_scales, quantise_both_op, transposed_codes

Codes = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _fake(x: torch.Tensor, columns: int) -> Codes:
    """(1x128 codes, scales, 128x1 codes, scales) of a matrix with x's rows."""
    m = x.shape[0]
    scales = torch.empty(blocks(m), columns, dtype=torch.float32, device=x.device)
    rows = torch.empty(m, columns, dtype=FP8, device=x.device), aligned_scales(m, blocks(columns), x.device)
    return *rows, transposed_codes(m, columns, x.device), scales


def _outputs(x: torch.Tensor, columns: int) -> Codes:
    """As `_fake`, with the storage of the 128x1 codes in place of themselves."""
    codes, scales, _, scales_t = _fake(x, columns)
    return codes, scales, _words(x.shape[0], columns, x.device), scales_t


@torch.library.custom_op("precision_kernels::silu_mul_quantise_both", mutates_args=())
def silu_mul_quantise_both_op(
    gate: torch.Tensor, up: torch.Tensor, ue8m0: bool, floor: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """gate, up [M, K] with contiguous rows -> what `quantise_both_op` gives of their product."""
    m, k = gate.shape
    if not (m and k and packed_activation.accepts(floor, gate, up)):
        y, _, _ = silu_mul_op(gate, up, True, False, ue8m0, floor)
        return quantise_both_op(y, ue8m0, floor)
    outputs = _outputs(gate, k)
    packed_activation.product(gate, up, outputs, ue8m0, floor)
    return outputs[0], outputs[1], outputs[2].view(FP8).t()[:m], outputs[3]


@silu_mul_quantise_both_op.register_fake
def _(gate, up, ue8m0, floor):
    return _fake(gate, gate.shape[1])


@torch.library.custom_op("precision_kernels::silu_mul_backward_quantise_both", mutates_args=())
def silu_mul_backward_quantise_both_op(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, ue8m0: bool, floor: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """dy, gate, up [M, K] with contiguous rows -> what `quantise_both_op` gives of (dgate | dup) [M, 2K]."""
    return quantise_both_op(silu_mul_backward_op(dy, gate, None, up, None), ue8m0, floor)


@silu_mul_backward_quantise_both_op.register_fake
def _(dy, gate, up, ue8m0, floor):
    return _fake(gate, 2 * gate.shape[1])


def _quantised(codes: Codes, scale_format: ScaleFormat) -> tuple[Quantised, Quantised]:
    rows = Quantised(codes[0], codes[1], "1x128", scale_format)
    return rows, Quantised(codes[2], codes[3], "128x1", scale_format)


def silu_mul_quantise_both(
    gate: torch.Tensor, up: torch.Tensor, scale_format: ScaleFormat = "fp32", scale_floor: float = SCALE_FLOOR
) -> tuple[Quantised, Quantised]:
    """``reference.fused.silu_mul_quantise_both``; halves of one fused projection are read in place."""
    _check(gate, up)
    gate, up = _matrix(gate), _matrix(up)
    _quantise_check("silu_mul_quantise_both", gate, scale_format, scale_floor)
    return _quantised(silu_mul_quantise_both_op(gate, up, scale_format == "ue8m0", scale_floor), scale_format)


def silu_mul_backward_quantise_both(
    dy: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    scale_format: ScaleFormat = "fp32",
    scale_floor: float = SCALE_FLOOR,
) -> tuple[Quantised, Quantised]:
    """``reference.fused.silu_mul_backward_quantise_both``: in two launches."""
    _check(gate, up)
    dy, gate, up = _matrix(dy), _matrix(gate), _matrix(up)
    _quantise_check("silu_mul_backward_quantise_both", dy, scale_format, scale_floor)
    codes = silu_mul_backward_quantise_both_op(dy, gate, up, scale_format == "ue8m0", scale_floor)
    return _quantised(codes, scale_format)


__all__ = ["silu_mul_backward_quantise_both", "silu_mul_quantise_both"]
