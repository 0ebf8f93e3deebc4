"""Rotary position embedding of :mod:`precision_kernels.reference.rotary`: q and k in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from precision_kernels.reference.rotary import _check
from precision_kernels.registration import fake, operator
from precision_kernels.triton.launch import cdiv, next_power_of_2
from precision_kernels.triton.numerics import round_to, widen

_TOKENS = 4


@triton.jit
def _rotate(
    x, out, tokens, head, cos, sin, mask, T, x_t, x_h, out_t, D, HALF, PAIRS: tl.constexpr, REST: tl.constexpr
):
    pairs = tl.arange(0, PAIRS)[None, :]
    source = x + tokens[:, None] * x_t + head * x_h
    target = out + tokens[:, None] * out_t + head * D
    x1 = widen(tl.load(source + pairs, mask, 0.0))
    x2 = widen(tl.load(source + HALF + pairs, mask, 0.0))
    tl.store(target + pairs, round_to(x1 * cos - x2 * sin, out.dtype.element_ty), mask)
    tl.store(target + HALF + pairs, round_to(x2 * cos + x1 * sin, out.dtype.element_ty), mask)
    if REST > 0:
        rest = 2 * HALF + tl.arange(0, REST)[None, :]
        kept = (tokens < T)[:, None] & (rest < D)
        tl.store(target + rest, tl.load(source + rest, kept), kept)


@triton.jit
def _rotary_kernel(
    q, k, q_out, k_out, positions, table, T, H, HKV, D, HALF, q_t, q_h, k_t, k_h, SIGN: tl.constexpr,
    TOKENS: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    pairs = tl.arange(0, PAIRS)[None, :]
    mask = (tokens < T)[:, None] & (pairs < HALF)
    row = tl.load(positions + tokens, tokens < T, 0)[:, None] * (2 * HALF)
    cos = widen(tl.load(table + row + pairs, mask, 0.0))
    sin = widen(tl.load(table + row + HALF + pairs, mask, 0.0)) * SIGN
    head = tl.program_id(1)
    if head < H:
        _rotate(q, q_out, tokens, head, cos, sin, mask, T, q_t, q_h, H * D, D, HALF, PAIRS, REST)
    else:
        _rotate(k, k_out, tokens, head - H, cos, sin, mask, T, k_t, k_h, HKV * D, D, HALF, PAIRS, REST)


@operator("rotary")
def rotary_op(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, sign: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [T, H, D], k [T, Hkv, D], contiguous heads -> both rotated by ``sign`` times their positions' angles."""
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    tokens, heads, d = q.shape
    half = cos_sin.shape[-1] // 2
    if tokens:
        _rotary_kernel[(cdiv(tokens, _TOKENS), heads + k.shape[1])](
            q, k, q_out, k_out, positions, cos_sin, tokens, heads, k.shape[1], d, half, q.stride(0), q.stride(1),
            k.stride(0), k.stride(1), SIGN=sign, TOKENS=_TOKENS, PAIRS=next_power_of_2(half),
            REST=next_power_of_2(d - 2 * half) if d > 2 * half else 0, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return q_out, k_out


@fake(rotary_op)
def _(q, k, positions, cos_sin, sign):
    return torch.empty(q.shape, dtype=q.dtype, device=q.device), torch.empty(
        k.shape, dtype=k.dtype, device=k.device
    )


@triton.jit
def _joint_kernel(
    q, k, v, out, positions, table, T, H, HKV, D, HALF, q_t, q_h, k_t, k_h, v_t, v_h, SIGN: tl.constexpr,
    TOKENS: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    pairs = tl.arange(0, PAIRS)[None, :]
    mask = (tokens < T)[:, None] & (pairs < HALF)
    out_t = (H + 2 * HKV) * D
    head = tl.program_id(1)
    if head < H + HKV:
        row = tl.load(positions + tokens, tokens < T, 0)[:, None] * (2 * HALF)
        cos = widen(tl.load(table + row + pairs, mask, 0.0))
        sin = widen(tl.load(table + row + HALF + pairs, mask, 0.0)) * SIGN
        if head < H:
            _rotate(q, out, tokens, head, cos, sin, mask, T, q_t, q_h, out_t, D, HALF, PAIRS, REST)
        else:
            behind = out + H * D
            _rotate(k, behind, tokens, head - H, cos, sin, mask, T, k_t, k_h, out_t, D, HALF, PAIRS, REST)
    else:
        columns = tl.arange(0, WIDTH)[None, :]
        inside = (tokens < T)[:, None] & (columns < D)
        copied = tl.load(v + tokens[:, None] * v_t + (head - H - HKV) * v_h + columns, inside)
        tl.store(out + tokens[:, None] * out_t + head * D + columns, copied, inside)


@operator("rotary_joint")
def rotary_joint_op(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    sign: float,
) -> torch.Tensor:
    """As `rotary_op`, both results and v [T, Hkv, D] beside each other: [T, (H + 2 Hkv) D]."""
    tokens, heads, d = q.shape
    kv, half = k.shape[1], cos_sin.shape[-1] // 2
    out = torch.empty(tokens, (heads + 2 * kv) * d, dtype=q.dtype, device=q.device)
    if tokens:
        _joint_kernel[(cdiv(tokens, _TOKENS), heads + 2 * kv)](
            q, k, v, out, positions, cos_sin, tokens, heads, kv, d, half, q.stride(0), q.stride(1), k.stride(0),
            k.stride(1), v.stride(0), v.stride(1), SIGN=sign, TOKENS=_TOKENS, PAIRS=next_power_of_2(half),
            REST=next_power_of_2(d - 2 * half) if d > 2 * half else 0, WIDTH=next_power_of_2(d),
            num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return out


@fake(rotary_joint_op)
def _(q, k, v, positions, cos_sin, sign):
    tokens, heads, d = q.shape
    return torch.empty(tokens, (heads + 2 * k.shape[1]) * d, dtype=q.dtype, device=q.device)


def _heads(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _table(cos_sin: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return positions.contiguous(), cos_sin.contiguous()


def rotary(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``reference.rotary.rotary``: q [T, H, D] and k [T, Hkv, D] at positions int64 [T], table [P, R]."""
    _check(q, k, cos_sin)
    positions, cos_sin = _table(cos_sin, positions)
    return rotary_op(_heads(q), _heads(k), positions, cos_sin, 1.0)


def rotary_backward(
    dq: torch.Tensor, dk: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``reference.rotary.rotary_backward``: the rotation by the opposite angle."""
    positions, cos_sin = _table(cos_sin, positions)
    return rotary_op(_heads(dq), _heads(dk), positions, cos_sin, -1.0)


def rotary_backward_joint(
    dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
) -> torch.Tensor:
    """``reference.rotary.rotary_backward_joint``: written once, where the joint q/k/v projection reads it."""
    positions, cos_sin = _table(cos_sin, positions)
    return rotary_joint_op(_heads(dq), _heads(dk), _heads(dv), positions, cos_sin, -1.0)


__all__ = ["rotary", "rotary_backward", "rotary_backward_joint"]
