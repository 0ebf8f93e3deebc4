"""SiLU(gate) * up and its backward for bf16, packed by fours, with the codes of their results in both directions.

The results themselves are never written: of the forward's product, and of the gradients of gate and up side by side,
the GEMMs that follow read 1x128 codes and 128x1 codes only. A program holds 128 x 128 of them, rounded to bf16, and
both sets of scales.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from precision_kernels.reference.formats import BLOCK
from precision_kernels.triton.numerics import INTERPRETED, exp, fast, reciprocal, silu_bf16
from precision_kernels.triton.packed import is_packable, multiply, pack, quads, unpack
from precision_kernels.triton.packed_codes import put_both

_WIDTH = tl.constexpr(32)
"""Quads of a tile's row: one 1x128 block."""


@triton.jit
def _one_plus_exp(x):
    """1 + `numerics.exp` for x a negated widened bf16, on a GPU only: wherever a fused multiply-add changes no bit."""
    x = tl.minimum(
        tl.maximum(x, -88.0, propagate_nan=tl.PropagateNan.ALL), 89.0, propagate_nan=tl.PropagateNan.ALL
    )
    shifted = tl.fma(x, 1.4426950408889634, 12582912.0)
    k = shifted - 12582912.0
    r = tl.fma(k, -0.693359375, x) - k * -2.1219444005469057e-4
    p = tl.fma(r, 1.9875691500e-4, 1.3981999507e-3)
    p = tl.fma(p, r, 8.3334519073e-3)
    p = tl.fma(p, r, 4.1665795894e-2)
    p = tl.fma(p, r, 1.6666665459e-1) * r
    p = (p + 5.0000001201e-1) * r * r + r + 1.0
    power = ((shifted.to(tl.int32, bitcast=True) << 23) + 0x3F800000).to(tl.float32, bitcast=True)
    return tl.fma(p, power, 1.0)


@triton.jit
def sigmoid(g):
    """1 / (1 + exp(-g)) for g a widened bf16, with the bits of the definition's IEEE arithmetic.

    On a GPU fused multiply-adds and an approximate reciprocal with one Newton step take half the instructions: equal
    for all 65 536 inputs (tests/kernels/test_gpu_arithmetic.py). The step runs on a sixteenth of the denominator, whose
    reciprocal is normal.
    """
    if INTERPRETED:
        return tl.div_rn(tl.full(g.shape, 1.0, tl.float32), exp(-g) + 1.0)
    denominator = _one_plus_exp(-g)
    part = denominator * 0.0625
    r = reciprocal(part)
    r = tl.fma(r, tl.fma(-part, r, 1.0), r) * 0.0625
    return tl.where(denominator == float("inf"), 0.0, r)


@triton.jit
def _silu(g):
    """An fp32 that rounds to the bf16 of the definition, for g a widened bf16."""
    if INTERPRETED:
        return tl.div_rn(g, exp(-g) + 1.0)
    return silu_bf16(g)


@triton.jit
def _product(gate, up):
    """round(round(silu(gate)) * up) of four bf16."""
    a, b, c, d = unpack(gate)
    return multiply(pack(_silu(a), _silu(b), _silu(c), _silu(d)), up)


@triton.jit
def _slope(dy, g, u, s):
    """fp32 gradient of gate, s = sigmoid(g)."""
    return dy * u * (s * (1.0 + g * (1.0 - s)))


@triton.jit
def _gradients(dy, gate, up):
    """(dgate, dup) of four bf16."""
    d0, d1, d2, d3 = unpack(dy)
    g0, g1, g2, g3 = unpack(gate)
    u0, u1, u2, u3 = unpack(up)
    s0, s1, s2, s3 = sigmoid(g0), sigmoid(g1), sigmoid(g2), sigmoid(g3)
    dup = multiply(dy, pack(g0 * s0, g1 * s1, g2 * s2, g3 * s3))
    dgate = pack(
        _slope(d0, g0, u0, s0), _slope(d1, g1, u1, s1), _slope(d2, g2, u2, s2), _slope(d3, g3, u3, s3)
    )
    return dgate, dup


@triton.jit
def _load(x, row, columns, M, x_m):
    return tl.load(x + row[:, None] * x_m + columns[None, :], (row < M)[:, None], 0)


@triton.jit
def _forward_kernel(
    gate, up, codes, scales, words, scales_t, M, K, gate_m, up_m, scale_b, word_k, floor, UE8M0: tl.constexpr
):
    row = tl.program_id(1).to(tl.int64) * 128 + tl.arange(0, 32) * 4
    columns = (tl.program_id(0) * _WIDTH + tl.arange(0, _WIDTH)).to(tl.int64)
    a = _product(_load(gate, row, columns, M, gate_m), _load(up, row, columns, M, up_m))
    b = _product(_load(gate, row + 1, columns, M, gate_m), _load(up, row + 1, columns, M, up_m))
    c = _product(_load(gate, row + 2, columns, M, gate_m), _load(up, row + 2, columns, M, up_m))
    d = _product(_load(gate, row + 3, columns, M, gate_m), _load(up, row + 3, columns, M, up_m))
    first = tl.program_id(0) * 128
    put_both(a, b, c, d, row, first, codes, scales, words, scales_t, M, K, scale_b, word_k, floor, UE8M0)


@triton.jit
def _read_and_differentiate(dy, gate, up, row, columns, M, dy_m, gate_m, up_m):
    return _gradients(
        _load(dy, row, columns, M, dy_m),
        _load(gate, row, columns, M, gate_m),
        _load(up, row, columns, M, up_m),
    )


@triton.jit
def _backward_kernel(
    dy, gate, up, codes, scales, words, scales_t, M, K, dy_m, gate_m, up_m, scale_b, word_k, floor,
    UE8M0: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64) * 128 + tl.arange(0, 32) * 4
    columns = (tl.program_id(0) * _WIDTH + tl.arange(0, _WIDTH)).to(tl.int64)
    a, e = _read_and_differentiate(dy, gate, up, row, columns, M, dy_m, gate_m, up_m)
    b, f = _read_and_differentiate(dy, gate, up, row + 1, columns, M, dy_m, gate_m, up_m)
    c, g = _read_and_differentiate(dy, gate, up, row + 2, columns, M, dy_m, gate_m, up_m)
    d, h = _read_and_differentiate(dy, gate, up, row + 3, columns, M, dy_m, gate_m, up_m)
    first = tl.program_id(0) * 128
    put_both(a, b, c, d, row, first, codes, scales, words, scales_t, M, 2 * K, scale_b, word_k, floor, UE8M0)
    put_both(
        e, f, g, h, row, K + first, codes, scales, words, scales_t, M, 2 * K, scale_b, word_k, floor, UE8M0
    )


def accepts(floor: float, *matrices: torch.Tensor) -> bool:
    """Whether the kernels take these: packable bf16 matrices [M, K], K a multiple of 128."""
    return is_packable(*matrices) and matrices[0].shape[1] % BLOCK == 0 and fast(matrices[0].dtype, floor)


def product(gate, up, outputs, ue8m0: bool, floor: float) -> None:
    """Fill ``outputs`` (codes, scales, words, scales_t as of `packed_quantise.launch`) for silu(gate) * up [M, K]."""
    codes, scales, words, scales_t = outputs
    m, k = gate.shape
    _forward_kernel[(k // BLOCK, triton.cdiv(m, BLOCK))](
        quads(gate), quads(up), codes.view(torch.int32), scales, words, scales_t, m, k, gate.stride(0) // 4,
        up.stride(0) // 4, scales.stride(1), words.stride(0), floor, UE8M0=ue8m0, num_warps=4, maxnreg=168,
        enable_fp_fusion=False,
    )  # fmt: skip


def gradients(dy, gate, up, outputs, ue8m0: bool, floor: float) -> None:
    """Fill ``outputs`` for (dgate | dup) [M, 2K]."""
    codes, scales, words, scales_t = outputs
    m, k = gate.shape
    _backward_kernel[(k // BLOCK, triton.cdiv(m, BLOCK))](
        quads(dy), quads(gate), quads(up), codes.view(torch.int32), scales, words, scales_t, m, k,
        dy.stride(0) // 4, gate.stride(0) // 4, up.stride(0) // 4, scales.stride(1), words.stride(0), floor,
        UE8M0=ue8m0, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip


__all__ = ["accepts", "gradients", "product", "sigmoid"]
