"""SiLU(gate) * up of :mod:`precision_kernels.reference.activation`, plain or quantising its result, and backward."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from precision_kernels.declaration import implements
from precision_kernels.reference.activation import check_gate_up
from precision_kernels.reference.formats import BLOCK, FP8, SCALE_FLOOR, Quantised, ScaleFormat, blocks
from precision_kernels.reference.quantise import check_quantisable
from precision_kernels.registration import fake, operator
from precision_kernels.triton.launch import VERSION, as_matrix, cdiv
from precision_kernels.triton.numerics import (
    INTERPRETED,
    block_amax,
    block_scale,
    decode_e4m3,
    divide_by_scale,
    encode_e4m3,
    exp,
    fast,
    multiply,
    round_to,
    silu_bf16,
    widen,
)
from precision_kernels.triton.quantise import aligned_scales

_ROWS, _BLOCKS = 8, 2
"""8 x 256 elements, 16 per thread: 86 % of the copy bandwidth, where 32 per thread gave 70 %."""


@triton.jit
def _silu(g):
    """silu(g) rounded to g's dtype."""
    wide = widen(g)
    if g.dtype == tl.bfloat16 and not INTERPRETED:
        return round_to(silu_bf16(wide), g.dtype)
    return round_to(tl.div_rn(wide, exp(-wide) + 1.0), g.dtype)


@triton.jit
def _put_codes(
    v, codes, scales, rows, M, K, scale_m, scale_b, floor, UE8M0: tl.constexpr, FAST: tl.constexpr
):
    """1x128 codes and scales of v [ROWS, BLOCKS * 128], the tile of this program."""
    ROWS: tl.constexpr = v.shape[0]
    BLOCKS: tl.constexpr = v.shape[1] // 128
    # Registers: the tile as [rows, blocks, 128]; a block is reduced to its amax, and one scale serves its 128
    # elements.
    wide = tl.reshape(widen(v), (ROWS, BLOCKS, 128))
    scale = block_scale(block_amax(wide, 2), floor, UE8M0)
    code = encode_e4m3(divide_by_scale(wide, scale[:, :, None], FAST))
    # Codes go out row by row as they lie in registers; scales column by column, the layout that DeepGEMM loads.
    columns = tl.program_id(1) * (BLOCKS * 128) + tl.arange(0, BLOCKS * 128)
    inside = (rows < M)[:, None]
    out = codes + rows[:, None] * K + columns[None, :]
    tl.store(out, tl.reshape(code, (ROWS, BLOCKS * 128)), inside & (columns < K)[None, :])
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    pointer = scales + rows[:, None] * scale_m + block[None, :].to(tl.int64) * scale_b
    tl.store(pointer, scale, inside & (block * 128 < K)[None, :])


@triton.jit
def _forward_kernel(
    gate, up, y, codes, scales, M, K, gate_m, up_m, scale_m, scale_b, floor,
    WRITE: tl.constexpr, QUANTISE: tl.constexpr, UE8M0: tl.constexpr, FAST: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    # A tile of 8 x 256 elements: 16 per thread of four warps. 86 % of the copy bandwidth, 32 per thread gave 70 %
    # (`_ROWS`).
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * (BLOCKS * 128) + tl.arange(0, BLOCKS * 128)
    mask = (rows < M)[:, None] & (columns < K)[None, :]
    # gate and up into registers, each read once; columns outside are zeros, so a ragged block has the amax of its
    # elements.
    g = tl.load(gate + rows[:, None] * gate_m + columns[None, :], mask, 0.0)
    u = tl.load(up + rows[:, None] * up_m + columns[None, :], mask, 0.0)
    # Two roundings, SiLU to the compute dtype and then the product, as in the definition; nothing crosses threads.
    z = multiply(_silu(g), u)
    if WRITE:
        tl.store(y + rows[:, None] * K + columns[None, :], z, mask)
    # The product is quantised from the registers that hold it: with WRITE off it is never in memory.
    if QUANTISE:
        _put_codes(z, codes, scales, rows, M, K, scale_m, scale_b, floor, UE8M0, FAST)


@triton.jit
def _saving_kernel(
    gate, up, y, gate_codes, gate_scales, up_codes, up_scales, M, K, gate_m, up_m, scale_m, scale_b, floor,
    UE8M0: tl.constexpr, FAST: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    # The tile of `_forward_kernel`.
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * (BLOCKS * 128) + tl.arange(0, BLOCKS * 128)
    mask = (rows < M)[:, None] & (columns < K)[None, :]
    # gate and up are read once, and stay in registers for the product and for the codes of both.
    g = tl.load(gate + rows[:, None] * gate_m + columns[None, :], mask, 0.0)
    u = tl.load(up + rows[:, None] * up_m + columns[None, :], mask, 0.0)
    tl.store(y + rows[:, None] * K + columns[None, :], multiply(_silu(g), u), mask)
    # What training keeps instead of the two: their 1x128 codes, a byte an element.
    _put_codes(g, gate_codes, gate_scales, rows, M, K, scale_m, scale_b, floor, UE8M0, FAST)
    _put_codes(u, up_codes, up_scales, rows, M, K, scale_m, scale_b, floor, UE8M0, FAST)


@triton.jit
def _read(x, scales, rows, M, K, x_m, scale_m, scale_b, dtype, CODES: tl.constexpr, BLOCKS: tl.constexpr):
    """fp32 tile of x [M, K]; with CODES of e4m3 codes times their scales, rounded to ``dtype``."""
    columns = tl.program_id(1) * (BLOCKS * 128) + tl.arange(0, BLOCKS * 128)
    mask = (rows < M)[:, None] & (columns < K)[None, :]
    pointer = x + rows[:, None] * x_m + columns[None, :]
    # With CODES a byte per element is read, multiplied by its block's scale and rounded to the dtype that was
    # quantised.
    if CODES:
        ROWS: tl.constexpr = rows.shape[0]
        block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
        inside = (rows < M)[:, None] & (block * 128 < K)[None, :]
        at = scales + rows[:, None] * scale_m + block[None, :].to(tl.int64) * scale_b
        scale = tl.load(at, inside, 0.0)
        v = tl.reshape(decode_e4m3(tl.load(pointer, mask)), (ROWS, BLOCKS, 128)) * scale[:, :, None]
        return widen(round_to(tl.reshape(v, (ROWS, BLOCKS * 128)), dtype))
    return widen(tl.load(pointer, mask, 0.0))


@triton.jit
def _backward_kernel(
    dy, gate, gate_scales, up, up_scales, dgate, dup, M, K, dy_m, gate_m, up_m, scale_m, scale_b, out_m,
    CODES: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = dgate.dtype.element_ty
    # The tile of `_forward_kernel`; one program makes both gradients, which share the sigmoid.
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * (BLOCKS * 128) + tl.arange(0, BLOCKS * 128)
    mask = (rows < M)[:, None] & (columns < K)[None, :]
    # fp32 copies of gate, up and dy in registers.
    g = _read(gate, gate_scales, rows, M, K, gate_m, scale_m, scale_b, dtype, CODES, BLOCKS)
    u = _read(up, up_scales, rows, M, K, up_m, scale_m, scale_b, dtype, CODES, BLOCKS)
    d = widen(tl.load(dy + rows[:, None] * dy_m + columns[None, :], mask, 0.0))
    # IEEE division, and products in the order of the definition; dup takes the rounded SiLU, as the forward did.
    sigmoid = tl.div_rn(tl.full(g.shape, 1.0, tl.float32), exp(-g) + 1.0)
    out = rows[:, None] * out_m + columns[None, :]
    # dgate and dup are the halves of one matrix, the layout of a joint gate-and-up projection's gradient.
    tl.store(dup + out, round_to(d * widen(round_to(g * sigmoid, dtype)), dtype), mask)
    tl.store(dgate + out, round_to(d * u * (sigmoid * (1.0 + g * (1.0 - sigmoid))), dtype), mask)


def _outputs(
    gate: torch.Tensor, write: bool, quantise: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    m, k = gate.shape
    none = lambda dtype: torch.empty(0, 0, dtype=dtype, device=gate.device)  # noqa: E731
    y = torch.empty(m, k, dtype=gate.dtype, device=gate.device) if write else none(gate.dtype)
    codes = torch.empty(m, k, dtype=FP8, device=gate.device) if quantise else none(FP8)
    return y, codes, aligned_scales(m, blocks(k), gate.device) if quantise else none(torch.float32)


@operator("silu_mul")
def silu_mul_op(
    gate: torch.Tensor, up: torch.Tensor, write: bool, quantise: bool, ue8m0: bool, floor: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """gate, up [M, K] with contiguous rows -> (y, codes, scales); what is not asked for has no elements."""
    y, codes, scales = _outputs(gate, write, quantise)
    m, k = gate.shape
    if m and k:
        _forward_kernel[(cdiv(m, _ROWS), cdiv(k, BLOCK * _BLOCKS))](
            gate, up, y, codes, scales, m, k, gate.stride(0), up.stride(0), *scales.stride(), floor,
            WRITE=write, QUANTISE=quantise, UE8M0=ue8m0, FAST=fast(gate.dtype, floor),
            ROWS=_ROWS, BLOCKS=_BLOCKS, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return y, codes, scales


@fake(silu_mul_op)
def _(gate, up, write, quantise, ue8m0, floor):
    return _outputs(gate, write, quantise)


@operator("silu_mul_saving")
def silu_mul_saving_op(
    gate: torch.Tensor, up: torch.Tensor, ue8m0: bool, floor: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """gate, up [M, K] with contiguous rows -> (y, codes and scales of gate, codes and scales of up)."""
    y, gate_codes, gate_scales = _outputs(gate, True, True)
    _, up_codes, up_scales = _outputs(gate, False, True)
    m, k = gate.shape
    if m and k:
        _saving_kernel[(cdiv(m, _ROWS), cdiv(k, BLOCK * _BLOCKS))](
            gate, up, y, gate_codes, gate_scales, up_codes, up_scales, m, k, gate.stride(0), up.stride(0),
            *gate_scales.stride(), floor, UE8M0=ue8m0, FAST=fast(gate.dtype, floor), ROWS=_ROWS, BLOCKS=_BLOCKS,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return y, gate_codes, gate_scales, up_codes, up_scales


@fake(silu_mul_saving_op)
def _(gate, up, ue8m0, floor):
    return *_outputs(gate, True, True), *_outputs(gate, False, True)[1:]


@operator("silu_mul_backward")
def silu_mul_backward_op(
    dy: torch.Tensor,
    gate: torch.Tensor,
    gate_scales: torch.Tensor | None,
    up: torch.Tensor,
    up_scales: torch.Tensor | None,
) -> torch.Tensor:
    """(dgate | dup) as one matrix [M, 2K], the layout of a fused gate-and-up projection's gradient.

    With scales, gate and up are 1x128 codes of dy's dtype, with equal strides.
    """
    m, k = gate.shape
    out = torch.empty(m, 2 * k, dtype=dy.dtype, device=dy.device)
    if m and k:
        # Without codes nothing is read behind the scales' pointers and strides.
        scales = (dy, dy) if gate_scales is None or up_scales is None else (gate_scales, up_scales)
        _backward_kernel[(cdiv(m, _ROWS), cdiv(k, BLOCK * _BLOCKS))](
            dy, gate, scales[0], up, scales[1], out, out[:, k:], m, k, dy.stride(0), gate.stride(0), up.stride(0),
            *scales[0].stride(), 2 * k, CODES=scales[0] is not dy, ROWS=_ROWS, BLOCKS=_BLOCKS, num_warps=4,
            enable_fp_fusion=False,
        )  # fmt: skip
    return out


@fake(silu_mul_backward_op)
def _(dy, gate, gate_scales, up, up_scales):
    return torch.empty(gate.shape[0], 2 * gate.shape[1], dtype=dy.dtype, device=dy.device)


@implements("triton", VERSION)
def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``reference.activation.silu_mul``; halves of one fused projection are read in place."""
    check_gate_up(gate, up)
    y, _, _ = silu_mul_op(as_matrix(gate), as_matrix(up), True, False, False, SCALE_FLOOR)
    return y.view(gate.shape)


@implements("triton", VERSION)
def silu_mul_quantise(
    gate: torch.Tensor, up: torch.Tensor, scale_format: ScaleFormat = "fp32", scale_floor: float = SCALE_FLOOR
) -> Quantised:
    """``reference.fused.silu_mul_quantise``: one read of gate and up, nothing but codes and scales written."""
    check_gate_up(gate, up)
    _, codes, scales = silu_mul_op(
        as_matrix(gate), as_matrix(up), False, True, scale_format == "ue8m0", scale_floor
    )
    return Quantised(codes, scales, "1x128", scale_format)


@implements("triton", VERSION)
def silu_mul_backward(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``reference.activation.silu_mul_backward``: (dgate, dup), the two halves of one [M, 2K] matrix."""
    check_gate_up(gate, up)
    both = silu_mul_backward_op(as_matrix(dy), as_matrix(gate), None, as_matrix(up), None)
    dgate, dup = both.chunk(2, -1)
    return dgate.view(gate.shape), dup.view(gate.shape)


@implements("triton", VERSION)
def silu_mul_saving(
    gate: torch.Tensor, up: torch.Tensor, scale_format: ScaleFormat = "fp32", scale_floor: float = SCALE_FLOOR
) -> tuple[torch.Tensor, Quantised, Quantised]:
    """``reference.fused.silu_mul_saving``: gate and up are read once for the product and for their codes."""
    check_gate_up(gate, up)
    check_quantisable("silu_mul_saving", as_matrix(gate), scale_format, scale_floor)
    y, gate_codes, gate_scales, up_codes, up_scales = silu_mul_saving_op(
        as_matrix(gate), as_matrix(up), scale_format == "ue8m0", scale_floor
    )
    saved = Quantised(gate_codes, gate_scales, "1x128", scale_format)
    return y.view(gate.shape), saved, Quantised(up_codes, up_scales, "1x128", scale_format)


@implements("triton", VERSION)
def silu_mul_backward_saved(
    dy: torch.Tensor, gate: Quantised, up: Quantised
) -> tuple[torch.Tensor, torch.Tensor]:
    """``reference.fused.silu_mul_backward_saved``: codes are read in place of gate and up."""
    if gate.kind != "1x128" or up.kind != "1x128" or gate.scales.stride() != up.scales.stride():
        raise ValueError(
            "silu_mul_backward_saved: gate and up must be what silu_mul_saving returned, 1x128 codes whose scales have "
            f"one layout; got {gate.kind} {gate.scales.stride()} and {up.kind} {up.scales.stride()}"
        )
    both = silu_mul_backward_op(as_matrix(dy), gate.codes, gate.scales, up.codes, up.scales)
    dgate, dup = both.chunk(2, -1)
    return dgate.view(dy.shape), dup.view(dy.shape)


__all__ = ["silu_mul", "silu_mul_backward", "silu_mul_backward_saved", "silu_mul_quantise", "silu_mul_saving"]
