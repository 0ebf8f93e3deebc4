"""RMSNorm of wide bf16 rows (`precision_kernels.triton.norm` says what is computed), packed by fours.

The warps of a program share a row. It lies in pieces of 2048 columns, of which a thread of four warps holds 16
neighbours each: adding the pieces and the neighbours, the first levels of the tree, stays in registers, five levels are
shuffles of one number, and the warps meet once. A row stays packed between its two uses
(`precision_kernels.triton.packed`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from precision_kernels.reference.exact import SUM_LANES
from precision_kernels.triton.launch import cdiv, next_power_of_2
from precision_kernels.triton.numerics import amax_of, block_scale, divide_by_scale, encode_rows, fast
from precision_kernels.triton.packed import add, is_packable, largest, lifted, normalise, quads, unpack

_NARROWEST, _WIDEST = 1024, 16 * SUM_LANES
_SHARE = tl.constexpr(128)
"""Quads of a piece that one of four warps holds: 16 columns per thread, whose codes are one 16-byte store."""


@triton.jit
def _squares(v):
    a, b, c, d = unpack(v)
    return a * a, b * b, c * c, d * d


@triton.jit
def _total(v):
    """`reference.exact.fold_lanes` of v [n] -> scalar; n is twice or four times `_SHARE`.

    Within a warp by shuffles. The warps' sums then come to every thread in one exchange through shared memory, where
    each of two reductions between warps would take two.
    """
    for _ in tl.static_range(7):
        v = tl.sum(tl.reshape(v, (v.shape[0] // 2, 2)), 1)
    v = tl.gather(v, tl.arange(0, v.shape[0]), 0)
    if v.shape[0] == 4:
        a, b = tl.split(tl.reshape(v, (2, 2)))
        v = a + b
    a, b = tl.split(v)
    return a + b


@triton.jit
def _quantise(z, codes, scales, at, block, inside, QUADS, scale_b, floor, UE8M0: tl.constexpr):
    """1x128 codes and scales of z [quads], whose quads are ``at`` of the row and whose first block is ``block``."""
    BLOCKS: tl.constexpr = z.shape[0] // 32
    z = tl.reshape(z, (BLOCKS, 32))
    scale = block_scale(amax_of(tl.max(largest(lifted(z)), 1) & -65536), floor, UE8M0)
    e, f, g, h = unpack(z)
    wide = scale[:, None]
    code = encode_rows(
        divide_by_scale(e, wide, True),
        divide_by_scale(f, wide, True),
        divide_by_scale(g, wide, True),
        divide_by_scale(h, wide, True),
    )
    tl.store(codes + at, tl.reshape(code, at.shape), inside)
    block += tl.arange(0, BLOCKS)
    tl.store(scales + block.to(tl.int64) * scale_b, scale, block * 32 < QUADS)


@triton.jit
def _wide_kernel(
    x, residual, weight, y, new_residual, rstd, codes, scales, QUADS, D, x_m, scale_b, eps, floor,
    ADD: tl.constexpr, WRITE: tl.constexpr, QUANTISE: tl.constexpr, UE8M0: tl.constexpr, PIECES: tl.constexpr,
    WIDTH: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, WIDTH)
    pieces = ()
    for p in tl.static_range(PIECES):
        at = p * WIDTH + lanes
        inside = (at < QUADS) | (EVEN or p < PIECES - 1)
        v = tl.load(x + row * x_m + at, inside, 0)
        if ADD:
            v = add(v, tl.load(residual + row * QUADS + at, inside, 0))
            tl.store(new_residual + row * QUADS + at, v, inside)
        pieces = pieces + (v,)  # type: ignore[assignment]  # noqa: RUF005 (Triton has no starred tuples)
    a, b, c, d = _squares(pieces[0])  # type: ignore[misc]
    for p in tl.static_range(1, PIECES):
        e, f, g, h = _squares(pieces[p])
        a, b, c, d = a + e, b + f, c + g, d + h
    total = _total((a + b) + (c + d))
    r = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(total, D.to(tl.float32)) + eps))
    tl.store(rstd + row, r)
    for p in tl.static_range(PIECES):
        at = p * WIDTH + lanes
        inside = (at < QUADS) | (EVEN or p < PIECES - 1)
        z = normalise(pieces[p], r, tl.load(weight + at, inside, 0))
        if WRITE:
            tl.store(y + row * QUADS + at, z, inside)
        if QUANTISE:
            _quantise(
                z,
                codes + row * QUADS,
                scales + row,
                at,
                p * (WIDTH // 32),
                inside,
                QUADS,
                scale_b,
                floor,
                UE8M0,
            )


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
    width = min(SUM_LANES, next_power_of_2(d)) // 4
    pieces = cdiv(d, 4 * width)
    # One H200, 8192 rows, quantised, 4 and 8 warps: 0.029 and 0.033 ms for 4096 columns, 0.036 and 0.041 for 5120,
    # 0.087 and 0.081 for 12288.
    warps = width // _SHARE.value * (1 if pieces <= 3 else 2)
    _wide_kernel[(m,)](
        quads(x), quads(x if residual is None else residual), quads(weight), quads(y), quads(summed), rstd,
        codes.view(torch.int32) if quantise else codes, scales, d // 4, d, x.stride(0) // 4, scales.stride(1), eps,
        floor, ADD=residual is not None, WRITE=write, QUANTISE=quantise, UE8M0=ue8m0, PIECES=pieces, WIDTH=width,
        EVEN=d == pieces * width * 4, num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip


__all__ = ["accepts", "launch"]
