"""A low-rank adapter on a linear: y = base + scale * B (A x), with gradients of x, A and B.

=========  ================================  ==========================================  ======================
product    operands                          in                                          rounded to
=========  ================================  ==========================================  ======================
h = A x    x [M, K] . A [r, K]^T             `weight`, row-invariant                     `inner`
z = B h    h [M, r] . B [N, r]^T             `weight`, row-invariant                     fp32
y          base + scale * z                  fp32 (`reference.add_scaled`)               base's dtype
dh         scale * (dy [M, N] . B [N, r])    `dgrad`, fp32 out, then times scale         x's dtype
dx         dh [M, r] . A [r, K]              `dgrad`                                     x's dtype
dB [N, r]  scale * (dy^T . h)                `wgrad`, fp32 out, then times scale         fp32
dA [r, K]  dh^T . x                          `wgrad`                                     fp32
=========  ================================  ==========================================  ======================

A and B are the parameters rounded to the compute dtype, then brought into `weight`. Learner and engine call this one
function on equal A and B, so y has equal bits on both sides; on a GPU its products are those that are bound there for
`invariant_matmul`, whatever the rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from precision_kernels import reference
from precision_kernels.autograd.prepared import DTYPES
from precision_kernels.autograd.weight_gradient import Recompute
from precision_kernels.dispatch import implementation


@dataclass(frozen=True)
class LowRankFormats:
    """Formats of an adapter's products: each "bf16", "fp16" or "fp32". See the table of the module."""

    weight: str = "bf16"
    inner: str = "bf16"
    dgrad: str = "bf16"
    wgrad: str = "bf16"
    saved: str = "bf16"

    def __post_init__(self) -> None:
        wrong = {name: value for name, value in vars(self).items() if value not in DTYPES}
        if wrong:
            raise ValueError(f"LowRankFormats: each must be one of {', '.join(DTYPES)}, got {wrong}")


class PreparedLowRank:
    """A [r, K] and B [N, r] as their GEMMs read them. Make it with `prepare_low_rank`, once per optimiser step."""

    def __init__(self, a: torch.Tensor, b: torch.Tensor, formats: LowRankFormats) -> None:
        self.a, self.b, self.formats = a, b, formats
        pack = implementation(reference.pack_weight, a.device.type)
        self.packed_a, self.packed_b = pack(a), pack(b)


def prepare_low_rank(
    a: torch.Tensor, b: torch.Tensor, formats: LowRankFormats, compute_dtype: torch.dtype
) -> PreparedLowRank:
    """Round A [r, K] and B [N, r] to the compute dtype and pack them; no gradient flows through.

    Raises ValueError for shapes that do not fit.
    """
    if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1]:
        raise ValueError(
            f"prepare_low_rank: A [r, K] and B [N, r] are needed, got {list(a.shape)} and {list(b.shape)}"
        )
    a, b = (factor.detach().to(compute_dtype).to(DTYPES[formats.weight]) for factor in (a, b))
    return PreparedLowRank(a, b, formats)


def _forward(
    base: torch.Tensor, x: torch.Tensor, prepared: PreparedLowRank, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y [M, N], h [M, r])."""
    formats, device = prepared.formats, x.device.type
    matmul, weight = implementation(reference.invariant_matmul, device), DTYPES[formats.weight]
    # h = A x, row-invariant, one rounding to `inner`.
    h = matmul(x.to(weight), prepared.packed_a, DTYPES[formats.inner])
    # z = B h, row-invariant, not rounded below fp32; then y, one rounding.
    z = matmul(h.to(weight), prepared.packed_b, torch.float32)
    return implementation(reference.add_scaled, device)(base, z, scale), h


class _LowRank(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        base: torch.Tensor,
        x: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        prepared: PreparedLowRank,
        scale: float,
        recompute: Recompute | None,
    ) -> torch.Tensor:
        y, h = _forward(base, x, prepared, scale)
        ctx.prepared, ctx.scale, ctx.dtype = prepared, scale, x.dtype
        saved = DTYPES[prepared.formats.saved]
        ctx.recompute = None if recompute is None or saved != x.dtype else recompute._replace(tensors=())
        kept = (x.to(saved),) if ctx.recompute is None or recompute is None else recompute.tensors
        ctx.save_for_backward(h.to(saved), *kept)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        h, *kept = ctx.saved_tensors
        prepared, scale, device = ctx.prepared, ctx.scale, dy.device.type
        dgrad, wgrad = DTYPES[prepared.formats.dgrad], DTYPES[prepared.formats.wgrad]
        _, needs_x, needs_a, needs_b, *_ = ctx.needs_input_grad
        multiply = implementation(reference.dgrad_matmul, device)
        weigh = implementation(reference.wgrad_matmul, device)
        dx = da = db = None
        if needs_x or needs_a:
            dh = multiply(dy.to(dgrad), prepared.b.to(dgrad), torch.float32).mul_(scale).to(ctx.dtype)
            if needs_x:
                dx = multiply(dh.to(dgrad), prepared.a.to(dgrad), ctx.dtype)
            if needs_a:
                x = (
                    kept[0]
                    if ctx.recompute is None
                    else ctx.recompute.function(*kept).reshape(dy.shape[0], -1)
                )
                da = weigh(dh.to(wgrad), x.to(wgrad))
        if needs_b:
            db = weigh(dy.to(wgrad), h.to(wgrad)).mul_(scale)
        return dy if ctx.needs_input_grad[0] else None, dx, da, db, None, None, None


def low_rank(
    base: torch.Tensor,
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    prepared: PreparedLowRank,
    scale: float,
    recompute: Recompute | None = None,
) -> torch.Tensor:
    """base [..., N] + scale * B (A x) in base's dtype, x [..., K]; differentiable in base, x, a [r, K] and b [N, r].

    ``prepared``: `prepare_low_rank` of a and b. ``recompute``: what makes x again, saved in its place.
    Raises ValueError listing everything that does not fit.
    """
    problems = []
    if x.shape[:-1] != base.shape[:-1]:
        problems.append(f"x {list(x.shape)} has other rows than base {list(base.shape)}")
    if prepared.a.shape != a.shape or prepared.b.shape != b.shape:
        problems.append(
            f"prepared were {list(prepared.a.shape)} and {list(prepared.b.shape)}, given are {list(a.shape)} and "
            f"{list(b.shape)}"
        )
    if (x.shape[-1], base.shape[-1]) != (prepared.a.shape[1], prepared.b.shape[0]):
        problems.append(
            f"the adapter is for {prepared.a.shape[1]} inputs and {prepared.b.shape[0]} outputs, got x {list(x.shape)} "
            f"and base {list(base.shape)}"
        )
    if problems:
        raise ValueError("low_rank: " + "; ".join(problems))
    rows, outputs = x.reshape(-1, x.shape[-1]), base.reshape(-1, base.shape[-1])
    if torch.is_grad_enabled():
        y = _LowRank.apply(outputs, rows, a, b, prepared, scale, recompute)
    else:
        y, _ = _forward(outputs, rows, prepared, scale)
    return y.view(base.shape)


__all__ = ["LowRankFormats", "PreparedLowRank", "low_rank", "prepare_low_rank"]
