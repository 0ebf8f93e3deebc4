"""Rotary embedding of heads that are slices of one q/k/v product, with their gradients written as one matrix again."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from precision_kernels import reference
from precision_kernels.dispatch import implementation


class _RotaryOfProjections(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(positions, cos_sin)
        return implementation(reference.rotary, q.device.type)(q, k, positions, cos_sin, v)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        joint = implementation(reference.rotary_backward_joint, dq.device.type)
        positions, cos_sin = ctx.saved_tensors
        whole = joint(dq, dk, dv, positions, cos_sin).view(len(dq), -1, dq.shape[2])
        return *whole.split([dq.shape[1], dk.shape[1], dv.shape[1]], 1), None, None


def rotary_of_projections(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`rotary` of q [T, H, D] and k [T, Hkv, D], and a copy of v [T, Hkv, D]: their product need not be kept for it.

    The three gradients are slices of one matrix [T, (H + 2 Hkv) D], which joined projections read without a copy.
    """
    return _RotaryOfProjections.apply(q, k, v, positions, cos_sin)


__all__ = ["rotary_of_projections"]
