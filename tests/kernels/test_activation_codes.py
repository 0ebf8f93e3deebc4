"""SiLU·mul with codes in both directions, Triton against the definition, bit for bit."""

from __future__ import annotations

import importlib

import pytest
import torch

from precision_kernels import reference
from tests.edge_cases import VALUE_CASES, assert_same_bits, normal, value_case

pytestmark = pytest.mark.slow

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
TRITON = importlib.import_module("precision_kernels.triton.activation_codes")
CASES = VALUE_CASES if GPU else ("normal", "60 binary orders of magnitude", "NaN and infinities", "subnormal")
SHAPES = [(130, 256), *([(8192, 512), (300, 14336), (127, 128)] if GPU else [])]


def check(operator: str, inputs: tuple[torch.Tensor, ...], scale_format: str, what: str) -> None:
    """Codes and scales have the definition's kind and bits, in both directions."""
    actual = getattr(TRITON, operator)(*(x.to(DEVICE) for x in inputs), scale_format)
    expected = getattr(reference, operator)(*inputs, scale_format)
    for a, e in zip(actual, expected, strict=True):
        assert (a.kind, a.scale_format) == (e.kind, e.scale_format), what
        assert_same_bits(a.scales, e.scales, f"{what} {e.kind} scales")
        assert_same_bits(a.codes, e.codes, f"{what} {e.kind} codes")


def inputs(operator: str, both: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Gate and up, and for the backward a gradient with values of either."""
    gate, up = both.chunk(2, -1)
    return (up.flip(-1).contiguous(), gate, up) if "backward" in operator else (gate, up)


OPERATORS = pytest.mark.parametrize("operator", ["silu_mul_quantise_both", "silu_mul_backward_quantise_both"])


@OPERATORS
@pytest.mark.parametrize("case", CASES)
def test_one_launch_has_the_bits_of_the_composition(case, operator):
    """Codes and scales are those of both steps on every value case, ragged rows too."""
    for m, k in SHAPES:
        both = value_case(case, m, 2 * k, torch.bfloat16)
        assert TRITON.accepts(*both.chunk(2, -1), 2.0**-126)
        check(operator, inputs(operator, both), "fp32" if m % 2 else "ue8m0", f"{case} {m, k}")


def test_gradients_at_every_gate():
    """Codes of both gradients are the definition's where the gate takes all 65 536 values of bf16."""
    gate = (
        torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(128, 512)
    )
    dy, up = normal(2, 128 * 512).to(torch.bfloat16).view(2, 128, 512)
    check("silu_mul_backward_quantise_both", (dy, gate, up), "fp32", "every gate")


@OPERATORS
@pytest.mark.parametrize(
    ("shape", "dtype"), [((5, 192), torch.bfloat16), ((3, 128), torch.float16), ((0, 128), torch.bfloat16)]
)
def test_what_is_not_packed_has_the_same_bits(shape, dtype, operator):
    """Columns that are no multiple of 128, fp16 and empty matrices take two launches, to the same codes."""
    both = normal(shape[0], 2 * shape[1]).to(dtype)
    assert not TRITON.accepts(*both.chunk(2, -1), 2.0**-126)
    check(operator, inputs(operator, both), "fp32", f"{shape} {dtype}")


def test_padding_rows_are_zero_codes():
    """The storage of the 128x1 codes is whole blocks of 128 rows; those beyond M are zero."""
    both = normal(5, 256).to(DEVICE, torch.bfloat16)
    columns = TRITON.silu_mul_quantise_both(*both.chunk(2, -1))[1]
    whole = torch.as_strided(columns.codes, (128, 128), (128, 1)).float()
    assert whole[:, :5].abs().sum() > 0
    assert whole[:, 5:].abs().sum() == 0


def test_a_gradient_that_cannot_be_packed_has_the_same_bits():
    """A gradient whose rows do not begin on 8 bytes takes two launches, to the same codes."""
    gate, up = normal(5, 256).to(torch.bfloat16).chunk(2, -1)
    dy = normal(5, 130).to(torch.bfloat16)[:, 1:129]
    check("silu_mul_backward_quantise_both", (dy, gate, up), "fp32", "odd gradient")


def test_the_fake_describes_the_real_outputs():
    """torch.library.opcheck accepts the custom op: schema, fake shapes and strides, no hidden mutation."""
    gate, up = (half.contiguous() for half in normal(130, 256).to(DEVICE, torch.bfloat16).chunk(2, -1))
    torch.library.opcheck(
        torch.ops.precision_kernels.silu_mul_quantise_both.default,
        (gate, up, True, 1e-30),
        test_utils=["test_schema", "test_faketensor"],
    )
