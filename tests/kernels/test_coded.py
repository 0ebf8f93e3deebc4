"""Norms of training that exist as codes only: forward bits and gradients of the norm, its quantiser and the linears."""

from __future__ import annotations

import importlib

import pytest
import torch

import precision_kernels as pk
from precision_kernels import LinearFormats, reference
from tests.edge_cases import VALUE_CASES, assert_same_bits, normal, value_case

pytestmark = pytest.mark.slow

FP8 = LinearFormats("fp8", "fp8", "fp8", "fp8")
GPU = torch.cuda.is_available()
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TRITON = importlib.import_module("precision_kernels.triton.norm_columns")
CASES = VALUE_CASES if GPU else ("normal", "60 binary orders of magnitude", "NaN and infinities", "1e-20")
EPS = 1e-5


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("added", [True, False], ids=["add", "first"])
def test_outputs_and_gradients_are_those_of_a_written_norm(added, device):
    """Joined linears behind a coded norm: same outputs, new residual, and gradients of x, residual and all weights."""
    results = []
    for coded in (True, False):
        x, residual = (normal(130, 256, s).bfloat16().to(device).requires_grad_() for s in (1, 2))
        weight = normal(1, 256, 3)[0].to(device).requires_grad_()
        ws = [normal(n, 256, 4 + n, std=0.1).to(device).requires_grad_() for n in (256, 128)]
        joint, operand = pk.prepare_joint(ws, FP8, torch.bfloat16), weight.detach().bfloat16()
        leaves = [x, *([residual] if added else []), weight, *ws]
        if coded:
            y, summed = pk.rms_norm_coded(x, residual if added else None, weight, EPS, operand)
            assert y.handle.isnan().all()
            outputs = pk.linears(y.handle, ws, [None] * 2, FP8, joint, y.codes, recompute=y.recompute)
        else:
            if added:
                y, summed = pk.add_rms_norm(x, residual, weight, EPS, operand)
            else:
                y, summed = pk.rms_norm(x, weight, EPS, operand), x
            outputs = pk.linears(y, ws, [None] * 2, FP8, joint)
        dys = [
            normal(130, t.shape[1], 20 + i).bfloat16().to(device) for i, t in enumerate((*outputs, summed))
        ]
        grads = torch.autograd.grad((*outputs, summed), leaves, dys)
        results.append((*outputs, summed, *grads))
    for i, (a, b) in enumerate(zip(*results, strict=True)):
        assert_same_bits(a, b, f"result {i}")


def test_nothing_of_the_norm_is_kept_but_its_residual():
    """Between forward and backward: the new residual, the rounded weight and rstd, for the norm and for the linears."""
    x, residual = (normal(130, 256, s).bfloat16().requires_grad_() for s in (1, 2))
    weight, w = normal(1, 256, 3)[0].requires_grad_(), normal(128, 256, 4).requires_grad_()
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y, summed = pk.rms_norm_coded(x, residual, weight, EPS, weight.detach().bfloat16())
        pk.linears(y.handle, [w], [None], FP8, None, y.codes, recompute=y.recompute)
    assert {t.data_ptr() for t in saved[3:]} == {t.data_ptr() for t in saved[:3]}
    assert saved[0].data_ptr() == summed.data_ptr()
    assert [t.numel() for t in saved[:3]] == [130 * 256, 256, 130]


@pytest.mark.parametrize("case", CASES)
def test_codes_made_again_are_the_definitions(case):
    """One pass over x and the rstd of the forward gives the 128x1 codes of the norm, ragged and wide rows too."""
    for shape in ((130, 196), (5, 64), *(((8192, 4096), (300, 10944)) if GPU else ())):
        x, weight = value_case(case, *shape, torch.bfloat16), normal(1, shape[1], 2)[0].bfloat16()
        _, rstd = reference.rms_norm(x, weight, EPS)
        arguments = [t.cuda() if GPU else t for t in (x, weight, rstd)]
        actual = TRITON.rms_norm_quantise_columns(*arguments, EPS, "ue8m0")
        expected = reference.rms_norm_quantise_columns(x, weight, rstd, EPS, "ue8m0")
        assert_same_bits(actual.scales, expected.scales, f"{case} {shape} scales")
        assert_same_bits(actual.codes, expected.codes, f"{case} {shape} codes")


def test_what_is_not_packed_takes_two_launches():
    """fp16 rows, whose norm is made again by the norm's kernel, have the definition's codes."""
    x, weight = normal(5, 192).half(), normal(1, 192, 2)[0].half()
    _, rstd = reference.rms_norm(x, weight, EPS)
    arguments = [t.cuda() if GPU else t for t in (x, weight, rstd)]
    expected = reference.rms_norm_quantise_columns(x, weight, rstd, EPS)
    assert_same_bits(TRITON.rms_norm_quantise_columns(*arguments, EPS).codes, expected.codes)


def test_the_fake_describes_the_real_outputs():
    """torch.library.opcheck accepts the custom op: schema, fake shapes and strides, no hidden mutation."""
    x, weight = normal(130, 196).bfloat16(), normal(1, 196, 2)[0].bfloat16()
    _, rstd = reference.rms_norm(x, weight, EPS)
    arguments = tuple(t.cuda() if GPU else t for t in (x, weight, rstd))
    op = torch.ops.precision_kernels.rms_norm_quantise_columns.default
    torch.library.opcheck(op, (*arguments, EPS, True, 1e-30), test_utils=["test_schema", "test_faketensor"])
