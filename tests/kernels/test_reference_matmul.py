"""The GEMMs: values against fp64, and bits that depend on nothing but the row."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import pytest
import torch

from precision_kernels import reference
from precision_kernels.reference import Quantised
from tests.edge_cases import (
    FINITE_VALUE_CASES,
    assert_same_bits,
    cancelling,
    layouts,
    mirrored,
    normal,
    row_contexts,
    value_case,
)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Runs the test with one and with two intra-op threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def integer_product(a: Quantised, b: Quantised) -> torch.Tensor:
    """a @ b.T by the docstring's formula: block sums in int64 (codes are multiples of 2^-9), then fp32 in
    numpy.
    """
    rows, columns = a.shape[0], b.shape[0]
    total = np.zeros((rows, columns), np.float32)
    for block in range(a.scales.shape[1]):
        part = slice(block * 128, (block + 1) * 128)
        left, right = ((q.codes[:, part].double() * 512).long().numpy() for q in (a, b))
        sums = (left @ right.T).astype(np.float64) * 2.0**-18
        scale_b = np.repeat(b.scales[:, block].numpy(), 128)[:columns]
        term = sums.astype(np.float32) * (a.scales[:, block].numpy()[:, None] * scale_b[None])
        total = term if block == 0 else total + term
    return torch.from_numpy(total)


@pytest.mark.parametrize("scale_format", ["fp32", "ue8m0"])
def test_forward_product_is_the_written_sum(scale_format: str) -> None:
    """Every element equals integer arithmetic bit for bit, on ragged shapes and where all leading digits
    cancel.
    """
    for m, n, k in ((3, 5, 64), (130, 200, 300), (2, 129, 576), (0, 3, 64)):
        for x, w in (
            (normal(m, k, 1), normal(n, k, 2)),
            (cancelling(m, k, torch.float32), mirrored(n, k, torch.float32)),
        ):
            a, b = reference.quantise_activation(x, scale_format), reference.quantise_weight(w, scale_format)
            assert_same_bits(
                reference.block_fp8_matmul(a, b, torch.float32), integer_product(a, b), f"{m}x{n}x{k}"
            )


def test_block_sums_of_aligned_operands_are_exact() -> None:
    """invariant_matmul over one block equals rational arithmetic on the aligned operands, rounded once to
    fp32.
    """
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x, w = cancelling(4, 128, dtype), mirrored(5, 128, dtype)
        y = reference.invariant_matmul(x, w, torch.float32)
        left, right = reference.align(x).tolist(), reference.align(w).tolist()
        for i in range(4):
            for j in range(5):
                terms = zip(left[i], right[j], strict=True)
                truth = sum((Fraction(a) * Fraction(b) for a, b in terms), Fraction(0))
                assert y[i, j].item() == np.float32(float(truth)), (dtype, i, j)


def test_three_products_match_fp64_within_fp32_accumulation() -> None:
    """Forward, dgrad, wgrad: |error| <= (blocks + 2) * 2^-24 * sum of |terms| (one rounding per block and
    per scale).
    """
    x, w, dy = normal(200, 300, 1), normal(140, 300, 2), normal(200, 140, 3)
    xq, wq, dyq = (
        reference.quantise_activation(x),
        reference.quantise_weight(w),
        reference.quantise_activation(dy),
    )
    xc, dyc = reference.quantise_columns(x), reference.quantise_columns(dy)
    cases = {
        "forward": (reference.block_fp8_matmul(xq, wq, torch.float32), xq, wq, lambda a, b: a @ b.T, 300),
        "dgrad": (reference.dgrad_fp8_matmul(dyq, wq, torch.float32), dyq, wq, lambda a, b: a @ b, 140),
        "wgrad": (reference.wgrad_fp8_matmul(dyc, xc), dyc, xc, lambda a, b: a.T @ b, 200),
    }
    for name, (actual, left, right, product, contraction) in cases.items():
        a, b = left.dequantise(torch.float64), right.dequantise(torch.float64)
        bound = (-(-contraction // 128) + 2) * 2.0**-24 * product(a.abs(), b.abs())
        assert bool(((actual.double() - product(a, b)).abs() <= bound).all()), name
        assert actual.dtype == torch.float32, name


def test_weight_gradient_accumulates_into_the_given_tensor() -> None:
    """out= adds to what is there, in place, and returns it."""
    dy, x = reference.quantise_columns(normal(130, 64, 1)), reference.quantise_columns(normal(130, 96, 2))
    fresh = reference.wgrad_fp8_matmul(dy, x)
    out = torch.full((64, 96), 2.0)
    assert reference.wgrad_fp8_matmul(dy, x, out) is out
    torch.testing.assert_close(out, fresh + 2.0, rtol=0, atol=1e-5 * float(fresh.abs().max()))


def test_fp8_rows_depend_on_themselves_only(threads: int) -> None:
    """A row's product is the same alone, anywhere in a batch, beside NaN rows, and with one or two threads."""
    for k, n in ((128, 3), (192, 130), (512, 256)):
        w = reference.quantise_weight(mirrored(n, k, torch.float32, 9))
        row = cancelling(1, k, torch.bfloat16, 4)[0]
        torch.set_num_threads(1)
        alone = reference.block_fp8_matmul(reference.quantise_activation(row[None]), w)
        torch.set_num_threads(threads)
        for name, batch, i in row_contexts(row):
            y = reference.block_fp8_matmul(reference.quantise_activation(batch), w)
            assert_same_bits(y[i : i + 1], alone, f"{name}, K {k}, N {n}, {threads} threads")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_invariant_matmul_rows_depend_on_themselves_only(threads: int, dtype: torch.dtype) -> None:
    """The same for bf16, fp16 and fp32 operands; packed and unpacked weights and any layout give the same
    bits.
    """
    for k, n in ((128, 3), (192, 130), (512, 512)):
        w = mirrored(n, k, dtype, 9)
        packed = reference.pack_weight(w)
        row = cancelling(1, k, dtype, 4)[0]
        torch.set_num_threads(1)
        alone = reference.invariant_matmul(row[None], w)
        torch.set_num_threads(threads)
        for name, batch, i in row_contexts(row):
            y = reference.invariant_matmul(batch, packed)
            assert_same_bits(y[i : i + 1], alone, f"{name}, K {k}, N {n}, {threads} threads")
        for name, view in layouts(batch):
            assert_same_bits(
                reference.invariant_matmul(view, packed), reference.invariant_matmul(batch, w), name
            )


def test_invariant_matmul_is_as_accurate_as_fp32_accumulation() -> None:
    """fp32 out: error <= 2^-23 * sum over blocks of (128 max|x| max|w|) (alignment) + half an ulp of the
    result.
    """
    for case in FINITE_VALUE_CASES:
        if case == "huge":
            continue  # products overflow fp32 in any implementation
        x, w = value_case(case, 7, 576, torch.bfloat16), normal(33, 576, 2).bfloat16()
        y = reference.invariant_matmul(x, w, torch.float32)
        truth = x.double() @ w.double().T
        tops = [
            (x[:, s : s + 128].abs().amax(1), w[:, s : s + 128].abs().amax(1)) for s in range(0, 576, 128)
        ]
        bound = sum(2.0**-23 * 128 * a.double()[:, None] * b.double()[None] for a, b in tops)
        assert bool(((y.double() - truth).abs() <= bound + truth.abs() * 2.0**-24 + 2.0**-149).all()), case


def test_infinite_and_nan_rows_follow_ieee() -> None:
    """inf times positive weights is inf, NaN is NaN, neighbours stay finite."""
    x = torch.tensor([[float("inf"), 1.0], [float("nan"), 1.0], [2.0, 3.0]])
    y = reference.invariant_matmul(x, torch.ones(3, 2))
    assert torch.isposinf(y[0]).all()
    assert torch.isnan(y[1]).all()
    assert y[2].tolist() == [5.0, 5.0, 5.0]


def test_empty_operands() -> None:
    """No rows give an empty result, an empty contraction gives zeros."""
    w = reference.quantise_weight(normal(5, 64))
    assert reference.block_fp8_matmul(reference.quantise_activation(torch.zeros(0, 64)), w).shape == (0, 5)
    assert reference.invariant_matmul(torch.zeros(0, 64), torch.zeros(5, 64)).shape == (0, 5)
    none = reference.quantise_columns(torch.zeros(0, 4))
    assert reference.wgrad_fp8_matmul(none, none).tolist() == [[0.0] * 4] * 4


def test_mismatched_operands_are_named() -> None:
    """Wrong block kinds and contraction lengths raise with both values."""
    a, w = reference.quantise_activation(normal(2, 64)), reference.quantise_weight(normal(3, 128))
    with pytest.raises(ValueError, match=r"a must be quantised in 1x128 blocks, got 128x128"):
        reference.block_fp8_matmul(w, w)
    with pytest.raises(ValueError, match=r"a columns \(64\) and b columns \(128\)"):
        reference.block_fp8_matmul(a, w)
    with pytest.raises(ValueError, match="got float64"):
        reference.invariant_matmul(normal(2, 64).double(), normal(3, 64))
    with pytest.raises(ValueError, match=r"\(2, 64\) and \(3, 128\)"):
        reference.invariant_matmul(normal(2, 64), normal(3, 128))
