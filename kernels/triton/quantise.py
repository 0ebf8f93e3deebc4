"""The quantisers of :mod:`precision_kernels.reference.quantise` as Triton kernels: the same bits.

Each kernel reads its input once. Transposing ones hold four rows per thread and move them as int32, four codes each:
as bytes, every code cost one access of shared memory. What differs from the reference is layout only, and every layout
is a strided view of the same shape:

* scales of ``quantise_activation`` are stored column by column, the column length rounded up to 16 bytes: the layout
  that DeepGEMM's TMA loads need, so no transform runs inside the GEMM call;
* codes of ``quantise_columns`` and the second copy of ``quantise_weight`` are stored transposed (the contraction of
  wgrad and dgrad must be contiguous on Hopper), rows rounded up to 128 and zero-filled.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from precision_kernels.declaration import implements
from precision_kernels.reference.formats import BLOCK, FP8, SCALE_FLOOR, Quantised, ScaleFormat, blocks
from precision_kernels.reference.quantise import INPUT_DTYPES, check_quantisable
from precision_kernels.registration import fake, operator
from precision_kernels.triton import packed_quantise
from precision_kernels.triton.launch import VERSION, cdiv, jit_any_rows
from precision_kernels.triton.numerics import (
    amax_of,
    block_amax,
    block_scale,
    decode_e4m3,
    divide_by_scale,
    encode_e4m3,
    encode_rows,
    fast,
    ordered,
    round_to,
    widen,
)

_ROWS, _BLOCKS = 8, 4
"""Tile of the 1x128 kernel, 8 x 512: 90 % of the copy bandwidth, where 32 x 256 gave 85 % (2026-11-29, one H200)."""


_COLUMNS, _BOTH = (64, 4), (128, 8)
"""(width of a tile of 128 rows, warps) of the 128x1 kernel, alone and with the 1x128 codes."""


def aligned_scales(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """Uninitialised fp32 scales [rows, columns], column-major with the column stride a multiple of 4 (16 bytes)."""
    return torch.empty(columns, -(-rows // 4) * 4, dtype=torch.float32, device=device).t()[:rows]


def transposed_codes(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """Uninitialised e4m3 codes [rows, columns] whose storage is [columns, rows rounded up to 128]."""
    return code_words(rows, columns, device).view(FP8).t()[:rows]


def code_words(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """Uninitialised storage of `transposed_codes`, four neighbouring rows' codes of a column in one int32."""
    return torch.empty(columns, blocks(rows) * BLOCK // 4, dtype=torch.int32, device=device)


@triton.jit
def _rows_kernel(
    x, codes, scales, M, K, x_m, x_k, scale_m, scale_b, floor,
    UE8M0: tl.constexpr, FAST: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    # A tile of 8 x 512, 32 elements per thread of four warps: a row piece is four whole blocks (`_ROWS`: 90 % of
    # the copy bandwidth).
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * (BLOCKS * 128) + tl.arange(0, BLOCKS * 128)
    mask = (rows < M)[:, None] & (columns < K)[None, :]
    v = widen(tl.load(x + rows[:, None] * x_m + columns[None, :].to(tl.int64) * x_k, mask, 0.0))
    # A block's elements meet once, for the amax; the scale is then with all threads of the block.
    v = tl.reshape(v, (ROWS, BLOCKS, 128))
    scale = block_scale(block_amax(v, 2), floor, UE8M0)
    code = encode_e4m3(divide_by_scale(v, scale[:, :, None], FAST))
    tl.store(codes + rows[:, None] * K + columns[None, :], tl.reshape(code, (ROWS, BLOCKS * 128)), mask)
    # Scales are stored column by column, as DeepGEMM's bulk copies read them.
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    inside = (rows < M)[:, None] & (block * 128 < K)[None, :]
    tl.store(scales + rows[:, None] * scale_m + block[None, :].to(tl.int64) * scale_b, scale, inside)


@triton.jit
def _load_four(x, M, K, x_m, x_k, row, columns):
    """Rows row, row + 1, row + 2, row + 3 of x as four fp32 tensors [32, WIDTH]; zero outside."""
    at = x + row[:, None] * x_m + columns[None, :] * x_k
    inside = (columns < K)[None, :]
    return (
        widen(tl.load(at, (row < M)[:, None] & inside, 0.0)),
        widen(tl.load(at + x_m, (row + 1 < M)[:, None] & inside, 0.0)),
        widen(tl.load(at + 2 * x_m, (row + 2 < M)[:, None] & inside, 0.0)),
        widen(tl.load(at + 3 * x_m, (row + 3 < M)[:, None] & inside, 0.0)),
    )


@triton.jit
def _ordered_four(a, b, c, d):
    return tl.maximum(tl.maximum(ordered(a), ordered(b)), tl.maximum(ordered(c), ordered(d)))


@triton.jit
def _store_words(words, a, b, c, d, scale, word_k, columns, K, FAST: tl.constexpr):
    """Transposed codes of four rows. Rows beyond M are zero codes: the storage is whole blocks of 128."""
    at = tl.program_id(1) * 32 + tl.arange(0, 32)
    packed = encode_rows(
        divide_by_scale(a, scale, FAST),
        divide_by_scale(b, scale, FAST),
        divide_by_scale(c, scale, FAST),
        divide_by_scale(d, scale, FAST),
    )
    tl.store(words + at[:, None] + columns[None, :] * word_k, packed, (columns < K)[None, :])


@jit_any_rows
def _columns_kernel(
    x, codes, scales, words, scales_t, M, K, x_m, x_k, scale_m, scale_b, word_k, floor,
    UE8M0: tl.constexpr, FAST: tl.constexpr, ROWS_TOO: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    # A tile of 128 rows, one block of every column, WIDTH columns wide: 64 elements per thread. A thread holds rows
    # 4i to 4i + 3 (a, b, c, d), whose codes of a column are one int32 of the transpose.
    row = tl.program_id(1).to(tl.int64) * 128 + tl.arange(0, 32) * 4
    columns = (tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)).to(tl.int64)
    a, b, c, d = _load_four(x, M, K, x_m, x_k, row, columns)
    # WIDTH is 128 then: the same registers are also one 1x128 block per row.
    if ROWS_TOO:
        for i in tl.static_range(4):
            v = a if i == 0 else b if i == 1 else c if i == 2 else d
            inside = row + i < M
            scale = block_scale(block_amax(v, 1), floor, UE8M0)
            code = encode_e4m3(divide_by_scale(v, scale[:, None], FAST))
            out = codes + (row + i)[:, None] * K + columns[None, :]
            tl.store(out, code, inside[:, None] & (columns < K)[None, :])
            tl.store(scales + (row + i) * scale_m + tl.program_id(0).to(tl.int64) * scale_b, scale, inside)
    # Along the rows: the four rows of a thread first, then across threads.
    scale = block_scale(amax_of(tl.max(_ordered_four(a, b, c, d), 0)), floor, UE8M0)
    # Four codes cross shared memory as one word; as bytes each code cost one access.
    _store_words(words, a, b, c, d, scale[None, :], word_k, columns, K, FAST)
    tl.store(scales_t + tl.program_id(1).to(tl.int64) * K + columns, scale, columns < K)


@jit_any_rows
def _weight_kernel(
    w, codes, words, scales, N, K, w_n, w_k, word_k, floor,
    UE8M0: tl.constexpr, FAST: tl.constexpr, TRANSPOSE: tl.constexpr,
):  # fmt: skip
    # A tile is one 128x128 block, in the arrangement of `_columns_kernel`: 128 elements per thread of four warps.
    row = tl.program_id(1).to(tl.int64) * 128 + tl.arange(0, 32) * 4
    columns = (tl.program_id(0) * 128 + tl.arange(0, 128)).to(tl.int64)
    a, b, c, d = _load_four(w, N, K, w_n, w_k, row, columns)
    # A scalar: with the scale as a [1, 1] block, Triton 3.6 left a quarter of the transposed codes unwritten.
    scale = block_scale(amax_of(tl.max(tl.max(_ordered_four(a, b, c, d), 1), 0)), floor, UE8M0)
    # Codes row by row, for the forward ...
    for i in tl.static_range(4):
        v = a if i == 0 else b if i == 1 else c if i == 2 else d
        out = codes + (row + i)[:, None] * K + columns[None, :]
        code = encode_e4m3(divide_by_scale(v, scale, FAST))
        tl.store(out, code, (row + i < N)[:, None] & (columns < K)[None, :])
    # ... and the same codes transposed, for the dgrad, whose contraction must be contiguous on Hopper.
    if TRANSPOSE:
        _store_words(words, a, b, c, d, scale, word_k, columns, K, FAST)
    tl.store(scales + tl.program_id(1).to(tl.int64) * tl.cdiv(K, 128) + tl.program_id(0), scale)


@triton.jit
def _dequantise_kernel(
    codes, scales, y, M, K, code_m, code_k, scale_m, scale_k, HIGH: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    # A tile of 16 x 256; a scale is read once per element, from the cache after the first.
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    mask = (rows < M)[:, None] & (columns < K)[None, :]
    code = decode_e4m3(tl.load(codes + rows[:, None] * code_m + columns[None, :] * code_k, mask))
    scale = tl.load(
        scales + (rows // HIGH)[:, None] * scale_m + (columns // WIDE)[None, :] * scale_k, mask, 0.0
    )
    tl.store(y + rows[:, None] * K + columns[None, :], round_to(code * scale, y.dtype.element_ty), mask)


@operator("quantise_rows")
def quantise_rows_op(x: torch.Tensor, ue8m0: bool, floor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, K] -> codes [M, K], scales [M, ceil(K/128)] in the TMA layout."""
    m, k = x.shape
    codes = torch.empty(m, k, dtype=FP8, device=x.device)
    scales = aligned_scales(m, blocks(k), x.device)
    if m and k:
        grid = (cdiv(m, _ROWS), cdiv(k, BLOCK * _BLOCKS))
        _rows_kernel[grid](
            x, codes, scales, m, k, *x.stride(), *scales.stride(), floor,
            UE8M0=ue8m0, FAST=fast(x.dtype, floor), ROWS=_ROWS, BLOCKS=_BLOCKS, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return codes, scales


@fake(quantise_rows_op)
def _(x, ue8m0, floor):
    m, k = x.shape
    return torch.empty(m, k, dtype=FP8, device=x.device), aligned_scales(m, blocks(k), x.device)


def _columns(
    x: torch.Tensor, ue8m0: bool, floor: float, rows_too: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(1x128 codes, their scales, 128x1 codes, theirs); without ``rows_too`` the first two have no elements."""
    m, k = x.shape
    shape = (m, k) if rows_too else (0, 0)
    codes = torch.empty(shape, dtype=FP8, device=x.device)
    scales = aligned_scales(shape[0], blocks(shape[1]), x.device)
    words = code_words(m, k, x.device)
    scales_t = torch.empty(blocks(m), k, dtype=torch.float32, device=x.device)
    if m and k and rows_too and packed_quantise.accepts(x, floor):
        packed_quantise.launch(x, codes, scales, words, scales_t, ue8m0, floor)
    elif m and k:
        width, warps = _BOTH if rows_too else _COLUMNS
        _columns_kernel[(cdiv(k, width), cdiv(m, BLOCK))](
            x, codes, scales, words, scales_t, m, k, *x.stride(), *scales.stride(), words.stride(0), floor,
            UE8M0=ue8m0, FAST=fast(x.dtype, floor), ROWS_TOO=rows_too, WIDTH=width, num_warps=warps,
            enable_fp_fusion=False,
        )  # fmt: skip
    return codes, scales, words.view(FP8).t()[:m], scales_t


@operator("quantise_columns")
def quantise_columns_op(x: torch.Tensor, ue8m0: bool, floor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, K] -> codes [M, K] stored transposed, scales [ceil(M/128), K]."""
    return _columns(x, ue8m0, floor, False)[2:]


@fake(quantise_columns_op)
def _(x, ue8m0, floor):
    m, k = x.shape
    return transposed_codes(m, k, x.device), torch.empty(blocks(m), k, dtype=torch.float32, device=x.device)


@operator("quantise_both")
def quantise_both_op(
    x: torch.Tensor, ue8m0: bool, floor: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [M, K] -> what `quantise_rows_op` and `quantise_columns_op` give, from one read."""
    return _columns(x, ue8m0, floor, True)


@fake(quantise_both_op)
def _(x, ue8m0, floor):
    m, k = x.shape
    rows = torch.empty(m, k, dtype=FP8, device=x.device), aligned_scales(m, blocks(k), x.device)
    scales = torch.empty(blocks(m), k, dtype=torch.float32, device=x.device)
    return *rows, transposed_codes(m, k, x.device), scales


@operator("quantise_weight")
def quantise_weight_op(
    w: torch.Tensor, ue8m0: bool, floor: float, transpose: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """w [N, K] -> codes [N, K], scales, and with ``transpose`` the same codes stored transposed (else [0, 0])."""
    n, k = w.shape
    codes = torch.empty(n, k, dtype=FP8, device=w.device)
    scales = torch.empty(blocks(n), blocks(k), dtype=torch.float32, device=w.device)
    words = code_words(n, k, w.device) if transpose else code_words(0, 0, w.device)
    if n and k:
        _weight_kernel[(cdiv(k, BLOCK), cdiv(n, BLOCK))](
            w, codes, words, scales, n, k, *w.stride(), words.stride(0), floor, UE8M0=ue8m0,
            FAST=fast(w.dtype, floor), TRANSPOSE=transpose, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return codes, scales, words.view(FP8).t()[: n if transpose else 0]


@fake(quantise_weight_op)
def _(w, ue8m0, floor, transpose):
    n, k = w.shape
    codes_t = transposed_codes(n, k, w.device) if transpose else torch.empty(0, 0, dtype=FP8, device=w.device)
    scales = torch.empty(blocks(n), blocks(k), dtype=torch.float32, device=w.device)
    return torch.empty(n, k, dtype=FP8, device=w.device), scales, codes_t


@operator("dequantise")
def dequantise_op(
    codes: torch.Tensor, scales: torch.Tensor, high: int, wide: int, dtype: torch.dtype
) -> torch.Tensor:
    """codes [M, K] times the scales of their blocks of ``high`` x ``wide`` elements -> [M, K] in ``dtype``."""
    m, k = codes.shape
    y = torch.empty(m, k, dtype=dtype, device=codes.device)
    if m and k:
        _dequantise_kernel[(cdiv(m, 16), cdiv(k, 256))](
            codes, scales, y, m, k, *codes.stride(), *scales.stride(), HIGH=high, WIDE=wide, ROWS=16, COLUMNS=256,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return y


@fake(dequantise_op)
def _(codes, scales, high, wide, dtype):
    return torch.empty(codes.shape, dtype=dtype, device=codes.device)


@implements("triton", VERSION)
def quantise_activation(
    x: torch.Tensor, scale_format: ScaleFormat = "fp32", scale_floor: float = SCALE_FLOOR
) -> Quantised:
    """``reference.quantise_activation``; scales lie in the TMA layout."""
    check_quantisable("quantise_activation", x, scale_format, scale_floor)
    codes, scales = quantise_rows_op(x, scale_format == "ue8m0", scale_floor)
    return Quantised(codes, scales, "1x128", scale_format)


@implements("triton", VERSION)
def quantise_columns(
    x: torch.Tensor, scale_format: ScaleFormat = "fp32", scale_floor: float = SCALE_FLOOR
) -> Quantised:
    """``reference.quantise_columns``; codes are stored transposed."""
    check_quantisable("quantise_columns", x, scale_format, scale_floor)
    codes, scales = quantise_columns_op(x, scale_format == "ue8m0", scale_floor)
    return Quantised(codes, scales, "128x1", scale_format)


@implements("triton", VERSION)
def quantise_both(
    x: torch.Tensor, scale_format: ScaleFormat = "fp32", scale_floor: float = SCALE_FLOOR
) -> tuple[Quantised, Quantised]:
    """``reference.quantise_both`` in one launch: x is read once."""
    check_quantisable("quantise_both", x, scale_format, scale_floor)
    codes, scales, codes_t, scales_t = quantise_both_op(x, scale_format == "ue8m0", scale_floor)
    rows = Quantised(codes, scales, "1x128", scale_format)
    return rows, Quantised(codes_t, scales_t, "128x1", scale_format)


@implements("triton", VERSION)
def quantise_weight(
    w: torch.Tensor, scale_format: ScaleFormat = "fp32", scale_floor: float = SCALE_FLOOR
) -> Quantised:
    """``reference.quantise_weight``, with the transposed codes that dgrad needs in ``operands["transposed"]``."""
    check_quantisable("quantise_weight", w, scale_format, scale_floor)
    codes, scales, codes_t = quantise_weight_op(w, scale_format == "ue8m0", scale_floor, True)
    return Quantised(codes, scales, "128x128", scale_format, {"transposed": codes_t})


@implements("triton", VERSION)
def dequantise(q: Quantised, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """``reference.dequantise`` to float32, bfloat16 or float16."""
    if dtype not in INPUT_DTYPES:
        raise ValueError(f"dequantise: dtype must be one of {INPUT_DTYPES} on this device, got {dtype}")
    high, wide = (1 if side == "1" else BLOCK for side in q.kind.split("x"))
    return dequantise_op(q.codes, q.scales, high, wide, dtype)


__all__ = [
    "aligned_scales",
    "dequantise",
    "quantise_activation",
    "quantise_both",
    "quantise_columns",
    "quantise_weight",
]
