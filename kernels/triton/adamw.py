"""AdamW of :mod:`precision_kernels.reference.adamw` in one pass: every stored number is read and written once.

One launch for each tensor. A program has 8 blocks of 128 elements, so the scale of a block is known before its codes
are made. Tensors that are no multiple of 1 024 elements take the masked variant; the number of elements is not
compiled in (`triton.launch.jit_any_rows` says why).
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from precision_kernels.declaration import implements
from precision_kernels.reference.adamw import AdamWStep, check_adamw
from precision_kernels.reference.formats import BLOCK
from precision_kernels.reference.master import LowHalf
from precision_kernels.reference.moments import LEVELS, RANGE, Moment
from precision_kernels.registration import fake, operator
from precision_kernels.triton.launch import VERSION, cdiv
from precision_kernels.triton.numerics import round_to, widen

_ROWS = 8
_FIRST, _SECOND = tl.constexpr(float(LEVELS[False])), tl.constexpr(float(LEVELS[True]))
_FIRST_WHOLE, _SECOND_WHOLE = tl.constexpr(_FIRST.value**2), tl.constexpr(_SECOND.value**4)
_LOW, _HIGH = (tl.constexpr(bound) for bound in RANGE)


@triton.jit
def _mixed(h):
    """MurmurHash3's finaliser of uint32."""
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def _load(pointer, inside, FULL: tl.constexpr):
    if FULL:
        return tl.load(pointer)
    else:
        return tl.load(pointer, inside, 0)


@triton.jit
def _joined(high, rest, byte, bit):
    """fp32 of a bf16 number, its int16 remainder, and the byte whose bit says that -32768 is +32768."""
    rest = rest.to(tl.int32)
    tie = ((byte.to(tl.int32) >> bit) & 1) == 1
    rest = tl.where(tie & (rest == -32768), 32768, rest)
    return ((high.to(tl.int16, bitcast=True).to(tl.int32) << 16) + rest).to(tl.float32, bitcast=True)


@triton.jit
def _stochastic_bf16(v, bits):
    raised = ((v.to(tl.uint32, bitcast=True) + bits) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    finite = tl.abs(v) < float("inf")
    return tl.where(finite, raised, round_to(v, tl.bfloat16))


@triton.jit
def _values(stored, scale, BLOCKWISE: tl.constexpr, SQUARE: tl.constexpr):
    """What is stored, in fp32."""
    if not BLOCKWISE:
        return widen(stored)
    code = stored.to(tl.float32)
    power = code * code
    if SQUARE:
        return power * power * (scale * (1.0 / _SECOND_WHOLE))[:, None]
    else:
        return tl.where(code < 0.0, -power, power) * (scale * (1.0 / _FIRST_WHOLE))[:, None]


@triton.jit
def _codes(v, bits, SQUARE: tl.constexpr):
    """(codes as fp32, scales) of v [ROWS, 128]; bits: 16 random ones of each."""
    size = tl.minimum(tl.abs(v), _HIGH)
    scale = tl.maximum(tl.max(size, 1), _LOW)
    inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)[:, None]
    if SQUARE:
        y = (size * inverse) * _SECOND_WHOLE
        code = tl.minimum(tl.floor(tl.sqrt_rn(tl.sqrt_rn(y))), _SECOND - 1.0)
    else:
        y = (size * inverse) * _FIRST_WHOLE
        code = tl.minimum(tl.floor(tl.sqrt_rn(y)), _FIRST - 1.0)
    below, above = code * code, (code + 1.0) * (code + 1.0)
    if SQUARE:
        below, above = below * below, above * above
    chance = (bits.to(tl.float32) + 0.5) * 0.0000152587890625
    code = tl.where(chance * (above - below) < y - below, code + 1.0, code)
    if SQUARE:
        return tl.where(v > 0.0, tl.maximum(code, 1.0), 0.0), scale
    else:
        return tl.where(v < 0.0, -code, code), scale


@triton.jit
def _put(
    stored, scales, at, inside, row, v, bits, BLOCKWISE: tl.constexpr, STOCHASTIC: tl.constexpr,
    SQUARE: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Store a moment."""
    if BLOCKWISE:
        code, scale = _codes(v, bits, SQUARE)
        out = code.to(stored.dtype.element_ty)
        if FULL:
            tl.store(scales + row, scale)
        else:
            tl.store(scales + row, scale, tl.max(inside.to(tl.int32), 1) > 0)
    elif STOCHASTIC:
        out = _stochastic_bf16(v, bits)
    else:
        out = round_to(v, stored.dtype.element_ty)
    if FULL:
        tl.store(stored + at, out)
    else:
        tl.store(stored + at, out, inside)


@triton.jit
def _put_split(weight, low, ties, at, inside, tile, N, w, FULL: tl.constexpr):
    """Store fp32 w [ROWS, 128] in its two parts."""
    ROWS: tl.constexpr = w.shape[0]
    high = round_to(w, tl.bfloat16)
    rest = w.to(tl.int32, bitcast=True) - (high.to(tl.int16, bitcast=True).to(tl.int32) << 16)
    rest = tl.where(w != w, 0, rest)
    tie = rest == 32768
    rest = tl.where(tie, -32768, rest).to(tl.int16)
    bit = tl.arange(0, 8)[None, None, :]
    packed = tl.sum(tl.reshape(tie.to(tl.int32), (ROWS, 16, 8)) << bit, 2).to(tl.uint8)
    byte = tl.arange(0, ROWS)[:, None] * 16 + tl.arange(0, 16)[None, :]
    if FULL:
        tl.store(weight + at, high)
        tl.store(low + at, rest)
        tl.store(ties + tile // 8 + byte, packed)
    else:
        tl.store(weight + at, high, inside)
        tl.store(low + at, rest, inside)
        tl.store(ties + tile // 8 + byte, packed, tile + byte * 8 < N)


@triton.jit(do_not_specialize=("N", "key0", "key1"))
def _adamw_kernel(
    weight, low, ties, gradient, mean, mean_scales, square, square_scales, N,
    decay, rate1, beta2, rate2, correction, eps, size, scale, key0, key1,
    SPLIT: tl.constexpr, BLOCKWISE: tl.constexpr, STOCHASTIC: tl.constexpr, FULL: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0).to(tl.int64) * (ROWS * 128)
    column = tl.arange(0, 128)[None, :]
    at = tile + tl.arange(0, ROWS)[:, None] * 128 + column
    inside = at < N
    row = tile // 128 + tl.arange(0, ROWS)
    m_scale, v_scale = 0.0, 0.0
    if BLOCKWISE:
        m_scale = _load(mean_scales + row, row * 128 < N, FULL)
        v_scale = _load(square_scales + row, row * 128 < N, FULL)
    g = widen(_load(gradient + at, inside, FULL)) * scale
    m = _values(_load(mean + at, inside, FULL), m_scale, BLOCKWISE, False)
    v = _values(_load(square + at, inside, FULL), v_scale, BLOCKWISE, True)
    stored = _load(weight + at, inside, FULL)
    if SPLIT:
        w = _joined(stored, _load(low + at, inside, FULL), _load(ties + at // 8, inside, FULL), column % 8)
    else:
        w = widen(stored)
    m += (g - m) * rate1
    v = v * beta2 + (g * g) * rate2
    w = w * decay + tl.div_rn(m, tl.sqrt_rn(v) * correction + eps) * size
    if SPLIT:
        _put_split(weight, low, ties, at, inside, tile, N, w, FULL)
    elif FULL:
        tl.store(weight + at, round_to(w, weight.dtype.element_ty))
    else:
        tl.store(weight + at, round_to(w, weight.dtype.element_ty), inside)
    bits = at.to(tl.uint32)
    if BLOCKWISE or STOCHASTIC:
        first = _mixed(bits ^ key0.to(tl.uint32, bitcast=True))
        beyond = (tile >> 32).to(tl.uint32) * 0x9E3779B9 + key1.to(tl.uint32, bitcast=True)
        bits = _mixed(first + beyond)
    _put(mean, mean_scales, at, inside, row, m, bits & 0xFFFF, BLOCKWISE, STOCHASTIC, False, FULL)
    _put(square, square_scales, at, inside, row, v, bits >> 16, BLOCKWISE, STOCHASTIC, True, FULL)


@operator("adamw", mutates=("weight", "low", "ties", "mean", "mean_scales", "square", "square_scales"))
def adamw_op(
    weight: torch.Tensor, low: torch.Tensor, ties: torch.Tensor, gradient: torch.Tensor, mean: torch.Tensor,
    mean_scales: torch.Tensor, square: torch.Tensor, square_scales: torch.Tensor, stochastic: bool,
    decay: float, rate1: float, beta2: float, rate2: float, correction: float, eps: float, size: float,
    scale: float, key0: int, key1: int,
) -> None:  # fmt: skip
    """One update in place; low and ties have no elements for a weight that is not split, scales none where none are."""
    n = weight.numel()
    if not n:
        return
    _adamw_kernel[(cdiv(n, _ROWS * BLOCK),)](
        weight, low, ties, gradient, mean, mean_scales, square, square_scales, n,
        decay, rate1, beta2, rate2, correction, eps, size, scale, key0, key1,
        SPLIT=low.numel() > 0, BLOCKWISE=mean_scales.numel() > 0, STOCHASTIC=stochastic,
        FULL=n % (_ROWS * BLOCK) == 0, ROWS=_ROWS, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


@fake(adamw_op)
def _(
    weight, low, ties, gradient, mean, mean_scales, square, square_scales, stochastic,
    decay, rate1, beta2, rate2, correction, eps, size, scale, key0, key1,
):  # fmt: skip
    return None


@functools.cache
def _nothing(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """What stands for a tensor that a format has not."""
    return torch.empty(0, dtype=dtype, device=device)


def _signed(key: int) -> int:
    """32 bits as an int32, the type that Triton then always takes."""
    return key - (1 << 32) if key >> 31 else key


@implements("triton", VERSION)
@torch.no_grad()
def adamw(
    weight: torch.Tensor,
    low_half: LowHalf | None,
    gradient: torch.Tensor,
    mean: Moment,
    square: Moment,
    step: AdamWStep,
) -> None:
    """``reference.adamw.adamw``."""
    check_adamw(weight, low_half, gradient, mean, square)
    device = weight.device
    low, ties = low_half or (_nothing(device, torch.int16), _nothing(device, torch.uint8))
    scales = (_nothing(device, torch.float32) if m.scales is None else m.scales for m in (mean, square))
    mean_scales, square_scales = scales
    adamw_op(
        weight, low, ties, gradient.contiguous(), mean.values, mean_scales, square.values, square_scales,
        mean.format == "bfloat16_stochastic", *step[:-1], *map(_signed, step.keys),
    )  # fmt: skip


__all__ = ["adamw"]
