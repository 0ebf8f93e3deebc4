"""The Triton quantisers against their definition, bit for bit."""

from __future__ import annotations

import pytest
import torch

from precision_kernels.triton import norm_columns
from tests.edge_cases import VALUE_CASES, layouts, normal, shapes, value_case
from tests.kernels.triton_cases import DEVICE, DTYPES, GPU, REFERENCE, TRITON, check, same

pytestmark = pytest.mark.slow

QUANTISERS = ("quantise_activation", "quantise_columns", "quantise_weight")
SHAPES = shapes(full=GPU)


@pytest.mark.parametrize("scale_format", ["fp32", "ue8m0"])
@pytest.mark.parametrize("case", VALUE_CASES)
@pytest.mark.parametrize("name", QUANTISERS)
def test_quantisers_on_values(name, case, scale_format):
    """Codes and scales are the definition's on every value case, for all three input dtypes."""
    # The interpreter needs 30 ms per program: two blocks of the quantiser's own, of which one is ragged.
    shape = (130, 192) if GPU else (17, 192) if name == "quantise_activation" else (130, 68)
    for dtype in DTYPES:
        check("quantise", name, value_case(case, *shape, dtype), scale_format, what=f"{dtype}")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", QUANTISERS)
def test_quantisers_on_shapes(name, shape):
    """Codes and scales are the definition's for empty, single, ragged and large matrices."""
    check("quantise", name, normal(*shape).to(torch.bfloat16), "fp32", what=str(shape))


@pytest.mark.parametrize("name", QUANTISERS)
def test_quantisers_on_layouts(name):
    """Strides and offsets of the input change nothing."""
    x = normal(130, 192).to(torch.bfloat16)
    expected = getattr(REFERENCE["quantise"], name)(x)
    # Moving to the GPU keeps the strides of dense layouts only; slicing there makes the others.
    for layout, view in layouts(x.to(DEVICE) if GPU else x):
        same(getattr(TRITON["quantise"], name)(view), expected, f"{name} {layout}")


@pytest.mark.parametrize("shape", [(0, 128), (1, 64), (129, 192), (256, 256)], ids=str)
def test_both_directions(shape):
    """`quantise_both` gives what the two quantisers give, and the transposed codes are whole zero-filled blocks."""
    x = normal(*shape).to(torch.bfloat16)
    rows, columns = TRITON["quantise"].quantise_both(x.to(DEVICE))
    same(rows, REFERENCE["quantise"].quantise_activation(x), "rows")
    same(columns, REFERENCE["quantise"].quantise_columns(x), "columns")
    assert not beyond(columns).any()


def beyond(columns) -> torch.Tensor:
    """What the storage of 128x1 codes holds behind the last row, [columns, rows up to the next multiple of 128]."""
    rows, width = columns.shape
    padded = -(-rows // 128) * 128
    return torch.as_strided(columns.codes, (width, padded), (padded, 1)).view(torch.uint8)[:, rows:]


@pytest.mark.parametrize("rows", [1, 2, 3, 127, 129])
@pytest.mark.parametrize("name", ["quantise_columns", "quantise_both", "rms_norm_quantise_columns"])
def test_rows_beyond_the_matrix_are_zero_codes(name, rows):
    """A weight gradient reads whole blocks of 128 tokens: behind the last are zeros, not another kernel's NaN."""
    for seed in range(6 if GPU else 1):
        torch.manual_seed(seed)
        for width in (64, 576) if GPU else (68,):  # what other kernels leave behind, a GPU has alone
            x = torch.randn(rows, width, device=DEVICE, dtype=torch.bfloat16)
            x = x * torch.rand(
                rows, 1, device=DEVICE, dtype=torch.bfloat16
            )  # leaves other numbers in registers
            torch.full(
                (1 << 20,), 255, dtype=torch.uint8, device=DEVICE
            )  # and NaN in memory that is used next
            if name == "rms_norm_quantise_columns":
                weight, rstd = torch.ones_like(x[0]), torch.ones(rows, device=DEVICE)
                columns = norm_columns.rms_norm_quantise_columns(x, weight, rstd, 1e-6)
            else:
                columns = getattr(TRITON["quantise"], name)(x)
            columns = columns[1] if name == "quantise_both" else columns
            assert not beyond(columns).any(), (seed, width)


@pytest.mark.parametrize("case", VALUE_CASES)
def test_both_directions_on_values(case):
    """One read gives the codes and scales of both quantisers on every value case; bf16 is packed, fp16 is not."""
    shapes = [(130, 196), (128, 128), (4096, 4304), (300, 1000), (1024, 4096)] if GPU else [(130, 68)]
    if case == "60 binary orders of magnitude":
        shapes += [(130, 196), (128, 128)]
    for shape in shapes:
        check("quantise", "quantise_both", value_case(case, *shape, torch.bfloat16), "ue8m0", what=str(shape))
    if GPU or case == "NaN and infinities":
        check("quantise", "quantise_both", value_case(case, 130, 196, torch.float16), what="fp16")


@pytest.mark.parametrize("name", QUANTISERS)
def test_dequantise(name):
    """Codes times scales have the definition's bits in every block shape and dtype, from the layouts kernels store."""
    for case in ("normal", "NaN and infinities", "1e-20"):
        x = value_case(case, 130, 300, torch.bfloat16)
        expected = getattr(REFERENCE["quantise"], name)(x)
        actual = getattr(TRITON["quantise"], name)(x.to(DEVICE))
        for dtype in DTYPES:
            same(
                TRITON["quantise"].dequantise(actual, dtype),
                expected.dequantise(dtype),
                f"{name} {case} {dtype}",
            )


def test_layouts_that_deepgemm_reads():
    """Activation scales are column-major with 16-byte columns; weights carry their codes transposed."""
    q = TRITON["quantise"].quantise_activation(normal(130, 300).to(DEVICE))
    assert q.scales.stride() == (1, 132)
    w = TRITON["quantise"].quantise_weight(normal(192, 300).to(DEVICE, torch.bfloat16))
    transposed = w.operands["transposed"]
    assert transposed.stride() == (1, 256)
    same(transposed.cpu(), w.codes.cpu().contiguous(), "transposed codes")


def test_bad_arguments_are_named():
    """The kernels refuse what the definitions refuse, in the same words."""
    with pytest.raises(ValueError, match=r"float64.*scale_format must be one of"):
        TRITON["quantise"].quantise_activation(torch.zeros(2, 2, dtype=torch.float64, device=DEVICE), "e5m2")
