"""Rotary embedding of heads that are slices of one q/k/v product, with their gradients written as one matrix again."""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from precision_kernels.dispatch import implementation


class _RotaryOfProjections(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, positions, cos_sin):
        ctx.save_for_backward(positions, cos_sin)
        return implementation("rotary", q.device.type)(q, k, positions, cos_sin, v)

    @staticmethod
    @once_differentiable
    def backward(ctx, dq, dk, dv):
        joint = implementation("rotary_backward_joint", dq.device.type)
        whole = joint(dq, dk, dv, *ctx.saved_tensors).view(len(dq), -1, dq.shape[2])
        return *whole.split([dq.shape[1], dk.shape[1], dv.shape[1]], 1), None, None


def rotary_of_projections(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`rotary` of q [T, H, D] and k [T, Hkv, D], and a copy of v [T, Hkv, D]: their product need not be kept for it.

    The three gradients are slices of one matrix [T, (H + 2 Hkv) D], which joined projections read without a copy.
    """
    return _RotaryOfProjections.apply(q, k, v, positions, cos_sin)


__all__ = ["rotary_of_projections"]
