"""`quantise_both` for bf16, packed by fours: a tile of 128 x 128 and both sets of its scales in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from precision_kernels.triton.numerics import amax_of, block_scale, divide_by_scale, encode_rows, fast
from precision_kernels.triton.packed import is_packable, lane, larger, largest, lifted, quads, unpack

_WIDTH = tl.constexpr(32)
"""Quads of a tile's row: one 1x128 block."""
_REGISTERS = 168
"""Three programs of 4 warps fit a multiprocessor: 0.127 ms for 8192 x 12288, 8 warps 0.144 (2026-11-29, one H200)."""


@triton.jit
def _word(a, b, c, d, scale):
    """Codes of four numbers in one int32."""
    return encode_rows(
        divide_by_scale(a, scale, True),
        divide_by_scale(b, scale, True),
        divide_by_scale(c, scale, True),
        divide_by_scale(d, scale, True),
    )


@triton.jit
def _rows(v, row, codes, scales, M, QUADS, scale_b, columns, floor, UE8M0: tl.constexpr):
    """1x128 codes and scales of 32 rows v [32, 32 quads]."""
    scale = block_scale(amax_of(tl.max(largest(lifted(v)), 1) & -65536), floor, UE8M0)
    a, b, c, d = unpack(v)
    word = _word(a, b, c, d, scale[:, None])
    inside = row < M
    tl.store(
        codes + row[:, None] * QUADS + columns[None, :], word, inside[:, None] & (columns < QUADS)[None, :]
    )
    tl.store(scales + row + tl.program_id(0).to(tl.int64) * scale_b, scale, inside)


@triton.jit
def _column_scale(lanes, LANE: tl.constexpr, floor, UE8M0: tl.constexpr):
    """Scales of every fourth column from the `lifted` maxima of four rows each."""
    return block_scale(amax_of(tl.max(lane(lanes, LANE), 0) << 16), floor, UE8M0)


@triton.jit
def _both_kernel(
    x, codes, scales, words, scales_t, M, QUADS, x_m, scale_b, word_k, floor, UE8M0: tl.constexpr
):
    row = tl.program_id(1).to(tl.int64) * 128 + tl.arange(0, 32) * 4
    columns = (tl.program_id(0) * _WIDTH + tl.arange(0, _WIDTH)).to(tl.int64)
    inside = (columns < QUADS)[None, :]
    at = x + row[:, None] * x_m + columns[None, :]
    a = tl.load(at, (row < M)[:, None] & inside, 0)
    b = tl.load(at + x_m, (row + 1 < M)[:, None] & inside, 0)
    c = tl.load(at + 2 * x_m, (row + 2 < M)[:, None] & inside, 0)
    d = tl.load(at + 3 * x_m, (row + 3 < M)[:, None] & inside, 0)
    _rows(a, row, codes, scales, M, QUADS, scale_b, columns, floor, UE8M0)
    _rows(b, row + 1, codes, scales, M, QUADS, scale_b, columns, floor, UE8M0)
    _rows(c, row + 2, codes, scales, M, QUADS, scale_b, columns, floor, UE8M0)
    _rows(d, row + 3, codes, scales, M, QUADS, scale_b, columns, floor, UE8M0)
    lanes = larger(larger(lifted(a), lifted(b)), larger(lifted(c), lifted(d)))
    s0, s1 = _column_scale(lanes, 0, floor, UE8M0), _column_scale(lanes, 1, floor, UE8M0)
    s2, s3 = _column_scale(lanes, 2, floor, UE8M0), _column_scale(lanes, 3, floor, UE8M0)
    a0, a1, a2, a3 = unpack(a)
    b0, b1, b2, b3 = unpack(b)
    c0, c1, c2, c3 = unpack(c)
    d0, d1, d2, d3 = unpack(d)
    even = tl.join(_word(a0, b0, c0, d0, s0[None, :]), _word(a2, b2, c2, d2, s2[None, :]))
    odd = tl.join(_word(a1, b1, c1, d1, s1[None, :]), _word(a3, b3, c3, d3, s3[None, :]))
    word = tl.reshape(tl.join(even, odd), (32, 4 * _WIDTH))
    scale = tl.reshape(tl.join(tl.join(s0, s2), tl.join(s1, s3)), (4 * _WIDTH,))
    group = tl.program_id(1) * 32 + tl.arange(0, 32)
    column = (tl.program_id(0) * (4 * _WIDTH) + tl.arange(0, 4 * _WIDTH)).to(tl.int64)
    # Rows beyond M are zero codes: the storage is whole blocks of 128.
    tl.store(words + group[:, None] + column[None, :] * word_k, word, (column < 4 * QUADS)[None, :])
    tl.store(scales_t + tl.program_id(1).to(tl.int64) * (4 * QUADS) + column, scale, column < 4 * QUADS)


def accepts(x: torch.Tensor, floor: float) -> bool:
    """Whether `launch` takes this matrix."""
    return is_packable(x) and fast(x.dtype, floor)


def launch(x, codes, scales, words, scales_t, ue8m0: bool, floor: float) -> None:
    """Fill what `quantise._columns` returns for x [M, K], one that `accepts`; ``words``: storage of the 128x1 codes."""
    m, k = x.shape
    _both_kernel[(triton.cdiv(k, 4 * _WIDTH.value), triton.cdiv(m, 128))](
        quads(x), codes.view(torch.int32), scales, words, scales_t, m, k // 4, x.stride(0) // 4, scales.stride(1),
        words.stride(0), floor, UE8M0=ue8m0, num_warps=4, maxnreg=_REGISTERS, enable_fp_fusion=False,
    )  # fmt: skip


__all__ = ["accepts", "launch"]
