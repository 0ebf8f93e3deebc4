"""Linears of one input as one GEMM: forward bits of each alone, gradients of the definition, nothing copied twice."""

from __future__ import annotations

import pytest
import torch

import precision_kernels as pk
from precision_kernels import LinearFormats, Quantised, reference
from precision_kernels.autograd.linear import joined_columns
from tests.edge_cases import assert_same_bits, normal

FP8 = LinearFormats("fp8", "fp8", "fp8", "fp8")
BF16 = LinearFormats("bf16", "bf16", "bf16", "bf16")
FORMATS = [
    FP8,
    BF16,
    LinearFormats("fp8", "fp8", "bf16", "fp8"),
    LinearFormats("fp8", "fp8", "fp8", "fp8", "ue8m0"),
]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SIZES, K = (256, 128, 128), 192


def operands(device: str, m: int) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """x bf16 [m, K], fp32 masters [Ni, K] and biases [Ni]."""
    k = K if device == "cpu" else 256  # DeepGEMM takes K % 128 == 0
    x = normal(m, k, 1).bfloat16().to(device)
    weights = [normal(n, k, 2 + i, std=0.1).to(device) for i, n in enumerate(SIZES)]
    return x, weights, [normal(1, n, 9 + i)[0].to(device) for i, n in enumerate(SIZES)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("formats", FORMATS, ids=lambda f: f"{f.forward}-{f.wgrad}-{f.scale_format}")
@pytest.mark.parametrize("m", [1, 3, 127, 129])
def test_outputs_have_the_bits_of_each_alone(formats: LinearFormats, m: int, device: str) -> None:
    """Joined or one by one, with biases: every output has the same bits."""
    x, weights, biases = operands(device, m)
    joint = pk.prepare_joint(weights, formats, torch.bfloat16)
    together = pk.linears(x, weights, biases, formats, joint)
    for y, w, b in zip(together, weights, biases, strict=True):
        assert_same_bits(y, pk.linear(x, w, b, formats))
    if formats.forward == "fp8":
        codes = pk.quantise_activation(x, formats.scale_format)
        for y, z in zip(together, pk.linears_of_codes(codes, joint, biases, torch.bfloat16), strict=True):
            assert_same_bits(y, z)


def test_gradients_are_one_product_over_all_outputs() -> None:
    """dx is the dgrad of the stacked matrix and dW, dbias of each linear are the rows of its wgrad, bit for bit."""
    x, weights, biases = operands("cpu", 150)
    x.requires_grad_()
    parameters = [t.requires_grad_() for t in (*weights, *biases)]
    dys = [normal(150, n, 20 + i).bfloat16() for i, n in enumerate(SIZES)]
    outputs = pk.linears(x, weights, biases, FP8, pk.prepare_joint(weights, FP8, torch.bfloat16))
    dx, *rest = torch.autograd.grad(outputs, (x, *parameters), dys)
    dy, w = torch.cat(dys, 1), torch.cat([w.detach() for w in weights]).bfloat16()
    expected = reference.dgrad_fp8_matmul(
        reference.quantise_activation(dy), reference.quantise_weight(w), torch.bfloat16
    )
    assert_same_bits(dx, expected)
    dw = reference.wgrad_fp8_matmul(reference.quantise_columns(dy), reference.quantise_columns(x.detach()))
    for got, want in zip(rest[:3], dw.split(SIZES), strict=True):
        assert_same_bits(got, want)
    for got, want in zip(rest[3:], dys, strict=True):
        assert_same_bits(got, want.float().sum(0))


@pytest.mark.parametrize("formats", [FP8, BF16], ids=["fp8", "bf16"])
def test_halves_of_one_gradient_and_missing_ones_count_as_their_copies(formats: LinearFormats) -> None:
    """A gradient that arrives as column slices of one matrix, or not at all, gives what copies and zeros give."""
    x, weights, _ = operands("cpu", 40)
    x.requires_grad_()
    whole = normal(40, sum(SIZES), 30).bfloat16()
    results = []
    for dys in (
        list(whole.split(SIZES, 1)),
        [dy.contiguous() for dy in whole.split(SIZES, 1)],
    ):
        ws = [w.detach().requires_grad_() for w in weights]
        outputs = pk.linears(x, ws, [None] * 3, formats, pk.prepare_joint(ws, formats, torch.bfloat16))
        results.append(torch.autograd.grad(outputs, (x, *ws), dys))
    for a, b in zip(*results, strict=True):
        assert_same_bits(a, b)
    ws = [w.detach().requires_grad_() for w in weights]
    outputs = pk.linears(x, ws, [None] * 3, formats, pk.prepare_joint(ws, formats, torch.bfloat16))
    part = whole[:, SIZES[0] : SIZES[0] + SIZES[1]].contiguous()
    dx, dw = torch.autograd.grad(outputs[1], (x, ws[1]), part, retain_graph=True)
    zeros = [part if i == 1 else torch.zeros(40, n, dtype=part.dtype) for i, n in enumerate(SIZES)]
    full_dx, full_dw = torch.autograd.grad(outputs, (x, ws[1]), zeros)
    assert_same_bits(dx, full_dx)
    assert_same_bits(dw, full_dw)


def test_a_frozen_member_gets_no_gradient() -> None:
    """One frozen weight among trained ones: it has no gradient, the others have theirs."""
    x, weights, _ = operands("cpu", 20)
    weights[0].requires_grad_()
    outputs = pk.linears(x, weights, [None] * 3, FP8, pk.prepare_joint(weights, FP8, torch.bfloat16))
    sum(y.float().sum() for y in outputs).backward()
    assert weights[0].grad is not None
    assert weights[1].grad is None


def test_received_codes_are_not_copied() -> None:
    """Quantised weights that are rows of one tensor are joined as they lie; apart they are stacked; parts are views."""
    w = normal(sum(SIZES), K, 5)
    q = reference.quantise_weight(w.bfloat16())
    rows, blocks = q.codes.split(SIZES), q.scales.split([n // 128 for n in SIZES])
    pieces = [Quantised(c, s, "128x128") for c, s in zip(rows, blocks, strict=True)]
    joint = pk.prepare_joint(pieces, FP8, torch.bfloat16)
    assert joint.whole.quantised.codes.data_ptr() == q.codes.data_ptr()
    assert [p.quantised.codes.data_ptr() for p in joint.parts] == [r.data_ptr() for r in rows]
    apart = [Quantised(c.clone(), s.clone(), "128x128") for c, s in zip(rows, blocks, strict=True)]
    stacked = pk.prepare_joint(apart, FP8, torch.bfloat16).whole.quantised
    assert_same_bits(stacked.codes, q.codes)
    assert_same_bits(stacked.scales, q.scales)
    assert pk.rows_of_one([rows[1], rows[0]]) is None


@pytest.mark.parametrize(
    "shapes", [[(128, 64)], [(128, 64), (64, 64)], [(128, 64), (128, 128)], [(0, 64), (128, 64)]]
)
def test_what_cannot_be_joined_is_refused(shapes: list[tuple[int, int]]) -> None:
    """One weight, rows that are no multiple of 128, different K: not joinable, and prepare_joint says why."""
    assert not pk.joinable(shapes)
    with pytest.raises(ValueError, match="multiple of 128"):
        pk.prepare_joint([torch.zeros(s) for s in shapes], FP8, torch.bfloat16)


def test_codes_need_an_fp8_forward() -> None:
    """Codes given to linears of another format are refused, with what does not fit."""
    x, weights, _ = operands("cpu", 4)
    joint = pk.prepare_joint(weights, BF16, torch.bfloat16)
    with pytest.raises(ValueError, match="fp8 forward"):
        pk.linears_of_codes(pk.quantise_activation(x), joint, [None] * 3, torch.bfloat16)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("formats", FORMATS, ids=lambda f: f"{f.forward}-{f.wgrad}-{f.scale_format}")
def test_an_input_made_again_gives_the_gradients_of_a_saved_one(formats: LinearFormats, device: str) -> None:
    """With `Recompute` every result has the same bits, and an fp8 wgrad keeps the tensors it names, no codes of x."""
    x, weights, _ = operands(device, 150)
    source, weight = x.clone(), normal(1, x.shape[1], 40)[0].bfloat16().to(device)
    recompute = pk.Recompute(lambda rows, w: pk.rms_norm(rows, w, 1e-5), (source, weight))
    dys = [normal(150, n, 20 + i).bfloat16().to(device) for i, n in enumerate(SIZES)]
    joint = pk.prepare_joint(weights, formats, torch.bfloat16)
    results, kept = [], []
    for given in (None, recompute):
        leaves = [t.clone().requires_grad_() for t in (pk.rms_norm(source, weight, 1e-5), *weights)]
        saved: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, saved=saved: saved.append(t) or t, lambda t: t
        ):
            outputs = pk.linears(leaves[0], leaves[1:], [None] * 3, formats, joint, recompute=given)
        results.append((*outputs, *torch.autograd.grad(outputs, leaves, dys)))
        kept.append(saved)
    for a, b in zip(*results, strict=True):
        assert_same_bits(a, b)
    if formats.wgrad == "fp8" == formats.saved:
        assert [t.data_ptr() for t in kept[1]] == [source.data_ptr(), weight.data_ptr()]
        assert kept[0][0].dtype == torch.float8_e4m3fn


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_of_rotated_heads_are_one_matrix(device: str) -> None:
    """q, k, v of one product: outputs and gradients are those of `rotary` and a copy, and dy is read where it lies."""
    heads, kv, dim = 4, 2, 64
    sizes = (heads * dim, kv * dim, kv * dim)
    positions = torch.arange(40, device=device) * 7 % 50
    table = pk.rotary_cos_sin(1e4 ** (-torch.arange(0, dim, 2) / dim), 64, torch.bfloat16).to(device)
    whole = normal(40, sum(sizes), 3).bfloat16().to(device).requires_grad_()
    dys = [normal(40, n, 10 + i).bfloat16().to(device).view(40, -1, dim) for i, n in enumerate(sizes)]
    results = []
    for together in (True, False):
        q, k, v = (t.view(40, -1, dim) for t in whole.split(sizes, 1))
        if together:
            outputs = pk.rotary_of_projections(q, k, v, positions, table)
            grads = torch.autograd.grad(outputs, (q, k, v), dys, retain_graph=True)
            assert joined_columns([g.flatten(1) for g in grads], sizes).data_ptr() == grads[0].data_ptr()
        else:
            outputs = (*pk.rotary(q, k, positions, table), v.contiguous())
        results.append((*outputs, *torch.autograd.grad(outputs, whole, dys)))
    assert results[0][2].is_contiguous()
    assert results[0][2].data_ptr() != whole.data_ptr() + 2 * (sizes[0] + sizes[1])
    for a, b in zip(*results, strict=True):
        assert_same_bits(a, b)
