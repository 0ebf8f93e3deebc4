"""SiLU(gate) * up, and the gradients of gate and up, with their codes in both directions: what training's GEMMs read.

bf16 in whole blocks of 128 columns takes one launch, packed by fours: a program holds 128 x 128 of the product, or of
both gradients, rounded to bf16, and writes its 1x128 and 128x1 codes only. Anything else takes the kernels of both
steps, one after the other. The bits are the same.

A program of the backward makes both gradients, for they share the sigmoid, half of what either costs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from precision_kernels.declaration import implements
from precision_kernels.reference.activation import check_gate_up
from precision_kernels.reference.formats import BLOCK, FP8, SCALE_FLOOR, Quantised, ScaleFormat, blocks
from precision_kernels.reference.quantise import check_quantisable
from precision_kernels.registration import fake, operator
from precision_kernels.triton.activation import silu_mul_backward_op, silu_mul_op
from precision_kernels.triton.launch import VERSION, as_matrix, cdiv, jit_any_rows
from precision_kernels.triton.numerics import INTERPRETED, exp, fast, sigmoid_bf16, silu_bf16
from precision_kernels.triton.packed import is_packable, multiply, pack, quads, unpack
from precision_kernels.triton.quantise import aligned_scales, code_words, quantise_both_op, transposed_codes
from precision_kernels.triton.tile_codes import put_both

_WIDTH = tl.constexpr(32)
"""Quads of a tile's row: one 1x128 block."""
_WARPS, _REGISTERS = 4, 168
"""8192 x 14336 took 0.183 ms, with 8 warps of 80 registers 0.194; 0.165 are its bytes (H200)."""
_GRADIENT_WARPS, _GRADIENT_REGISTERS = 8, 128
"""8192 x 14336: 0.432 ms where two launches took 0.543; with 96 registers, and 42 words spilled, 0.503 (H200)."""


@triton.jit
def _silu(g):
    """An fp32 that rounds to the bf16 of the definition, for g a widened bf16."""
    if INTERPRETED:
        return tl.div_rn(g, exp(-g) + 1.0)
    return silu_bf16(g)


@triton.jit
def _product(gate, up, row, columns, M, gate_m, up_m):
    """round(round(silu(gate)) * up) of rows [32, 32 quads]; zero outside."""
    # Four bf16 of a row lie in one int64 register pair from the load on; gate is widened one quad at a time.
    inside = (row < M)[:, None]
    a, b, c, d = unpack(tl.load(gate + row[:, None] * gate_m + columns[None, :], inside, 0))
    right = tl.load(up + row[:, None] * up_m + columns[None, :], inside, 0)
    # SiLU is rounded by packing it, the product by the pair instruction that makes it.
    return multiply(pack(_silu(a), _silu(b), _silu(c), _silu(d)), right)


@jit_any_rows
def _product_kernel(
    gate, up, codes, scales, words, scales_t, M, K, gate_m, up_m, scale_b, word_k, floor, UE8M0: tl.constexpr
):
    # A tile of 128 x 128: as many rows as a 128x1 block has, as many columns as a 1x128 block. A thread holds the
    # same quads of rows 4i, 4i + 1, 4i + 2, 4i + 3 (a, b, c, d), so that it has the four codes of a word of the
    # transpose.
    row = tl.program_id(1).to(tl.int64) * 128 + tl.arange(0, 32) * 4
    columns = (tl.program_id(0) * _WIDTH + tl.arange(0, _WIDTH)).to(tl.int64)
    # The whole product is in registers, 64 of a thread's 168 (`_REGISTERS`: three programs of four warps fit a
    # multiprocessor).
    a = _product(gate, up, row, columns, M, gate_m, up_m)
    b = _product(gate, up, row + 1, columns, M, gate_m, up_m)
    c = _product(gate, up, row + 2, columns, M, gate_m, up_m)
    d = _product(gate, up, row + 3, columns, M, gate_m, up_m)
    # Scales and codes of both directions from these registers (`tile_codes.put_both`); the product is never in
    # memory.
    first = tl.program_id(0) * 128
    put_both(a, b, c, d, row, first, codes, scales, words, scales_t, M, K, scale_b, word_k, floor, UE8M0)


@triton.jit
def _sigmoid(g):
    """The definition's fp32, for g a widened bf16."""
    if INTERPRETED:
        return tl.div_rn(tl.full(g.shape, 1.0, tl.float32), exp(-g) + 1.0)
    return sigmoid_bf16(g)


@triton.jit
def _dgate(dy, g, u, sigmoid):
    return dy * u * (sigmoid * (1.0 + g * (1.0 - sigmoid)))


@triton.jit
def _gradients(dy, gate, up, row, columns, M, dy_m, gate_m, up_m):
    """(dgate, dup) of rows [32, 32 quads], rounded to bf16; zero outside."""
    # Quads as in `_product`; three operands are read, and only the two results outlive this function.
    inside = (row < M)[:, None]
    dy = tl.load(dy + row[:, None] * dy_m + columns[None, :], inside, 0)
    d0, d1, d2, d3 = unpack(dy)
    g0, g1, g2, g3 = unpack(tl.load(gate + row[:, None] * gate_m + columns[None, :], inside, 0))
    u0, u1, u2, u3 = unpack(tl.load(up + row[:, None] * up_m + columns[None, :], inside, 0))
    # The sigmoid is half of what either gradient costs, so both are made of it here.
    s0, s1, s2, s3 = _sigmoid(g0), _sigmoid(g1), _sigmoid(g2), _sigmoid(g3)
    dgate = pack(
        _dgate(d0, g0, u0, s0), _dgate(d1, g1, u1, s1), _dgate(d2, g2, u2, s2), _dgate(d3, g3, u3, s3)
    )
    return dgate, multiply(pack(g0 * s0, g1 * s1, g2 * s2, g3 * s3), dy)


@jit_any_rows
def _gradients_kernel(
    dy, gate, up, codes, scales, words, scales_t, M, K, dy_m, gate_m, up_m, scale_b, word_k, floor,
    UE8M0: tl.constexpr,
):  # fmt: skip
    # The tile of `_product_kernel`, twice: a to d are dgate, e to h are dup. Both in registers take 8 warps of 128
    # (`_GRADIENT_WARPS`); with 96 registers 42 words spilled.
    row = tl.program_id(1).to(tl.int64) * 128 + tl.arange(0, 32) * 4
    columns = (tl.program_id(0) * _WIDTH + tl.arange(0, _WIDTH)).to(tl.int64)
    a, e = _gradients(dy, gate, up, row, columns, M, dy_m, gate_m, up_m)
    b, f = _gradients(dy, gate, up, row + 1, columns, M, dy_m, gate_m, up_m)
    c, g = _gradients(dy, gate, up, row + 2, columns, M, dy_m, gate_m, up_m)
    d, h = _gradients(dy, gate, up, row + 3, columns, M, dy_m, gate_m, up_m)
    # One piece of code for both: unrolled it spills 46 words (0.509 ms).
    # Columns 0 to K - 1 of the result are dgate, K to 2K - 1 dup.
    for half in range(2):
        first = half * K + tl.program_id(0) * 128
        put_both(
            a, b, c, d, row, first, codes, scales, words, scales_t, M, 2 * K, scale_b, word_k, floor, UE8M0
        )
        a, b, c, d = e, f, g, h


def accepts(gate: torch.Tensor, up: torch.Tensor, floor: float) -> bool:
    """Whether one launch takes these matrices [M, K]: packable bf16, K a multiple of 128."""
    return (
        gate.numel() > 0 and is_packable(gate, up) and gate.shape[1] % BLOCK == 0 and fast(gate.dtype, floor)
    )


def _results(m: int, k: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Uninitialised 1x128 codes and scales, words of the 128x1 codes and their scales, for a matrix [M, K]."""
    codes = torch.empty(m, k, dtype=FP8, device=device)
    scales_t = torch.empty(blocks(m), k, dtype=torch.float32, device=device)
    return codes, aligned_scales(m, blocks(k), device), code_words(m, k, device), scales_t


@operator("silu_mul_quantise_both")
def silu_mul_quantise_both_op(
    gate: torch.Tensor, up: torch.Tensor, ue8m0: bool, floor: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """gate, up [M, K] with contiguous rows -> what `quantise_both_op` gives of their product."""
    if not accepts(gate, up, floor):
        y, _, _ = silu_mul_op(gate, up, True, False, ue8m0, floor)
        return quantise_both_op(y, ue8m0, floor)
    m, k = gate.shape
    codes, scales, words, scales_t = _results(m, k, gate.device)
    _product_kernel[(k // BLOCK, cdiv(m, BLOCK))](
        quads(gate), quads(up), codes.view(torch.int32), scales, words, scales_t, m, k, gate.stride(0) // 4,
        up.stride(0) // 4, scales.stride(1), words.stride(0), floor, UE8M0=ue8m0, num_warps=_WARPS,
        maxnreg=_REGISTERS, enable_fp_fusion=False,
    )  # fmt: skip
    return codes, scales, words.view(FP8).t()[:m], scales_t


@fake(silu_mul_quantise_both_op)
def _(gate, up, ue8m0, floor):
    return _fake(gate.shape[0], gate.shape[1], gate.device)


@operator("silu_mul_backward_quantise_both")
def silu_mul_backward_quantise_both_op(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, ue8m0: bool, floor: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """dy, gate, up [M, K] with contiguous rows -> what `quantise_both_op` gives of (dgate | dup) [M, 2K]."""
    if not (accepts(gate, up, floor) and is_packable(dy)):
        return quantise_both_op(silu_mul_backward_op(dy, gate, None, up, None), ue8m0, floor)
    m, k = gate.shape
    codes, scales, words, scales_t = _results(m, 2 * k, gate.device)
    _gradients_kernel[(k // BLOCK, cdiv(m, BLOCK))](
        quads(dy), quads(gate), quads(up), codes.view(torch.int32), scales, words, scales_t, m, k, dy.stride(0) // 4,
        gate.stride(0) // 4, up.stride(0) // 4, scales.stride(1), words.stride(0), floor, UE8M0=ue8m0,
        num_warps=_GRADIENT_WARPS, maxnreg=_GRADIENT_REGISTERS, enable_fp_fusion=False,
    )  # fmt: skip
    return codes, scales, words.view(FP8).t()[:m], scales_t


@fake(silu_mul_backward_quantise_both_op)
def _(dy, gate, up, ue8m0, floor):
    return _fake(gate.shape[0], 2 * gate.shape[1], gate.device)


def _fake(m: int, k: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    codes, scales, _, scales_t = _results(m, k, device)
    return codes, scales, transposed_codes(m, k, device), scales_t


def _quantised(outputs: tuple[torch.Tensor, ...], scale_format: ScaleFormat) -> tuple[Quantised, Quantised]:
    codes, scales, codes_t, scales_t = outputs
    rows = Quantised(codes, scales, "1x128", scale_format)
    return rows, Quantised(codes_t, scales_t, "128x1", scale_format)


@implements("triton", VERSION)
def silu_mul_quantise_both(
    gate: torch.Tensor, up: torch.Tensor, scale_format: ScaleFormat = "fp32", scale_floor: float = SCALE_FLOOR
) -> tuple[Quantised, Quantised]:
    """``reference.fused.silu_mul_quantise_both``; halves of one fused projection are read in place."""
    check_gate_up(gate, up)
    gate, up = as_matrix(gate), as_matrix(up)
    check_quantisable("silu_mul_quantise_both", gate, scale_format, scale_floor)
    outputs = silu_mul_quantise_both_op(gate, up, scale_format == "ue8m0", scale_floor)
    return _quantised(outputs, scale_format)


@implements("triton", VERSION)
def silu_mul_backward_quantise_both(
    dy: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    scale_format: ScaleFormat = "fp32",
    scale_floor: float = SCALE_FLOOR,
) -> tuple[Quantised, Quantised]:
    """``reference.fused.silu_mul_backward_quantise_both``; halves of one fused projection are read in place."""
    check_gate_up(gate, up)
    dy, gate, up = as_matrix(dy), as_matrix(gate), as_matrix(up)
    check_quantisable("silu_mul_backward_quantise_both", gate, scale_format, scale_floor)
    outputs = silu_mul_backward_quantise_both_op(dy, gate, up, scale_format == "ue8m0", scale_floor)
    return _quantised(outputs, scale_format)


__all__ = ["accepts", "silu_mul_backward_quantise_both", "silu_mul_quantise_both"]
