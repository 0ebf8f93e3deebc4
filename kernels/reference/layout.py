"""Which query may see which key: packed sequences, optionally continuing what a key/value cache already
holds.

`AttentionLayout` is made once per model forward and shared by all layers. `WorkUnit`s cut the job so that the
score matrix of one unit stays small; cutting cannot change bits (`attention`), only time and memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

SCORE_BUDGET = 1 << 21
"""Scores (queries x keys) per head that one work unit may hold; x heads x about 20 bytes of memory."""
_RAGGEDNESS = 1.5


@dataclass(frozen=True)
class WorkUnit:
    """Queries [start, stop) of some sequences, padded to one length, against keys [0, keys).

    ``query_index`` [n, tq] indexes the packed tokens (padding repeats the sequence's last query),
    ``positions`` [n, tq] are absolute positions, ``keep`` selects from the flattened [n*tq] the true queries,
    whose packed indices are ``tokens``. ``key_index`` [n, keys] indexes the packed tokens (without a cache).
    """

    sequences: torch.Tensor
    query_index: torch.Tensor
    positions: torch.Tensor
    keep: torch.Tensor
    tokens: torch.Tensor
    key_index: torch.Tensor
    keys: int


@dataclass(frozen=True, eq=False)
class AttentionLayout:
    """T packed tokens of B sequences.

    cu_seqlens: int64 [B+1], token range of sequence b is cu_seqlens[b]:cu_seqlens[b+1] (at least one token
    each).
    cached:     int64 [B], keys that row slots[b] of the cache holds before this call (default zeros).
    slots:      int64 [B], the cache row of each sequence (default 0..B-1).

    Uses: training forward or prefill (cached zero), chunked prefill, decode (one token each, cached =
    length so far). Raises ValueError listing everything that does not fit.
    """

    cu_seqlens: torch.Tensor
    cached: torch.Tensor | None = None
    slots: torch.Tensor | None = None
    memo: dict = field(default_factory=dict, repr=False)

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
        if problems:
            raise ValueError("AttentionLayout: " + "; ".join(problems))

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

    def units(self, budget: int = SCORE_BUDGET) -> list[WorkUnit]:
        """The work units, each at most ``budget`` scores per head (or one query row)."""
        if ("units", budget) not in self.memo:
            self.memo["units", budget] = [
                self._unit(group, start, stop)
                for group, queries in _groups(self.lengths.tolist(), self.starts().tolist(), budget)
                for start, stop in queries
            ]
        return self.memo["units", budget]

    def _unit(self, group: list[int], start: int, stop: int) -> WorkUnit:
        device = self.cu_seqlens.device
        sequences = torch.tensor(group, device=device)
        lengths, cached = self.lengths[sequences], self.starts()[sequences]
        offset = self.cu_seqlens[:-1][sequences]
        stop = min(stop, int(lengths.max()))
        query = torch.arange(start, stop, device=device)[None, :]
        clamped = torch.minimum(query, lengths[:, None] - 1)
        keep = (query < lengths[:, None]).reshape(-1).nonzero()[:, 0]
        query_index = offset[:, None] + clamped
        keys = int((cached + lengths.clamp(max=stop)).max())
        key = torch.minimum(torch.arange(keys, device=device)[None, :], lengths[:, None] - 1)
        return WorkUnit(
            sequences, query_index, cached[:, None] + clamped, keep, query_index.reshape(-1)[keep],
            offset[:, None] + key, keys,
        )  # fmt: skip


def _groups(
    lengths: list[int], cached: list[int], budget: int
) -> list[tuple[list[int], list[tuple[int, int]]]]:
    """Sequences of similar size together, each group with its query ranges."""
    sizes = [n * (n + c) for n, c in zip(lengths, cached, strict=True)]
    longest, deepest = max(lengths), max(n + c for n, c in zip(lengths, cached, strict=True))
    padded = len(sizes) * longest * deepest
    if padded <= budget and padded <= _RAGGEDNESS * sum(sizes) + 4096:
        return [(list(range(len(sizes))), [(0, longest)])]
    order = sorted(range(len(sizes)), key=lambda i: (lengths[i], cached[i]), reverse=True)
    groups: list[list[int]] = []
    for index in order:
        if groups:
            members = [*groups[-1], index]
            area = (
                len(members) * max(lengths[i] for i in members) * max(lengths[i] + cached[i] for i in members)
            )
            if area <= budget and area <= _RAGGEDNESS * sum(sizes[i] for i in members):
                groups[-1] = members
                continue
        groups.append([index])
    result = []
    for group in groups:
        longest = max(lengths[i] for i in group)
        deepest = max(lengths[i] + cached[i] for i in group)
        step = max(1, budget // (len(group) * deepest))
        result.append((group, [(start, min(start + step, longest)) for start in range(0, longest, step)]))
    return result
