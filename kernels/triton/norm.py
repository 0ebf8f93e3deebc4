"""RMSNorm and residual-add + RMSNorm of :mod:`precision_kernels.reference.norm`, optionally quantising the result.

A row is read once, held in registers, reduced by ``reference.exact.lane_sum``'s tree and written once; several short
rows (the per-head q and k norms) share a program. Nothing in a program depends on how many rows the call has, so a
row's bits cannot either. ``quantise=True`` writes e4m3 codes and 1x128 scales instead of (or besides) the bf16 result:
the same bits as ``quantise_activation(rms_norm(x))``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from precision_kernels.declaration import implements
from precision_kernels.reference.exact import SUM_LANES
from precision_kernels.reference.formats import FP8, SCALE_FLOOR, Quantised, ScaleFormat, blocks
from precision_kernels.reference.norm import check_norm
from precision_kernels.registration import fake, operator
from precision_kernels.triton import wide_norm
from precision_kernels.triton.launch import VERSION, as_matrix, cdiv, jit_any_rows, next_power_of_2
from precision_kernels.triton.numerics import (
    INTERPRETED,
    block_amax,
    block_scale,
    divide_by_scale,
    encode_e4m3,
    fast,
    fold,
    round_to,
    widen,
)
from precision_kernels.triton.quantise import aligned_scales, quantise_rows_op

_HELD = 6
"""Chunks of 2048 that stay in registers between sum and result, 16 elements per thread each; others are read again."""


@triton.jit
def _load_rows(x, residual, new_residual, offsets, out, mask, ADD: tl.constexpr):
    """The rows to normalise, in the compute dtype; with ADD the rounded sum, which is stored."""
    v = tl.load(x + offsets, mask, 0.0)
    if ADD:
        v = round_to(widen(v) + widen(tl.load(residual + out, mask, 0.0)), v.dtype)
        tl.store(new_residual + out, v, mask)
    return v


@triton.jit
def _forget(v):
    """v, but the compiler cannot see that: it keeps the 16-bit registers instead of their fp32 copies.

    A row that is held as fp32 takes twice the registers, and half the warps fit a multiprocessor.
    """
    if v.dtype.primitive_bitwidth == 16 and not INTERPRETED:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [v], dtype=v.dtype, is_pure=False, pack=2)
    return v


@triton.jit
def _forward_kernel(
    x, residual, weight, y, new_residual, rstd, codes, scales, M, H, D, x_m, x_h, scale_m, scale_b, eps, floor,
    ADD: tl.constexpr, WRITE: tl.constexpr, QUANTISE: tl.constexpr, UE8M0: tl.constexpr, FAST: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, LOG2: tl.constexpr, CHUNKS: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    # 2048 elements per program and chunk, 16 for each thread of four warps: one long row, or several short ones
    # (heads), whose index becomes an outer and an inner one where heads are slices.
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = (rows < M)[:, None]
    start = (rows // H * x_m + rows % H * x_h)[:, None]
    lanes = tl.arange(0, WIDTH)[None, :]
    # Read: x (+ residual, rounded and stored) into registers, its squares added elementwise 2048 apart. Up to six
    # chunks (`_HELD`) stay in registers in the compute dtype; longer rows are read again below.
    squares = tl.zeros((ROWS, WIDTH), tl.float32)
    chunks = ()
    for c in tl.static_range(CHUNKS):
        columns = lanes + c * WIDTH
        out = rows[:, None] * D + columns
        v = _load_rows(x, residual, new_residual, start + columns, out, inside & (columns < D), ADD)
        if HELD:
            chunks = chunks + (v,)  # type: ignore[assignment]  # noqa: RUF005 (Triton has no starred tuples)
        wide = widen(v)
        squares = wide * wide if c == 0 else squares + wide * wide
    # The tree over 2048 lanes, IEEE division and square root: the bits of the definition.
    total = fold(squares, LOG2)
    r = tl.sqrt_rn(tl.div_rn(total, tl.zeros((ROWS,), tl.float32) + D) + eps)
    r = tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), r)
    tl.store(rstd + rows, r, rows < M)
    # Write: normalise, round, times weight, round; codes are made of the registers that hold the result.
    for c in tl.static_range(CHUNKS):
        columns = lanes + c * WIDTH
        mask = inside & (columns < D)
        if HELD:
            v = widen(_forget(chunks[c]))
        elif ADD:  # read again what this thread has just touched
            v = widen(tl.load(new_residual + rows[:, None] * D + columns, mask, 0.0))
        else:
            v = widen(tl.load(x + start + columns, mask, 0.0))
        n = widen(round_to(v * r[:, None], x.dtype.element_ty))
        z = round_to(n * widen(tl.load(weight + columns, columns < D, 0.0)), x.dtype.element_ty)
        out = rows[:, None] * D + columns
        if WRITE:
            tl.store(y + out, z, mask)
        # A block's elements lie in neighbouring threads: its amax is a few shuffles.
        if QUANTISE:
            q = tl.reshape(widen(z), (ROWS, WIDTH // 128, 128))
            scale = block_scale(block_amax(q, 2), floor, UE8M0)
            code = encode_e4m3(divide_by_scale(q, scale[:, :, None], FAST))
            tl.store(codes + out, tl.reshape(code, (ROWS, WIDTH)), mask)
            block = c * (WIDTH // 128) + tl.arange(0, WIDTH // 128)[None, :]
            pointer = scales + rows[:, None] * scale_m + block.to(tl.int64) * scale_b
            tl.store(pointer, scale, inside & (block * 128 < D))


@jit_any_rows
def _backward_kernel(
    dy, x, weight, rstd, dresidual, dx, partial, M, H, D, x_m, x_h, dy_m, dy_h,
    ADD: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    # A program holds ROWS whole rows at a time and goes through STEPS of them: weight and the partial dweight stay
    # in registers, and only one row of fp32 per 32 rows is written for dweight.
    columns = tl.arange(0, WIDTH)[None, :]
    w = widen(tl.load(weight + columns, columns < D, 0.0))
    dweight = tl.zeros((ROWS, WIDTH), tl.float32)
    # A step reads x and dy once. Rows outside are zeros and add nothing to dweight.
    for step in range(STEPS):
        rows = tl.program_id(0).to(tl.int64) * (ROWS * STEPS) + step * ROWS + tl.arange(0, ROWS)
        mask = (rows < M)[:, None] & (columns < D)
        v = tl.load(x + (rows // H * x_m + rows % H * x_h)[:, None] + columns, mask, 0.0)
        g = widen(tl.load(dy + (rows // H * dy_m + rows % H * dy_h)[:, None] + columns, mask, 0.0))
        r = tl.load(rstd + rows, rows < M, 0.0)[:, None]
        n = widen(v) * r
        dweight += g * widen(round_to(n, v.dtype))
        g = g * w
        # One sum per row, over all its columns: the order is Triton's, fixed by D. So dx is close to the
        # definition, not bit-equal.
        mean = tl.div_rn(tl.sum(g * n, 1), tl.zeros((ROWS,), tl.float32) + D)
        out = rows[:, None] * D + columns
        d = r * (g - n * mean[:, None])
        if ADD:
            d += widen(tl.load(dresidual + out, mask, 0.0))
        # dweight of this program's rows; the host sums programs in order.
        tl.store(dx + out, round_to(d, dx.dtype.element_ty), mask)
    tl.store(
        partial + tl.program_id(0).to(tl.int64) * D + tl.arange(0, WIDTH),
        tl.sum(dweight, 0),
        tl.arange(0, WIDTH) < D,
    )


def _shape(x: torch.Tensor) -> tuple[int, int, int, int, int]:
    """(rows, rows per outer index, D, outer stride, inner stride) of x [M, D] or [T, H, D] with contiguous rows."""
    if x.dim() == 2:
        return x.shape[0], 1, x.shape[1], x.stride(0), 0
    return x.shape[0] * x.shape[1], x.shape[1], x.shape[2], x.stride(0), x.stride(1)


def _rows_of(x: torch.Tensor) -> torch.Tensor:
    """x [..., D] as [M, D] or [T, H, D] with contiguous rows, without a copy where strides allow it."""
    x = x if x.dim() in (2, 3) else x.reshape(-1, x.shape[-1])
    return x if x.stride(-1) == 1 else x.contiguous()


def _tile(d: int, quantise: bool) -> tuple[int, int]:
    """(rows per program, width of a chunk): 2048 elements, 16 for each thread of four warps."""
    width = min(SUM_LANES, max(128 if quantise else 16, next_power_of_2(d)))
    return SUM_LANES // width, width


def _outputs(
    x: torch.Tensor, add: bool, write: bool, quantise: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Uninitialised (y, new residual, rstd, codes, scales); what is not asked for has no elements."""
    m, _, d, _, _ = _shape(x)
    none = lambda dtype: torch.empty(0, 0, dtype=dtype, device=x.device)  # noqa: E731
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device) if write else none(x.dtype)
    summed = torch.empty(x.shape, dtype=x.dtype, device=x.device) if add else none(x.dtype)
    rstd = torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device)
    codes = torch.empty(m, d, dtype=FP8, device=x.device) if quantise else none(FP8)
    scales = aligned_scales(m, blocks(d), x.device) if quantise else none(torch.float32)
    return y, summed, rstd, codes, scales


@operator("rms_norm")
def rms_norm_op(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, write: bool, quantise: bool,
    ue8m0: bool, floor: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """x, residual [M, D] or [T, H, D] -> (y, new residual, rstd, codes, scales), see `_outputs`."""
    outputs = _outputs(x, residual is not None, write, quantise)
    y, summed, rstd, codes, scales = outputs
    m, h, d, x_m, x_h = _shape(x)
    if m and wide_norm.accepts(x, residual, weight, floor):
        wide_norm.launch(x, residual, weight, outputs, eps, write, quantise, ue8m0, floor)
    elif m and d:
        rows, width = _tile(d, quantise)
        chunks = cdiv(d, width)
        _forward_kernel[(cdiv(m, rows),)](
            x, residual if residual is not None else x, weight, y, summed, rstd, codes, scales, m, h, d, x_m, x_h,
            *scales.stride(), eps, floor, ADD=residual is not None, WRITE=write, QUANTISE=quantise, UE8M0=ue8m0,
            FAST=fast(x.dtype, floor), ROWS=rows, WIDTH=width, LOG2=width.bit_length() - 1,
            CHUNKS=chunks, HELD=chunks <= _HELD, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return outputs


@fake(rms_norm_op)
def _(x, residual, weight, eps, write, quantise, ue8m0, floor):
    return _outputs(x, residual is not None, write, quantise)


@operator("rms_norm_backward")
def rms_norm_backward_op(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    dresidual: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dx like x, dweight fp32 [D])."""
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if wide_norm.accepts_backward(dy, x, weight, dresidual):
        return dx, wide_norm.launch_backward(dy, x, weight, rstd, dresidual, dx).sum(0)
    m, h, d, x_m, x_h = _shape(x)
    width = next_power_of_2(max(d, 16))
    rows = max(1, 2048 // width)
    steps = max(1, wide_norm.BACKWARD_ROWS // rows)
    programs = cdiv(m, rows * steps)
    partial = torch.empty(programs, d, dtype=torch.float32, device=x.device)
    if m and d:
        _, _, _, dy_m, dy_h = _shape(dy)
        _backward_kernel[(programs,)](
            dy, x, weight, rstd, dresidual if dresidual is not None else x, dx, partial, m, h, d, x_m, x_h, dy_m, dy_h,
            ADD=dresidual is not None, ROWS=rows, STEPS=steps, WIDTH=width,
            num_warps=4 if width * rows < 4096 else 8 if width <= 8192 else 16, enable_fp_fusion=False,
        )  # fmt: skip
    return dx, partial.sum(0)


@fake(rms_norm_backward_op)
def _(dy, x, weight, rstd, dresidual):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), x.new_empty(x.shape[-1], dtype=torch.float32)


@implements("triton", VERSION)
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """``reference.norm.rms_norm``: (y like x, rstd fp32 [..., 1])."""
    check_norm("rms_norm", x, weight)
    y, _, rstd, _, _ = rms_norm_op(_rows_of(x), None, weight, eps, True, False, False, SCALE_FLOOR)
    return y.view(x.shape), rstd.view(*x.shape[:-1], 1)


@implements("triton", VERSION)
def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``reference.norm.add_rms_norm``: (y, new residual, rstd)."""
    check_norm("add_rms_norm", x, weight, residual)
    rows = _rows_of(x)
    y, summed, rstd, _, _ = rms_norm_op(
        rows, residual.reshape(rows.shape).contiguous(), weight, eps, True, False, False, SCALE_FLOOR
    )
    return y.view(x.shape), summed.view(x.shape), rstd.view(*x.shape[:-1], 1)


def _normalise_and_quantise(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    scale_format: ScaleFormat,
    scale_floor: float,
) -> tuple[Quantised, torch.Tensor, torch.Tensor]:
    """(1x128 codes, new residual, rstd): one kernel for bf16 and rows that fit the registers, else two."""
    fused = x.shape[1] <= _HELD * SUM_LANES or wide_norm.accepts(x, residual, weight, scale_floor)
    ue8m0 = scale_format == "ue8m0"
    y, summed, rstd, codes, scales = rms_norm_op(
        x, residual, weight, eps, not fused, fused, ue8m0, scale_floor
    )
    if not fused:
        codes, scales = quantise_rows_op(y, ue8m0, scale_floor)
    return Quantised(codes, scales, "1x128", scale_format), summed, rstd


@implements("triton", VERSION)
def rms_norm_quantise(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    scale_format: ScaleFormat = "fp32",
    scale_floor: float = SCALE_FLOOR,
) -> tuple[Quantised, torch.Tensor]:
    """``reference.fused.rms_norm_quantise``: (1x128 codes of the norm [M, D], rstd fp32 [M, 1])."""
    check_norm("rms_norm_quantise", x, weight)
    codes, _, rstd = _normalise_and_quantise(as_matrix(x), None, weight, eps, scale_format, scale_floor)
    return codes, rstd


@implements("triton", VERSION)
def add_rms_norm_quantise(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    scale_format: ScaleFormat = "fp32",
    scale_floor: float = SCALE_FLOOR,
) -> tuple[Quantised, torch.Tensor, torch.Tensor]:
    """``reference.fused.add_rms_norm_quantise``: (1x128 codes of the norm, new residual [M, D], rstd fp32 [M, 1])."""
    check_norm("add_rms_norm_quantise", x, weight, residual)
    rows = as_matrix(residual).contiguous()
    return _normalise_and_quantise(as_matrix(x), rows, weight, eps, scale_format, scale_floor)


@implements("triton", VERSION)
def rms_norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    dresidual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``reference.norm.rms_norm_backward``: (dx like x, dweight fp32 [D]).

    Not bit-equal to the reference: torch orders ``mean`` and ``sum`` as it likes. The order here is fixed for a given
    number of rows, so a run repeats exactly.
    """
    rows = _rows_of(x)
    dy_rows = dy if dy.shape == rows.shape and dy.stride(-1) == 1 else dy.reshape(rows.shape).contiguous()
    d = None if dresidual is None else dresidual.reshape(rows.shape).contiguous()
    dx, dweight = rms_norm_backward_op(dy_rows, rows, weight, rstd.contiguous(), d)
    return dx.view(x.shape), dweight


__all__ = ["add_rms_norm", "add_rms_norm_quantise", "rms_norm", "rms_norm_backward", "rms_norm_quantise"]
