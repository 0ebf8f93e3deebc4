"""Arithmetic on int64 that hold four neighbouring bf16 of a row: what keeps a row or a tile in few registers.

A bf16 that Triton holds as an element of its own takes a 32-bit register as soon as it is used twice, and two
instructions to widen; packed it takes half a register and one. Pair instructions round the exact sum or product once.
That is what the definitions give, whose fp32 sum or product of two bf16 numbers is exact, or rounds to the same bf16
(a sum whose smaller term lies below the larger one's half ulp; a product below 2^-133): compared on the GPU over all
exponents (tests/kernels/test_gpu_arithmetic.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from precision_kernels.triton.numerics import INTERPRETED, round_to


def is_packable(*tensors: torch.Tensor) -> bool:
    """Whether matrices can be read as int64: bf16, contiguous rows of whole quads, on 8-byte boundaries."""
    return all(
        t.dtype == torch.bfloat16
        and t.shape[-1] % 4 == 0
        and t.stride(-1) == 1
        and (t.dim() < 2 or t.stride(0) % 4 == 0)
        and t.data_ptr() % 8 == 0
        for t in tensors
    )


def quads(t: torch.Tensor) -> torch.Tensor:
    """A packable tensor as int64; one without elements as it is."""
    return t.view(torch.int64) if t.numel() else t


@triton.jit
def unpack(quad):
    """int64 of four bf16 -> four fp32, exactly."""
    low, high = quad.to(tl.int32), (quad >> 32).to(tl.int32)
    return (
        (low << 16).to(tl.float32, bitcast=True),
        (low & -65536).to(tl.float32, bitcast=True),
        (high << 16).to(tl.float32, bitcast=True),
        (high & -65536).to(tl.float32, bitcast=True),
    )


@triton.jit
def pack(a, b, c, d):
    """Four fp32 -> int64 of their roundings to bf16."""
    if INTERPRETED:
        packed = round_to(d, tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.uint64)
        packed = (packed << 16) | round_to(c, tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.uint64)
        packed = (packed << 16) | round_to(b, tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.uint64)
        packed = (packed << 16) | round_to(a, tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.uint64)
        return packed.to(tl.int64, bitcast=True)
    return tl.inline_asm_elementwise(
        """{ .reg .b32 low, high; cvt.rn.bf16x2.f32 low, $2, $1; cvt.rn.bf16x2.f32 high, $4, $3;
        mov.b64 $0, {low, high}; }""",
        "=l,r,r,r,r",
        [a, b, c, d],
        dtype=tl.int64,
        is_pure=True,
        pack=1,
    )


@triton.jit
def multiply(x, y):
    """Rounded products of four bf16 pairs."""
    if INTERPRETED:
        a, b, c, d = unpack(x)
        e, f, g, h = unpack(y)
        return pack(a * e, b * f, c * g, d * h)
    return tl.inline_asm_elementwise(
        """{ .reg .b32 a, b, c, d; mov.b64 {a, b}, $1; mov.b64 {c, d}, $2;
        mul.rn.bf16x2 a, a, c; mul.rn.bf16x2 b, b, d; mov.b64 $0, {a, b}; }""",
        "=l,l,l",
        [x, y],
        dtype=tl.int64,
        is_pure=True,
        pack=1,
    )


@triton.jit
def add(x, y):
    """Rounded sums of four bf16 pairs."""
    if INTERPRETED:
        a, b, c, d = unpack(x)
        e, f, g, h = unpack(y)
        return pack(a + e, b + f, c + g, d + h)
    return tl.inline_asm_elementwise(
        """{ .reg .b32 a, b, c, d; mov.b64 {a, b}, $1; mov.b64 {c, d}, $2;
        add.rn.bf16x2 a, a, c; add.rn.bf16x2 b, b, d; mov.b64 $0, {a, b}; }""",
        "=l,l,l",
        [x, y],
        dtype=tl.int64,
        is_pure=True,
        pack=1,
    )


@triton.jit
def normalise(x, rstd, weight):
    """round(round(x * rstd) * weight) for four bf16 x and weights."""
    if INTERPRETED:
        a, b, c, d = unpack(x)
        e, f, g, h = unpack(weight)
        a, b, c, d = unpack(pack(a * rstd, b * rstd, c * rstd, d * rstd))
        return pack(a * e, b * f, c * g, d * h)
    # Not pure: the compiler would unpack x once for both of its uses and hold it as fp32.
    return tl.inline_asm_elementwise(
        """{ .reg .b32 low, high, p, q, r, s, wl, wh; .reg .f32 a, b, c, d;
        mov.b64 {low, high}, $1; mov.b64 {wl, wh}, $3;
        shl.b32 p, low, 16; and.b32 q, low, 0xffff0000; shl.b32 r, high, 16; and.b32 s, high, 0xffff0000;
        mov.b32 a, p; mov.b32 b, q; mov.b32 c, r; mov.b32 d, s;
        mul.rn.f32 a, a, $2; mul.rn.f32 b, b, $2; mul.rn.f32 c, c, $2; mul.rn.f32 d, d, $2;
        cvt.rn.bf16x2.f32 low, b, a; cvt.rn.bf16x2.f32 high, d, c;
        mul.rn.bf16x2 low, low, wl; mul.rn.bf16x2 high, high, wh; mov.b64 $0, {low, high}; }""",
        "=l,l,r,l",
        [x, rstd, weight],
        dtype=tl.int64,
        is_pure=False,
        pack=1,
    )


@triton.jit
def lifted(quad):
    """Per 16-bit lane |x| + 2^7 as a signed integer: grows with |x|, negative where x is not finite."""
    if INTERPRETED:
        # 0x7FFF + 0x80 carries into no other lane.
        return (quad & 0x7FFF7FFF7FFF7FFF) + 0x0080008000800080
    return tl.inline_asm_elementwise(
        """{ .reg .b32 a, b; mov.b64 {a, b}, $1; and.b32 a, a, 0x7fff7fff; and.b32 b, b, 0x7fff7fff;
        add.u32 a, a, 0x00800080; add.u32 b, b, 0x00800080; mov.b64 $0, {a, b}; }""",
        "=l,l",
        [quad],
        dtype=tl.int64,
        is_pure=True,
        pack=1,
    )


@triton.jit
def lane(quad, i: tl.constexpr):
    """16-bit lane i, signed, as int32."""
    return (quad << (48 - 16 * i) >> 48).to(tl.int32)


@triton.jit
def larger(x, y):
    """Maximum of each signed 16-bit lane."""
    if INTERPRETED:
        best = tl.zeros(x.shape, tl.int64)
        for i in tl.static_range(4):
            m = tl.maximum(lane(x, i), lane(y, i))
            best = best | ((m & 0xFFFF).to(tl.int64) << (16 * i))
        return best
    return tl.inline_asm_elementwise(
        """{ .reg .b32 a, b, c, d; mov.b64 {a, b}, $1; mov.b64 {c, d}, $2;
        max.s16x2 a, a, c; max.s16x2 b, b, d; mov.b64 $0, {a, b}; }""",
        "=l,l,l",
        [x, y],
        dtype=tl.int64,
        is_pure=True,
        pack=1,
    )


@triton.jit
def largest_along(quad, AXIS: tl.constexpr):
    """`larger` of all along an axis."""
    if INTERPRETED:
        best = tl.max(lane(quad, 0), AXIS).to(tl.int64) & 0xFFFF
        for i in tl.static_range(1, 4):
            best = best | ((tl.max(lane(quad, i), AXIS).to(tl.int64) & 0xFFFF) << (16 * i))
        return best
    return tl.reduce(quad, AXIS, larger)


@triton.jit
def largest(quad):
    """`numerics.ordered` of the largest of four `lifted` lanes, except for rubbish in its low half."""
    if INTERPRETED:
        first = tl.maximum(lane(quad, 0), lane(quad, 1))
        return tl.maximum(first, tl.maximum(lane(quad, 2), lane(quad, 3))) << 16
    return tl.inline_asm_elementwise(
        """{ .reg .b32 a, b; mov.b64 {a, b}, $1; max.s16x2 a, a, b; shl.b32 b, a, 16; max.s32 $0, a, b; }""",
        "=r,l",
        [quad],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


__all__ = [
    "add",
    "is_packable",
    "lane",
    "larger",
    "largest",
    "largest_along",
    "lifted",
    "multiply",
    "normalise",
    "pack",
    "quads",
    "unpack",
]
