"""SiLU·mul and its backward with codes in both directions, Triton against the definition, bit for bit."""

from __future__ import annotations

import importlib

import pytest
import torch

from precision_kernels import reference
from precision_kernels.reference.formats import Quantised
from tests.edge_cases import VALUE_CASES, assert_same_bits, normal, value_case

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
TRITON = importlib.import_module("precision_kernels.triton.activation_codes")
PACKED = importlib.import_module("precision_kernels.triton.packed_activation")
CASES = VALUE_CASES if GPU else ("normal", "60 binary orders of magnitude", "NaN and infinities", "subnormal")
SHAPES = [(130, 256), *([(8192, 512), (300, 14336), (127, 128)] if GPU else [])]


def same(actual: tuple[Quantised, ...], expected: tuple[Quantised, ...], what: str) -> None:
    """Codes and scales of both directions have one kind and the same bits."""
    for a, e in zip(actual, expected, strict=True):
        assert (a.kind, a.scale_format) == (e.kind, e.scale_format), what
        assert_same_bits(a.scales, e.scales, f"{what} {e.kind} scales")
        assert_same_bits(a.codes, e.codes, f"{what} {e.kind} codes")


def check(dy: torch.Tensor, both: torch.Tensor, scale_format: str, what: str) -> None:
    """Forward and backward on the halves of one matrix."""
    gate, up = both.chunk(2, -1)
    device_gate, device_up = both.to(DEVICE).chunk(2, -1)
    same(
        TRITON.silu_mul_quantise_both(device_gate, device_up, scale_format),
        reference.silu_mul_quantise_both(gate, up, scale_format),
        f"forward {what}",
    )
    same(
        TRITON.silu_mul_backward_quantise_both(dy.to(DEVICE), device_gate, device_up, scale_format),
        reference.silu_mul_backward_quantise_both(dy, gate, up, scale_format),
        f"backward {what}",
    )


@pytest.mark.parametrize("case", CASES)
def test_one_launch_has_the_bits_of_the_composition(case):
    """Codes and scales of the product, and of both gradients side by side, on every value case, ragged rows too."""
    for shape in SHAPES:
        m, k = shape
        both, dy = value_case(case, m, 2 * k, torch.bfloat16), normal(m, k, 4).to(torch.bfloat16)
        assert PACKED.accepts(2.0**-126, dy, *both.chunk(2, -1))
        check(dy, both, "fp32" if m % 2 else "ue8m0", f"{case} {shape}")


@pytest.mark.parametrize(
    ("shape", "dtype"), [((5, 192), torch.bfloat16), ((3, 128), torch.float16), ((0, 128), torch.bfloat16)]
)
def test_what_is_not_packed_has_the_same_bits(shape, dtype):
    """Columns that are no multiple of 128, fp16 and empty matrices take two launches, to the same codes."""
    both, dy = normal(shape[0], 2 * shape[1]).to(dtype), normal(*shape, 4).to(dtype)
    assert not (shape[0] and PACKED.accepts(2.0**-126, dy, *both.chunk(2, -1)))
    check(dy, both, "fp32", f"{shape} {dtype}")


def test_padding_rows_are_zero_codes():
    """The storage of the 128x1 codes is whole blocks of 128 rows; those beyond M are zero."""
    both, dy = normal(5, 256).to(DEVICE, torch.bfloat16), normal(5, 128, 4).to(DEVICE, torch.bfloat16)
    columns = TRITON.silu_mul_backward_quantise_both(dy, *both.chunk(2, -1))[1]
    whole = torch.as_strided(columns.codes, (256, 128), (128, 1)).float()
    assert whole[:, :5].abs().sum() > 0
    assert whole[:, 5:].abs().sum() == 0


def test_fakes_describe_the_real_outputs():
    """torch.library.opcheck accepts both custom ops: schema, fake shapes and strides, no hidden mutation."""
    both, dy = normal(130, 256).to(DEVICE, torch.bfloat16), normal(130, 128, 4).to(DEVICE, torch.bfloat16)
    ops = torch.ops.precision_kernels
    gate, up = (half.contiguous() for half in both.chunk(2, -1))
    checks = ["test_schema", "test_faketensor"]
    torch.library.opcheck(ops.silu_mul_quantise_both.default, (gate, up, True, 1e-30), test_utils=checks)
    arguments = (dy, gate, up, False, 1e-30)
    torch.library.opcheck(ops.silu_mul_backward_quantise_both.default, arguments, test_utils=checks)
