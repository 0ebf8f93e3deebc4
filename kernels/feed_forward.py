"""The gated feed-forward block of training, down(silu(gate(x)) * up(x)), where all its GEMMs are fp8.

Forward bits and gradients are those of `linears`, `silu_mul`, `linear` one after the other. As one function, SiLU
hands its product to the next GEMMs as codes in both directions: it is rounded to x's dtype, but never written in it.
So are the gradients of gate and up.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd.function import once_differentiable

from precision_kernels.coded import Coded
from precision_kernels.dispatch import implementation
from precision_kernels.prepared import JointWeight, PreparedWeight
from precision_kernels.reference.formats import Quantised
from precision_kernels.weight_gradient import Remake, main_gradient, marked


def gated_feed_forward_problems(
    gate_up: JointWeight, down: PreparedWeight, weights: Sequence[torch.Tensor], saved: str
) -> list[str]:
    """Why `gated_feed_forward` cannot take these; empty if it can.

    ``saved``: the format in which SiLU keeps gate and up for the backward (policy key `activation.saved`).
    """
    formats, problems = down.formats, []
    if {formats.forward, formats.dgrad, formats.wgrad, formats.saved} != {"fp8"}:
        problems.append(f"forward, dgrad, wgrad and saved must all be fp8, got {formats}")
    if gate_up.whole.formats != formats:
        problems.append(f"gate and up have other formats than down: {gate_up.whole.formats}, {formats}")
    if saved == "fp8":
        problems.append("gate and up are read by the backward as they are, not as the codes of saved='fp8'")
    if gate_up.sizes != [down.shape[1]] * 2:
        problems.append(
            f"gate and up must both have down's {down.shape[1]} inputs as outputs, got {gate_up.sizes}"
        )
    if not all(w.requires_grad for w in weights):
        problems.append("all three weights must require a gradient")
    return problems


class _GatedFeedForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, codes, gate_up, down, remake, *weights):
        scale, device = (down.formats.scale_format, down.formats.scale_floor), x.device.type
        if remake is None:
            codes, columns = implementation("quantise_both", device)(x, *scale)
            kept = (columns.codes, columns.scales)
        else:
            codes = codes or implementation("quantise_activation", device)(x, *scale)
            kept = remake.tensors
        matmul = implementation("block_fp8_matmul", device)
        both = matmul(codes, gate_up.whole.quantised, x.dtype)
        rows, columns = implementation("silu_mul_quantise_both", device)(*both.chunk(2, 1), *scale)
        ctx.gate_up, ctx.down, ctx.dtype = gate_up, down, x.dtype
        ctx.remake = None if remake is None else remake._replace(tensors=())
        ctx.weights = [marked(w) for w in weights]
        ctx.save_for_backward(both, columns.codes, columns.scales, *kept)
        return matmul(rows, down.quantised, x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        both, *saved = ctx.saved_tensors
        formats, device = ctx.down.formats, dy.device.type
        scale = (formats.scale_format, formats.scale_floor)
        dgrad = implementation("dgrad_fp8_matmul", device)
        rows, columns = implementation("quantise_both", device)(dy, *scale)
        dproduct = dgrad(rows, ctx.down.dgrad_operand(), ctx.dtype)
        product = Quantised(saved[0], saved[1], "128x1", formats.scale_format)
        ddown = _weight_gradient(columns, product, ctx.weights[2:])
        gradients = implementation("silu_mul_backward_quantise_both", device)
        rows, columns = gradients(dproduct, *both.chunk(2, 1), *scale)
        dx = dgrad(rows, ctx.gate_up.whole.dgrad_operand(), ctx.dtype) if ctx.needs_input_grad[0] else None
        dgate_up = _weight_gradient(columns, _columns(ctx, saved[2:]), ctx.weights[:2])
        dweights = (None, None) if dgate_up is None else dgate_up.chunk(2)
        return dx, None, None, None, None, *dweights, ddown


def _columns(ctx, kept) -> Quantised:
    """The 128x1 codes of x, kept or of x made again."""
    if ctx.remake is None:
        return Quantised(kept[0], kept[1], "128x1", ctx.down.formats.scale_format)
    return ctx.remake.codes(kept, ctx.down.formats)


def _weight_gradient(dy: Quantised, x: Quantised, weights) -> torch.Tensor | None:
    """dW fp32 [N, K], or None after adding it to the ``.grad`` of ``weights``."""
    target = main_gradient(weights)
    product = implementation("wgrad_fp8_matmul", dy.codes.device.type)(dy, x, target)
    return product if target is None else None


def gated_feed_forward(
    x: torch.Tensor | Coded,
    weights: Sequence[torch.Tensor],
    gate_up: JointWeight,
    down: PreparedWeight,
    remake: Remake | None = None,
) -> torch.Tensor:
    """down(silu(gate(x)) * up(x)) without biases: x [..., H] -> [..., H]; differentiable in x and the weights.

    ``weights``: the parameters of gate [F, H], up [F, H] and down [H, F]; ``gate_up``, ``down``: what was prepared of
    them; ``remake`` as in `linears`.
    Raises ValueError listing what does not fit (`gated_feed_forward_problems`, for tensors SiLU keeps as they are).
    """
    codes = None
    if isinstance(x, Coded):
        x, codes, remake = x
    problems = gated_feed_forward_problems(gate_up, down, weights, "values")
    shapes = [tuple(p.shape) for p in (*gate_up.parts, down)]
    if [tuple(w.shape) for w in weights] != shapes or x.shape[-1] != shapes[0][1]:
        problems.append(
            f"x {tuple(x.shape)} and weights {[tuple(w.shape) for w in weights]} do not fit what was prepared, {shapes}"
        )
    if problems:
        raise ValueError("gated_feed_forward: " + "; ".join(problems))
    y = _GatedFeedForward.apply(x.reshape(-1, x.shape[-1]), codes, gate_up, down, remake, *weights)
    return y.view(*x.shape[:-1], y.shape[-1])


__all__ = ["gated_feed_forward", "gated_feed_forward_problems"]
