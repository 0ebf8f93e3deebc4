"""Weight gradients that the GEMM adds to ``.grad``: the sums of autograd, and autograd itself wherever it listens."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

import precision_kernels as pk
from precision_kernels import LinearFormats
from precision_kernels.autograd.weight_gradient import if_accumulating
from tests.edge_cases import assert_same_bits, normal

FP8 = LinearFormats("fp8", "fp8", "fp8", "fp8")
FORMATS = [FP8, LinearFormats(), LinearFormats("fp8", "bf16", "bf16", "fp8"), LinearFormats(*["fp32"] * 4)]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SIZES, K = (256, 128, 128), 256


def parameters(device: str = "cpu", dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    """Masters of q, k, v [Ni, K] and of another linear [128, K]."""
    return [
        torch.nn.Parameter(normal(n, K, 2 + i, std=0.1).to(device, dtype))
        for i, n in enumerate((*SIZES, 128))
    ]


def backward(weights: list[torch.nn.Parameter], seed: int, formats: LinearFormats = FP8) -> None:
    """One micro-batch through joined q, k, v and the linear beside them."""
    x = normal(40, K, seed).to(weights[0].device, torch.bfloat16)
    joint = pk.prepare_joint(weights[:3], formats, torch.bfloat16)
    outputs = pk.linears(x, weights[:3], [None] * 3, formats, joint)
    outputs = (*outputs, pk.linear(x, weights[3], None, formats))
    dys = [normal(40, y.shape[1], 10 * seed + i).to(y) for i, y in enumerate(outputs)]
    torch.autograd.backward(outputs, dys)


def accumulated(marked: bool, device: str, **options) -> list[torch.Tensor]:
    """Sums of three micro-batches."""
    weights = parameters(device)
    if marked:
        pk.accumulate_in_place(weights)
    for seed in (1, 2, 3):
        backward(weights, seed, **options)
    return [w.grad for w in weights]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("formats", FORMATS, ids=lambda f: f"{f.forward}-{f.wgrad}")
def test_sums_are_those_of_autograd(formats, device):
    """Three micro-batches, joined weights and a single one: the same sums up to the order of fp32 additions."""
    sums = (accumulated(marked, device, formats=formats) for marked in (True, False))
    for added, summed in zip(*sums, strict=True):
        assert added.dtype == torch.float32
        assert (added - summed).norm() < 1e-6 * summed.norm()


def test_the_second_micro_batch_writes_into_the_first_ones_gradient(monkeypatch):
    """.grad stays where it is, and the GEMM is given it: q, k and v as one matrix."""
    weights = parameters()
    pk.accumulate_in_place(weights)
    backward(weights, 1)
    places = [w.grad.data_ptr() for w in weights]
    targets = []
    dispatch = pk.dispatch
    bound = dispatch.implementation("wgrad_fp8_matmul", "cpu")
    spy = dispatch.Implementation(
        "spy", "0", lambda dy, x, out=None: targets.append(out) or bound(dy, x, out)
    )
    monkeypatch.setitem(dispatch.table("cpu"), "wgrad_fp8_matmul", spy)
    backward(weights, 2)
    assert [w.grad.data_ptr() for w in weights] == places
    assert sorted(tuple(t.shape) for t in targets) == [(128, K), (sum(SIZES), K)]


def test_the_definition_adds_block_by_block():
    """.grad after two micro-batches is `wgrad_fp8_matmul` of the second, added to the first, bit for bit."""
    weight = torch.nn.Parameter(normal(128, K, 2, std=0.1))
    pk.accumulate_in_place([weight])
    expected = None
    for seed in (1, 2):
        x, dy = normal(150, K, seed).bfloat16(), normal(150, 128, 10 + seed).bfloat16()
        pk.linear(x, weight, None, FP8).backward(dy)
        codes = [pk.quantise_columns(t) for t in (dy, x)]
        expected = pk.wgrad_fp8_matmul(*codes, expected)
    assert_same_bits(weight.grad, expected)


def _hooked(weights):
    weights[0].register_hook(lambda g: g * 2)


def _post_hooked(weights):
    weights[0].register_post_accumulate_grad_hook(lambda p: None)


def _scattered(weights):
    for w in weights[:3]:
        w.grad = None if w.grad is None else w.grad.clone()


def _frozen(weights):
    weights[0].requires_grad_(False)


@pytest.mark.parametrize("change", [_hooked, _post_hooked, _scattered, _frozen])
def test_listeners_and_gradients_apart_go_through_autograd(change):
    """Hooks see every gradient, a frozen member stays without, gradients that lie apart are summed one by one."""
    results = []
    for marked in (True, False):
        weights = parameters()
        if marked:
            pk.accumulate_in_place(weights)
        backward(weights, 1)
        change(weights)
        backward(weights, 2)
        results.append([w.grad for w in weights])
    for a, b in zip(*(r[:3] for r in results), strict=True):
        assert_same_bits(a, b)


def test_masters_below_fp32_go_through_autograd():
    """A bf16 .grad is not written by the GEMM."""
    weights = parameters(dtype=torch.bfloat16)
    pk.accumulate_in_place(weights)
    plain = parameters(dtype=torch.bfloat16)
    for seed in (1, 2):
        backward(weights, seed)
        backward(plain, seed)
    for a, b in zip(weights, plain, strict=True):
        assert_same_bits(a.grad, b.grad)


def _loaded(weights):
    file = io.BytesIO()
    torch.save(weights, file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda w: [copy.copy(w[0])], lambda w: pickle.loads(pickle.dumps(w)), _loaded]
)
def test_copies_do_not_accumulate(copied):
    """Nobody promised anything about a copy, a pickled or a saved parameter."""
    weights = parameters()
    pk.accumulate_in_place(weights)
    assert if_accumulating(weights[0]) is weights[0]
    assert if_accumulating(copied(weights)[0]) is None


@pytest.mark.parametrize("of", ["weights and x", "x", "backward(inputs=[x])"])
def test_gradients_that_are_asked_for_do_not_go_to_grad(of):
    """autograd.grad gives the gradients of marked weights, and no pass writes a .grad that it was not asked for."""
    weights = parameters()
    pk.accumulate_in_place(weights)
    backward(weights, 1)
    before = [w.grad.clone() for w in weights]
    x = normal(40, K, 2).bfloat16().requires_grad_()
    joint = pk.prepare_joint(weights[:3], FP8, torch.bfloat16)
    outputs = (*pk.linears(x, weights[:3], [None] * 3, FP8, joint), pk.linear(x, weights[3], None, FP8))
    loss = sum(y.float().square().sum() for y in outputs)
    if of == "weights and x":
        asked = torch.autograd.grad(loss, [*weights, x], retain_graph=True)
        for w in weights:
            w.grad = None
        loss.backward()
        for w, grad in zip(weights, asked, strict=False):
            assert_same_bits(w.grad, grad)
        return
    if of == "x":
        torch.autograd.grad(loss, x)
    else:
        loss.backward(inputs=[x])
    for w, expected in zip(weights, before, strict=True):
        assert_same_bits(w.grad, expected)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_a_gradient_with_a_graph_is_not_written_to():
    """After backward(create_graph=True) .grad belongs to a graph: autograd adds to it."""
    weights = parameters()
    pk.accumulate_in_place(weights)
    weights[3].grad = (weights[3].detach().requires_grad_() * 2).float()
    kept = weights[3].grad
    expected = kept.detach().clone()
    pk.linear(normal(40, K, 2).bfloat16(), weights[3], None, FP8).float().sum().backward(create_graph=True)
    assert_same_bits(kept.detach(), expected)
    assert not torch.equal(weights[3].grad, expected)


def test_zeroed_gradients_are_added_to_and_none_starts_anew():
    """zero_grad(set_to_none=False) leaves zeros to add to; set_to_none=True gives the next pass to autograd."""
    weights = parameters()
    pk.accumulate_in_place(weights)
    optimiser = torch.optim.SGD(weights)
    backward(weights, 1)
    first = [w.grad.clone() for w in weights]
    optimiser.zero_grad(set_to_none=False)
    backward(weights, 1)
    for w, f in zip(weights, first, strict=True):
        assert (w.grad - f).norm() < 1e-6 * f.norm()
    optimiser.zero_grad()
    backward(weights, 1)
    for w, f in zip(weights, first, strict=True):
        assert_same_bits(w.grad, f)


def test_only_leaves_can_be_marked():
    """A tensor without a .grad of its own is refused."""
    with pytest.raises(ValueError, match="only leaves"):
        pk.accumulate_in_place([torch.zeros(2, 2)])
