"""A sample as packed micro-batches, and its trained tokens as flat arrays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.long_answers.sampler import Sample
from rllib_llm.models import PackedBatch


@dataclass(frozen=True)
class Micro:
    """B whole sequences of one forward; of its N trained tokens where they are predicted, flat index and sequence."""

    packed: PackedBatch
    at: torch.Tensor
    slots: torch.Tensor
    sequence: torch.Tensor
    rows: torch.Tensor


class Batch:
    """Trained tokens of a sample, flat and in order of the sequences: targets, rollout log-probs, sequence ids."""

    def __init__(self, sample: Sample, device: torch.device) -> None:
        self.device, self.prompt = device, sample.prompts.shape[1]
        prompts = sample.prompts.repeat(sample.group, axis=0)
        self.rows = [
            torch.from_numpy(np.concatenate(pair)) for pair in zip(prompts, sample.completions, strict=True)
        ]
        self.lengths = np.array([len(c) for c in sample.completions])
        self.starts = np.concatenate([[0], self.lengths.cumsum()])
        self.targets = torch.from_numpy(np.concatenate(sample.completions)).to(device)
        self.rollout = torch.from_numpy(np.concatenate(sample.logprobs)).to(device)
        self.sequence = torch.from_numpy(np.arange(len(self.rows)).repeat(self.lengths)).to(device)
        self.mask = torch.ones_like(self.sequence, dtype=torch.bool)

    def micro_batches(self, rows: list[int], max_tokens: int) -> Iterator[Micro]:
        group: list[int] = []
        for row in rows:
            if group and sum(len(self.rows[r]) for r in group) + len(self.rows[row]) > max_tokens:
                yield self._pack(group)
                group = []
            group.append(row)
        if group:
            yield self._pack(group)

    def _pack(self, rows: list[int]) -> Micro:
        offsets = np.cumsum([0, *(len(self.rows[r]) for r in rows)])
        lengths = [int(self.lengths[r]) for r in rows]
        at = [np.arange(n) + start + self.prompt - 1 for start, n in zip(offsets, lengths, strict=False)]
        slots = [np.arange(self.starts[r], self.starts[r + 1]) for r in rows]
        arrays = [
            np.concatenate(at),
            np.concatenate(slots),
            np.arange(len(rows)).repeat(lengths),
            np.array(rows),
        ]
        packed = PackedBatch.from_sequences([self.rows[r] for r in rows]).to(self.device)
        return Micro(packed, *(torch.from_numpy(a).to(self.device) for a in arrays))
