"""Triton GEMMs: block-scaled FP8 for the shapes that DeepGEMM refuses, and a row-invariant one for fp16, fp32 and bf16.

Both have one tile size, one loop over the contraction in ascending order and no split of it, so a row's bits cannot
depend on how many rows the call has. The FP8 GEMM follows ``reference.matmul`` block by block; it is close to it, not
bit-equal, for one reason: Hopper's FP8 tensor cores keep fewer than fp32's bits while they sum a 128-block (about 14),
where the reference sums exactly. Likewise the other GEMM sums in fp32 where the reference sums in fp64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from precision_kernels.declaration import implements
from precision_kernels.reference.formats import BLOCK, Quantised
from precision_kernels.reference.matmul import check_contraction, check_kinds
from precision_kernels.registration import fake, operator
from precision_kernels.triton.launch import VERSION, cdiv
from precision_kernels.triton.numerics import INTERPRETED, decode_e4m3, round_to, widen

_TILE_M, _TILE_N, _TILE_K = 64, 128, 64


@triton.jit
def _block_fp8_kernel(
    a, a_scales, b, b_scales, c, M, N, K, a_m, a_k, b_n, b_k, as_m, as_b, bs_n, bs_b, c_m,
    B_ROWS: tl.constexpr, ACCUMULATE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """c [M, N] (+)= a [M, K] @ b [N, K].T; a's scales [M, K/128], b's [N/B_ROWS, K/128]."""
    # A tile of 64 x 128 of c per program, four warps, 64 fp32 accumulators per thread. One tile for every shape: a
    # row's bits must not depend on M, so there is nothing to tune by the number of rows, and the contraction is not
    # split.
    rows = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    columns = tl.program_id(1).to(tl.int64) * BN + tl.arange(0, BN)
    ks = tl.arange(0, 128)
    acc = tl.zeros((BM, BN), tl.float32)
    out = c + rows[:, None] * c_m + columns[None, :]
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    # Main gradients: the sum starts from what is there, block by block as in the definition.
    if ACCUMULATE:
        acc = tl.load(out, inside, 0.0)
    # One step is one 128-block of the contraction, for which the scales are constant. Operands go through shared
    # memory, three steps under way.
    for block in range(tl.cdiv(K, 128)):
        k = block * 128 + ks
        x = tl.load(a + rows[:, None] * a_m + k[None, :] * a_k, (rows < M)[:, None] & (k < K)[None, :], 0.0)
        y = tl.load(
            b + columns[None, :] * b_n + k[:, None] * b_k, (columns < N)[None, :] & (k < K)[:, None], 0.0
        )
        # The sum over the block starts from zero, so that it is one fp32 number (of about 14 bits on Hopper's
        # tensor cores).
        if INTERPRETED:
            product = tl.dot(decode_e4m3(x), decode_e4m3(y), input_precision="ieee")
        else:
            product = tl.dot(x, y, input_precision="ieee")
        # Scaled outside of the tensor cores: acc + product * (scale_a * scale_b), in fp32 without FMA, blocks
        # ascending.
        row_scale = tl.load(a_scales + rows * as_m + block * as_b, rows < M, 0.0)
        column_scale = tl.load(b_scales + columns // B_ROWS * bs_n + block * bs_b, columns < N, 0.0)
        acc += product * (row_scale[:, None] * column_scale[None, :])
    tl.store(out, round_to(acc, c.dtype.element_ty), inside)


_block_fp8_one_kernel = triton.jit(_block_fp8_kernel.fn, do_not_specialize=("M", "N", "K"))
"""For one token or one row: `launch.jit_any_rows` says why. Longer contractions need their divisors compiled in."""


@triton.jit
def _invariant_kernel(
    x, w, y, M, N, K, x_m, x_k, w_n, w_k, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    # The tile of `_block_fp8_kernel`, whatever the number of rows.
    rows = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    columns = tl.program_id(1).to(tl.int64) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    # 64 elements of the contraction at a time (32 of fp32, which take twice the shared memory), added to fp32
    # accumulators in registers; ieee: fp32 operands are not cut to tf32.
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        a = tl.load(x + rows[:, None] * x_m + k[None, :] * x_k, (rows < M)[:, None] & (k < K)[None, :], 0.0)
        b = tl.load(
            w + columns[None, :] * w_n + k[:, None] * w_k, (columns < N)[None, :] & (k < K)[:, None], 0.0
        )
        if INTERPRETED:
            acc = tl.dot(widen(a), widen(b), acc, input_precision="ieee")
        else:
            acc = tl.dot(a, b, acc, input_precision="ieee")
    out = y + rows[:, None] * N + columns[None, :]
    tl.store(out, round_to(acc, y.dtype.element_ty), (rows < M)[:, None] & (columns < N)[None, :])


@operator("block_fp8_gemm", mutates=("out",))
def block_fp8_gemm_op(
    a: torch.Tensor, a_scales: torch.Tensor, b: torch.Tensor, b_scales: torch.Tensor, out: torch.Tensor,
    b_rows: int, accumulate: bool,
) -> None:  # fmt: skip
    """out [M, N] (+)= a [M, K] @ b [N, K].T for e4m3 codes of any strides; one b scale serves ``b_rows`` rows of b."""
    (m, k), n = a.shape, b.shape[0]
    if m and n:
        kernel = _block_fp8_one_kernel if 1 in (m, n, k) else _block_fp8_kernel
        kernel[(cdiv(m, _TILE_M), cdiv(n, _TILE_N))](
            a, a_scales, b, b_scales, out, m, n, k, *a.stride(), *b.stride(), *a_scales.stride(), *b_scales.stride(),
            out.stride(0), B_ROWS=b_rows, ACCUMULATE=accumulate, BM=_TILE_M, BN=_TILE_N,
            num_warps=4, num_stages=3, enable_fp_fusion=False,
        )  # fmt: skip


@fake(block_fp8_gemm_op)
def _(a, a_scales, b, b_scales, out, b_rows, accumulate):
    return None


@operator("invariant_gemm")
def invariant_gemm_op(x: torch.Tensor, w: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """x [M, K] @ w [N, K].T -> [M, N] in ``out_dtype``."""
    (m, k), n = x.shape, w.shape[0]
    y = torch.empty(m, n, dtype=out_dtype, device=x.device)
    if m and n:
        depth = 32 if x.dtype == torch.float32 else _TILE_K
        _invariant_kernel[(cdiv(m, _TILE_M), cdiv(n, _TILE_N))](
            x, w, y, m, n, k, *x.stride(), *w.stride(), BM=_TILE_M, BN=_TILE_N, BK=depth,
            num_warps=4, num_stages=3, enable_fp_fusion=False,
        )  # fmt: skip
    return y


@fake(invariant_gemm_op)
def _(x, w, out_dtype):
    return torch.empty(x.shape[0], w.shape[0], dtype=out_dtype, device=x.device)


@implements("triton", VERSION)
def block_fp8_matmul(a: Quantised, b: Quantised, out_dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """``reference.matmul.block_fp8_matmul``: a [M, K] (1x128) @ b [N, K].T (128x128) -> [M, N]."""
    check_kinds("block_fp8_matmul", a=(a, "1x128"), b=(b, "128x128"))
    check_contraction("block_fp8_matmul", "a columns", a.shape[1], "b columns", b.shape[1])
    out = torch.empty(a.shape[0], b.shape[0], dtype=out_dtype, device=a.codes.device)
    block_fp8_gemm_op(a.codes, a.scales, b.codes, b.scales, out, BLOCK, False)
    return out


@implements("triton", VERSION)
def dgrad_fp8_matmul(dy: Quantised, w: Quantised, out_dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """``reference.matmul.dgrad_fp8_matmul``: dy [M, N] (1x128) @ w [N, K] (128x128) -> [M, K]."""
    check_kinds("dgrad_fp8_matmul", dy=(dy, "1x128"), w=(w, "128x128"))
    check_contraction("dgrad_fp8_matmul", "dy columns", dy.shape[1], "w rows", w.shape[0])
    out = torch.empty(dy.shape[0], w.shape[1], dtype=out_dtype, device=dy.codes.device)
    codes = w.operands.get("transposed", w.codes)
    block_fp8_gemm_op(dy.codes, dy.scales, codes.t(), w.scales.t(), out, BLOCK, False)
    return out


@implements("triton", VERSION)
def wgrad_fp8_matmul(dy: Quantised, x: Quantised, out: torch.Tensor | None = None) -> torch.Tensor:
    """``reference.matmul.wgrad_fp8_matmul``: dy [M, N].T @ x [M, K], both 128x1, -> fp32 [N, K], added to ``out``."""
    check_kinds("wgrad_fp8_matmul", dy=(dy, "128x1"), x=(x, "128x1"))
    check_contraction("wgrad_fp8_matmul", "dy rows", dy.shape[0], "x rows", x.shape[0])
    accumulate = out is not None
    if out is None:
        out = torch.empty(dy.shape[1], x.shape[1], dtype=torch.float32, device=dy.codes.device)
    block_fp8_gemm_op(dy.codes.t(), dy.scales.t(), x.codes.t(), x.scales.t(), out, 1, accumulate)
    return out


def invariant_matmul(x: torch.Tensor, w: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """``reference.matmul.invariant_matmul`` with fp32 accumulation: x [M, K] @ w [N, K].T -> [M, N]."""
    if x.dim() != 2 or w.dim() != 2 or x.shape[1] != w.shape[1] or x.dtype != w.dtype:
        raise ValueError(
            "invariant_matmul: x [M, K] and w [N, K] of one dtype are needed, "
            f"got {x.dtype} {tuple(x.shape)} and {w.dtype} {tuple(w.shape)}"
        )
    return invariant_gemm_op(x, w, out_dtype or x.dtype)


__all__ = ["block_fp8_matmul", "dgrad_fp8_matmul", "invariant_matmul", "wgrad_fp8_matmul"]
