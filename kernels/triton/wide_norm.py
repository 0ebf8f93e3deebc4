"""RMSNorm of wide bf16 rows and its backward (`precision_kernels.triton.norm` says what is computed), packed by fours.

The warps of a program share a row. It lies in pieces of 2048 columns, of which a thread of four warps holds 16
neighbours each: adding the pieces and the neighbours, the first levels of the tree, stays in registers, five levels are
shuffles of one number, and the warps meet once. A row stays packed between its two uses
(`precision_kernels.triton.packed`).

A program of the backward goes from row to row, for it adds up the weight's gradient: it loads a row while it computes
the one before.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from precision_kernels.reference.exact import SUM_LANES
from precision_kernels.triton.launch import cdiv, jit_any_rows, next_power_of_2
from precision_kernels.triton.numerics import amax_of, block_scale, divide_by_scale, encode_rows, fast
from precision_kernels.triton.packed import add, is_packable, largest, lifted, normalise, pack, quads, unpack

_NARROWEST, _WIDEST = 1024, 16 * SUM_LANES
_WIDEST_BACKWARD = 8192
BACKWARD_ROWS = 32
"""Rows whose dweight one program adds up: a constant, so that the sum's order depends on the number of rows only.

8192 x 4096 took 0.071 ms with 32, 0.075 with 16, 0.082 with 62, and 0.081 without loading ahead; 0.063 are its bytes
(H200).
"""
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
    # A block is 32 quads, which lie in 8 threads: its amax is three shuffles.
    BLOCKS: tl.constexpr = z.shape[0] // 32
    z = tl.reshape(z, (BLOCKS, 32))
    scale = block_scale(amax_of(tl.max(largest(lifted(z)), 1) & -65536), floor, UE8M0)
    e, f, g, h = unpack(z)
    wide = scale[:, None]
    # Four codes of a quad are one int32, four of these one 16-byte store per thread.
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
    # A program per row. Four warps hold a piece of 2048 columns as 512 quads: 16 neighbouring columns per thread.
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, WIDTH)
    # The row (with the residual: the rounded sum, which is stored) stays packed in registers until it is written:
    # half the registers of fp32 copies, twice the programs per multiprocessor.
    pieces = ()
    for p in tl.static_range(PIECES):
        at = p * WIDTH + lanes
        inside = (at < QUADS) | (EVEN or p < PIECES - 1)
        v = tl.load(x + row * x_m + at, inside, 0)
        if ADD:
            v = add(v, tl.load(residual + row * QUADS + at, inside, 0))
            tl.store(new_residual + row * QUADS + at, v, inside)
        pieces = pieces + (v,)  # type: ignore[assignment]  # noqa: RUF005 (Triton has no starred tuples)
    # Pieces are added elementwise (elements 2048 apart), neighbours in the thread's registers, lanes by shuffles,
    # warps once.
    a, b, c, d = _squares(pieces[0])  # type: ignore[misc]
    for p in tl.static_range(1, PIECES):
        e, f, g, h = _squares(pieces[p])
        a, b, c, d = a + e, b + f, c + g, d + h
    total = _total((a + b) + (c + d))
    # IEEE division and square root.
    r = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(total, D.to(tl.float32)) + eps))
    tl.store(rstd + row, r)
    # Normalised, multiplied by the weight and rounded in pairs; codes are made of the same registers.
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


@triton.jit
def _backward_row(x, dy, dresidual, row, lanes, inside, QUADS, x_m, dy_m, ADD: tl.constexpr):
    v = tl.load(x + row * x_m + lanes, inside, 0)
    g = tl.load(dy + row * dy_m + lanes, inside, 0)
    return v, g, tl.load(dresidual + row * QUADS + lanes, inside, 0) if ADD else v


@triton.jit
def _through(n0, n1, n2, n3, g0, g1, g2, g3, weights, r, D):
    """Gradients of a row whose normalised numbers are n, from those of the norm's result."""
    w0, w1, w2, w3 = unpack(weights)
    g0, g1, g2, g3 = g0 * w0, g1 * w1, g2 * w2, g3 * w3
    total = tl.sum(tl.fma(g0, n0, g1 * n1) + tl.fma(g2, n2, g3 * n3), 0)
    mean = tl.div_rn(total, D.to(tl.float32))
    return r * (g0 - n0 * mean), r * (g1 - n1 * mean), r * (g2 - n2 * mean), r * (g3 - n3 * mean)


@jit_any_rows
def _wide_backward_kernel(
    dy, x, weight, rstd, dresidual, dx, partial, M, QUADS, D, x_m, dy_m,
    ADD: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    # A program takes 32 rows one after the other; its warps share a row of up to 8192 columns, 16 per thread. The
    # weight and the sums of dweight (fp32, s0 to s3: elements 0 to 3 of a quad) stay in registers.
    lanes = tl.arange(0, WIDTH)
    inside = lanes < QUADS
    weights = tl.load(weight + lanes, inside, 0)
    s0 = tl.zeros((WIDTH,), tl.float32)
    s1, s2, s3 = s0, s0, s0
    row = tl.program_id(0).to(tl.int64) * ROWS
    end = tl.minimum(row + ROWS, M)
    # The first row, then in each turn the next one is loaded before the present one is computed: 0.071 ms instead
    # of 0.081 for 8192 x 4096 (H200).
    v, g, d = _backward_row(x, dy, dresidual, row, lanes, inside, QUADS, x_m, dy_m, ADD)
    r = tl.load(rstd + row)
    for _ in range(ROWS):
        more = row + 1 < end
        ahead = _backward_row(x, dy, dresidual, row + 1, lanes, inside & more, QUADS, x_m, dy_m, ADD)
        r_ahead = tl.load(rstd + row + 1, more, 0.0)
        # x * rstd in fp32; rounded to bf16 for dweight, as the forward rounded it.
        n0, n1, n2, n3 = unpack(v)
        n0, n1, n2, n3 = n0 * r, n1 * r, n2 * r, n3 * r
        g0, g1, g2, g3 = unpack(g)
        z0, z1, z2, z3 = unpack(pack(n0, n1, n2, n3))
        s0, s1, s2, s3 = tl.fma(g0, z0, s0), tl.fma(g1, z1, s1), tl.fma(g2, z2, s2), tl.fma(g3, z3, s3)
        # dx: one sum over the row, across all warps, per row.
        g0, g1, g2, g3 = _through(n0, n1, n2, n3, g0, g1, g2, g3, weights, r, D)
        if ADD:
            d0, d1, d2, d3 = unpack(d)
            g0, g1, g2, g3 = g0 + d0, g1 + d1, g2 + d2, g3 + d3
        tl.store(dx + row * QUADS + lanes, pack(g0, g1, g2, g3), inside & (row < end))
        v, g, d = ahead
        r = r_ahead
        row += 1
    # dweight of 32 rows; the host adds the programs in order, so only the number of rows decides the order.
    out = partial + tl.program_id(0).to(tl.int64) * D + 4 * lanes
    tl.store(out, s0, inside)
    tl.store(out + 1, s1, inside)
    tl.store(out + 2, s2, inside)
    tl.store(out + 3, s3, inside)


def accepts(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, floor: float) -> bool:
    """Whether `launch` takes these: matrices of wide rows that can be packed."""
    return (
        x.dim() == 2
        and _NARROWEST <= x.shape[1] <= _WIDEST
        and fast(x.dtype, floor)
        and is_packable(x, weight, *([] if residual is None else [residual]))
    )


def launch(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, outputs: tuple[torch.Tensor, ...],
    eps: float, write: bool, quantise: bool, ue8m0: bool, floor: float,
) -> None:  # fmt: skip
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


def accepts_backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, dresidual: torch.Tensor | None
) -> bool:
    """Whether `launch_backward` takes these."""
    return (
        x.dim() == 2
        and _NARROWEST <= x.shape[1] <= _WIDEST_BACKWARD
        and is_packable(dy, x, weight, *([] if dresidual is None else [dresidual]))
    )


def launch_backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, dresidual: torch.Tensor | None,
    dx: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Fill ``dx`` of `norm.rms_norm_backward_op` -> dweight of each `BACKWARD_ROWS` rows, fp32; all are accepted."""
    m, d = x.shape
    width = next_power_of_2(d) // 4
    partial = torch.empty(cdiv(m, BACKWARD_ROWS), d, dtype=torch.float32, device=x.device)
    if m:
        _wide_backward_kernel[(len(partial),)](
            quads(dy), quads(x), quads(weight), rstd, quads(x if dresidual is None else dresidual), quads(dx), partial,
            m, d // 4, d, x.stride(0) // 4, dy.stride(0) // 4, ADD=dresidual is not None, ROWS=BACKWARD_ROWS,
            WIDTH=width, num_warps=width // _SHARE.value, enable_fp_fusion=False,
        )  # fmt: skip
    return partial


__all__ = ["BACKWARD_ROWS", "accepts", "accepts_backward", "launch", "launch_backward"]
