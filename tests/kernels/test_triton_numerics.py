"""The arithmetic under the Triton kernels, against torch: on a CPU through the interpreter, on a GPU as compiled."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from precision_kernels.reference import exact
from precision_kernels.reference.quantise import block_scales
from precision_kernels.triton import numerics
from tests.edge_cases import assert_same_bits, finite_codes, generator, normal

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK = 4096


@triton.jit
def _apply(x, y, OP: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + at)
    if OP == "widen":
        v = numerics.widen(v)
    elif OP == "round":
        v = numerics.round_to(v, y.dtype.element_ty)
    elif OP == "encode":
        v = numerics.encode_e4m3(v)
    elif OP == "decode":
        v = numerics.decode_e4m3(v)
    elif OP == "exp":
        v = numerics.exp(v)
    elif OP == "log":
        v = numerics.log(v)
    elif OP == "scale":
        v = numerics.block_scale(v, 1.1754943508222875e-38, False)
    elif OP == "scale_ue8m0":
        v = numerics.block_scale(v, 1.1754943508222875e-38, True)
    tl.store(y + at, v)


def apply(op: str, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``op`` of numerics on every element of x [n]."""
    n = x.numel()
    padded = torch.ones(-(-n // BLOCK) * BLOCK, dtype=torch.float32).to(x.dtype)
    padded[:n] = x
    padded = padded.to(DEVICE)
    y = torch.empty(padded.shape, dtype=dtype, device=DEVICE)
    _apply[(len(padded) // BLOCK,)](padded, y, OP=op, BLOCK=BLOCK, enable_fp_fusion=False)
    return y[:n].cpu()


def any_float(n: int, seed: int) -> torch.Tensor:
    """n fp32 numbers of every exponent, subnormals, infinities and NaN among them."""
    bits = torch.randint(-(2**31), 2**31 - 1, (n,), generator=generator(seed), dtype=torch.int64)
    return bits.to(torch.int32).view(torch.float32)


def halfway(dtype: torch.dtype) -> torch.Tensor:
    """fp32 midpoints between neighbouring finite numbers of a 16-bit dtype, and their fp32 neighbours."""
    numbers = torch.arange(0, 2**15 - 1, dtype=torch.int32).to(torch.int16).view(dtype).float()
    numbers = numbers[torch.isfinite(numbers)]
    middle = (numbers[1:].double() + numbers[:-1].double()).div(2).float()
    up, down = torch.nextafter(middle, middle * 2), torch.nextafter(middle, middle * 0)
    return torch.cat((middle, up, down, -middle))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_to_16_bits_is_to_nearest_even(dtype):
    """fp32 to bf16 and fp16 equals torch on every halfway case, its neighbours, and random bit patterns."""
    x = torch.cat((halfway(dtype), any_float(50_000, 1)))
    assert_same_bits(apply("round", x, dtype), x.to(dtype), str(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_widening_is_exact(dtype):
    """All 65 536 numbers of a 16-bit dtype widen to the fp32 number torch gives, subnormals included."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    assert_same_bits(apply("widen", x, torch.float32), x.float(), str(dtype))


def test_decoding_all_codes():
    """All 256 e4m3 codes decode to torch's numbers."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    padded = torch.zeros(BLOCK, dtype=torch.uint8)
    padded[:256] = codes.view(torch.uint8)
    decoded = apply("decode", padded.view(torch.float8_e4m3fn), torch.float32)[:256]
    assert_same_bits(decoded, codes.float())


def test_encoding_rounds_to_nearest_even_and_saturates():
    """Codes of every tie, its fp32 neighbours, random bit patterns and infinities equal torch's clamp and cast."""
    codes = finite_codes()
    middle = (codes[1:] + codes[:-1]) / 2
    ties = torch.cat((middle, torch.nextafter(middle, middle + 1), torch.nextafter(middle, middle - 1)))
    x = torch.cat(
        (ties, codes, any_float(50_000, 2), torch.tensor([float("inf"), -float("inf"), 464.0, 1e-10, -0.0]))
    )
    assert_same_bits(apply("encode", x, torch.float8_e4m3fn), x.clamp(-448, 448).to(torch.float8_e4m3fn))


def test_exp_is_the_reference():
    """e^x has the reference's bits over its range, at its edges, at infinities and NaN."""
    x = torch.cat((torch.linspace(-104, 100, 60_000), normal(1, 30_000)[0] * 1e-3))
    x = torch.cat(
        (
            x,
            torch.tensor(
                [0.0, -0.0, 88.0, 88.72284, 89.0, -87.3, -88.0, float("inf"), -float("inf"), float("nan")]
            ),
        )
    )
    assert_same_bits(apply("exp", x, torch.float32), exact.exp(x))


def test_log_is_the_reference():
    """log x has the reference's bits for normal numbers of every exponent."""
    x = any_float(60_000, 3).abs()
    x = x[torch.isfinite(x) & (x >= 2.0**-126)]
    x = torch.cat((x, torch.linspace(0.5, 2.0, 30_000)))
    assert_same_bits(apply("log", x, torch.float32), exact.log(x))


@pytest.mark.parametrize("scale_format", ["fp32", "ue8m0"])
def test_scales_are_the_reference(scale_format):
    """Scales from amax values of every size, on and beside powers of two, equal the reference's."""
    amax = any_float(50_000, 4).abs()
    powers = 448.0 * 2.0 ** torch.arange(-120, 110)
    amax = torch.cat(
        (amax[torch.isfinite(amax)], powers, torch.nextafter(powers, powers * 2), torch.zeros(3))
    )
    op = "scale" if scale_format == "fp32" else "scale_ue8m0"
    assert_same_bits(apply(op, amax, torch.float32), block_scales(amax.clone(), scale_format, 2.0**-126))


@triton.jit
def _fold(x, y, WIDTH: tl.constexpr, LOG2: tl.constexpr):
    rows = tl.arange(0, 4)
    v = tl.load(x + rows[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :])
    tl.store(y + rows, numerics.fold(v, LOG2))


@pytest.mark.parametrize("width", [16, 128, 1024, 2048])
def test_fold_is_the_reference_tree(width):
    """A row's sum has the bits of `lane_sum`, whichever lanes hold the row."""
    x = (
        normal(4, width, seed=width)
        * 2.0 ** torch.randint(-20, 20, (4, width), generator=generator(9)).float()
    )
    y = torch.empty(4, device=DEVICE)
    _fold[(1,)](x.to(DEVICE), y, WIDTH=width, LOG2=width.bit_length() - 1, enable_fp_fusion=False)
    assert_same_bits(y, exact.lane_sum(x))
