"""128x1 codes of an RMSNorm's result, made again from its input: what a weight gradient reads of it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from precision_kernels.declaration import implements
from precision_kernels.reference.formats import BLOCK, FP8, SCALE_FLOOR, Quantised, ScaleFormat, blocks
from precision_kernels.reference.norm import check_norm
from precision_kernels.reference.quantise import check_quantisable
from precision_kernels.registration import fake, operator
from precision_kernels.triton.launch import VERSION, as_matrix, cdiv, jit_any_rows
from precision_kernels.triton.norm import rms_norm_op
from precision_kernels.triton.numerics import fast
from precision_kernels.triton.packed import is_packable, normalise, quads
from precision_kernels.triton.quantise import code_words, quantise_columns_op, transposed_codes
from precision_kernels.triton.tile_codes import put_columns

_WIDTH = tl.constexpr(16)
"""Quads of a tile's row."""


@triton.jit
def _load(x, rstd, weight, row, columns, M, QUADS, x_m):
    """Normalised rows [32, WIDTH] as quads; zero outside."""
    # Quads stay packed from the load to the code; the norm is two roundings of pairs.
    inside = (columns < QUADS)[None, :]
    v = tl.load(x + row[:, None] * x_m + columns[None, :], (row < M)[:, None] & inside, 0)
    w = tl.load(weight + columns, columns < QUADS, 0)
    return normalise(v, tl.load(rstd + row, row < M, 0.0)[:, None], w[None, :])


@jit_any_rows
def _kernel(x, rstd, weight, words, scales_t, M, QUADS, x_m, word_k, floor, UE8M0: tl.constexpr):
    # A tile of 128 rows x 64 columns, 16 quads per thread of four warps: a program needs whole 128x1 blocks, and no
    # sum along a row, for rstd is that of the forward.
    row = tl.program_id(1).to(tl.int64) * 128 + tl.arange(0, 32) * 4
    columns = (tl.program_id(0) * _WIDTH + tl.arange(0, _WIDTH)).to(tl.int64)
    a = _load(x, rstd, weight, row, columns, M, QUADS, x_m)
    b = _load(x, rstd, weight, row + 1, columns, M, QUADS, x_m)
    c = _load(x, rstd, weight, row + 2, columns, M, QUADS, x_m)
    d = _load(x, rstd, weight, row + 3, columns, M, QUADS, x_m)
    # Scales of the 64 columns and the transposed codes, from registers.
    first = tl.program_id(0) * (4 * _WIDTH)
    put_columns(a, b, c, d, first, words, scales_t, 4 * QUADS, word_k, floor, UE8M0)


@operator("rms_norm_quantise_columns")
def rms_norm_quantise_columns_op(
    x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, eps: float, ue8m0: bool, floor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, D] with contiguous rows, rstd fp32 [M, 1] -> codes [M, D] stored transposed, scales [ceil(M/128), D]."""
    m, d = x.shape
    if not (m and d and is_packable(x, weight) and fast(x.dtype, floor)):
        y = rms_norm_op(x, None, weight, eps, True, False, False, floor)[0]
        return quantise_columns_op(y, ue8m0, floor)
    words = code_words(m, d, x.device)
    scales = torch.empty(blocks(m), d, dtype=torch.float32, device=x.device)
    _kernel[(cdiv(d, 4 * _WIDTH.value), cdiv(m, BLOCK))](
        quads(x), rstd, quads(weight), words, scales, m, d // 4, x.stride(0) // 4, words.stride(0), floor, UE8M0=ue8m0,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return words.view(FP8).t()[:m], scales


@fake(rms_norm_quantise_columns_op)
def _(x, weight, rstd, eps, ue8m0, floor):
    m, d = x.shape
    return transposed_codes(m, d, x.device), torch.empty(blocks(m), d, dtype=torch.float32, device=x.device)


@implements("triton", VERSION)
def rms_norm_quantise_columns(
    x: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    eps: float,
    scale_format: ScaleFormat = "fp32",
    scale_floor: float = SCALE_FLOOR,
) -> Quantised:
    """``reference.fused.rms_norm_quantise_columns``: rows are scaled by the rstd of the forward, nothing is summed."""
    check_norm("rms_norm_quantise_columns", x, weight)
    x = as_matrix(x)
    check_quantisable("rms_norm_quantise_columns", x, scale_format, scale_floor)
    rows = rstd.reshape(-1, 1).contiguous()
    codes, scales = rms_norm_quantise_columns_op(x, weight, rows, eps, scale_format == "ue8m0", scale_floor)
    return Quantised(codes, scales, "128x1", scale_format)


__all__ = ["rms_norm_quantise_columns"]
