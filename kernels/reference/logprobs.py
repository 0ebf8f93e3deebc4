"""log-softmax and the log-probabilities of sampled tokens, fp32, row-invariant, forward and backward.

For a row of logits l [V] (fp32) and temperature T::

    z = l / T (true division);  m = max z;  e = exp(z - m);  s = lane_sum(e)          (`exact`)
    log_softmax = (z - m) - log s;   entropy = log s - lane_sum(e * (z - m)) / s

-inf logits (tokens removed by top-k/top-p) have probability 0 and count 0 in the entropy. Rows are handled in
chunks, so only the logits themselves are [T, V]-sized.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from precision_kernels.declaration import define
from precision_kernels.reference.exact import exp, lane_sum, log

_CHUNK_ELEMENTS = 1 << 20


def check_logits(name: str, logits: torch.Tensor, temperature: float) -> None:
    """Raises ValueError unless logits are fp32 [T, V] and the temperature is positive; ``name``: the operator."""
    if logits.dim() != 2 or logits.dtype != torch.float32 or not temperature > 0:
        raise ValueError(
            f"{name}: logits must be float32 [T, V] and temperature positive (sample greedily without it), "
            f"got {logits.dtype} {tuple(logits.shape)}, temperature {temperature!r}"
        )


def check_ids(logits: torch.Tensor, ids: torch.Tensor) -> None:
    """Raises ValueError unless there is one int64 id per row of logits [T, V]."""
    if ids.shape != logits.shape[:1] or ids.dtype != torch.int64:
        raise ValueError(
            f"token_logprobs: ids must be int64 [{logits.shape[0]}], got {ids.dtype} {tuple(ids.shape)}"
        )


def _scaled(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    if temperature == 1.0:
        return logits
    return logits / torch.tensor(temperature, dtype=torch.float32, device=logits.device)


def _chunks(logits: torch.Tensor) -> Iterator[slice]:
    rows = max(1, _CHUNK_ELEMENTS // max(1, logits.shape[1]))
    for start in range(0, logits.shape[0], rows):
        yield slice(start, start + rows)


@define
def log_softmax(logits: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """fp32 [T, V] -> fp32 [T, V]."""
    check_logits("log_softmax", logits, temperature)
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    for rows in _chunks(logits):
        z = _scaled(logits[rows], temperature)
        shifted = z - z.amax(-1, keepdim=True)
        torch.sub(shifted, log(lane_sum(exp(shifted))).unsqueeze(-1), out=out[rows])
    return out


@define
def token_logprobs(
    logits: torch.Tensor, ids: torch.Tensor, temperature: float = 1.0, want_entropy: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """logits fp32 [T, V], ids int64 [T] -> (log p(ids) fp32 [T], entropy fp32 [T] or None, log-sum-exp fp32 [T]).

    The log-sum-exp m + log s of z is what the backward needs.
    """
    check_logits("token_logprobs", logits, temperature)
    check_ids(logits, ids)
    logp, entropy, lse = [], [], []
    for rows in _chunks(logits):
        z = _scaled(logits[rows], temperature)
        top = z.amax(-1, keepdim=True)
        shifted = z - top
        e = exp(shifted)
        total = lane_sum(e)
        log_total = log(total)
        logp.append(shifted.gather(-1, ids[rows, None])[:, 0] - log_total)
        lse.append(top[:, 0] + log_total)
        if want_entropy:
            weighted = torch.where(e > 0, e * shifted, 0.0)
            entropy.append(log_total - lane_sum(weighted) / total)
    empty = logits.new_zeros(0)
    join = lambda parts: torch.cat(parts) if parts else empty  # noqa: E731
    return join(logp), join(entropy) if want_entropy else None, join(lse)


@define
def token_logprobs_backward(
    dlogp: torch.Tensor | None,
    dentropy: torch.Tensor | None,
    logits: torch.Tensor,
    ids: torch.Tensor,
    lse: torch.Tensor,
    entropy: torch.Tensor | None,
    temperature: float,
) -> torch.Tensor:
    """dlogits fp32 [T, V]: dlogp * (onehot - p) - dentropy * p * (log p + H), divided by the temperature."""
    out = torch.empty_like(logits)
    for rows in _chunks(logits):
        log_p = _scaled(logits[rows], temperature) - lse[rows, None]
        p = exp(log_p)
        grad = torch.zeros_like(p)
        if dlogp is not None:
            grad.sub_(p * dlogp[rows, None])
            grad.scatter_add_(-1, ids[rows, None], dlogp[rows, None])
        if dentropy is not None and entropy is not None:
            slope = torch.where(p > 0, p * (log_p + entropy[rows, None]), 0.0)
            grad.sub_(slope * dentropy[rows, None])
        torch.div(grad, temperature, out=out[rows])
    return out


@define
def log_softmax_backward(dy: torch.Tensor, y: torch.Tensor, temperature: float) -> torch.Tensor:
    """dlogits fp32 [T, V] from dy and the output y of `log_softmax`."""
    out = torch.empty_like(y)
    for rows in _chunks(y):
        out[rows] = (dy[rows] - exp(y[rows]) * dy[rows].sum(-1, keepdim=True)) / temperature
    return out


__all__ = ["log_softmax", "log_softmax_backward", "token_logprobs", "token_logprobs_backward"]
