"""Arithmetic that every Triton kernel here shares: exact widening, rounding, amax, scales and reduction trees.

The kernels must agree bit for bit with :mod:`precision_kernels.reference` on the GPU, and under Triton's interpreter on
a CPU. Three things make that hold:

* nothing is contracted: every kernel is launched with ``enable_fp_fusion=False``, and divisions and square roots are
  the IEEE ones (``tl.div_rn``, ``tl.sqrt_rn``);
* sums are the explicit tree of ``reference.exact.lane_sum`` (:func:`fold`), so no compiler chooses an order, and
  padding a row with zeros does not change it;
* rounding to bf16 and e4m3 is to nearest even. Triton 3.6's interpreter does not round so (``runtime/interpreter.py``,
  ``_convert_float`` adds the first discarded bit and loses the carry), nor does it widen bf16 subnormals, therefore the
  interpreter takes the integer formulas below. ``tests/kernels/test_triton_numerics.py`` compares both with torch.
"""

from __future__ import annotations

import functools
import struct
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs

INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))


def _repair_interpreter() -> None:
    """Let interpreted kernels loop to a runtime bound: numpy >= 2.4 refuses the int(one-element array) they rely on."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def repaired(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = repaired


if INTERPRETED:
    _repair_interpreter()


@triton.jit
def widen(x):
    """Any floating dtype to fp32, exactly."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def round_to(v, dtype: tl.constexpr):
    """fp32 to ``dtype`` (fp32, fp16 or bf16), to nearest, ties to even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = v.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded)
        return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return v.to(dtype)


@triton.jit
def multiply(a, b):
    """a * b of one dtype, rounded to it once.

    bf16 pairs in one instruction: an fp32 product of bf16 numbers is exact, or so small that both round to zero alike.
    """
    if a.dtype == tl.bfloat16 and not INTERPRETED:
        return tl.inline_asm_elementwise(
            "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    return round_to(widen(a) * widen(b), a.dtype)


@triton.jit
def encode_e4m3(v):
    """fp32 to e4m3, to nearest, ties to even; beyond 448 and at infinity +-448, NaN stays NaN."""
    if INTERPRETED:
        bits = v.to(tl.uint32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
        # e4m3 subnormals are multiples of 2^-9, the spacing of fp32 numbers just above 2^14.
        tiny = (tl.abs(v) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
        code = tl.where(magnitude < 0x3C800000, tiny, normal)
        code = tl.where(magnitude > 0x43E00000, 0x7E, code)
        code = tl.where(magnitude > 0x7F800000, 0x7F, code) | ((bits >> 24) & 0x80)
        return code.to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    return v.to(tl.float8e4nv)


@triton.jit
def decode_e4m3(codes):
    """e4m3 to fp32, exactly."""
    if INTERPRETED:
        bits = codes.to(tl.uint8, bitcast=True).to(tl.uint32)
        magnitude = bits & 0x7F
        normal = ((magnitude + (120 << 3)) << 20).to(tl.float32, bitcast=True)
        tiny = magnitude.to(tl.float32) * 0.001953125
        value = tl.where(magnitude < 8, tiny, normal)
        value = tl.where(magnitude == 0x7F, float("nan"), value)
        sign = (bits & 0x80) << 24
        return (value.to(tl.uint32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    return codes.to(tl.float32)


@triton.jit
def encode_rows(a, b, c, d):
    """`encode_e4m3` of four fp32 tensors, packed in one int32 per element, ``a`` in the lowest byte."""
    if INTERPRETED:
        packed = encode_e4m3(d).to(tl.uint8, bitcast=True).to(tl.uint32)
        packed = (packed << 8) | encode_e4m3(c).to(tl.uint8, bitcast=True).to(tl.uint32)
        packed = (packed << 8) | encode_e4m3(b).to(tl.uint8, bitcast=True).to(tl.uint32)
        packed = (packed << 8) | encode_e4m3(a).to(tl.uint8, bitcast=True).to(tl.uint32)
        return packed.to(tl.int32, bitcast=True)
    return tl.inline_asm_elementwise(
        """{ .reg .b16 low, high;
        cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
        mov.b32 $0, {low, high}; }""",
        "=r,r,r,r,r",
        [a, b, c, d],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def ordered(v):
    """int32 that grows with \\|v\\| where v is finite and is negative where it is not; zero gives 2^23."""
    return (v.to(tl.int32, bitcast=True) & 0x7FFFFFFF) + 0x00800000


@triton.jit
def amax_of(largest):
    """fp32 largest finite magnitude from the maximum of :func:`ordered`."""
    return (tl.maximum(largest, 0x00800000) - 0x00800000).to(tl.float32, bitcast=True)


@triton.jit
def block_amax(v, AXIS: tl.constexpr):
    """Largest finite magnitude of v along an axis, 0 if there is none: a block's amax."""
    return amax_of(tl.max(ordered(v), AXIS))


@triton.jit
def block_scale(amax, floor, UE8M0: tl.constexpr):
    """Scale of a block with largest finite magnitude ``amax`` (``reference.quantise.block_scales``).

    On a GPU the division by 448 is a product with a residual correction, correctly rounded because 1/448 is (Markstein
    1990): equal for all 2^31 amax (tests/kernels/test_gpu_arithmetic.py).
    """
    if INTERPRETED:
        scale = tl.div_rn(amax, amax * 0.0 + 448.0)
    else:
        scale = amax * 0.002232142857142857
        scale = tl.fma(tl.fma(scale, -448.0, amax), 0.002232142857142857, scale)
    scale = tl.maximum(scale, floor)
    if UE8M0:
        bits = scale.to(tl.int32, bitcast=True)
        scale = ((bits + 0x007FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def reciprocal(x):
    """1 / x to one ulp, for 2^-126 <= x <= 2^126 and infinity; on a GPU only."""
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _exp2(x):
    """2^x to two ulp, zero below 2^-126; on a GPU only."""
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def reciprocal_terms(scale):
    """(high, low) whose sum is 1 / scale to 2^-45, for `times_terms`; under the interpreter the scale itself, twice.

    ``high`` is four steps below the approximate reciprocal, so ``low`` is positive and an infinite v gives infinity, a
    negative zero itself.
    """
    if INTERPRETED:
        return scale, scale
    high = (reciprocal(scale).to(tl.int32, bitcast=True) - 4).to(tl.float32, bitcast=True)
    error = tl.fma(-scale, high, 1.0)
    return high, high * tl.fma(error, error, error)


@triton.jit
def times_terms(v, high, low):
    """v / scale from the scale's `reciprocal_terms`, which broadcast against v; see `divide_by_scale`."""
    if INTERPRETED:
        return tl.div_rn(v, tl.zeros(v.shape, tl.float32) + high)
    return tl.fma(v, high, v * low)


@triton.jit
def divide_by_scale(v, scale, FAST: tl.constexpr):
    """v / scale rounded as IEEE division rounds it, as far as an e4m3 code can tell; ``scale`` broadcasts against v.

    ``FAST`` (16-bit inputs, `fast`) multiplies by 1 / scale as a sum of two numbers on a GPU, two instructions where
    IEEE division takes ten. Codes are equal for every pair of 16-bit amax and value, and for all 2^23 significands of a
    scale (tests/kernels/test_gpu_arithmetic.py).
    """
    if FAST and not INTERPRETED:
        high, low = reciprocal_terms(scale)
        return times_terms(v, high, low)
    return tl.div_rn(v, tl.zeros(v.shape, tl.float32) + scale)


@functools.cache
def fast(dtype: torch.dtype, floor: float) -> bool:
    """Whether `divide_by_scale` may multiply by a reciprocal: 16-bit values, scales that have a normal reciprocal.

    One significand of 2^23, all ones, is out: 2^-9 divided by it comes within 2^-48 of a tie between two codes.
    Quotients of 16-bit numbers by 448 never have it, a floor might.
    """
    (bits,) = struct.unpack("<I", struct.pack("<f", floor))
    return dtype != torch.float32 and floor < 2.0**60 and bits & 0x7FFFFF != 0x7FFFFF


@triton.jit
def fold(v, LOG2: tl.constexpr):
    """Sum of v [R, 2**LOG2] over its last axis -> [R]: neighbours are added until one is left.

    Each level sums an axis of two, which has only one result (IEEE addition commutes), whatever lanes hold the pair.
    The first levels stay in a thread's registers, where its elements are neighbours.
    """
    for _ in tl.static_range(LOG2):
        v = tl.sum(tl.reshape(v, (v.shape[0], v.shape[1] // 2, 2)), 2)
    return tl.reshape(v, (v.shape[0],))


@triton.jit
def exp(x):
    """e^x: ``reference.exact.exp``, the same multiplications and additions in the same order."""
    if INTERPRETED:
        x = tl.where(x < -88.0, -88.0, x)
        x = tl.where(x > 89.0, 89.0, x)
    else:
        x = tl.maximum(x, -88.0, propagate_nan=tl.PropagateNan.ALL)
        x = tl.minimum(x, 89.0, propagate_nan=tl.PropagateNan.ALL)
    # Adding 1.5 * 2^23 rounds to an integer, to nearest even.
    shifted = x * 1.4426950408889634 + 12582912.0
    k = shifted - 12582912.0
    r = (x - k * 0.693359375) - k * -2.1219444005469057e-4
    p = r * 1.9875691500e-4
    p = (p + 1.3981999507e-3) * r
    p = (p + 8.3334519073e-3) * r
    p = (p + 4.1665795894e-2) * r
    p = (p + 1.6666665459e-1) * r
    p = (p + 5.0000001201e-1) * r * r + r + 1.0
    # The low bits of 1.5 * 2^23 + k are k; shifted they leave nothing of the constant. k = 128 gives infinity.
    # The power of two as in `exp`.
    power = ((shifted.to(tl.int32, bitcast=True) << 23) + 0x3F800000).to(tl.float32, bitcast=True)
    return p * power


@triton.jit
def silu_bf16(g):
    """fp32 number that rounds to the bf16 that the definition of SiLU gives, for g a widened bf16; on a GPU only.

    2^x and the reciprocal are the GPU's approximations, a sixth of the definition's instructions. Such a number may be
    off by some fp32 ulp, which can matter for 65 536 inputs: all are compared (tests/kernels/test_gpu_arithmetic.py).
    """
    # Halved, a sum below 2^127 has a normal reciprocal. That of a larger one, g < -88, is flushed to the zero that the
    # definition's infinite e^-g gives.
    half = _exp2(tl.fma(g, -1.4426950408889634, -1.0)) + 0.5
    return (g * 0.5) * reciprocal(half)


@triton.jit
def sigmoid_bf16(g):
    """1 / (1 + e^-g) with the definition's fp32 bits, for g a widened bf16; on a GPU only.

    `exp` with multiply-adds where they change nothing, and one Newton step on an approximate reciprocal: all 65 536
    inputs are compared (tests/kernels/test_gpu_arithmetic.py). The sum is halved, so that its reciprocal is normal up
    to g = -88; for g below, e^-g is infinite by definition, and here the reciprocal is flushed to the same zero.
    """
    x = tl.maximum(-g, -80.0, propagate_nan=tl.PropagateNan.ALL)  # below -80 the sum 1 + e^x is 1 already
    x = tl.minimum(x, 89.0, propagate_nan=tl.PropagateNan.ALL)
    shifted = tl.fma(x, 1.4426950408889634, 12582912.0)
    k = shifted - 12582912.0
    r = tl.fma(k, -0.693359375, x) - k * -2.1219444005469057e-4
    p = tl.fma(r, 1.9875691500e-4, 1.3981999507e-3)
    p = tl.fma(p, r, 8.3334519073e-3)
    p = tl.fma(p, r, 4.1665795894e-2)
    p = tl.fma(p, r, 1.6666665459e-1)
    p = (p * r + 5.0000001201e-1) * r * r + r + 1.0
    power = ((shifted.to(tl.int32, bitcast=True) << 23) + 0x3F000000).to(tl.float32, bitcast=True)
    half = tl.fma(p, power, 0.5)
    twice = reciprocal(half)
    return tl.fma(twice, tl.fma(-half, twice, 1.0), twice) * 0.5


@triton.jit
def log(x):
    """Natural logarithm of positive normal fp32 numbers: ``reference.exact.log``, in fp64, rounded once."""
    bits = x.to(tl.int32, bitcast=True)
    e = (bits - 0x3F400000) >> 23
    m = (bits - (e << 23)).to(tl.float32, bitcast=True).to(tl.float64)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    p = tl.full(z.shape, 2.0 / 23, tl.float64)
    for i in tl.static_range(10, -1, -1):
        p = p * z + 2.0 / (2 * i + 1)
    return (e.to(tl.float64) * 0.6931471805599453 + p * s).to(tl.float32)
