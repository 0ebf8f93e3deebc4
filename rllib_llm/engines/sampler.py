"""One token for each row of logits, from uniform numbers that belong to the row's sequence."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import numpy as np
import torch

from precision_kernels import log_softmax
from precision_kernels.reference import exp
from rllib_llm.models.sampling_distribution import logprobs_of, truncated_logits


def sequence_seeds(count: int, seed: int | None, seeds: Sequence[int] | None) -> list[tuple[int, ...]]:
    """One seed tuple per prompt: ``(seeds[p],)``, or ``(seed, p)``; a fresh seed if both are None."""
    if seeds is not None:
        if len(seeds) != count or any(s < 0 for s in seeds):
            raise ValueError(
                f"seeds: one non-negative integer per prompt is needed, got {len(seeds)} for {count} prompts"
            )
        return [(int(s),) for s in seeds]
    base = secrets.randbits(63) if seed is None else seed
    return [(base, prompt) for prompt in range(count)]


def sequence_uniforms(seed: Sequence[int], count: int) -> np.ndarray:
    """float64 [count] in [0, 1): the numbers that tokens 0..count-1 of one sequence are drawn with.

    `seed` identifies the sequence, e.g. (seed, prompt index, index within n). Philox with a SeedSequence:
    streams of different seeds are independent, and no stream depends on how many sequences run beside it.
    """
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(list(seed)))).random(count)


def sample(
    logits: torch.Tensor,
    uniforms: torch.Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    banned_ids: Sequence[int] = (),
    banned_rows: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Invert the cumulative distribution at `uniforms`.

    Args:
        logits: fp32 [T, V].
        uniforms: fp64 [T] in [0, 1); unused at temperature 0.
        temperature, top_k, top_p, banned_ids, banned_rows: see `rllib_llm.models.sampling_distribution`.

    Returns:
        ids int64 [T] and their log-probs fp32 [T], of the distribution sampled from.
    """
    distribution = truncated_logits(logits, temperature, top_k, top_p, None, banned_ids, banned_rows)
    if temperature == 0:
        ids = distribution.argmax(dim=-1)
    else:
        cumulative = exp(log_softmax(distribution)).to(torch.float64).cumsum(dim=-1)
        total = cumulative[:, -1:]
        # u < 1, but u * total may round to total: stay below it, so that the id found has positive
        # probability.
        target = torch.minimum(uniforms[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
        # The clamp acts on NaN rows only; their log-prob is NaN, which the caller reports.
        ids = torch.searchsorted(cumulative, target, right=True).squeeze(-1).clamp_(max=logits.shape[-1] - 1)
    logp, _ = logprobs_of(logits, ids, temperature, top_k, top_p, banned_ids, banned_rows)
    return ids, logp
