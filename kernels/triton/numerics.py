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

import triton
import triton.language as tl
from triton import knobs

INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))


def _repair_interpreter() -> None:
    """Let interpreted kernels loop to a runtime bound: numpy >= 2.4 refuses the int(one-element array) they rely on."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def repaired(tensor, scope) -> None:
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
def finite_magnitude(v):
    """|v| where v is finite, else 0: what counts for a block's amax."""
    magnitude = tl.abs(v)
    return tl.where(magnitude < float("inf"), magnitude, 0.0)


@triton.jit
def block_scale(amax, floor, UE8M0: tl.constexpr):
    """Scale of a block with largest finite magnitude ``amax`` (``reference.quantise.block_scales``)."""
    scale = tl.maximum(tl.div_rn(amax, amax * 0.0 + 448.0), floor)
    if UE8M0:
        bits = scale.to(tl.int32, bitcast=True)
        scale = ((bits + 0x007FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def divide_by_scale(v, scale, FAST: tl.constexpr):
    """v / scale rounded as IEEE division rounds it, as far as an e4m3 code can tell; ``scale`` broadcasts against v.

    ``FAST`` (16-bit inputs on a GPU) replaces the division by one reciprocal per block and a residual correction.
    That it gives the same code for every bf16 and fp16 significand and all 2^23 fp32 significands of the scale is
    checked exhaustively in ``tests/kernels/test_gpu_quantise.py``. Scales below 2^-80 are lifted by 2^40, exactly, so
    that the residual cannot underflow; the clamp keeps an infinite ``v`` from turning the residual into NaN.
    """
    if FAST and not INTERPRETED:
        lift = tl.where(scale < 8.271806125530277e-25, 1099511627776.0, 1.0)
        divisor = scale * lift
        reciprocal = tl.div_rn(divisor * 0.0 + 1.0, divisor)
        # Both factors are negated so that the residual of a zero is +0 and a negative zero keeps its sign.
        negated = v * -lift
        quotient = negated * -reciprocal
        quotient = tl.minimum(quotient, 512.0, propagate_nan=tl.PropagateNan.ALL)
        quotient = tl.maximum(quotient, -512.0, propagate_nan=tl.PropagateNan.ALL)
        return tl.fma(tl.fma(divisor, quotient, negated), -reciprocal, quotient)
    return tl.div_rn(v, tl.zeros(v.shape, tl.float32) + scale)


@triton.jit
def fold(v, LOG2: tl.constexpr):
    """Sum of v [R, 2**LOG2] over its last axis -> [R]: upper half added to lower half until one element is left.

    Each level sums an axis of two, which has only one result (IEEE addition commutes), whatever lanes hold the pair.
    """
    for _ in tl.static_range(LOG2):
        v = tl.sum(tl.reshape(v, (v.shape[0], 2, v.shape[1] // 2)), 1)
    return tl.reshape(v, (v.shape[0],))


@triton.jit
def exp(x):
    """e^x: ``reference.exact.exp``, the same multiplications and additions in the same order."""
    x = tl.where(x < -88.0, -88.0, x)
    x = tl.where(x > 89.0, 89.0, x)
    # Adding 1.5 * 2^23 rounds to an integer, to nearest even.
    k = (x * 1.4426950408889634 + 12582912.0) - 12582912.0
    r = (x - k * 0.693359375) - k * -2.1219444005469057e-4
    p = r * 1.9875691500e-4
    p = (p + 1.3981999507e-3) * r
    p = (p + 8.3334519073e-3) * r
    p = (p + 4.1665795894e-2) * r
    p = (p + 1.6666665459e-1) * r
    p = (p + 5.0000001201e-1) * r * r + r + 1.0
    power = ((k.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return p * power


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
