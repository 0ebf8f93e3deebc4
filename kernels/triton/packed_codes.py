"""Codes of a tile of bf16 that a kernel holds in registers, packed by fours: in one direction or both."""

from __future__ import annotations

import triton
import triton.language as tl

from precision_kernels.triton.numerics import amax_of, block_scale, divide_by_scale, encode_rows
from precision_kernels.triton.packed import lane, larger, largest, lifted, unpack


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
def _rows(v, row, codes, scales, M, QUADS, columns, floor, UE8M0: tl.constexpr):
    """1x128 codes and scales of 32 rows v [32, 32 quads]; ``scales``: those of the block."""
    scale = block_scale(amax_of(tl.max(largest(lifted(v)), 1) & -65536), floor, UE8M0)
    a, b, c, d = unpack(v)
    word = _word(a, b, c, d, scale[:, None])
    inside = row < M
    tl.store(codes + row[:, None] * QUADS + columns[None, :], word, inside[:, None])
    tl.store(scales + row, scale, inside)


@triton.jit
def _column_scale(lanes, LANE: tl.constexpr, floor, UE8M0: tl.constexpr):
    """Scales of every fourth column from the `lifted` maxima of four rows each."""
    return block_scale(amax_of(tl.max(lane(lanes, LANE), 0) << 16), floor, UE8M0)


@triton.jit
def put_columns(a, b, c, d, first, words, scales_t, K, word_k, floor, UE8M0: tl.constexpr):
    """128x1 codes and scales of a tile: a, b, c, d are its rows 0, 1, 2, 3 modulo 4 as quads [32, WIDTH], its first
    column is ``first``, its rows are the 128 of program_id(1)."""
    WIDTH: tl.constexpr = a.shape[1]
    lanes = larger(larger(lifted(a), lifted(b)), larger(lifted(c), lifted(d)))
    s0, s1 = _column_scale(lanes, 0, floor, UE8M0), _column_scale(lanes, 1, floor, UE8M0)
    s2, s3 = _column_scale(lanes, 2, floor, UE8M0), _column_scale(lanes, 3, floor, UE8M0)
    a0, a1, a2, a3 = unpack(a)
    b0, b1, b2, b3 = unpack(b)
    c0, c1, c2, c3 = unpack(c)
    d0, d1, d2, d3 = unpack(d)
    even = tl.join(_word(a0, b0, c0, d0, s0[None, :]), _word(a2, b2, c2, d2, s2[None, :]))
    odd = tl.join(_word(a1, b1, c1, d1, s1[None, :]), _word(a3, b3, c3, d3, s3[None, :]))
    word = tl.reshape(tl.join(even, odd), (32, 4 * WIDTH))
    scale = tl.reshape(tl.join(tl.join(s0, s2), tl.join(s1, s3)), (4 * WIDTH,))
    group = tl.program_id(1) * 32 + tl.arange(0, 32)
    column = first + tl.arange(0, 4 * WIDTH).to(tl.int64)
    # Rows beyond M are zero codes: the storage is whole blocks of 128.
    tl.store(words + group[:, None] + column[None, :] * word_k, word, (column < K)[None, :])
    tl.store(scales_t + tl.program_id(1).to(tl.int64) * K + column, scale, column < K)


@triton.jit
def put_both(
    a, b, c, d, row, first, codes, scales, words, scales_t, M, K, scale_b, word_k, floor, UE8M0: tl.constexpr
):
    """Both sets of codes and scales of a tile: rows row, row + 1, ... as quads [32, 32], its first column ``first``."""
    columns = first // 4 + tl.arange(0, 32).to(tl.int64)
    block = scales + (first // 128).to(tl.int64) * scale_b
    _rows(a, row, codes, block, M, K // 4, columns, floor, UE8M0)
    _rows(b, row + 1, codes, block, M, K // 4, columns, floor, UE8M0)
    _rows(c, row + 2, codes, block, M, K // 4, columns, floor, UE8M0)
    _rows(d, row + 3, codes, block, M, K // 4, columns, floor, UE8M0)
    put_columns(a, b, c, d, first, words, scales_t, K, word_k, floor, UE8M0)


__all__ = ["put_both", "put_columns"]
