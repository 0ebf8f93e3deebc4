"""Log-probs of logits: differentiable operators as those of `operators`."""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from precision_kernels.dispatch import implementation
from precision_kernels.operators import no_gradient


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, ids, temperature, want_entropy):
        forward = implementation("token_logprobs", logits.device.type)
        logp, entropy, lse = forward(logits, ids, temperature, want_entropy)
        ctx.set_materialize_grads(False)
        ctx.temperature = temperature
        ctx.save_for_backward(logits, ids, lse, entropy)
        return logp, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, dlogp, dentropy):
        saved = ctx.saved_tensors  # read once: torch.utils.checkpoint recomputes on the first access only
        backward = implementation("token_logprobs_backward", saved[0].device.type)
        return backward(dlogp, dentropy, *saved, ctx.temperature), None, None, None


def token_logprobs(
    logits: torch.Tensor, ids: torch.Tensor, temperature: float = 1.0, want_entropy: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """logits fp32 [T, V], ids int64 [T] -> (log p(ids) fp32 [T], entropy fp32 [T] or None); see
    `reference.logprobs`.
    """
    if no_gradient(logits):
        return implementation("token_logprobs", logits.device.type)(logits, ids, temperature, want_entropy)[
            :2
        ]
    return _TokenLogprobs.apply(logits, ids, temperature, want_entropy)


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, temperature):
        y = implementation("log_softmax", logits.device.type)(logits, temperature)
        ctx.temperature = temperature
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return implementation("log_softmax_backward", dy.device.type)(
            dy, *ctx.saved_tensors, ctx.temperature
        ), None


def log_softmax(logits: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Row-invariant log-softmax of logits / temperature, fp32 [T, V]; definition in `reference.logprobs`."""
    if no_gradient(logits):
        return implementation("log_softmax", logits.device.type)(logits, temperature)
    return _LogSoftmax.apply(logits, temperature)


__all__ = ["log_softmax", "token_logprobs"]
