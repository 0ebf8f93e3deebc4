"""The GPU's short cuts against IEEE arithmetic, over every input they can get: scales, codes, SiLU, bf16 pairs."""

from __future__ import annotations

import importlib

import pytest
import torch
import triton
import triton.language as tl

from precision_kernels.reference import exact
from precision_kernels.triton import numerics, packed
from tests.edge_cases import assert_same_bits, generator, normal

pytestmark = pytest.mark.gpu
CUDA = "cuda"
SMALLEST = 2.0**-126


def _count(kernel, grid: tuple[int, ...], **constants) -> int:
    """Mismatches that a kernel adds up."""
    mismatches = torch.zeros(1, dtype=torch.int32, device=CUDA)
    kernel[grid](mismatches, **constants, enable_fp_fusion=False)
    return int(mismatches)


@triton.jit
def _scale_kernel(mismatches, FLOOR: tl.constexpr, BLOCK: tl.constexpr):
    bits = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    amax = bits.to(tl.float32, bitcast=True)
    expected = tl.maximum(tl.div_rn(amax, amax * 0.0 + 448.0), FLOOR)
    wrong = numerics.block_scale(amax, FLOOR, False) != expected
    tl.atomic_add(mismatches, tl.sum((wrong & (bits < 0x7F800000)).to(tl.int32), 0))


def test_scales_of_every_amax():
    """amax / 448 as product and correction is the IEEE quotient for all 2^31 non-negative fp32 numbers."""
    assert _count(_scale_kernel, (2**31 // 4096,), FLOOR=SMALLEST, BLOCK=4096) == 0


@triton.jit
def _code_kernel(
    mismatches, FP16: tl.constexpr, UE8M0: tl.constexpr, FLOOR: tl.constexpr, BLOCK: tl.constexpr
):
    """Every 16-bit value of program_id(1) against the 16-bit amax of program_id(0)."""
    a = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if FP16:
        amax = a.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        v = at.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        amax = (a << 16).to(tl.float32, bitcast=True)
        v = (at << 16).to(tl.float32, bitcast=True)
    scale = tl.zeros((BLOCK,), tl.float32) + numerics.block_scale(amax, FLOOR, UE8M0)
    fast = numerics.encode_e4m3(numerics.divide_by_scale(v, scale, True)).to(tl.uint8, bitcast=True)
    exact = numerics.encode_e4m3(tl.div_rn(v, scale)).to(tl.uint8, bitcast=True)
    possible = (at & 0x7FFF) <= a
    tl.atomic_add(mismatches, tl.sum(((fast != exact) & possible).to(tl.int32), 0))


@pytest.mark.parametrize("ue8m0", [False, True], ids=["fp32", "ue8m0"])
@pytest.mark.parametrize("fp16", [False, True], ids=["bf16", "fp16"])
def test_codes_of_every_amax_and_value(fp16, ue8m0):
    """Codes by the two-term reciprocal are those of IEEE division for every pair of 16-bit amax and value <= amax."""
    largest = 0x7C00 if fp16 else 0x7F80
    assert _count(_code_kernel, (largest, 32), FP16=fp16, UE8M0=ue8m0, FLOOR=SMALLEST, BLOCK=2048) == 0


@triton.jit
def _significand_kernel(mismatches, SIGNIFICANDS: tl.constexpr, EXPONENT: tl.constexpr, BLOCK: tl.constexpr):
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    scale = (b | 0x3F800000).to(tl.float32, bitcast=True)
    wrong = tl.zeros((BLOCK,), tl.int32)
    for i in range(SIGNIFICANDS):
        v = tl.zeros((BLOCK,), tl.float32) + (1.0 + i.to(tl.float32) / SIGNIFICANDS) * EXPONENT
        fast = numerics.encode_e4m3(numerics.divide_by_scale(v, scale, True)).to(tl.uint8, bitcast=True)
        exact = numerics.encode_e4m3(tl.div_rn(v, scale)).to(tl.uint8, bitcast=True)
        wrong += ((fast != exact) & (b != 0x7FFFFF)).to(tl.int32)
    tl.atomic_add(mismatches, tl.sum(wrong, 0))


@pytest.mark.parametrize("significands", [128, 1024], ids=["bf16", "fp16"])
def test_codes_of_every_scale_significand(significands):
    """A policy's floor may have any significand: codes agree for all but the one that `fast` refuses."""
    for exponent in (8, 0, -5, -6, -7, -8, -9, -10):
        constants = {"SIGNIFICANDS": significands, "EXPONENT": 2.0**exponent, "BLOCK": 1024}
        assert _count(_significand_kernel, (2**23 // 1024,), **constants) == 0, exponent
    assert numerics.fast(torch.bfloat16, SMALLEST)
    assert not numerics.fast(torch.bfloat16, 2.0**-40 * (2 - 2.0**-23))


def test_codes_at_the_edges_of_the_range():
    """Blocks near fp32's smallest and largest numbers, where a quotient could underflow, have the right codes."""
    triton_quantise = importlib.import_module("precision_kernels.triton.quantise")
    quantise = importlib.import_module("precision_kernels.reference.quantise")
    x = normal(64, 256)
    for exponent in (-126, -120, -100, -81, -79, 90, 126):
        scaled = (x * 2.0**exponent).to(torch.bfloat16)
        expected = quantise.quantise_both(scaled)
        for name, actual, wanted in zip(
            ("1x128", "128x1"), triton_quantise.quantise_both(scaled.to(CUDA)), expected, strict=True
        ):
            assert_same_bits(actual.codes, wanted.codes, f"{name} 2^{exponent}")
            assert_same_bits(actual.scales, wanted.scales, f"{name} 2^{exponent}")


def test_silu_of_every_bf16():
    """`silu_bf16` rounds to the definition's bf16 for all 65 536 inputs."""
    activation = importlib.import_module("precision_kernels.triton.activation")
    g = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(-1, 128)
    expected = (g.float() / exact.exp(-g.float()).add_(1.0)).to(torch.bfloat16)
    actual = activation.silu_mul(g.to(CUDA), torch.ones_like(g, device=CUDA))
    assert_same_bits(actual, expected)


@triton.jit
def _sigmoid_kernel(g, out, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, numerics.sigmoid_bf16(tl.load(g + at).to(tl.float32)))


def test_sigmoid_of_every_bf16():
    """`sigmoid_bf16` is the fp32 of the definition for all 65 536 inputs."""
    g = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    actual = torch.empty(2**16, device=CUDA)
    _sigmoid_kernel[(64,)](g.to(CUDA), actual, BLOCK=1024, enable_fp_fusion=False)
    assert_same_bits(actual, exact.exp(-g.float()).add_(1.0).reciprocal_())


@triton.jit
def _pair_kernel(x, y, mismatches, MULTIPLY: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a, b = tl.load(x + at), tl.load(y + at)
    a0, a1, a2, a3 = packed.unpack(a)
    b0, b1, b2, b3 = packed.unpack(b)
    if MULTIPLY:
        # x times 1 is rounded to itself before the product with the weight.
        r0, r1, r2, r3 = packed.unpack(packed.normalise(a, 1.0, b))
        e0, e1, e2, e3 = a0 * b0, a1 * b1, a2 * b2, a3 * b3
    else:
        r0, r1, r2, r3 = packed.unpack(packed.add(a, b))
        e0, e1, e2, e3 = a0 + b0, a1 + b1, a2 + b2, a3 + b3
    wrong = _differ(r0, e0) + _differ(r1, e1) + _differ(r2, e2) + _differ(r3, e3)
    tl.atomic_add(mismatches, tl.sum(wrong, 0))


@triton.jit
def _differ(result, exact):
    rounded = exact.to(tl.bfloat16).to(tl.float32)
    same = result.to(tl.int32, bitcast=True) == rounded.to(tl.int32, bitcast=True)
    return ((rounded == rounded) & (same == 0)).to(tl.int32)


@pytest.mark.parametrize("multiply", [False, True], ids=["add", "multiply"])
def test_bf16_pair_instructions_round_once(multiply):
    """10^9 random bf16 pairs, of all exponents and of neighbouring ones, give the fp32 result rounded to bf16."""
    g = torch.Generator(CUDA).manual_seed(1)
    wrong = torch.zeros(1, dtype=torch.int32, device=CUDA)
    for round_ in range(16):
        x = torch.randint(-(2**15), 2**15, (2**26,), generator=g, device=CUDA, dtype=torch.int32)
        y = torch.randint(-(2**15), 2**15, x.shape, generator=g, device=CUDA, dtype=torch.int32)
        if round_ % 2:  # y within 16 binary orders of x, or of 2^-130 / x: the smallest products
            near = y % 4096 - 2048
            y = ((0x3E00 - (x & 0x7FFF) if multiply else x & 0x7FFF) + near).clamp(0, 0x7F7F) | (y & 0x8000)
        pairs = [t.to(torch.int16).view(torch.int64) for t in (x, y)]
        _pair_kernel[(2**24 // 1024,)](*pairs, wrong, MULTIPLY=multiply, BLOCK=1024, enable_fp_fusion=False)
    assert int(wrong) == 0


def test_wide_norms_and_both_quantisers_use_packed_arithmetic():
    """What these tests are about runs: bf16 matrices are packed, other inputs are not."""
    wide = importlib.import_module("precision_kernels.triton.wide_norm")
    tile = importlib.import_module("precision_kernels.triton.packed_quantise")
    x = torch.randn(4, 4096, generator=generator(0)).to(CUDA, torch.bfloat16)
    assert wide.accepts(x, x, x[0], SMALLEST)
    assert tile.accepts(x, SMALLEST)
    for other in (x.half(), x[:, 1:], x.t()):
        assert not tile.accepts(other, SMALLEST)
