"""Alignment, the fixed summation tree, exp and log: accuracy, exactness, and independence of where a value
stands.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from precision_kernels.reference import exact
from precision_kernels.reference.formats import FP8
from tests.edge_cases import FINITE_VALUE_CASES, assert_same_bits, layouts, normal, value_case, value_cases


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_aligned_blocks_are_23_bit_integers_near_the_input(dtype: torch.dtype) -> None:
    """align(x) / grid is an integer of magnitude <= 2^23 and within half a grid step of x / grid, for every
    block.
    """
    for case in FINITE_VALUE_CASES:
        x = value_case(case, 5, 576, dtype)
        aligned = exact.align(x)
        for start in range(0, 576, 128):
            block, original = aligned[:, start : start + 128], x[:, start : start + 128].double()
            amax = original.abs().amax(-1, keepdim=True)
            grid = 2.0 ** (torch.ceil(torch.log2(amax.clamp(min=2.0**-126))) - 23)
            units = block / grid
            assert torch.equal(units, units.round()), case
            assert float(units.abs().max()) <= 2**23, case
            assert bool(((block - original).abs() <= grid / 2).all()), case


def test_alignment_is_idempotent_and_stays_in_the_input_dtype() -> None:
    """A cache may store aligned values in the compute dtype: converting back loses nothing, aligning again
    does nothing.
    """
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for case in FINITE_VALUE_CASES:
            aligned = exact.align(value_case(case, 3, 192, dtype))
            assert_same_bits(aligned.to(dtype).double(), aligned, case)
            assert_same_bits(exact.align(aligned.to(dtype)), aligned, case)


def test_block_products_are_exact() -> None:
    """An fp64 product of aligned 128-blocks equals the rational sum, in any order of the 128 terms."""
    for case in FINITE_VALUE_CASES:
        a, b = (
            exact.align(value_case(case, 2, 128, seed=1)),
            exact.align(value_case("normal", 3, 128, seed=2)),
        )
        product = a @ b.T
        shuffled = torch.randperm(128, generator=torch.Generator().manual_seed(3))
        assert_same_bits(a[:, shuffled] @ b[:, shuffled].T, product, case)
        for i, j in ((0, 0), (1, 2)):
            terms = zip(a[i].tolist(), b[j].tolist(), strict=True)
            truth = sum((Fraction(x) * Fraction(y) for x, y in terms), Fraction(0))
            assert Fraction(product[i, j].item()) == truth, case


def test_the_largest_possible_block_product_is_exact() -> None:
    """128 products of 2^23 * 2^23 reach 2^53, the last integer that fp64 counts to without a gap."""
    a = torch.full((1, 128), 2.0**23).double()
    assert (a @ a.T).item() == 2.0**53
    assert ((a - 1) @ a.T).item() == 128 * (2**23 - 1) * 2**23


def test_widened_codes_equal_the_library_conversion() -> None:
    """All 256 codes, NaN included, convert like codes.double(); also under flush-to-zero."""
    everything = torch.arange(256, dtype=torch.uint8).view(FP8)
    assert_same_bits(exact.widen(everything), everything.double())
    finite = everything[torch.isfinite(everything.float())]
    expected = finite.double()
    assert torch.set_flush_denormal(True)
    try:
        assert_same_bits(exact.widen(finite), expected, "flush to zero")
    finally:
        torch.set_flush_denormal(False)


def test_lane_sum_follows_its_order() -> None:
    """The sum equals a scalar fp32 loop: elements 2048 apart one after the other, then neighbours in pairs."""

    def fold(values: list[np.float32]) -> np.float32:
        size = 1 << max(0, len(values) - 1).bit_length()
        values = values + [np.float32(0)] * (size - len(values))
        while len(values) > 1:
            values = [values[i] + values[i + 1] for i in range(0, len(values), 2)]
        return values[0]

    for k in (1, 2, 3, 127, 128, 129, 576, 2048, 2049, 4096, 10944):
        x = value_case("60 binary orders of magnitude", 1, k)[0]
        values = list(x.numpy())
        lanes = values[:2048]
        for i in range(2048, k):
            lanes[i % 2048] = lanes[i % 2048] + values[i]
        assert exact.lane_sum(x).item() == float(fold(lanes)), k
    assert exact.lane_sum(torch.zeros(2, 0)).tolist() == [0.0, 0.0]


def test_lane_sum_ignores_appended_zeros_and_layout() -> None:
    """Zeros at the end, strides and the other rows of a batch change no bit."""
    for k in (1, 5, 64, 129, 2000, 4304):
        x = normal(7, k)
        expected = exact.lane_sum(x)
        assert_same_bits(exact.lane_sum(torch.nn.functional.pad(x, (0, 300))), expected, f"padded {k}")
        for name, view in layouts(x):
            assert_same_bits(exact.lane_sum(view), expected, f"{name} {k}")
            assert_same_bits(exact.lane_sum(view[3:4]), expected[3:4], f"{name} alone {k}")


def test_exp_is_within_two_ulp_and_saturates() -> None:
    """Two ulp of e^x where e^x is a normal number below 2^127.5; 0 below, inf above, NaN for NaN."""
    x = torch.linspace(-87.3, 88.3, 400_001)
    truth = x.double().exp()
    ulp = torch.pow(2.0, torch.floor(torch.log2(truth)) - 23)
    assert float(((exact.exp(x).double() - truth).abs() / ulp).max()) <= 2.0
    special = torch.tensor([-math.inf, -1e30, -88.0, -0.0, 0.0, 88.4, 1e30, math.inf, math.nan])
    expected = torch.tensor([0.0, 0.0, 0.0, 1.0, 1.0, math.inf, math.inf, math.inf, math.nan])
    assert_same_bits(exact.exp(special), expected)


def test_exp_is_its_written_sequence_of_roundings() -> None:
    """The bits of the docstring's formula evaluated in numpy, one fp32 rounding per operation."""
    f = np.float32
    x = torch.linspace(-88.5, 89.5, 20_001)
    r = np.clip(x.numpy(), f(-88), f(89))
    k = np.rint(r * f(1.4426950408889634))
    r = (r - k * f(0.693359375)) - k * f(-2.1219444005469057e-4)
    p = r * f(1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = (p + f(c)) * r
    power = ((k.astype(np.int32) + 127) << 23).view(np.float32)
    assert_same_bits(exact.exp(x), torch.from_numpy(((p * r + r) + f(1)) * power))


def test_log_is_correctly_rounded_almost_everywhere() -> None:
    """Within 0.501 ulp of ln x over all magnitudes (one fp64-to-fp32 rounding), exact at 1."""
    x = torch.cat(
        (
            torch.linspace(1.0, 1e6, 200_001),
            torch.logspace(-37, 38, 200_001),
            torch.linspace(0.99, 1.01, 1001),
        )
    )
    truth = x.double().log()
    ulp = torch.pow(2.0, torch.floor(torch.log2(truth.abs().clamp(min=1e-30))) - 23)
    assert float(((exact.log(x).double() - truth).abs() / ulp).max()) <= 0.501
    assert exact.log(torch.ones(1)).item() == 0.0


@pytest.mark.parametrize("function", [exact.exp, lambda x: exact.log(x.abs() + 0.1)], ids=["exp", "log"])
def test_elementwise_functions_do_not_see_position_or_stride(function) -> None:
    """An element's bits are those it has alone, at every offset of a vector, in any layout (torch.exp fails
    this).
    """
    x = normal(1, 97, std=20.0)
    alone = torch.cat([function(x[:, i : i + 1].clone()) for i in range(97)], 1)
    assert_same_bits(function(x), alone, "vector")
    for offset in range(17):
        assert_same_bits(function(x[:, offset:]), alone[:, offset:], f"offset {offset}")
    for name, view in layouts(x):
        assert_same_bits(function(view), alone, name)


def test_special_values_pass_through_alignment() -> None:
    """Rows without inf or NaN keep their bits whatever other rows hold; inf and NaN survive in their own row."""
    for name, x in value_cases(5, 192):
        aligned = exact.align(x)
        for i in range(5):
            assert_same_bits(exact.align(x[i : i + 1]), aligned[i : i + 1], name)
        assert bool((~torch.isfinite(aligned[~torch.isfinite(x)])).all()), name
