"""Rotary position embedding of :mod:`precision_kernels.reference.rotary`: q and k, and a copy of v, in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from precision_kernels.declaration import implements
from precision_kernels.reference.rotary import check_rotary
from precision_kernels.registration import fake, operator
from precision_kernels.triton.launch import VERSION, cdiv, next_power_of_2
from precision_kernels.triton.numerics import round_to, widen

_TOKENS, _WARPS = 8, 2
"""8192 tokens of 48 heads of 128 took 0.054 ms, with 4 tokens and one warp 0.064; 0.047 are their bytes (H200)."""


@triton.jit
def _rotate(
    x, out, tokens, head, cos, sin, mask, T, x_t, x_h, out_t, D, HALF, PAIRS: tl.constexpr, REST: tl.constexpr
):
    # Both elements of a pair are with one thread, so the rotation needs no exchange.
    pairs = tl.arange(0, PAIRS)[None, :]
    source = x + tokens[:, None] * x_t + head * x_h
    target = out + tokens[:, None] * out_t + head * D
    x1 = widen(tl.load(source + pairs, mask, 0.0))
    x2 = widen(tl.load(source + HALF + pairs, mask, 0.0))
    tl.store(target + pairs, round_to(x1 * cos - x2 * sin, out.dtype.element_ty), mask)
    tl.store(target + HALF + pairs, round_to(x2 * cos + x1 * sin, out.dtype.element_ty), mask)
    # Elements beyond the rotated ones are copied.
    if REST > 0:
        rest = 2 * HALF + tl.arange(0, REST)[None, :]
        kept = (tokens < T)[:, None] & (rest < D)
        tl.store(target + rest, tl.load(source + rest, kept), kept)


@triton.jit
def _rotary_kernel(
    q, k, v, q_out, k_out, v_out, positions, table, T, H, HKV, D, HALF, q_t, q_h, k_t, k_h, v_t, v_h, q_out_t, k_out_t,
    v_out_t, SIGN: tl.constexpr, TOKENS: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    # A program per 8 tokens and one head of q, k or v (2 warps; `_TOKENS` has the measurement).
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    pairs = tl.arange(0, PAIRS)[None, :]
    mask = (tokens < T)[:, None] & (pairs < HALF)
    head = tl.program_id(1)
    # cos and sin of the tokens into registers; the table is small and stays in the cache between heads.
    if head < H + HKV:
        row = tl.load(positions + tokens, tokens < T, 0)[:, None] * (2 * HALF)
        cos = widen(tl.load(table + row + pairs, mask, 0.0))
        sin = widen(tl.load(table + row + HALF + pairs, mask, 0.0)) * SIGN
        if head < H:
            _rotate(q, q_out, tokens, head, cos, sin, mask, T, q_t, q_h, q_out_t, D, HALF, PAIRS, REST)
        else:
            _rotate(k, k_out, tokens, head - H, cos, sin, mask, T, k_t, k_h, k_out_t, D, HALF, PAIRS, REST)
    else:
        # A head of v is copied as it is: the joint product that holds it need not be kept.
        head -= H + HKV
        columns = tl.arange(0, WIDTH)[None, :]
        inside = (tokens < T)[:, None] & (columns < D)
        copied = tl.load(v + tokens[:, None] * v_t + head * v_h + columns, inside)
        tl.store(v_out + tokens[:, None] * v_out_t + head * D + columns, copied, inside)


def _launch(
    sources: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], positions: torch.Tensor,
    cos_sin: torch.Tensor, sign: float,
) -> None:  # fmt: skip
    """q and k of ``sources`` rotated, and v, if there is one, as it is, to ``outputs`` [T, heads, D], whose heads are
    contiguous.
    """
    (q, k), (tokens, heads, d) = sources[:2], outputs[0].shape
    v, copied = (sources[2], outputs[2]) if len(sources) == 3 else (k, outputs[1])
    half = cos_sin.shape[-1] // 2
    if tokens:
        _rotary_kernel[(cdiv(tokens, _TOKENS), sum(x.shape[1] for x in sources))](
            q, k, v, outputs[0], outputs[1], copied, positions, cos_sin, tokens, heads, k.shape[1], d, half,
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), outputs[0].stride(0),
            outputs[1].stride(0), copied.stride(0), SIGN=sign, TOKENS=_TOKENS, PAIRS=next_power_of_2(half),
            REST=next_power_of_2(d - 2 * half) if d > 2 * half else 0, WIDTH=next_power_of_2(d), num_warps=_WARPS,
            enable_fp_fusion=False,
        )  # fmt: skip


@operator("rotary")
def rotary_op(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, sign: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [T, H, D], k [T, Hkv, D], contiguous heads -> both rotated by ``sign`` times their positions' angles."""
    outputs = _like(q), _like(k)
    _launch((q, k), outputs, positions, cos_sin, sign)
    return outputs


def _like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@fake(rotary_op)
def _(q, k, positions, cos_sin, sign):
    return _like(q), _like(k)


@operator("rotary_and_copy")
def rotary_and_copy_op(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    sign: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `rotary_op`, and v [T, Hkv, D] as it is."""
    outputs = _like(q), _like(k), _like(v)
    _launch((q, k, v), outputs, positions, cos_sin, sign)
    return outputs


@fake(rotary_and_copy_op)
def _(q, k, v, positions, cos_sin, sign):
    return _like(q), _like(k), _like(v)


@operator("rotary_joint")
def rotary_joint_op(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    sign: float,
) -> torch.Tensor:
    """As `rotary_and_copy_op`, all three side by side: [T, (H + 2 Hkv) D]."""
    out = _joint(q, k)
    _launch((q, k, v), out.view(len(q), -1, q.shape[2]).split([q.shape[1], k.shape[1], k.shape[1]], 1), positions,
            cos_sin, sign)  # fmt: skip
    return out


def _joint(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return torch.empty(len(q), (q.shape[1] + 2 * k.shape[1]) * q.shape[2], dtype=q.dtype, device=q.device)


@fake(rotary_joint_op)
def _(q, k, v, positions, cos_sin, sign):
    return _joint(q, k)


def _heads(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _table(cos_sin: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return positions.contiguous(), cos_sin.contiguous()


@implements("triton", VERSION)
def rotary(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    v: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """``reference.rotary.rotary``: q [T, H, D], k and v [T, Hkv, D], positions int64 [T], table [P, R]."""
    check_rotary(q, k, cos_sin)
    positions, cos_sin = _table(cos_sin, positions)
    if v is None:
        return rotary_op(_heads(q), _heads(k), positions, cos_sin, 1.0)
    return rotary_and_copy_op(_heads(q), _heads(k), _heads(v), positions, cos_sin, 1.0)


@implements("triton", VERSION)
def rotary_backward(
    dq: torch.Tensor, dk: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``reference.rotary.rotary_backward``: the rotation by the opposite angle."""
    positions, cos_sin = _table(cos_sin, positions)
    return rotary_op(_heads(dq), _heads(dk), positions, cos_sin, -1.0)


@implements("triton", VERSION)
def rotary_backward_joint(
    dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
) -> torch.Tensor:
    """``reference.rotary.rotary_backward_joint``: written once, where the joint q/k/v projection reads it."""
    positions, cos_sin = _table(cos_sin, positions)
    return rotary_joint_op(_heads(dq), _heads(dk), _heads(dv), positions, cos_sin, -1.0)


__all__ = ["rotary", "rotary_backward", "rotary_backward_joint"]
