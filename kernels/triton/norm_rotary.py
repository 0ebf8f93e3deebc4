"""Per-head RMSNorm of q and k and their rotation in one launch: decode at few rows is bound by launches.

Bit-equal to `rms_norm` then `rotary`: the last level of the sum's tree (`numerics.fold`) adds the sums of a head's two
halves, whose elements are the pairs that the rotation turns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from precision_kernels.declaration import implements
from precision_kernels.reference.exact import SUM_LANES
from precision_kernels.reference.norm import check_norm
from precision_kernels.reference.rotary import check_rotary
from precision_kernels.registration import fake, operator
from precision_kernels.triton.launch import VERSION, cdiv
from precision_kernels.triton.norm import rms_norm
from precision_kernels.triton.numerics import fold, round_to, widen
from precision_kernels.triton.rotary import rotary

_TOKENS = 4


@triton.jit
def _turned(
    x, weight, out, tokens, head, cos, sin, mask, x_t, x_h, out_t, eps, HALF: tl.constexpr, LOG2: tl.constexpr
):
    # The two halves of a head are loaded apart, so that a thread holds both elements of a rotated pair. One warp
    # holds four heads.
    pairs = tl.arange(0, HALF)[None, :]
    source = x + tokens[:, None] * x_t + head * x_h
    target = out + tokens[:, None] * out_t + head * (2 * HALF)
    dtype: tl.constexpr = x.dtype.element_ty
    x1, x2 = widen(tl.load(source + pairs, mask, 0.0)), widen(tl.load(source + HALF + pairs, mask, 0.0))
    # The norm's tree: its last level adds the sums of the halves.
    total = fold(x1 * x1, LOG2) + fold(x2 * x2, LOG2)
    r = tl.sqrt_rn(tl.div_rn(total, tl.full(total.shape, 2.0 * HALF, tl.float32)) + eps)
    r = tl.div_rn(tl.full(total.shape, 1.0, tl.float32), r)[:, None]
    # The roundings of `rms_norm`, then those of `rotary`; the norm's result is never in memory.
    n1, n2 = widen(round_to(x1 * r, dtype)), widen(round_to(x2 * r, dtype))
    z1 = widen(round_to(n1 * widen(tl.load(weight + pairs)), dtype))
    z2 = widen(round_to(n2 * widen(tl.load(weight + HALF + pairs)), dtype))
    tl.store(target + pairs, round_to(z1 * cos - z2 * sin, dtype), mask)
    tl.store(target + HALF + pairs, round_to(z2 * cos + z1 * sin, dtype), mask)


@triton.jit
def _norm_rotary_kernel(
    q, k, q_weight, k_weight, q_out, k_out, positions, table, T, H, HKV, q_t, q_h, k_t, k_h, eps,
    TOKENS: tl.constexpr, HALF: tl.constexpr, LOG2: tl.constexpr,
):  # fmt: skip
    # A program per four tokens and one head of q or k; one warp, for at few rows launches cost more than bandwidth.
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    pairs = tl.arange(0, HALF)[None, :]
    mask = (tokens < T)[:, None] & (pairs < HALF)
    # cos and sin of the tokens, in registers, shared by both halves.
    row = tl.load(positions + tokens, tokens < T, 0)[:, None] * (2 * HALF)
    cos = widen(tl.load(table + row + pairs, mask, 0.0))
    sin = widen(tl.load(table + row + HALF + pairs, mask, 0.0))
    head = tl.program_id(1)
    if head < H:
        _turned(q, q_weight, q_out, tokens, head, cos, sin, mask, q_t, q_h, H * 2 * HALF, eps, HALF, LOG2)
    else:
        _turned(
            k, k_weight, k_out, tokens, head - H, cos, sin, mask, k_t, k_h, HKV * 2 * HALF, eps, HALF, LOG2
        )


@operator("norm_rotary")
def norm_rotary_op(
    q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float,
    positions: torch.Tensor, cos_sin: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """q [T, H, D], k [T, Hkv, D] with contiguous heads, D a power of two, table [P, D]."""
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    tokens, heads, d = q.shape
    if tokens:
        _norm_rotary_kernel[(cdiv(tokens, _TOKENS), heads + k.shape[1])](
            q, k, q_weight, k_weight, q_out, k_out, positions, cos_sin, tokens, heads, k.shape[1], q.stride(0),
            q.stride(1), k.stride(0), k.stride(1), eps, TOKENS=_TOKENS, HALF=d // 2, LOG2=(d // 2).bit_length() - 1,
            num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return q_out, k_out


@fake(norm_rotary_op)
def _(q, k, q_weight, k_weight, eps, positions, cos_sin):
    return torch.empty(q.shape, dtype=q.dtype, device=q.device), torch.empty(
        k.shape, dtype=k.dtype, device=k.device
    )


def _fits(q: torch.Tensor, k: torch.Tensor, cos_sin: torch.Tensor) -> bool:
    """Whole heads are rotated, a head is a power of two, and heads are read where they lie."""
    d = q.shape[-1]
    return (
        q.dim() == k.dim() == 3
        and SUM_LANES >= cos_sin.shape[-1] == d >= 32
        and d & (d - 1) == 0
        and q.stride(-1) == k.stride(-1) == 1
    )


@implements("triton", VERSION)
def norm_rotary(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``reference.fused.norm_rotary``: one kernel for heads of 32, 64, 128, ... that are rotated whole, else three."""
    if not _fits(q, k, cos_sin):
        q, k = rotary(rms_norm(q, q_weight, eps)[0], rms_norm(k, k_weight, eps)[0], positions, cos_sin)
        return q, k
    check_norm("norm_rotary", q, q_weight)
    check_norm("norm_rotary", k, k_weight)
    check_rotary(q, k, cos_sin)
    weights = q_weight.contiguous(), k_weight.contiguous()
    return norm_rotary_op(q, k, *weights, eps, positions.contiguous(), cos_sin.contiguous())


__all__ = ["norm_rotary"]
