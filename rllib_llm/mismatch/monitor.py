"""Collects log-prob pairs over micro-batches, ranks and environments and computes the metrics of all of
them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rllib_llm.mismatch.metrics import metrics
from rllib_llm.mismatch.registry import BUCKETED


class MismatchMonitor:
    """Exact aggregation: keeps the trained tokens' pairs (24 bytes each) until `metrics` is asked for.

    `add` per micro-batch, `merge` per rank, `metrics` once per iteration, `clear`. Because the pairs
    themselves are kept, the result does not depend on how the batch was split (up to fp64 summation order),
    p99 included.
    """

    def __init__(self) -> None:
        self._chunks: list[
            tuple[Tensor, Tensor, Tensor, Tensor]
        ] = []  # train, rollout, sequence, environment
        self._environments: list[str] = []
        self._num_sequences = 0

    def add(
        self,
        train_logp: Tensor,
        rollout_logp: Tensor,
        mask: Tensor,
        sequence_ids: Tensor,
        environments: Sequence[str] | None = None,
    ) -> None:
        """One micro-batch: fp32 [T] pairs, mask [T], sequence_ids int64 [T] in 0..S-1, environments: S
        names."""
        kept = mask.bool()
        columns = [t.detach()[kept].to("cpu", copy=True) for t in (train_logp, rollout_logp, sequence_ids)]
        train, rollout, sequence = columns
        count = int(sequence_ids.max()) + 1 if sequence_ids.numel() else 0
        if environments is None:
            environment = torch.full_like(sequence, -1)
        else:
            if len(environments) < count:
                raise ValueError(
                    f"MismatchMonitor.add: {len(environments)} environment names for {count} sequences."
                )
            environment = torch.tensor([self._environment_index(e) for e in environments], dtype=torch.int64)[
                sequence
            ]
        self._chunks.append((train, rollout, sequence + self._num_sequences, environment))
        self._num_sequences += max(count, len(environments or ()))

    def merge(self, other: MismatchMonitor) -> None:
        """Adds another monitor's pairs (say of another rank); its sequences stay distinct from ours."""
        index = torch.tensor(
            [self._environment_index(e) for e in other._environments] + [-1], dtype=torch.int64
        )
        for train, rollout, sequence, environment in other._chunks:
            self._chunks.append((train, rollout, sequence + self._num_sequences, index[environment]))
        self._num_sequences += other._num_sequences

    def metrics(self, buckets: bool = True) -> dict[str, float]:
        """`metrics.metrics` of everything added, and "by_environment/<name>/<metric>" where names were
        given."""
        if not self._chunks:
            return {"num_tokens": 0.0, "nonfinite_tokens": 0.0}
        train, rollout, sequence, environment = (
            torch.cat(column) for column in zip(*self._chunks, strict=True)
        )
        everything = torch.ones_like(train, dtype=torch.bool)
        out = metrics(train, rollout, everything, sequence, buckets=buckets)
        for index, name in enumerate(self._environments):
            one = metrics(train, rollout, environment == index, sequence, buckets=False)
            out |= {f"by_environment/{name}/{key}": one[key] for key in BUCKETED if key in one}
        return out

    def clear(self) -> None:
        """Forgets all pairs, keeps the environment names."""
        self._chunks.clear()
        self._num_sequences = 0

    def _environment_index(self, name: str) -> int:
        if name not in self._environments:
            self._environments.append(name)
        return self._environments.index(name)
