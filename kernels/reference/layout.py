"""Which query may see which key: packed sequences, optionally continuing what a key/value cache already holds.

`AttentionLayout` is made once per model forward and shared by all layers. `WorkUnit`s cut the job so that the
score matrix of one unit stays small; cutting cannot change bits (`attention`), only time and memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

SCORE_BUDGET = 1 << 16
"""Scores (heads x queries x keys) that one work unit holds, so that its temporaries stay in a core's cache (measured).
"""
_SHORTEST_QUERY_RANGE = 64
"""Queries of a long sequence are cut no finer: every range reads all earlier keys again."""
_RAGGEDNESS = 1.5
"""A unit may hold this much more than its sequences need, for padding."""


@dataclass(frozen=True)
class WorkUnit:
    """A range of queries of n sequences, padded to one length tq, against keys [0, keys), for every head.

    sequences: int64 [n].
    query_rows: int64 [n, Hkv, G*tq], rows of q viewed as [T*H, D], G = H/Hkv query heads per key/value head.
    key_rows:   int64 [n, Hkv, keys], rows of k and v viewed as [T*Hkv, D]; without a cache only.
    hidden:     bool [n, 1, tq, keys], the keys that a query must not see; None if it may see all.
    padding:    bool [n, 1, tq, 1], queries that only fill the unit: they repeat their sequence's last one,
    with
                equal bits; None if there are none.
    """

    sequences: torch.Tensor
    query_rows: torch.Tensor
    key_rows: torch.Tensor
    hidden: torch.Tensor | None
    padding: torch.Tensor | None
    keys: int


@dataclass(frozen=True, eq=False)
class AttentionLayout:
    """T packed tokens of B sequences.

    cu_seqlens: int64 [B+1], token range of sequence b is cu_seqlens[b]:cu_seqlens[b+1] (at least one token
    each).
    cached:     int64 [B], keys that row slots[b] of the cache holds before this call (default zeros).
    slots:      int64 [B], the cache row of each sequence (default 0..B-1).
    window:     keys that a query sees, its own among them: t - window < j <= t; 0: all up to its own.

    Uses: training forward or prefill (cached zero), chunked prefill, decode (one token each, cached =
    length so far). Raises ValueError listing everything that does not fit.
    """

    cu_seqlens: torch.Tensor
    cached: torch.Tensor | None = None
    slots: torch.Tensor | None = None
    window: int = 0
    memo: dict[Any, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        lengths = self.cu_seqlens.diff()
        problems = []
        if (
            self.cu_seqlens.dim() != 1
            or len(self.cu_seqlens) < 2
            or int(self.cu_seqlens[0]) != 0
            or (lengths < 1).any()
        ):
            problems.append("cu_seqlens must be [B+1], start at 0 and increase (no empty sequence)")
        for name in ("cached", "slots"):
            value = getattr(self, name)
            if value is not None and (value.shape != lengths.shape or (value < 0).any()):
                problems.append(
                    f"{name} must be non-negative and of shape {tuple(lengths.shape)}, got {tuple(value.shape)}"
                )
        if self.slots is not None and len(self.slots.unique()) != len(self.slots):
            problems.append("slots must differ from each other, two sequences cannot share a cache row")
        if self.window < 0:
            problems.append(f"window must be >= 0, got {self.window}")
        if problems:
            raise ValueError("AttentionLayout: " + "; ".join(problems))

    def within(self, window: int) -> AttentionLayout:
        """The same tokens, of which a query sees the last ``window``; made once per window."""
        if window == self.window:
            return self
        if ("within", window) not in self.memo:
            self.memo["within", window] = AttentionLayout(self.cu_seqlens, self.cached, self.slots, window)
        return self.memo["within", window]

    @property
    def lengths(self) -> torch.Tensor:
        """New tokens per sequence, int64 [B]."""
        return self.cu_seqlens.diff()

    def starts(self) -> torch.Tensor:
        """Keys already cached per sequence, int64 [B]."""
        return torch.zeros_like(self.lengths) if self.cached is None else self.cached.to(torch.int64)

    def rows(self) -> torch.Tensor:
        """Cache row per sequence, int64 [B]."""
        if self.slots is not None:
            return self.slots.to(torch.int64)
        return torch.arange(len(self.cu_seqlens) - 1, device=self.cu_seqlens.device)

    def token_sequence(self) -> torch.Tensor:
        """Sequence number of every packed token, int64 [T]."""
        if "token_sequence" not in self.memo:
            order = torch.arange(len(self.lengths), device=self.cu_seqlens.device)
            self.memo["token_sequence"] = order.repeat_interleave(self.lengths)
        return self.memo["token_sequence"]

    def positions(self) -> torch.Tensor:
        """Absolute position of every packed token, int64 [T]."""
        if "positions" not in self.memo:
            sequence = self.token_sequence()
            tokens = torch.arange(len(sequence), device=sequence.device)
            self.memo["positions"] = tokens - self.cu_seqlens[:-1][sequence] + self.starts()[sequence]
        return self.memo["positions"]

    def units(self, heads: int, kv_heads: int, budget: int = SCORE_BUDGET) -> list[WorkUnit]:
        """Work units of at most about ``budget`` scores over all heads."""
        key = ("units", heads, kv_heads, budget)
        if key not in self.memo:
            lengths, cached = self.lengths.tolist(), self.starts().tolist()
            self.memo[key] = [
                self._unit(group, start, stop, heads, kv_heads)
                for group in _groups(lengths, cached, budget // heads)
                for start, stop in _query_ranges(group, lengths, cached, budget // heads)
            ]
        return self.memo[key]

    def _unit(self, group: list[int], start: int, stop: int, heads: int, kv_heads: int) -> WorkUnit:
        device = self.cu_seqlens.device
        sequences = torch.tensor(group, device=device)
        lengths, cached = self.lengths[sequences], self.starts()[sequences]
        offset = self.cu_seqlens[:-1][sequences]
        query = torch.arange(start, stop, device=device)[None, :]
        clamped = torch.minimum(query, lengths[:, None] - 1)
        keys = int((cached + lengths.clamp(max=stop)).max())
        key = torch.arange(keys, device=device)
        position = (cached[:, None] + clamped)[:, None, :, None]
        hidden = key > position
        if self.window:
            hidden = hidden | (key <= position - self.window)
        padding = (query >= lengths[:, None])[:, None, :, None]
        key_tokens = offset[:, None] + torch.minimum(key[None, :], lengths[:, None] - 1)
        return WorkUnit(
            sequences,
            _head_rows(offset[:, None] + clamped, heads).reshape(len(group), kv_heads, -1),
            _head_rows(key_tokens, kv_heads),
            hidden if bool(hidden.any()) else None,
            padding if bool(padding.any()) else None,
            keys,
        )


def _head_rows(tokens: torch.Tensor, heads: int) -> torch.Tensor:
    """Packed token indices [n, t] -> rows of a [T, heads, D] tensor viewed as [T*heads, D], int64 [n, heads, t]."""
    return tokens[:, None, :] * heads + torch.arange(heads, device=tokens.device)[None, :, None]


def _groups(lengths: list[int], cached: list[int], budget: int) -> list[list[int]]:
    """Sequences of similar size together; in their own order when all have one length (decode)."""
    order = list(range(len(lengths)))
    if len(set(lengths)) > 1:
        order.sort(key=lambda i: (lengths[i], cached[i]), reverse=True)
    groups: list[list[int]] = []
    longest = deepest = needed = 0
    for i in order:
        depth = lengths[i] + cached[i]
        size = lengths[i] * depth
        if groups:
            area = (len(groups[-1]) + 1) * max(longest, lengths[i]) * max(deepest, depth)
            if area <= budget and (area <= _RAGGEDNESS * (needed + size) or area <= budget // 8):
                groups[-1].append(i)
                longest, deepest, needed = max(longest, lengths[i]), max(deepest, depth), needed + size
                continue
        groups.append([i])
        longest, deepest, needed = lengths[i], depth, size
    return groups


def _query_ranges(
    group: list[int], lengths: list[int], cached: list[int], budget: int
) -> list[tuple[int, int]]:
    longest = max(lengths[i] for i in group)
    deepest = max(lengths[i] + cached[i] for i in group)
    step = max(_SHORTEST_QUERY_RANGE, budget // (len(group) * deepest))
    return [(start, min(start + step, longest)) for start in range(0, longest, step)]
