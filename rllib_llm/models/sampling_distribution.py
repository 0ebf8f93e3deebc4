"""The distribution that is sampled from, as a function of logits: one definition for sampler and trainer.

Order of vLLM's sampler: banned ids out, divide by the temperature, keep `top_k`, then `top_p`, renormalise.
Sets are thresholds on the logit (ties with the last kept are kept), so the support does not depend on the
order of the vocabulary. All functions are row-wise and row-invariant: a row's bits do not depend on the
other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from precision_kernels import log_softmax, token_logprobs
from precision_kernels.reference import exp

BANNED_LOGIT = float("-inf")
_PROBABILITY_ONE = 2.0**52
"""Probabilities are summed in units of 2^-52: exact in any order, and fp32 values above 2^-28 lose nothing."""


@dataclass(frozen=True)
class SamplingDistribution:
    """How all sequences of a batch are sampled; what each field does is said at `truncated_logits`."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    banned_ids: tuple[int, ...] = ()
    """ids of probability 0 in the first `min_tokens` tokens of an answer"""
    min_tokens: int = 0


def effective_temperature(temperature: float) -> float:
    """Greedy decoding (temperature 0) reports log-probs at temperature 1 (see
    `rllib_llm.engines.base.SamplingParams`)."""
    return temperature if temperature > 0 else 1.0


def is_truncated(
    vocab_size: int, temperature: float, top_k: int, top_p: float, banned_ids: Sequence[int] = ()
) -> bool:
    """Whether some ids have probability 0, so that the rest is renormalised."""
    return bool(banned_ids) or (temperature > 0 and (0 < top_k < vocab_size or top_p < 1.0))


def support(scaled: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Which ids can be sampled.

    Args:
        scaled: fp32 [T, V], logits / temperature, -inf for banned ids.
        top_k: keep logits >= the k-th largest; 0 keeps all.
        top_p: of those, keep logits >= the last of the smallest most-likely set whose probability reaches
            top_p.

    Returns:
        bool [T, V], at least one True in each row.
    """
    keep = scaled > BANNED_LOGIT
    if 0 < top_k < scaled.shape[-1]:
        kth = scaled.topk(top_k, dim=-1).values[:, -1:]
        keep = keep & (scaled >= kth)
    if top_p < 1.0:
        ordered = scaled.masked_fill(~keep, BANNED_LOGIT).sort(dim=-1, descending=True).values
        # Whole numbers: the order of CUDA's cumsum depends on the number of rows (torch's ScanUtils.cuh).
        reached = (exp(log_softmax(ordered)) * _PROBABILITY_ONE).to(torch.int64).cumsum_(dim=-1)
        last = (reached[:, :-1] < int(top_p * _PROBABILITY_ONE)).sum(dim=-1, keepdim=True)
        keep = keep & (scaled >= ordered.gather(-1, last))
    return keep


def truncated_logits(
    logits: torch.Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    target_ids: torch.Tensor | None = None,
    banned_ids: Sequence[int] = (),
    banned_rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """Logits whose softmax at temperature 1 is the distribution sampled from; -inf outside its support.

    Args:
        logits: fp32 [T, V].
        target_ids: int64 [T]; these stay in the support even where this side's own numbers would have cut
            them. That matters only when trainer and sampler differ: a sampled token must have a finite
            log-prob.
        banned_ids, banned_rows: ids of probability 0 in the rows where bool [T] is True (the first
            `min_tokens` of an answer ban the stop ids).
    """
    scaled = logits
    if effective_temperature(temperature) != 1.0:
        # A 0-d tensor, as in precision_kernels: with a Python number CUDA would multiply by the reciprocal.
        # Filled on the device: torch.tensor(..., device=) copies from pageable memory, which waits for the stream.
        divisor = torch.full((), temperature, dtype=torch.float32, device=logits.device)
        scaled = logits / divisor
    if banned_ids and banned_rows is not None:
        banned = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
        banned[list(banned_ids)] = True
        scaled = scaled.masked_fill(banned & banned_rows[:, None], BANNED_LOGIT)
    if is_truncated(logits.shape[-1], temperature, top_k, top_p):
        keep = support(scaled.detach(), top_k, top_p)
        if target_ids is not None:
            keep = keep.scatter(-1, target_ids[:, None], True)
        scaled = scaled.masked_fill(~keep, BANNED_LOGIT)
    return scaled


def logprobs_of(
    logits: torch.Tensor,
    target_ids: torch.Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    banned_ids: Sequence[int] = (),
    banned_rows: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies under the distribution sampled from; both differentiable.

    Args:
        logits: fp32 [T, V].
        target_ids: int64 [T], the sampled tokens.
        temperature, top_k, top_p, banned_ids, banned_rows: see `truncated_logits`.

    Returns:
        (log-probs fp32 [T], entropies in nats fp32 [T]).
    """
    if is_truncated(logits.shape[-1], temperature, top_k, top_p, banned_ids):
        logits = truncated_logits(logits, temperature, top_k, top_p, target_ids, banned_ids, banned_rows)
        temperature = 1.0
    logp, entropy = token_logprobs(logits, target_ids, effective_temperature(temperature), want_entropy=True)
    assert entropy is not None  # it was asked for
    return logp, entropy
