"""The quantisers of :mod:`precision_kernels.reference.quantise` as Triton kernels: the same bits.

Each kernel reads its input once. What differs from the reference is layout only, and every layout is a strided view of
the same shape:

* scales of ``quantise_activation`` are stored column by column, the column length rounded up to 16 bytes: the layout
  that DeepGEMM's TMA loads need, so no transform runs inside the GEMM call;
* codes of ``quantise_columns`` and the second copy of ``quantise_weight`` are stored transposed (the contraction of
  wgrad and dgrad must be contiguous on Hopper), rows rounded up to 128 and zero-filled.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from precision_kernels.reference.formats import BLOCK, FP8, SCALE_FLOOR, Quantised, ScaleFormat, blocks
from precision_kernels.reference.quantise import _check
from precision_kernels.triton.numerics import (
    block_scale,
    divide_by_scale,
    encode_e4m3,
    finite_magnitude,
    widen,
)

_ROWS, _BLOCKS = 32, 2
"""Tile of the 1x128 kernel: 32 x 256 elements, 64 per thread, measured in benchmarks/kernels.py."""


def aligned_scales(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """Uninitialised fp32 scales [rows, columns], column-major with the column stride a multiple of 4 (16 bytes)."""
    return torch.empty(columns, -(-rows // 4) * 4, dtype=torch.float32, device=device).t()[:rows]


def transposed_codes(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """Uninitialised e4m3 codes [rows, columns] whose storage is [columns, rows rounded up to 128]."""
    return torch.empty(columns, blocks(rows) * BLOCK, dtype=FP8, device=device).t()[:rows]


@triton.jit
def _rows_kernel(
    x, codes, scales, M, K, x_m, x_k, scale_m, scale_b, floor,
    UE8M0: tl.constexpr, FAST: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * (BLOCKS * 128) + tl.arange(0, BLOCKS * 128)
    mask = (rows < M)[:, None] & (columns < K)[None, :]
    v = widen(tl.load(x + rows[:, None] * x_m + columns[None, :].to(tl.int64) * x_k, mask, 0.0))
    v = tl.reshape(v, (ROWS, BLOCKS, 128))
    scale = block_scale(tl.max(finite_magnitude(v), 2), floor, UE8M0)
    code = encode_e4m3(divide_by_scale(v, scale[:, :, None], FAST))
    tl.store(codes + rows[:, None] * K + columns[None, :], tl.reshape(code, (ROWS, BLOCKS * 128)), mask)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    inside = (rows < M)[:, None] & (block * 128 < K)[None, :]
    tl.store(scales + rows[:, None] * scale_m + block[None, :].to(tl.int64) * scale_b, scale, inside)


@triton.jit
def _tile_kernel(
    x, row_codes, row_scales, column_codes, column_scales, M, K, x_m, x_k, row_scale_m, row_scale_b, code_m, code_k,
    floor, UE8M0: tl.constexpr, FAST: tl.constexpr, ROW: tl.constexpr, COLUMN: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One [128, WIDTH] tile in 128x1 blocks (COLUMN), and in 1x128 blocks too (ROW, which needs WIDTH = 128)."""
    rows = tl.program_id(0).to(tl.int64) * 128 + tl.arange(0, 128)
    columns = (tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)).to(tl.int64)
    mask = (rows < M)[:, None] & (columns < K)[None, :]
    v = widen(tl.load(x + rows[:, None] * x_m + columns[None, :] * x_k, mask, 0.0))
    magnitude = finite_magnitude(v)
    if ROW:
        scale = block_scale(tl.max(magnitude, 1), floor, UE8M0)
        code = encode_e4m3(divide_by_scale(v, scale[:, None], FAST))
        tl.store(row_codes + rows[:, None] * K + columns[None, :], code, mask)
        tl.store(
            row_scales + rows * row_scale_m + tl.program_id(1).to(tl.int64) * row_scale_b, scale, rows < M
        )
    if COLUMN:
        scale = block_scale(tl.max(magnitude, 0), floor, UE8M0)
        code = encode_e4m3(divide_by_scale(v, scale[None, :], FAST))
        # Rows beyond M are zero codes: the storage is whole blocks of 128.
        tl.store(
            column_codes + rows[:, None] * code_m + columns[None, :] * code_k, code, (columns < K)[None, :]
        )
        tl.store(column_scales + tl.program_id(0).to(tl.int64) * K + columns, scale, columns < K)


@triton.jit
def _weight_kernel(
    w, codes, codes_t, scales, N, K, w_n, w_k, code_n, code_k, floor,
    UE8M0: tl.constexpr, FAST: tl.constexpr, TRANSPOSE: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * 128 + tl.arange(0, 128)
    columns = tl.program_id(1).to(tl.int64) * 128 + tl.arange(0, 128)
    mask = (rows < N)[:, None] & (columns < K)[None, :]
    v = widen(tl.load(w + rows[:, None] * w_n + columns[None, :] * w_k, mask, 0.0))
    # The scale is held once per column: as a [1, 1] block, Triton 3.6 left a quarter of codes_t unwritten.
    amax = tl.zeros((128,), tl.float32) + tl.max(tl.max(finite_magnitude(v), 0), 0)
    scale = block_scale(amax, floor, UE8M0)
    code = encode_e4m3(divide_by_scale(v, scale[None, :], FAST))
    tl.store(codes + rows[:, None] * K + columns[None, :], code, mask)
    if TRANSPOSE:
        tl.store(codes_t + rows[:, None] * code_n + columns[None, :] * code_k, code, (columns < K)[None, :])
    pointer = scales + tl.program_id(0).to(tl.int64) * tl.cdiv(K, 128) + tl.program_id(1)
    tl.store(pointer, tl.max(scale, 0))


def _is_fast(x: torch.Tensor) -> bool:
    return x.dtype != torch.float32


@torch.library.custom_op("precision_kernels::quantise_rows", mutates_args=())
def quantise_rows_op(x: torch.Tensor, ue8m0: bool, floor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, K] -> codes [M, K], scales [M, ceil(K/128)] in the TMA layout."""
    m, k = x.shape
    codes = torch.empty(m, k, dtype=FP8, device=x.device)
    scales = aligned_scales(m, blocks(k), x.device)
    if m and k:
        grid = (triton.cdiv(m, _ROWS), triton.cdiv(k, BLOCK * _BLOCKS))
        _rows_kernel[grid](
            x, codes, scales, m, k, *x.stride(), *scales.stride(), floor,
            UE8M0=ue8m0, FAST=_is_fast(x), ROWS=_ROWS, BLOCKS=_BLOCKS, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return codes, scales


@quantise_rows_op.register_fake
def _(x, ue8m0, floor):
    m, k = x.shape
    return torch.empty(m, k, dtype=FP8, device=x.device), aligned_scales(m, blocks(k), x.device)


@torch.library.custom_op("precision_kernels::quantise_columns", mutates_args=())
def quantise_columns_op(x: torch.Tensor, ue8m0: bool, floor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, K] -> codes [M, K] stored transposed, scales [ceil(M/128), K]."""
    m, k = x.shape
    codes = transposed_codes(m, k, x.device)
    scales = torch.empty(blocks(m), k, dtype=torch.float32, device=x.device)
    if m and k:
        grid = (triton.cdiv(m, BLOCK), triton.cdiv(k, 64))
        _tile_kernel[grid](
            x, codes, scales, codes, scales, m, k, *x.stride(), 0, 0, *codes.stride(), floor,
            UE8M0=ue8m0, FAST=_is_fast(x), ROW=False, COLUMN=True, WIDTH=64, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return codes, scales


@quantise_columns_op.register_fake
def _(x, ue8m0, floor):
    m, k = x.shape
    return transposed_codes(m, k, x.device), torch.empty(blocks(m), k, dtype=torch.float32, device=x.device)


@torch.library.custom_op("precision_kernels::quantise_both", mutates_args=())
def quantise_both_op(
    x: torch.Tensor, ue8m0: bool, floor: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [M, K] -> what ``quantise_rows`` and ``quantise_columns`` give, from one read of x."""
    m, k = x.shape
    row_codes = torch.empty(m, k, dtype=FP8, device=x.device)
    row_scales = aligned_scales(m, blocks(k), x.device)
    codes = transposed_codes(m, k, x.device)
    scales = torch.empty(blocks(m), k, dtype=torch.float32, device=x.device)
    if m and k:
        _tile_kernel[(triton.cdiv(m, BLOCK), triton.cdiv(k, BLOCK))](
            x, row_codes, row_scales, codes, scales, m, k, *x.stride(), *row_scales.stride(), *codes.stride(), floor,
            UE8M0=ue8m0, FAST=_is_fast(x), ROW=True, COLUMN=True, WIDTH=BLOCK, num_warps=16, enable_fp_fusion=False,
        )  # fmt: skip
    return row_codes, row_scales, codes, scales


@quantise_both_op.register_fake
def _(x, ue8m0, floor):
    m, k = x.shape
    rows = torch.empty(m, k, dtype=FP8, device=x.device), aligned_scales(m, blocks(k), x.device)
    return (
        *rows,
        transposed_codes(m, k, x.device),
        torch.empty(blocks(m), k, dtype=torch.float32, device=x.device),
    )


@torch.library.custom_op("precision_kernels::quantise_weight", mutates_args=())
def quantise_weight_op(
    w: torch.Tensor, ue8m0: bool, floor: float, transpose: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """w [N, K] -> codes [N, K], scales, and with ``transpose`` the same codes stored transposed (else [0, 0])."""
    n, k = w.shape
    codes = torch.empty(n, k, dtype=FP8, device=w.device)
    scales = torch.empty(blocks(n), blocks(k), dtype=torch.float32, device=w.device)
    codes_t = transposed_codes(n, k, w.device) if transpose else torch.empty(0, 0, dtype=FP8, device=w.device)
    if n and k:
        _weight_kernel[(triton.cdiv(n, BLOCK), triton.cdiv(k, BLOCK))](
            w, codes, codes_t, scales, n, k, *w.stride(), *codes_t.stride(), floor,
            UE8M0=ue8m0, FAST=_is_fast(w), TRANSPOSE=transpose, num_warps=16, enable_fp_fusion=False,
        )  # fmt: skip
    return codes, scales, codes_t


@quantise_weight_op.register_fake
def _(w, ue8m0, floor, transpose):
    n, k = w.shape
    codes_t = transposed_codes(n, k, w.device) if transpose else torch.empty(0, 0, dtype=FP8, device=w.device)
    scales = torch.empty(blocks(n), blocks(k), dtype=torch.float32, device=w.device)
    return torch.empty(n, k, dtype=FP8, device=w.device), scales, codes_t


def quantise_activation(
    x: torch.Tensor, scale_format: ScaleFormat = "fp32", scale_floor: float = SCALE_FLOOR
) -> Quantised:
    """``reference.quantise_activation``; scales lie in the TMA layout."""
    _check("quantise_activation", x, scale_format, scale_floor)
    return Quantised(*quantise_rows_op(x, scale_format == "ue8m0", scale_floor), "1x128", scale_format)


def quantise_columns(
    x: torch.Tensor, scale_format: ScaleFormat = "fp32", scale_floor: float = SCALE_FLOOR
) -> Quantised:
    """``reference.quantise_columns``; codes are stored transposed."""
    _check("quantise_columns", x, scale_format, scale_floor)
    return Quantised(*quantise_columns_op(x, scale_format == "ue8m0", scale_floor), "128x1", scale_format)


def quantise_both(
    x: torch.Tensor, scale_format: ScaleFormat = "fp32", scale_floor: float = SCALE_FLOOR
) -> tuple[Quantised, Quantised]:
    """(``quantise_activation(x)``, ``quantise_columns(x)``) from one read of x: what a backward pass needs of dy."""
    _check("quantise_both", x, scale_format, scale_floor)
    row_codes, row_scales, codes, scales = quantise_both_op(x, scale_format == "ue8m0", scale_floor)
    rows = Quantised(row_codes, row_scales, "1x128", scale_format)
    return rows, Quantised(codes, scales, "128x1", scale_format)


def quantise_weight(
    w: torch.Tensor, scale_format: ScaleFormat = "fp32", scale_floor: float = SCALE_FLOOR
) -> Quantised:
    """``reference.quantise_weight``, with the transposed codes that dgrad needs in ``operands["transposed"]``."""
    _check("quantise_weight", w, scale_format, scale_floor)
    codes, scales, codes_t = quantise_weight_op(w, scale_format == "ue8m0", scale_floor, True)
    return Quantised(codes, scales, "128x128", scale_format, {"transposed": codes_t})


__all__ = ["aligned_scales", "quantise_activation", "quantise_both", "quantise_columns", "quantise_weight"]
