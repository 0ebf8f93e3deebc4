"""Codes of a tile of bf16 that a kernel holds in registers, packed by fours, in one direction or both.

a, b, c, d are a tile's rows 0, 1, 2, 3 modulo 4 as quads [32, WIDTH], so that a thread has the four rows whose
transposed codes make an int32.

A reduction leaves its result with every thread that took part: eight for a row's maximum, sixteen for a column's. What
a scale costs after that, 18 instructions with the two terms of its reciprocal, each of them would pay, a quarter of all
that the tile costs. `tl.gather` takes the maxima to one thread each and the terms back, each way once through shared
memory: 12.7 instead of 16.5 instructions per element of `quantise_both`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from precision_kernels.triton.numerics import amax_of, block_scale, encode_rows, reciprocal_terms, times_terms
from precision_kernels.triton.packed import larger, largest, largest_along, lifted, unpack


@triton.jit
def _encode_four(a, b, c, d, high, low):
    """Codes of four numbers in one int32, from the terms of their scales' reciprocals."""
    return encode_rows(
        times_terms(a, high, low),
        times_terms(b, high, low),
        times_terms(c, high, low),
        times_terms(d, high, low),
    )


@triton.jit
def _columns_of(v):
    """int64 [32, quads] of bf16 -> fp32 [32, 4 * quads]."""
    a, b, c, d = unpack(v)
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (v.shape[0], 4 * v.shape[1]))


@triton.jit
def _packed_terms(scale):
    """int64 of the two `reciprocal_terms`: they cross shared memory together."""
    high, low = reciprocal_terms(scale)
    return (low.to(tl.int32, bitcast=True).to(tl.int64) << 32) | high.to(tl.uint32, bitcast=True).to(tl.int64)


@triton.jit
def _terms(packed):
    high, low = packed.to(tl.int32), (packed >> 32).to(tl.int32)
    return high.to(tl.float32, bitcast=True), low.to(tl.float32, bitcast=True)


@triton.jit
def _column_amax(a, b, c, d):
    """Largest finite magnitudes of the columns, one per thread."""
    # A thread compares its four rows, packed, then the rows of the tile are reduced: 16-bit lanes, four columns at
    # once.
    top = largest_along(larger(larger(lifted(a), lifted(b)), larger(lifted(c), lifted(d))), 0)
    # Spread: thread i gets column i, so that a scale is computed once and not by every thread that took part.
    each = tl.arange(0, 4 * top.shape[0])
    lane = tl.gather(top, each // 4, 0) << (48 - 16 * (each % 4)).to(tl.int64)
    return amax_of((lane >> 48).to(tl.int32) << 16)


@triton.jit
def _row_top(v):
    """`numerics.ordered` of each row's largest element, except for rubbish in its low half."""
    return tl.max(largest(lifted(v)), 1)


@triton.jit
def _row_amax(a, b, c, d):
    """Largest finite magnitudes of the 128 rows, one per thread."""
    # The maxima of rows 4i to 4i + 3 are joined in the order of rows, and thread i gets row i.
    tops = tl.join(tl.join(_row_top(a), _row_top(c)), tl.join(_row_top(b), _row_top(d)))
    return amax_of(tl.gather(tl.reshape(tops, (128,)), tl.arange(0, 128), 0) & -65536)


@triton.jit
def _put_row_codes(v, packed, codes, inside):
    """1x128 codes of 32 rows v [32, 32 quads]."""
    high, low = _terms(packed)
    a, b, c, d = unpack(v)
    tl.store(codes, _encode_four(a, b, c, d, high[:, None], low[:, None]), inside)


@triton.jit
def _put_rows(a, b, c, d, row, first, codes, scales, M, QUADS, scale_b, floor, UE8M0: tl.constexpr):
    """1x128 codes and scales of a tile, those of its rows as in `put_both`."""
    # 128 scales, one per thread, stored as one contiguous piece.
    rows = tl.program_id(1).to(tl.int64) * 128 + tl.arange(0, 128)
    scale = block_scale(_row_amax(a, b, c, d), floor, UE8M0)
    tl.store(scales + rows + (first // 128).to(tl.int64) * scale_b, scale, rows < M)
    # Back through shared memory: the two terms of a reciprocal travel as one int64 to the threads that hold the
    # row.
    terms = tl.gather(_packed_terms(scale), tl.arange(0, 128), 0)
    terms_ac, terms_bd = tl.split(tl.reshape(terms, (32, 2, 2)))
    terms_a, terms_c = tl.split(terms_ac)
    terms_b, terms_d = tl.split(terms_bd)
    # Codes: four of a row are one int32.
    quad = first // 4 + tl.arange(0, 32).to(tl.int64)
    inside = (quad < QUADS)[None, :]
    out = codes + row[:, None] * QUADS + quad[None, :]
    _put_row_codes(a, terms_a, out, (row < M)[:, None] & inside)
    _put_row_codes(b, terms_b, out + QUADS, (row + 1 < M)[:, None] & inside)
    _put_row_codes(c, terms_c, out + 2 * QUADS, (row + 2 < M)[:, None] & inside)
    _put_row_codes(d, terms_d, out + 3 * QUADS, (row + 3 < M)[:, None] & inside)


@triton.jit
def _put_column_scales(a, b, c, d, first, scales_t, K, floor, UE8M0: tl.constexpr):
    """128x1 scales of a tile -> the packed terms of their reciprocals."""
    # One thread per column.
    scale = block_scale(_column_amax(a, b, c, d), floor, UE8M0)
    column = first + tl.arange(0, scale.shape[0]).to(tl.int64)
    tl.store(scales_t + tl.program_id(1).to(tl.int64) * K + column, scale, column < K)
    return _packed_terms(scale)


@triton.jit
def _put_column_codes(a, b, c, d, terms, first, words, K, word_k):
    """128x1 codes of a tile, those of four rows in an int32. Rows beyond M are zero codes: the storage is whole blocks
    of 128.
    """
    # The terms come back to the threads that hold the column; a word is the codes of four rows.
    high, low = _terms(tl.gather(terms, tl.arange(0, terms.shape[0]), 0))
    word = _encode_four(
        _columns_of(a), _columns_of(b), _columns_of(c), _columns_of(d), high[None, :], low[None, :]
    )
    group = tl.program_id(1) * 32 + tl.arange(0, 32)
    column = first + tl.arange(0, terms.shape[0]).to(tl.int64)
    tl.store(words + group[:, None] + column[None, :] * word_k, word, (column < K)[None, :])


@triton.jit
def put_columns(a, b, c, d, first, words, scales_t, K, word_k, floor, UE8M0: tl.constexpr):
    """128x1 codes and scales of a tile: the 128 rows of program_id(1), the first of its columns is ``first``."""
    terms = _put_column_scales(a, b, c, d, first, scales_t, K, floor, UE8M0)
    _put_column_codes(a, b, c, d, terms, first, words, K, word_k)


@triton.jit
def put_both(
    a, b, c, d, row, first, codes, scales, words, scales_t, M, K, scale_b, word_k, floor, UE8M0: tl.constexpr
):
    """Both sets of codes and scales of a tile: the 128 rows of program_id(1), ``row`` those of ``a``, and 128 columns,
    the first of them ``first``.
    """
    # Column scales first: their terms are on the way while the rows are handled, and the tile is read by both from
    # the same registers.
    terms = _put_column_scales(a, b, c, d, first, scales_t, K, floor, UE8M0)
    _put_rows(a, b, c, d, row, first, codes, scales, M, K // 4, scale_b, floor, UE8M0)
    _put_column_codes(a, b, c, d, terms, first, words, K, word_k)


__all__ = ["put_both", "put_columns"]
