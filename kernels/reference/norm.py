"""RMSNorm and residual-add + RMSNorm, forward and backward.

Forward, for a row x of D elements in the compute dtype c (everything else fp32, separate roundings, no FMA)::

    v    = fp32(x)                                            plain
    v    = fp32(round_c(fp32(x) + fp32(residual)))            add: the ROUNDED sum is the new residual and normalised
    ms   = lane_sum(v * v) / D                                `exact.lane_sum`: a fixed tree
    rstd = 1 / sqrt(ms + eps)                                 IEEE square root, then IEEE division
    y    = round_c(fp32(round_c(v * rstd)) * fp32(weight))

The rounding before the weight is Hugging Face's LlamaRMSNorm. Normalising the rounded sum (vLLM's native code
normalises the unrounded one) lets the residual stream be the only state: recomputing from it gives the same
bits. A row's bits depend on that row alone: vLLM 0.26's CUDA norm gives other bits for 256 rows than for 128 at
hidden 4096, which left 41 % of FP8 log-probs unequal (one H200; 0 % with a norm of this kind).

Backward (fp32, deterministic, not row-invariant in dweight), roundings passed straight through::

    n = v * rstd;  g = dy * weight
    dx = rstd * (g - n * mean(g * n));  dweight = sum over rows of dy * round_c(n)
"""

from __future__ import annotations

import torch

from precision_kernels.declaration import define
from precision_kernels.reference.exact import lane_sum


def check_norm(
    name: str, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None = None
) -> None:
    """Raises ValueError naming every argument of norm ``name`` whose shape or dtype does not fit."""
    problems = []
    if weight.dim() != 1 or x.shape[-1] != weight.shape[0]:
        problems.append(f"weight must have shape ({x.shape[-1]},), got {tuple(weight.shape)}")
    if not x.is_floating_point() or x.dtype == torch.float64:
        problems.append(f"x must be float32, bfloat16 or float16, got {x.dtype}")
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        problems.append(
            f"residual must be {x.dtype} {tuple(x.shape)}, got {residual.dtype} {tuple(residual.shape)}"
        )
    if problems:
        raise ValueError(f"{name}: " + "; ".join(problems))


def _normalise(
    v: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 v [..., D] -> (y in dtype, rstd fp32 [..., 1])."""
    # A full tensor divisor of the same device: CUDA multiplies by the reciprocal of a Python number.
    mean_square = lane_sum(v * v).unsqueeze(-1) / torch.tensor(float(v.shape[-1]), device=v.device)
    # torch's fp32 square root on CPU is off by one ulp for one value in five (torch 2.13, MKL); through fp64 it is
    # exact: no fp32 number has its root within 2^-50 of a rounding boundary, so a root off by an fp64 ulp rounds alike.
    rstd = mean_square.add_(eps).double().sqrt_().float().reciprocal_()
    normalised = (v * rstd).to(dtype).float()
    return normalised.mul_(weight.float()).to(dtype), rstd


@define
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., D] (fp32/bf16/fp16), weight [D] -> (y like x, rstd fp32 [..., 1])."""
    check_norm("rms_norm", x, weight)
    return _normalise(x.float(), weight, eps, x.dtype)


@define
def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, residual [..., D] -> (y, new residual = round(x + residual), rstd fp32 [..., 1])."""
    check_norm("add_rms_norm", x, weight, residual)
    summed = (x.float() + residual.float()).to(x.dtype)
    y, rstd = _normalise(summed.float(), weight, eps, x.dtype)
    return y, summed, rstd


@define
def rms_norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    dresidual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients (dx like x, dweight fp32 [D]) of `rms_norm` at its input x with the saved rstd.

    For `add_rms_norm` pass the new residual as x and its incoming gradient as ``dresidual``: it is added in
    fp32 before the rounding, and dx is the gradient of both x and residual.
    """
    dy32 = dy.float()
    normalised = x.float() * rstd
    g = dy32 * weight.float()
    dx = rstd * (g - normalised * (g * normalised).mean(-1, keepdim=True))
    if dresidual is not None:
        dx += dresidual.float()
    dweight = (dy32 * normalised.to(x.dtype).float()).reshape(-1, x.shape[-1]).sum(0)
    return dx.to(x.dtype), dweight


__all__ = ["add_rms_norm", "rms_norm", "rms_norm_backward"]
