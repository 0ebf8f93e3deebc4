"""Low-rank adapters on a linear: the definition of its sum, row invariance, and gradients."""

from __future__ import annotations

import math

import pytest
import torch

import precision_kernels as pk
from precision_kernels import LowRankFormats, reference
from precision_kernels.autograd.weight_gradient import Recompute
from tests.edge_cases import VALUE_CASES, assert_same_bits, layouts, normal, row_contexts, shapes, value_case
from tests.kernels.triton_cases import DTYPES, check, on_device

RANKS = (1, 3, 8, 16, 64, 256)
BF16 = LowRankFormats()
FP32 = LowRankFormats("fp32", "fp32", "fp32", "fp32", "fp32")


def factors(
    rank: int, n: int, k: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """A [rank, k] and B [n, rank]."""
    return normal(rank, k, 1, k**-0.5).to(dtype), normal(n, rank, 2, rank**-0.5).to(dtype)


def adapted(
    base: torch.Tensor,
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scale: float,
    formats: LowRankFormats = BF16,
    recompute: Recompute | None = None,
) -> torch.Tensor:
    """`low_rank` with A and B prepared for x's dtype."""
    return pk.low_rank(base, x, a, b, pk.prepare_low_rank(a, b, formats, x.dtype), scale, recompute)


@pytest.mark.parametrize("shape", shapes(), ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_sum_is_rounded_once_to_the_bases_dtype(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """base + scale * product: both steps rounded to fp32, then once; whatever the strides of base."""
    base, product = normal(*shape).to(dtype), normal(*shape, seed=1)
    scale = 16 / math.sqrt(3)
    step = product * torch.tensor(scale, dtype=torch.float32)
    expected = (base.float() + step).to(dtype)
    for name, placed in layouts(base):
        assert_same_bits(reference.add_scaled(placed, product, scale), expected, name)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_triton_kernel_has_the_bits_of_the_definition(dtype: torch.dtype) -> None:
    """On shapes around the tile, on extreme values, and on column slices of a joint product."""
    for shape in [(0, 64), (1, 1), (9, 257), (129, 192), (3, 4304)]:
        check(
            "low_rank", "add_scaled", normal(*shape).to(dtype), normal(*shape, seed=1), 0.3, what=str(shape)
        )
    for case in VALUE_CASES:
        arguments = value_case(case, 5, 192, dtype), value_case(case, 5, 192, seed=3), 2.0
        check("low_rank", "add_scaled", *arguments, what=case)
    joint = normal(9, 384).to(dtype)
    check("low_rank", "add_scaled", joint[:, 128:256], normal(9, 128, seed=1), 1 / 3, what="slice")


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("formats", [BF16, FP32], ids=["bf16", "fp32"])
def test_an_adapter_is_its_three_operators(rank: int, formats: LowRankFormats) -> None:
    """y equals the two row-invariant products and the sum applied by hand, with or without gradients."""
    x, base, scale = normal(7, 192, 3).bfloat16(), normal(7, 130, 4).bfloat16(), 2.0 / rank
    a, b = factors(rank, 130, 192)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[formats.weight]
    low_a, low_b = (f.bfloat16().to(dtype) for f in (a, b))
    h = reference.invariant_matmul(x.to(dtype), low_a, dtype)
    expected = reference.add_scaled(base, reference.invariant_matmul(h, low_b, torch.float32), scale)
    assert_same_bits(adapted(base, x, a, b, scale, formats), expected)
    with torch.no_grad():
        assert_same_bits(adapted(base, x, a, b, scale, formats), expected)


@pytest.mark.parametrize("rank", RANKS)
def test_a_row_does_not_depend_on_its_batch(rank: int) -> None:
    """A token's adapted output has the same bits alone, anywhere in a batch, and beside NaN and infinities."""
    row, base = normal(1, 192, 3)[0].bfloat16(), normal(1, 130, 4).bfloat16()
    a, b = factors(rank, 130, 192)
    alone = adapted(base, row[None], a, b, 0.7)
    for name, batch, index in row_contexts(row):
        y = adapted(base.expand(len(batch), -1), batch, a, b, 0.7)
        assert_same_bits(y[index], alone[0], name)


def test_a_new_adapter_changes_nothing() -> None:
    """With B = 0, as adapters start, y is base."""
    x, base = normal(5, 64).bfloat16(), normal(5, 32, 1).bfloat16()
    a, _ = factors(8, 32, 64)
    assert torch.equal(adapted(base, x, a, torch.zeros(32, 8), 2.0), base)


@pytest.mark.parametrize("rank", [1, 8, 200])
def test_gradients_are_those_of_the_formula(rank: int) -> None:
    """Finite differences in fp32 formats, all four inputs; relative error 2e-3 (fp32 sums, step 2^-6)."""
    x, base, scale = normal(6, 24, 3), normal(6, 20, 4), 1.5
    a, b = factors(rank, 20, 24)
    inputs = [t.clone().requires_grad_() for t in (base, x, a, b)]
    dy, step = normal(6, 20, 5), 2.0**-6
    grads = torch.autograd.grad(adapted(*inputs, scale, FP32), inputs, dy)
    for index, grad in enumerate(grads):
        direction = normal(*grad.shape, seed=9)

        def at(sign: float, index: int = index, direction: torch.Tensor = direction) -> torch.Tensor:
            moved = [t.detach().double() for t in inputs]
            moved[index] = moved[index] + sign * step * direction
            base, x, a, b = moved
            return base + scale * (x @ a.T) @ b.T

        slope = float(((at(1.0) - at(-1.0)) * dy).sum() / (2 * step))
        assert float((grad * direction).sum()) == pytest.approx(slope, rel=2e-3, abs=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_in_16_bits_are_close_to_fp64(dtype: torch.dtype) -> None:
    """dA, dB are fp32, dx in x's dtype; within 1 % in norm of fp64 on the same rounded operands."""
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    formats = LowRankFormats(name, name, name, name, name)
    x, base = normal(150, 192, 3).to(dtype), normal(150, 130, 4).to(dtype)
    a, b = (f.to(dtype).float() for f in factors(8, 130, 192))
    dy = normal(150, 130, 5).to(dtype)
    inputs = [t.clone().requires_grad_() for t in (base, x, a, b)]
    dbase, dx, da, db = torch.autograd.grad(adapted(*inputs, 2.0, formats), inputs, dy)
    assert (dbase.dtype, dx.dtype, da.dtype, db.dtype) == (dtype, dtype, torch.float32, torch.float32)
    assert_same_bits(dbase, dy)
    wide = dy.double(), x.double(), a.double(), b.double()
    dh = 2.0 * wide[0] @ wide[3]
    for grad, truth in (
        (dx, dh @ wide[2]),
        (da, dh.T @ wide[1]),
        (db, 2.0 * wide[0].T @ (wide[1] @ wide[2].T)),
    ):
        assert float((grad.double() - truth).norm() / truth.norm()) < 1e-2


def test_what_is_kept_for_the_backward() -> None:
    """A x and x; with a `recompute`, what x is made of in its place, and the same gradients."""
    a, b = (f.requires_grad_() for f in factors(4, 32, 64))
    source = normal(9, 64, 3).bfloat16()
    base = normal(9, 32, 4).bfloat16().requires_grad_()
    kept: list[tuple[int, ...]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    x = source * 2
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        plain = adapted(base, x, a, b, 1.0)
        assert kept == [(9, 4), (9, 64)]
        kept.clear()
        remade = adapted(base, x, a, b, 1.0, recompute=Recompute(lambda half: half * 2, (source,)))
    dy = normal(9, 32, 5).bfloat16()
    for one, other in zip(*(torch.autograd.grad(y, (a, b), dy) for y in (plain, remade)), strict=True):
        assert_same_bits(one, other)


def test_no_gradient_of_the_base_and_nothing_kept_for_it() -> None:
    """A frozen base linear saves no tensor and gives dx only."""
    weight = normal(32, 64, 1).bfloat16()
    for formats in (pk.LinearFormats(), pk.LinearFormats("fp8", "fp8", "fp8", "fp8")):
        prepared = pk.prepare_weight(weight, formats, torch.bfloat16)
        x = normal(9, 64, 3).bfloat16().requires_grad_()
        kept: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t) or t, lambda t: t):
            y = pk.linear(x, prepared, None, formats)
        assert kept == []
        (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
        assert dx.shape == x.shape


def test_what_does_not_fit_is_said_at_once() -> None:
    """Every mismatch of shapes is in one error; formats that are none are refused."""
    a, b = factors(4, 32, 64)
    prepared = pk.prepare_low_rank(a, b, BF16, torch.bfloat16)
    x, base = normal(3, 60).bfloat16(), normal(4, 30).bfloat16()
    with pytest.raises(ValueError, match=r"other rows.*64 inputs and 32 outputs"):
        pk.low_rank(base, x, a, b, prepared, 1.0)
    with pytest.raises(ValueError, match=r"A \[r, K\] and B \[N, r\]"):
        pk.prepare_low_rank(a, b.T, BF16, torch.bfloat16)
    with pytest.raises(ValueError, match="fp8"):
        LowRankFormats("fp8")
    with pytest.raises(ValueError, match="fp32 product"):
        reference.add_scaled(base, *on_device(base), 1.0)
