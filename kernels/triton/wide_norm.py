"""RMSNorm of wide bf16 rows (`precision_kernels.triton.norm` says what is computed), packed by fours.

Each chunk of 4096 belongs to one warp, so the tree never leaves its registers and shuffles; only the chunks' sums cross
warps. A row stays packed between its two uses (`precision_kernels.triton.packed`): a third fewer registers than as
single elements, so that more warps wait for memory at a time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from precision_kernels.reference.exact import SUM_CHUNK
from precision_kernels.triton.numerics import amax_of, block_scale, divide_by_scale, encode_rows, fast
from precision_kernels.triton.packed import add, is_packable, largest, lifted, normalise, quads, unpack

_NARROWEST, _WIDEST = 1024, 8 * SUM_CHUNK
_FEW_ROWS = 264
"""Two rows per multiprocessor: with fewer the GPU is not full, and more warps per row shorten the wait for one row."""


@triton.jit
def _sum4(a, b, c, d, e, f, g, h):
    return a + e, b + f, c + g, d + h


@triton.jit
def _halve(a, b, c, d, CHUNKS: tl.constexpr, HALF: tl.constexpr):
    """A level of the tree: [CHUNKS, 2 * HALF] -> [CHUNKS, HALF], upper half added to lower, four tensors at once."""
    return tl.reduce(
        (
            tl.reshape(a, (CHUNKS, 2, HALF)),
            tl.reshape(b, (CHUNKS, 2, HALF)),
            tl.reshape(c, (CHUNKS, 2, HALF)),
            tl.reshape(d, (CHUNKS, 2, HALF)),
        ),
        1,
        _sum4,
    )


@triton.jit
def _sums_of_squares(v, CHUNKS: tl.constexpr, LOG2: tl.constexpr):
    """`reference.exact.fold_lanes` of the squares of each chunk, v [CHUNKS, repeats, lanes] -> [CHUNKS]."""
    a, b, c, d = unpack(tl.reshape(v, (CHUNKS, 1 << LOG2)))
    a, b, c, d = a * a, b * b, c * c, d * d
    for i in tl.static_range(LOG2):
        a, b, c, d = _halve(a, b, c, d, CHUNKS, (1 << LOG2) >> (i + 1))
    # The last two levels: elements i and i + 2, then i and i + 1.
    return tl.reshape((a + c) + (b + d), (CHUNKS,))


@triton.jit
def _total(sums, CHUNKS: tl.constexpr):
    """Sum of the chunks' sums, one after the other."""
    if CHUNKS == 1:
        return tl.sum(sums, 0)
    index = tl.arange(0, CHUNKS)
    total = tl.sum(tl.where(index == 0, sums, 0.0), 0)
    for c in tl.static_range(1, CHUNKS):
        total += tl.sum(tl.where(index == c, sums, 0.0), 0)
    return total


@triton.jit
def _quantise(z, codes, scales, row, at, inside, QUADS, scale_b, floor, UE8M0: tl.constexpr):
    """1x128 codes and scales of z [CHUNKS, REPEATS, LANES]."""
    CHUNKS: tl.constexpr = z.shape[0]
    REPEATS: tl.constexpr = z.shape[1]
    BLOCKS: tl.constexpr = z.shape[2] // 32
    z = tl.reshape(z, (CHUNKS, REPEATS, BLOCKS, 32))
    scale = block_scale(amax_of(tl.max(largest(lifted(z)), 3) & -65536), floor, UE8M0)
    e, f, g, h = unpack(z)
    wide = scale[:, :, :, None]
    code = encode_rows(
        divide_by_scale(e, wide, True),
        divide_by_scale(f, wide, True),
        divide_by_scale(g, wide, True),
        divide_by_scale(h, wide, True),
    )
    tl.store(codes + row * QUADS + at, tl.reshape(code, at.shape), inside)
    block = (
        tl.arange(0, CHUNKS)[:, None, None] * (REPEATS * BLOCKS)
        + tl.arange(0, REPEATS)[None, :, None] * BLOCKS
        + tl.arange(0, BLOCKS)[None, None, :]
    )
    tl.store(scales + row + block.to(tl.int64) * scale_b, scale, block * 32 < QUADS)


@triton.jit
def _wide_kernel(
    x, residual, weight, y, new_residual, rstd, codes, scales, QUADS, D, x_m, scale_b, eps, floor,
    ADD: tl.constexpr, WRITE: tl.constexpr, QUANTISE: tl.constexpr, UE8M0: tl.constexpr, CHUNKS: tl.constexpr,
    REPEATS: tl.constexpr, LANES: tl.constexpr, LOG2: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = (
        tl.arange(0, CHUNKS)[:, None, None] * (REPEATS * LANES)
        + tl.arange(0, REPEATS)[None, :, None] * LANES
        + tl.arange(0, LANES)[None, None, :]
    )
    inside = (at < QUADS) | EVEN
    v = tl.load(x + row * x_m + at, inside, 0)
    if ADD:
        v = add(v, tl.load(residual + row * QUADS + at, inside, 0))
        tl.store(new_residual + row * QUADS + at, v, inside)
    total = _total(_sums_of_squares(v, CHUNKS, LOG2), CHUNKS)
    r = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(total, D.to(tl.float32)) + eps))
    tl.store(rstd + row, r)
    z = normalise(v, r, tl.load(weight + at, inside, 0))
    if WRITE:
        tl.store(y + row * QUADS + at, z, inside)
    if QUANTISE:
        _quantise(z, codes, scales, row, at, inside, QUADS, scale_b, floor, UE8M0)


def accepts(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, floor: float) -> bool:
    """Whether `launch` takes these: matrices of wide rows that can be packed."""
    return (
        x.dim() == 2
        and _NARROWEST <= x.shape[1] <= _WIDEST
        and fast(x.dtype, floor)
        and is_packable(x, weight, *([] if residual is None else [residual]))
    )


def launch(
    x, residual, weight, outputs, eps: float, write: bool, quantise: bool, ue8m0: bool, floor: float
) -> None:
    """Fill ``outputs`` = (y, new residual, rstd, codes, scales) of `norm.rms_norm_op`; x is one that `accepts`."""
    y, summed, rstd, codes, scales = outputs
    m, d = x.shape
    chunks = triton.next_power_of_2(triton.cdiv(d, SUM_CHUNK))
    width = min(SUM_CHUNK, triton.next_power_of_2(d)) // 4
    # One instruction of a warp: 16 bytes per thread, of codes if there are any, else of bf16.
    lanes = 128 if quantise else 64
    _wide_kernel[(m,)](
        quads(x), quads(x if residual is None else residual), quads(weight), quads(y), quads(summed), rstd,
        codes.view(torch.int32) if quantise else codes, scales, d // 4, d, x.stride(0) // 4, scales.stride(1), eps,
        floor, ADD=residual is not None, WRITE=write, QUANTISE=quantise, UE8M0=ue8m0, CHUNKS=chunks,
        REPEATS=width // lanes, LANES=lanes, LOG2=width.bit_length() - 1,
        EVEN=d == chunks * width * 4, num_warps=chunks if m > _FEW_ROWS else 4 * chunks,
        maxnreg=128 if quantise and chunks == 1 else None, enable_fp_fusion=False,
    )  # fmt: skip


__all__ = ["accepts", "launch"]
