"""The quantisers against their written definition, computed element by element in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from precision_kernels import reference
from precision_kernels.reference import SCALE_FLOOR, Quantised
from precision_kernels.reference.formats import scale_shape
from tests.edge_cases import (
    FINITE_VALUE_CASES,
    VALUE_CASES,
    assert_same_bits,
    finite_codes,
    layouts,
    shapes,
    value_case,
    value_cases,
)

QUANTISERS = {
    "1x128": (reference.quantise_activation, (1, 128)),
    "128x1": (reference.quantise_columns, (128, 1)),
    "128x128": (reference.quantise_weight, (128, 128)),
}
CODES = finite_codes().numpy()


def nearest_code(x: np.ndarray) -> np.ndarray:
    """Round float32 |x| <= 448 to the nearest e4m3 number by search; a tie goes to the even significand."""
    upper = np.clip(np.searchsorted(CODES, x), 1, len(CODES) - 1)
    low, high = CODES[upper - 1].astype(np.float64), CODES[upper].astype(np.float64)
    wide = x.astype(np.float64)
    below, above = wide - low, high - wide
    # From 0 upwards numbers alternate between even and odd significands; index 126 is 0.
    low_is_even = (np.abs(upper - 1 - 126) % 2) == 0
    return np.where((below < above) | ((below == above) & low_is_even), low, high)


def by_definition(x: torch.Tensor, tile: tuple[int, int], scale_format: str) -> tuple[np.ndarray, np.ndarray]:
    """(code values as float64 with NaN, float32 scales) of the docstring of reference/quantise.py, block by
    block.
    """
    values = x.float().numpy()
    rows, columns = values.shape
    high, wide = tile
    codes = np.zeros((rows, columns))
    scales = np.zeros((-(-rows // high), -(-columns // wide)), np.float32)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = np.s_[i * high : (i + 1) * high, j * wide : (j + 1) * wide]
            block = values[place]
            finite = np.abs(block[np.isfinite(block)])
            amax = finite.max() if finite.size else np.float32(0)
            scale = max(amax / np.float32(448), np.float32(SCALE_FLOOR))
            if scale_format == "ue8m0":
                mantissa, exponent = np.frexp(scale)
                scale = np.float32(np.ldexp(1.0, exponent - 1 if mantissa == 0.5 else exponent))
            scales[i, j] = scale
            with np.errstate(invalid="ignore", over="ignore"):
                scaled = np.clip(block / scale, np.float32(-448), np.float32(448))
            codes[place] = np.where(np.isnan(scaled), np.nan, nearest_code(np.nan_to_num(scaled)))
    return codes, scales


@pytest.mark.parametrize("scale_format", ["fp32", "ue8m0"])
@pytest.mark.parametrize("kind", QUANTISERS)
@pytest.mark.parametrize("case", VALUE_CASES)
def test_codes_and_scales_follow_the_definition(case: str, kind: str, scale_format: str) -> None:
    """Every code and scale equals the one computed in numpy from the written definition, on every value case."""
    quantise, tile = QUANTISERS[kind]
    for rows, dim, dtype in ((5, 192, torch.float32), (130, 200, torch.bfloat16), (3, 64, torch.float16)):
        x = value_case(case, rows, dim, dtype)
        codes, scales = by_definition(x, tile, scale_format)
        q = quantise(x, scale_format)
        np.testing.assert_array_equal(q.scales.numpy(), scales)
        np.testing.assert_array_equal(q.codes.double().numpy(), codes)


@pytest.mark.parametrize("kind", QUANTISERS)
def test_every_shape_and_layout_gives_the_codes_of_the_contiguous_matrix(kind: str) -> None:
    """Ragged, empty, transposed and strided inputs give codes [M, K] and scales of the documented shape."""
    quantise, _ = QUANTISERS[kind]
    for rows, dim in shapes():
        x = value_case("normal", rows, dim, torch.bfloat16)
        expected = quantise(x)
        assert tuple(expected.codes.shape) == (rows, dim)
        assert tuple(expected.scales.shape) == scale_shape(kind, rows, dim)
        for name, view in layouts(x):
            q = quantise(view)
            assert_same_bits(q.codes, expected.codes, f"{name} {rows}x{dim}")
            assert_same_bits(q.scales, expected.scales, f"{name} {rows}x{dim}")


@pytest.mark.parametrize("kind", QUANTISERS)
def test_a_ragged_edge_behaves_as_if_padded_with_zeros(kind: str) -> None:
    """Quantising the zero-padded matrix gives the same codes and scales, and code 0 in the padding."""
    quantise, _ = QUANTISERS[kind]
    x = value_case("normal", 131, 200)
    padded = torch.nn.functional.pad(x, (0, 56, 0, 125))
    q, p = quantise(x), quantise(padded)
    assert_same_bits(p.codes[:131, :200], q.codes)
    assert_same_bits(p.scales[: q.scales.shape[0], : q.scales.shape[1]], q.scales)
    assert not p.codes[131:].float().any()
    assert not p.codes[:, 200:].float().any()


@pytest.mark.parametrize("kind", QUANTISERS)
def test_quantising_twice_changes_nothing(kind: str) -> None:
    """ue8m0 codes are a fixed point: quantise(dequantise(q)) has q's values (power-of-two scales divide
    exactly).
    """
    quantise, _ = QUANTISERS[kind]
    for case in FINITE_VALUE_CASES:
        q = quantise(value_case(case, 130, 200), "ue8m0")
        again = quantise(q.dequantise(), "ue8m0")
        assert_same_bits(again.dequantise(torch.float64), q.dequantise(torch.float64), case)


def test_error_is_half_a_code_step() -> None:
    """|dequantised - x| <= max(|x| 2^-4, scale 2^-10) + one fp32 rounding of the quotient."""
    for case in FINITE_VALUE_CASES:
        x = value_case(case, 129, 576)
        q = reference.quantise_activation(x)
        step = torch.maximum(x.abs().double() * 2.0**-4, q.expanded_scales().double() * 2.0**-10)
        error = (q.dequantise(torch.float64) - x.double()).abs()
        assert bool((error <= step * (1 + 1e-6)).all()), case


def test_a_block_of_1e_20_keeps_its_value_and_a_zero_block_is_zero() -> None:
    """Scales of tiny blocks are not floored away: relative error stays 2^-4; all-zero blocks give 0, never
    NaN.
    """
    tiny = value_case("1e-20", 3, 256)
    q = reference.quantise_activation(tiny)
    big = tiny.abs() > 1e-22
    assert bool(((q.dequantise() - tiny).abs()[big] <= tiny.abs()[big] * 2.0**-4 * 1.001).all())
    zero = reference.quantise_activation(torch.zeros(2, 130))
    assert not zero.codes.float().any()
    assert not zero.dequantise().any()


def test_scale_floor_is_a_lower_bound_of_every_scale() -> None:
    """With a floor of 1e-6 smaller blocks get scale 1e-6 (2^-19 in ue8m0), larger ones are untouched."""
    x = torch.cat((torch.full((1, 128), 1e-9), torch.full((1, 128), 3.0)), 1)
    q = reference.quantise_activation(x, "fp32", 1e-6)
    assert q.scales.tolist() == [[np.float32(1e-6), np.float32(3) / np.float32(448)]]
    assert reference.quantise_activation(x, "ue8m0", 1e-6).scales[0, 0].item() == 2.0**-19


def test_rows_do_not_see_each_other() -> None:
    """A row's activation codes are the same alone, in a batch, and beside NaN and infinite rows."""
    for name, x in value_cases(129, 192, torch.bfloat16):
        q = reference.quantise_activation(x)
        for i in (0, 77, 128):
            alone = reference.quantise_activation(x[i : i + 1])
            assert_same_bits(q.codes[i : i + 1], alone.codes, name)
            assert_same_bits(q.scales[i : i + 1], alone.scales, name)


def test_wrong_arguments_are_all_named() -> None:
    """One error lists the shape, the dtype, the scale format and the floor, with the values given."""
    with pytest.raises(ValueError, match=r"\(2, 3, 4\).*float64.*e8m0.*0\.0"):
        reference.quantise_activation(torch.zeros(2, 3, 4, dtype=torch.float64), "e8m0", 0.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"float32 \(2, 2\), got torch.float32 \(2, 1\)"):
        Quantised(torch.zeros(2, 200).to(torch.float8_e4m3fn), torch.ones(2, 1), "1x128")
