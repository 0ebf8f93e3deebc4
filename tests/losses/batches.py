"""Packed batches for the loss tests: a plain-Python description of responses and its tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st

from rllib_llm.losses import LossInputs
from rllib_llm.losses.advantages import kl_to_go, moments, standardised


@dataclass
class Response:
    """One sequence: per-token numbers; `mask` marks trained tokens."""

    logp: list[float]
    old: list[float]
    mask: list[bool]
    advantage: float
    ref: list[float] = field(default_factory=list)
    entropy: list[float] = field(default_factory=list)
    weight: list[float] = field(default_factory=list)

    @property
    def trained(self) -> list[int]:
        return [t for t, m in enumerate(self.mask) if m]


def finite(low: float, high: float) -> st.SearchStrategy[float]:
    """fp32-representable floats, so that fp64 references see the very same numbers."""
    return st.floats(low, high, width=32)


@st.composite
def responses(draw: st.DrawFn, max_length: int = 5, spread: float = 0.5) -> Response:
    """A response of 1..max_length tokens with log-ratios within +-spread, some tokens masked (possibly
    all)."""
    n = draw(st.integers(1, max_length))

    def numbers(low: float, high: float) -> list[float]:
        return draw(st.lists(finite(low, high), min_size=n, max_size=n))

    old = numbers(-6.0, -0.5)
    logp = [o + d for o, d in zip(old, numbers(-spread, spread), strict=True)]
    return Response(
        logp=[float(torch.tensor(x, dtype=torch.float32)) for x in logp],
        old=old,
        mask=draw(st.lists(st.booleans(), min_size=n, max_size=n)),
        advantage=draw(finite(-2.0, 2.0)),
        ref=numbers(-6.0, -0.5),
        entropy=numbers(0.0, 3.0),
        weight=numbers(0.0, 2.0),
    )


def batches(min_size: int = 1, max_size: int = 6, spread: float = 0.5) -> st.SearchStrategy[list[Response]]:
    return st.lists(responses(spread=spread), min_size=min_size, max_size=max_size)


def pack(batch: list[Response], extras: bool = True) -> LossInputs:
    """The tensors of a batch; masked positions carry NaN, which no loss may read. logp requires grad."""

    def column(rows: list[list[float]], hide: bool = True) -> torch.Tensor:
        flat = [
            value if m or not hide else math.nan
            for row, response in zip(rows, batch, strict=True)
            for value, m in zip(row, response.mask, strict=True)
        ]
        return torch.tensor(flat, dtype=torch.float32)

    lengths = torch.tensor([len(r.mask) for r in batch])
    old = column([r.old for r in batch])
    return LossInputs(
        logp=column([r.logp for r in batch]).requires_grad_(),
        old_logp=old,
        rollout_logp=old,
        advantages=column([[r.advantage] * len(r.mask) for r in batch]),
        mask=torch.tensor([m for r in batch for m in r.mask]),
        sequence_ids=torch.repeat_interleave(torch.arange(len(batch)), lengths),
        num_sequences=len(batch),
        ref_logp=column([r.ref for r in batch]) if extras else None,
        entropy=column([r.entropy for r in batch]) if extras else None,
        correction_weights=column([r.weight for r in batch]) if extras else None,
    )


def token_advantages(
    rewards: torch.Tensor,
    kl: torch.Tensor | None,
    mask: torch.Tensor,
    sequence_ids: torch.Tensor,
    kl_coeff: float,
) -> torch.Tensor:
    """REINFORCE++ with the KL in each token's reward, fp32 [T], normalised over the batch's trained tokens.

    A'_t = R - beta sum_{u >= t, same response} KL_u, then (A' - mean) / (std + 1e-6) over all trained
    tokens; 0 where mask is false. kl None (or kl_coeff 0): A'_t = R. This is the whole batch in one
    process; a learner that holds a shard composes it from the same three functions, with `moments` summed over ranks.
    """
    value = rewards.double()[sequence_ids]
    if kl is not None and kl_coeff:
        value = value - kl_coeff * kl_to_go(kl, mask, sequence_ids, len(rewards))
    return standardised(value, mask, moments(value, mask))
