"""A packed batch: sequences laid end to end, without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PackedBatch:
    """Tokens of B sequences in one row of T tokens.

    Attributes:
        input_ids: int64 [T].
        positions: int64 [T], position of each token in its own sequence (a chunk need not start at 0).
        cu_seqlens: int64 [B + 1], sequence b is tokens ``cu_seqlens[b]:cu_seqlens[b + 1]``.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    cu_seqlens: torch.Tensor

    @classmethod
    def from_pieces(cls, pieces: Sequence[tuple[torch.Tensor, int]]) -> PackedBatch:
        """From (int64 token ids [n], position of the first of them) per sequence."""
        lengths = torch.tensor([0] + [len(ids) for ids, _ in pieces])
        return cls(
            torch.cat([ids for ids, _ in pieces]),
            torch.cat([torch.arange(start, start + len(ids)) for ids, start in pieces]),
            lengths.cumsum(0),
        )

    @classmethod
    def from_sequences(cls, sequences: Sequence[Sequence[int] | torch.Tensor]) -> PackedBatch:
        """Whole sequences, each from position 0."""
        return cls.from_pieces([(torch.as_tensor(ids, dtype=torch.int64), 0) for ids in sequences])

    @classmethod
    def decode(cls, input_ids: torch.Tensor, positions: torch.Tensor) -> PackedBatch:
        """One new token [B] for each of B sequences at `positions` [B]."""
        return cls(input_ids, positions, torch.arange(len(input_ids) + 1))

    @property
    def num_sequences(self) -> int:
        return len(self.cu_seqlens) - 1

    def to(self, device: torch.device) -> PackedBatch:
        return PackedBatch(self.input_ids.to(device), self.positions.to(device), self.cu_seqlens.to(device))
