"""The linear layer: each of its three GEMMs against its definition, gradients against fp64, and what it
keeps.
"""

from __future__ import annotations

import itertools

import pytest
import torch

import precision_kernels as pk
from precision_kernels import LinearFormats, reference
from precision_kernels.autograd.linear import DTYPES
from precision_kernels.dispatch import observed
from tests.edge_cases import assert_same_bits, normal, row_contexts

FP8 = LinearFormats("fp8", "fp8", "fp8", "fp8")
M, N, K = 150, 200, 192


def operands(
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [M, K] and dy [M, N] in ``dtype``, an fp32 master weight [N, K] and bias [N]."""
    return normal(M, K, 1).to(dtype), normal(N, K, 2, std=0.1), normal(1, N, 3)[0], normal(M, N, 4).to(dtype)


def run(
    formats: LinearFormats, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, dy: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(y, dx, dW) of one linear."""
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = pk.linear(x, w, b, formats)
    return (y.detach(), *torch.autograd.grad(y, (x, w), dy))


@pytest.mark.parametrize("scale_format", ["fp32", "ue8m0"])
def test_fp8_linear_is_its_three_block_products(scale_format: str) -> None:
    """y, dx and dW equal the reference quantisers and GEMMs applied by hand, bit for bit; no value is
    quantised twice.
    """
    x, w, b, dy = operands()
    formats = LinearFormats("fp8", "fp8", "fp8", "fp8", scale_format)  # type: ignore[arg-type]
    y, dx, dw = run(formats, x, w, b, dy)
    wq = reference.quantise_weight(w.bfloat16(), scale_format)
    product = reference.block_fp8_matmul(reference.quantise_activation(x, scale_format), wq, torch.bfloat16)
    assert_same_bits(y, product + b.bfloat16())
    assert_same_bits(
        dx, reference.dgrad_fp8_matmul(reference.quantise_activation(dy, scale_format), wq, torch.bfloat16)
    )
    columns = [reference.quantise_columns(t, scale_format) for t in (dy, x)]
    assert_same_bits(dw, reference.wgrad_fp8_matmul(*columns))


def test_every_combination_of_formats_multiplies_what_it_names() -> None:
    """dx = dy' W' and dW = dy'' x'' in fp64 of the operands that the formats name, for all 4^4 combinations.

    Tolerance: 4e-3 for the rounding of dx to bf16 (2^-9) and bf16 outputs; 3e-4 for fp32 dW (fp32
    accumulation of 150).
    """
    x, w, _, dy = operands()
    choices = ("fp8", "bf16", "fp16", "fp32")
    weights = {f: w.bfloat16().to(DTYPES[f]) for f in choices if f != "fp8"}
    quantised_weight = reference.quantise_weight(w.bfloat16())
    for forward, dgrad, wgrad, saved in itertools.product(choices, repeat=4):
        formats = LinearFormats(forward, dgrad, wgrad, saved)
        y, dx, dw = run(formats, x, w, None, dy)
        assert (y.dtype, dx.dtype, dw.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
        if forward == "fp8":
            used = quantised_weight.dequantise(torch.float64)
            back = used if dgrad == "fp8" else quantised_weight.dequantise(DTYPES[dgrad]).double()
        else:
            used = weights[forward].double()
            back = used
            if dgrad == "fp8":
                back = reference.quantise_weight(weights[forward]).dequantise(torch.float64)
        left = reference.quantise_activation(dy).dequantise(torch.float64) if dgrad == "fp8" else dy.double()
        truth = left @ back
        assert float((dx.double() - truth).norm() / truth.norm()) < 4e-3, formats
        if wgrad == "fp8":
            left, right = (reference.quantise_columns(t).dequantise(torch.float64) for t in (dy, x))
        else:
            left = dy.to(DTYPES[wgrad]).double()
            right = (
                reference.quantise_activation(x).dequantise(DTYPES[wgrad]).double()
                if saved == "fp8"
                else x.double()
            )
        truth = left.T @ right
        assert float((dw.double() - truth).norm() / truth.norm()) < 3e-4, formats


def test_gradients_match_fp64_autograd_of_the_dequantised_computation() -> None:
    """The fp8 linear's gradients are those of y = deq(x) deq(W)^T + b, up to the e4m3 rounding of dy and
    (wgrad) x.

    A uniform relative rounding error of at most 2^-4 has an RMS of about 2.6 %; two independent ones give
    3.7 %: < 5 %.
    """
    x, w, b, dy = operands()
    _, dx, dw = run(FP8, x, w, b, dy)
    x64 = reference.quantise_activation(x).dequantise(torch.float64).requires_grad_()
    w64 = reference.quantise_weight(w.bfloat16()).dequantise(torch.float64).requires_grad_()
    truth = torch.autograd.grad(x64 @ w64.T + b.double(), (x64, w64), dy.double())
    for actual, expected in zip((dx, dw), truth, strict=True):
        assert float((actual.double() - expected).norm() / expected.norm()) < 0.05


def test_bf16_linear_gradients_match_fp64() -> None:
    """Relative error below 4e-3: bf16 rounding of dx; dW (fp32) below 1e-5; dbias is the fp32 column sum."""
    x, w, b, dy = operands()
    x, w, b = x.requires_grad_(), w.bfloat16().float().requires_grad_(), b.requires_grad_()
    y = pk.linear(x, w, b, LinearFormats())
    dx, dw, db = torch.autograd.grad(y, (x, w, b), dy)
    x64, w64, b64 = (t.detach().double().requires_grad_() for t in (x, w, b))
    truth = torch.autograd.grad(x64 @ w64.T + b64, (x64, w64, b64), dy.double())
    for actual, expected, tolerance in zip((dx, dw, db), truth, (4e-3, 1e-5, 1e-6), strict=True):
        assert float((actual.double() - expected).norm() / expected.norm()) < tolerance


def saved_bytes(formats: LinearFormats, x: torch.Tensor, w: torch.Tensor) -> int:
    """Bytes of every tensor that autograd keeps for the backward of one linear, weights excluded."""
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        pk.linear(x.clone().requires_grad_(), w.clone().requires_grad_(), None, formats)
    return sum(t.numel() * t.element_size() for t in kept)


def test_saved_fp8_keeps_codes_and_scales_instead_of_the_activation() -> None:
    """M*K bytes plus fp32 scales instead of 2*M*K bytes, for an fp8 wgrad (128x1) and a bf16 wgrad (1x128)."""
    x, w, _, _ = operands()
    assert saved_bytes(LinearFormats(), x, w) == 2 * M * K
    assert saved_bytes(FP8, x, w) == M * K + 4 * 2 * K
    assert saved_bytes(LinearFormats("fp8", "fp8", "bf16", "fp8"), x, w) == M * K + 4 * M * 2


def test_nothing_is_kept_for_a_frozen_weight() -> None:
    """Without a weight gradient the input is not needed, and dx is still right."""
    x, w, _, dy = operands()
    kept: list[torch.Tensor] = []
    leaf = x.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = pk.linear(leaf, w, None, FP8)
    assert kept == []
    assert_same_bits(torch.autograd.grad(y, leaf, dy)[0], run(FP8, x, w, None, dy)[1])


def test_nothing_is_made_for_a_weight_gradient_without_grad_mode() -> None:
    """Scoring under no_grad quantises x for the forward only, though the weight is a parameter; bits are the same."""
    x, w, _, _ = operands()
    w = w.requires_grad_()
    trained, calls = pk.linear(x, w, None, FP8), []
    with torch.no_grad(), observed(lambda operator, *_: calls.append(operator)):
        assert_same_bits(pk.linear(x, w, None, FP8), trained.detach())
    assert calls == ["quantise_weight", "quantise_activation", "block_fp8_matmul"]


@pytest.mark.parametrize("formats", [FP8, LinearFormats()], ids=["fp8", "bf16"])
def test_a_second_derivative_is_refused(formats: LinearFormats) -> None:
    """The GEMMs' operands are no part of the graph of dx, so its derivative would lack the one by the weight."""
    x, w, _, _ = operands()
    x, w = x.requires_grad_(), w.requires_grad_()
    y = pk.linear(x, w, None, formats).float().square().sum()
    (dx,) = torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.float().square().sum().backward()


@pytest.mark.parametrize("formats", [FP8, LinearFormats()], ids=["fp8", "bf16"])
def test_rows_of_a_linear_depend_on_themselves_only(formats: LinearFormats) -> None:
    """Forward bits of a row are the same alone, in any batch, from a master weight, prepared, or quantised
    weight.
    """
    _, w, b, _ = operands()
    prepared = pk.prepare_weight(w, formats, torch.bfloat16)
    row = normal(1, K, 8)[0].bfloat16()
    alone = pk.linear(row[None], w, b, formats)
    for name, batch, i in row_contexts(row):
        assert_same_bits(pk.linear(batch, w, b, formats, prepared)[i : i + 1], alone, name)
        assert_same_bits(pk.linear(batch, prepared, b, formats)[i : i + 1], alone, name)
        if formats is FP8:
            received = pk.Quantised(
                prepared.quantised.codes.clone(), prepared.quantised.scales.clone(), "128x128"
            )
            assert_same_bits(pk.linear(batch, received, b, formats)[i : i + 1], alone, name)


@pytest.mark.parametrize("formats", [FP8, LinearFormats()], ids=["fp8", "bf16"])
def test_linears_of_one_input_equal_linears_one_by_one(formats: LinearFormats) -> None:
    """Same forward bits and weight gradients; dx is the sum, added in fp32; the input is kept once."""
    x, w, b, dy = operands()
    weights = [w, w[:64] * 2, w[:128] - 1]
    biases = [b, None, b[:128]]
    leaves = [x.clone().requires_grad_(), *(t.clone().requires_grad_() for t in weights)]
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        outputs = pk.linears(leaves[0], leaves[1:], biases, formats)
    assert sum(t.numel() * t.element_size() for t in kept) == saved_bytes(formats, x, w)
    cotangents = [dy, dy[:, :64], dy[:, :128]]
    dx, *dws = torch.autograd.grad(outputs, leaves, cotangents)
    total = torch.zeros(M, K, dtype=torch.float64)
    for y, weight, bias, g, dw in zip(outputs, weights, biases, cotangents, dws, strict=True):
        single_y, single_dx, single_dw = run(formats, x, weight, bias, g)
        assert_same_bits(y.detach(), single_y)
        assert_same_bits(dw, single_dw)
        total += single_dx.double()
    assert float((dx.double() - total).norm() / total.norm()) < 4e-3


def test_an_unused_output_costs_and_breaks_nothing() -> None:
    """Gradient through only one of two linears: the other's weight gets none."""
    x, w, _, dy = operands()
    first, second = w.clone().requires_grad_(), w.clone().requires_grad_()
    leaf = x.clone().requires_grad_()
    y, _ = pk.linears(leaf, [first, second], [None, None], FP8)
    y.backward(dy)
    assert second.grad is None
    assert_same_bits(leaf.grad, run(FP8, x, w, None, dy)[1])


def test_logits_in_fp32_from_bf16_operands() -> None:
    """out_dtype=float32 skips the rounding of the output only: rounding it gives the usual result."""
    x, w, _, _ = operands()
    logits = pk.linear(x, w, None, LinearFormats(), out_dtype=torch.float32)
    assert logits.dtype == torch.float32
    assert_same_bits(logits.bfloat16(), pk.linear(x, w, None, LinearFormats()))


def test_leading_dimensions_and_given_codes() -> None:
    """[2, 75, K] is [150, K]; handing in the codes of x (from a fused producer) changes nothing."""
    x, w, b, _ = operands()
    flat = pk.linear(x, w, b, FP8)
    assert_same_bits(pk.linear(x.view(2, 75, K), w, b, FP8).view(M, N), flat)
    assert_same_bits(pk.linear(x, w, b, FP8, quantised=pk.quantise_activation(x)), flat)


def test_backward_is_deterministic() -> None:
    """Two runs give the same bits."""
    x, w, b, dy = operands()
    for formats in (FP8, LinearFormats()):
        for first, second in zip(run(formats, x, w, b, dy), run(formats, x, w, b, dy), strict=True):
            assert_same_bits(first, second)


def test_what_does_not_fit_is_named() -> None:
    """All violations appear in one error."""
    x, w, _, _ = operands()
    with pytest.raises(ValueError, match=r"forward must be .*'int8'.*saved must be .*'none'"):
        LinearFormats("int8", saved="none")
    with pytest.raises(ValueError, match=r"\(200, 192\) but x has 96 features"):
        pk.linear(x[:, :96], w, None, FP8)
    with pytest.raises(ValueError, match=r"prepared for .*bf16.*not for .*fp8"):
        pk.linear(x, w, None, FP8, pk.prepare_weight(w, LinearFormats(), torch.bfloat16))
    with pytest.raises(ValueError, match="cannot serve a forward in 'bf16'"):
        pk.linear(x, pk.quantise_weight(w), None, LinearFormats())
    with pytest.raises(ValueError, match=r"1x128 blocks, got 128x1"):
        pk.linear(x, w, None, FP8, quantised=pk.quantise_columns(x))
