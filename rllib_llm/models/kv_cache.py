"""Keys and values of all layers for a fixed number of sequence slots, allocated once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from precision_kernels import AttentionLayout, allocate_kv_cache
from precision_kernels.hopper.attention_width import attention_width
from rllib_llm.models.architecture import Architecture
from rllib_llm.models.batch import PackedBatch

WIDE_STORAGE_BYTES = 256 << 20
"""Up to this size a CPU cache holds float64: the same numbers, without converting the whole cache in every step."""


@dataclass(frozen=True)
class CacheView:
    """The cache rows that one forward reads and extends, in the order of the batch's sequences.

    Attributes:
        layers: one `precision_kernels.allocate_kv_cache` per decoder layer.
        slots: int64 [B], or None when sequence b is row b.
    """

    layers: tuple[Any, ...]
    slots: torch.Tensor | None

    def layout(self, batch: PackedBatch) -> AttentionLayout:
        """New tokens stand at `batch.positions`: what is before the first of a sequence is taken from the cache."""
        return AttentionLayout(batch.cu_seqlens, batch.positions[batch.cu_seqlens[:-1]], self.slots)


class DecoderCache:
    """`slots` rows of `capacity` tokens for every layer of a model.

    Rows never need clearing: the positions of a batch say how much of a row counts. Stored in `dtype`, or wider where
    that is faster and fits into `max_bytes`.
    """

    def __init__(
        self,
        architecture: Architecture,
        slots: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        max_bytes: int,
    ) -> None:
        self.slots, self.capacity, self.device = slots, capacity, device
        wide_bytes = slots * self.bytes_per_slot(architecture, capacity, torch.float64)
        wide = device.type == "cpu" and wide_bytes <= min(WIDE_STORAGE_BYTES, max_bytes)
        self.dtype = torch.float64 if wide else dtype
        self.layers = tuple(
            allocate_kv_cache(
                slots, capacity, architecture.kv_heads, architecture.head_dim, self.dtype, device
            )
            for _ in range(architecture.layers)
        )

    @staticmethod
    def bytes_per_slot(
        architecture: Architecture, capacity: int, dtype: torch.dtype, device_type: str = "cpu"
    ) -> int:
        """Bytes of one slot: keys and values in `dtype`, one fp64 exponent per key and head; narrow heads are padded
        on CUDA."""
        head_dim = architecture.head_dim
        width = attention_width(head_dim) if device_type == "cuda" else head_dim
        per_key = 2 * width * dtype.itemsize + 8
        return architecture.layers * architecture.kv_heads * capacity * per_key

    def view(self, slots: Sequence[int]) -> CacheView:
        """Any rows, in this order."""
        return CacheView(self.layers, torch.tensor(slots, dtype=torch.int64, device=self.device))

    def view_first(self) -> CacheView:
        """Rows 0, 1, ... for as many sequences as the batch has; they are read in place."""
        return CacheView(self.layers, None)

    def copy_rows(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy row ``sources[i]`` over row ``targets[i]``."""
        source, target = (torch.tensor(rows, device=self.device) for rows in (sources, targets))
        for layer in self.layers:
            layer.copy_rows(source, target)
