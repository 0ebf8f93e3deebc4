"""Gradients of one optimiser step: accumulated in fp32, whatever the parameters' dtype."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from precision_kernels import accumulate_in_place

__all__ = ["Gradients"]


class Gradients:
    """fp32 gradients of a fixed list of parameters over several backward passes.

    torch accumulates in the parameter's dtype; with bf16 masters eight bits of mantissa lose every
    micro-batch below 1/256 of the sum. fp32 parameters, and high halves of fp32 masters (whose `grad_dtype` is
    fp32), use `param.grad` itself, without a copy; from the second micro-batch on the weight gradients of linears
    are added to it by their GEMM. The learner listens to no parameter, which is what `accumulate_in_place` asks for.
    """

    def __init__(self, params: Sequence[torch.nn.Parameter]):
        self.params = list(params)
        self._sums: dict[torch.nn.Parameter, torch.Tensor] = {}
        accumulate_in_place(p for p in self.params if p.requires_grad and _has_fp32_grad(p))

    def zero(self) -> None:
        self._sums = {}
        for param in self.params:
            param.grad = None

    def accumulate(self) -> None:
        """Call after each backward pass."""
        for param in self.params:
            if param.grad is None or _has_fp32_grad(param):
                continue
            if param in self._sums:
                self._sums[param].add_(param.grad)
            else:
                self._sums[param] = param.grad.float()
            param.grad = None

    def take(self) -> dict[torch.nn.Parameter, torch.Tensor]:
        """Gradient of every parameter, zeros where no backward pass reached it (another learner's may have)."""
        grads = {}
        for param in self.params:
            grad = param.grad if _has_fp32_grad(param) else self._sums.get(param)
            grads[param] = torch.zeros_like(param, dtype=torch.float32) if grad is None else grad
        return grads

    def release(self, param: torch.nn.Parameter) -> None:
        """Give up the gradient of a parameter, which was used."""
        param.grad = None
        self._sums.pop(param, None)

    @staticmethod
    def unscale_and_norm(grads: dict[torch.nn.Parameter, torch.Tensor], scale: float) -> float:
        """Divides by the loss scale in place; returns the global L2 norm (fp64), not finite if any element is not."""
        values = list(grads.values())
        if scale != 1.0:
            torch._foreach_mul_(values, 1.0 / scale)
        squares = [torch.linalg.vector_norm(v, dtype=torch.float64).square() for v in values]
        return float(torch.stack(squares).sum().sqrt())


def _has_fp32_grad(param: torch.nn.Parameter) -> bool:
    return param.grad_dtype == torch.float32
