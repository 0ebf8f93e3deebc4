"""The gated feed-forward block as one function: outputs and gradients of its operators one after the other."""

from __future__ import annotations

import pytest
import torch

import precision_kernels as pk
from precision_kernels import LinearFormats
from tests.edge_cases import assert_same_bits, normal

FP8 = LinearFormats("fp8", "fp8", "fp8", "fp8")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
H, F = 128, 256


def leaves(device: str, m: int) -> list[torch.Tensor]:
    """x bf16 [m, H] and fp32 masters of gate, up [F, H] and down [H, F]."""
    shapes = [(F, H), (F, H), (H, F)]
    weights = [normal(*shape, seed=2 + i, std=0.1).to(device) for i, shape in enumerate(shapes)]
    return [t.requires_grad_() for t in (normal(m, H, 1).to(device, torch.bfloat16), *weights)]


def apart(x, gate_w, up_w, down_w, formats, recompute) -> torch.Tensor:
    """The block by `linears`, `silu_mul` and `linear`."""
    joint = pk.prepare_joint([gate_w, up_w], formats, torch.bfloat16)
    gate, up = pk.linears(x, [gate_w, up_w], [None] * 2, formats, joint, recompute=recompute)
    return pk.linear(pk.silu_mul(gate, up), down_w, None, formats)


def together(x, gate_w, up_w, down_w, formats, recompute) -> torch.Tensor:
    """The block by `gated_feed_forward`."""
    joint = pk.prepare_joint([gate_w, up_w], formats, torch.bfloat16)
    down = pk.prepare_weight(down_w, formats, torch.bfloat16)
    return pk.gated_feed_forward(x, [gate_w, up_w, down_w], joint, down, recompute)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale_format", ["fp32", "ue8m0"])
@pytest.mark.parametrize("recomputed", [False, True])
def test_one_function_has_the_bits_of_the_operators(device, scale_format, recomputed):
    """Output, dx and all three weight gradients are equal, whether x is kept as codes or made again."""
    formats = LinearFormats("fp8", "fp8", "fp8", "fp8", scale_format)
    results = []
    for block in (apart, together):
        tensors = leaves(device, 130)
        recompute = pk.Recompute.of_saved(tensors[0]) if recomputed else None
        y = block(*tensors, formats, recompute)
        dy = normal(130, H, 9).to(device, torch.bfloat16)
        results.append((y, *torch.autograd.grad(y, tensors, dy)))
    for name, a, b in zip(("y", "dx", "dgate", "dup", "ddown"), *results, strict=True):
        assert_same_bits(b, a, name)


def test_nothing_of_the_product_is_kept_but_its_codes():
    """Between forward and backward: gate and up, 128x1 codes of their product, and what x is made of."""
    tensors = leaves("cpu", 130)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        together(*tensors, FP8, pk.Recompute.of_saved(tensors[0]))
    kinds = [(tuple(t.shape), t.dtype) for t in saved]
    assert kinds == [
        ((130, 2 * F), torch.bfloat16),
        ((130, F), torch.float8_e4m3fn),
        ((2, F), torch.float32),
        ((130, H), torch.bfloat16),
    ]


def test_an_input_without_gradient_gets_none():
    """The weights of the first block of a model with a frozen embedding are trained all the same."""
    x, *weights = leaves("cpu", 5)
    together(x.detach(), *weights, FP8, None).float().sum().backward()
    assert x.grad is None
    assert all(w.grad is not None for w in weights)


def test_what_does_not_fit_is_named():
    """Other formats, codes in place of gate and up, frozen weights and wrong shapes, all at once."""
    x, *weights = leaves("cpu", 4)
    weights[0].requires_grad_(False)
    mixed = LinearFormats("fp8", "bf16", "fp8", "fp8")
    joint = pk.prepare_joint(weights[:2], FP8, torch.bfloat16)
    down = pk.prepare_weight(weights[2], mixed, torch.bfloat16)
    problems = pk.gated_feed_forward_problems(joint, down, weights, "fp8")
    assert len(problems) == 4
    for problem, word in zip(
        problems, ("must all be fp8", "other formats", "codes", "gradient"), strict=True
    ):
        assert word in problem
    with pytest.raises(ValueError, match="do not fit what was prepared"):
        pk.gated_feed_forward(x[:, :64], weights, joint, down)
