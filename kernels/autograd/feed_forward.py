"""The gated feed-forward block of training, down(silu(gate(x)) * up(x)), where all its GEMMs are fp8.

Forward bits and gradients are those of `linears`, `silu_mul`, `linear` one after the other. As one function, SiLU
hands its product to the next GEMMs as codes in both directions: it is rounded to x's dtype, but never written in it.
So are the gradients of gate and up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from precision_kernels import reference
from precision_kernels.autograd.coded import Coded
from precision_kernels.autograd.prepared import Codes, JointWeight, PreparedWeight
from precision_kernels.autograd.weight_gradient import Recompute, if_accumulating, main_gradient
from precision_kernels.dispatch import implementation
from precision_kernels.reference.formats import Quantised


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
    """Six GEMMs, all fp8. M tokens, H hidden, F features; W_gu [2F, H] is gate above up, W_d [H, F] is down.

    ======  ================================  ===============================================
    GEMM    product                           blocks of the operands
    ======  ================================  ===============================================
    1       gu [M, 2F] = x . W_gu^T           x 1x128 along H, W_gu 128x128
    2       y  [M, H]  = product . W_d^T      product 1x128 along F, W_d 128x128
    3       dproduct [M, F] = dy . W_d        dy 1x128 along H, W_d 128x128
    4       dW_d [H, F] = dy^T . product      both 128x1 along M, fp32 out
    5       dx [M, H] = dgu . W_gu            dgu 1x128 along 2F, W_gu 128x128
    6       dW_gu [2F, H] = dgu^T . x         both 128x1 along M, fp32 out
    ======  ================================  ===============================================
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        x_rows: Quantised | None,
        gate_up: JointWeight,
        down: PreparedWeight,
        recompute: Recompute | None,
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        assert gate_up.whole.quantised is not None  # `gated_feed_forward_problems`
        assert down.quantised is not None
        scale, device = down.formats.scale, x.device.type
        # x as codes: 1x128 for GEMM 1; 128x1 for GEMM 6, unless x can be made again for it.
        if recompute is None:
            x_rows, x_columns = implementation(reference.quantise_both, device)(x, *scale)
            saved_x: tuple[torch.Tensor, ...] = (x_columns.codes, x_columns.scales)
        else:
            x_rows = x_rows or implementation(reference.quantise_activation, device)(x, *scale)
            saved_x = recompute.tensors
        matmul = implementation(reference.block_fp8_matmul, device)
        # GEMM 1, rounded to x's dtype: the backward of SiLU reads it, so it is kept.
        gu = matmul(x_rows, gate_up.whole.quantised, x.dtype)
        # silu(gate) * up leaves the registers as codes only: 1x128 for GEMM 2, 128x1 for GEMM 4.
        gate, up = gu.chunk(2, 1)
        product = Codes(*implementation(reference.silu_mul_quantise_both, device)(gate, up, *scale))
        assert product.rows is not None
        assert product.columns is not None
        ctx.gate_up, ctx.down, ctx.dtype = gate_up, down, x.dtype
        ctx.recompute = None if recompute is None else recompute._replace(tensors=())
        ctx.weights = [if_accumulating(w) for w in weights]
        ctx.save_for_backward(gu, product.columns.codes, product.columns.scales, *saved_x)
        # GEMM 2
        return matmul(product.rows, down.quantised, x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gu, product_codes, product_scales, *saved_x = ctx.saved_tensors
        formats, device = ctx.down.formats, dy.device.type
        dgrad = implementation(reference.dgrad_fp8_matmul, device)
        # dy as codes: 1x128 for GEMM 3, 128x1 for GEMM 4.
        dy_rows, dy_columns = implementation(reference.quantise_both, device)(dy, *formats.scale)
        # GEMM 3
        dproduct = dgrad(dy_rows, ctx.down.fp8_dgrad_operand(), ctx.dtype)
        # GEMM 4
        product = Quantised(product_codes, product_scales, "128x1", formats.scale_format)
        dw_down = _weight_gradient(dy_columns, product, ctx.weights[2:])
        # dgate | dup [M, 2F] leave the registers as codes only: 1x128 for GEMM 5, 128x1 for GEMM 6.
        gate, up = gu.chunk(2, 1)
        quantised_gradients = implementation(reference.silu_mul_backward_quantise_both, device)
        dgu_rows, dgu_columns = quantised_gradients(dproduct, gate, up, *formats.scale)
        # GEMM 5
        needs_dx = ctx.needs_input_grad[0]
        dx = dgrad(dgu_rows, ctx.gate_up.whole.fp8_dgrad_operand(), ctx.dtype) if needs_dx else None
        # GEMM 6
        dw_gate_up = _weight_gradient(dgu_columns, _columns_of_x(ctx, saved_x), ctx.weights[:2])
        dw_gate, dw_up = (None, None) if dw_gate_up is None else dw_gate_up.chunk(2)
        return dx, None, None, None, None, dw_gate, dw_up, dw_down


def _columns_of_x(ctx: Any, saved: Sequence[torch.Tensor]) -> Quantised:
    """The 128x1 codes of x: the saved ones, or those of x made again of what was saved."""
    if ctx.recompute is None:
        return Quantised(saved[0], saved[1], "128x1", ctx.down.formats.scale_format)
    return ctx.recompute.codes(saved, ctx.down.formats)


def _weight_gradient(
    dy: Quantised, x: Quantised, weights: Sequence[torch.Tensor | None]
) -> torch.Tensor | None:
    """dW [N, K] = dy [M, N]^T . x [M, K], fp32; None after adding it to the ``.grad`` of ``weights``."""
    target = main_gradient(weights)
    product = implementation(reference.wgrad_fp8_matmul, dy.codes.device.type)(dy, x, target)
    return product if target is None else None


def gated_feed_forward(
    x: torch.Tensor | Coded,
    weights: Sequence[torch.Tensor],
    gate_up: JointWeight,
    down: PreparedWeight,
    recompute: Recompute | None = None,
) -> torch.Tensor:
    """down(silu(gate(x)) * up(x)) without biases: x [..., H] -> [..., H]; differentiable in x and the weights.

    ``weights``: the parameters of gate [F, H], up [F, H] and down [H, F]; ``gate_up``, ``down``: what was prepared of
    them; ``recompute`` as in `linears`.
    Raises ValueError listing what does not fit (`gated_feed_forward_problems`, for tensors SiLU keeps as they are).
    """
    x_rows = None
    if isinstance(x, Coded):
        coded = x
        x, x_rows, recompute = coded
    problems = gated_feed_forward_problems(gate_up, down, weights, "values")
    shapes = [tuple(p.shape) for p in (*gate_up.parts, down)]
    if [tuple(w.shape) for w in weights] != shapes or x.shape[-1] != shapes[0][1]:
        problems.append(
            f"x {tuple(x.shape)} and weights {[tuple(w.shape) for w in weights]} do not fit what was prepared, {shapes}"
        )
    if problems:
        raise ValueError("gated_feed_forward: " + "; ".join(problems))
    y = _GatedFeedForward.apply(x.reshape(-1, x.shape[-1]), x_rows, gate_up, down, recompute, *weights)
    return y.view(*x.shape[:-1], y.shape[-1])


__all__ = ["gated_feed_forward", "gated_feed_forward_problems"]
