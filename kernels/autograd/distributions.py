"""Log-probs of logits: differentiable operators as those of `operators`."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from precision_kernels import reference
from precision_kernels.autograd.operators import no_gradient
from precision_kernels.dispatch import implementation


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, ids: torch.Tensor, temperature: float, want_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        forward = implementation(reference.token_logprobs, logits.device.type)
        logp, entropy, lse = forward(logits, ids, temperature, want_entropy)
        ctx.set_materialize_grads(False)
        ctx.temperature = temperature
        ctx.save_for_backward(logits, ids, lse, entropy)
        return logp, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dlogp: torch.Tensor | None, dentropy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        # Read once: torch.utils.checkpoint recomputes on the first access only.
        logits, ids, lse, entropy = ctx.saved_tensors
        backward = implementation(reference.token_logprobs_backward, logits.device.type)
        return backward(dlogp, dentropy, logits, ids, lse, entropy, ctx.temperature), None, None, None


def token_logprobs(
    logits: torch.Tensor, ids: torch.Tensor, temperature: float = 1.0, want_entropy: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """logits fp32 [T, V], ids int64 [T] -> (log p(ids) fp32 [T], entropy fp32 [T] or None); `reference.logprobs`."""
    if no_gradient(logits):
        return implementation(reference.token_logprobs, logits.device.type)(
            logits, ids, temperature, want_entropy
        )[:2]
    return _TokenLogprobs.apply(logits, ids, temperature, want_entropy)


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, temperature: float) -> torch.Tensor:
        y = implementation(reference.log_softmax, logits.device.type)(logits, temperature)
        ctx.temperature = temperature
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (y,) = ctx.saved_tensors
        backward = implementation(reference.log_softmax_backward, dy.device.type)
        return backward(dy, y, ctx.temperature), None


def log_softmax(logits: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Row-invariant log-softmax of logits / temperature, fp32 [T, V]; definition in `reference.logprobs`."""
    if no_gradient(logits):
        return implementation(reference.log_softmax, logits.device.type)(logits, temperature)
    return _LogSoftmax.apply(logits, temperature)


__all__ = ["log_softmax", "token_logprobs"]
