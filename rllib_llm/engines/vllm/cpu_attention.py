"""The reference attention of `precision_kernels` on vLLM's paged keys and values, for CPU.

vLLM's own CPU kernel sums in an order that depends on the batch (92-95 % of log-probs bit-equal with
everything else shared, measured on 2026-11-29); the reference does not, so that a CPU engine is exactly
on-policy. Pages hold keys and values as they came, in the compute dtype; what a step needs is gathered and
prepared anew. Built for vLLM's CPU worker (0.32).
"""

from __future__ import annotations

import torch
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
)

from precision_kernels import AttentionLayout, attention
from precision_kernels.reference.attention import KVCache


class ReferenceAttentionBackend(CPUAttentionBackend):
    """vLLM's CPU backend with another kernel: its metadata and page allocation are kept."""

    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN"  # vLLM looks names up in its registry; this one fits the pages that are allocated

    @staticmethod
    def get_impl_cls() -> type[ReferenceAttentionImpl]:
        return ReferenceAttentionImpl


class ReferenceAttentionImpl(CPUAttentionBackendImpl):
    """Keys and values of page p, head h, slot s: ``kv_cache[p, h, s]`` = key | value, each [D]."""

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write key, value [T, Hkv, D] to their slots; slot -1 is padding."""
        count = slot_mapping.shape[0]
        used = slot_mapping >= 0
        slots = slot_mapping[used].long()
        block = kv_cache.shape[2]
        kv_cache[slots // block, :, slots % block] = torch.cat(
            [key[:count][used], value[:count][used]], dim=-1
        )

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """query [T, H, D], key and value [T, Hkv, D] -> output [T, H, D], filled in place."""
        if attn_metadata is None:  # vLLM's profiling run
            return output
        count = attn_metadata.num_actual_tokens
        starts = attn_metadata.query_start_loc.long()
        lengths = starts.diff()
        cached = attn_metadata.seq_lens.long() - lengths
        layout = AttentionLayout(starts, cached)
        cache = self._gather(
            kv_cache, attn_metadata.block_table.long(), cached, int(attn_metadata.seq_lens.max())
        )
        result = attention(query[:count], key[:count], value[:count], layout, cache)
        output[:count].view(result.shape).copy_(result)
        return output

    def _gather(
        self, kv_cache: torch.Tensor, table: torch.Tensor, cached: torch.Tensor, longest: int
    ) -> KVCache:
        """What each sequence has cached before this step, as a cache of one row per sequence."""
        sequences = len(cached)
        cache = KVCache.allocate(sequences, longest, self.num_kv_heads, self.head_size, kv_cache.dtype)
        if int(cached.max()) == 0:
            return cache
        block = kv_cache.shape[2]
        row = torch.arange(sequences).repeat_interleave(cached)
        position = torch.arange(len(row)) - (cached.cumsum(0) - cached)[row]
        pages = kv_cache[table[row, position // block], :, position % block]
        keys, values = pages.split(self.head_size, dim=-1)
        have = cached > 0
        bounds = torch.cat([torch.zeros(1, dtype=torch.long), cached[have].cumsum(0)])
        cache.append(keys, values, AttentionLayout(bounds, slots=have.nonzero()[:, 0]))
        return cache
