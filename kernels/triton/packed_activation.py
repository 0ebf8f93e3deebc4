"""SiLU(gate) * up for bf16, packed by fours, with the codes of the product in both directions.

The product itself is never written: the GEMMs that follow read its 1x128 codes and 128x1 codes only. A program holds
128 x 128 of it, rounded to bf16, and both sets of scales.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from precision_kernels.reference.formats import BLOCK
from precision_kernels.triton.numerics import INTERPRETED, exp, fast, silu_bf16
from precision_kernels.triton.packed import is_packable, multiply, pack, quads, unpack
from precision_kernels.triton.packed_codes import put_both

_WIDTH = tl.constexpr(32)
"""Quads of a tile's row: one 1x128 block."""


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


def accepts(floor: float, *matrices: torch.Tensor) -> bool:
    """Whether the kernels take these: packable bf16 matrices [M, K], K a multiple of 128."""
    return is_packable(*matrices) and matrices[0].shape[1] % BLOCK == 0 and fast(matrices[0].dtype, floor)


def product(gate, up, outputs, ue8m0: bool, floor: float) -> None:
    """Fill ``outputs`` (codes, scales, words, scales_t as of `packed_quantise.launch`) for silu(gate) * up [M, K]."""
    codes, scales, words, scales_t = outputs
    m, k = gate.shape
    _forward_kernel[(k // BLOCK, triton.cdiv(m, BLOCK))](
        quads(gate), quads(up), codes.view(torch.int32), scales, words, scales_t, m, k, gate.stride(0) // 4,
        up.stride(0) // 4, scales.stride(1), words.stride(0), floor, UE8M0=ue8m0, num_warps=8, maxnreg=128,
        enable_fp_fusion=False,
    )  # fmt: skip


__all__ = ["accepts", "product"]
