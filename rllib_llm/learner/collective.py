"""The few sums that learners of one LearnerGroup exchange, over torch.distributed or over nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Collective"]

BUCKET_ELEMENTS = (
    2**26
)  # 256 MB of fp32 per message: large enough to saturate a link, small enough to hold twice


class Collective:
    """Sums and gathers over the learners; with one learner every method returns its input.

    RLlib wraps modules in DistributedDataParallel, which averages over ranks, wants the same number of
    backward passes on each, and keeps a second copy of all gradients. Sums once per optimiser step need
    none of that: a rank without samples adds zeros.
    """

    def __init__(self, num_learners: int):
        self.size = max(1, num_learners)
        if self.size > 1 and (not dist.is_initialized() or dist.get_world_size() != self.size):
            found = dist.get_world_size() if dist.is_initialized() else "no process group"
            raise RuntimeError(f"num_learners = {self.size}, but torch.distributed has {found}.")

    @contextlib.contextmanager
    def failing_together(self) -> Iterator[None]:
        """An exception in the block leaves the process group, so that the other learners fail too.

        Otherwise they would wait in their next sum for one that never comes, and the driver for them. (gloo
        notices at once; NCCL after its timeout.)
        """
        try:
            yield
        except Exception:
            if self.size > 1:
                dist.destroy_process_group()
            raise

    def sum_(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replaces each tensor by its sum over the learners; all of one dtype and device, same order everywhere."""
        if self.size == 1:
            return
        bucket: list[torch.Tensor] = []
        for i, tensor in enumerate(tensors):
            bucket.append(tensor)
            if i + 1 == len(tensors) or sum(t.numel() for t in bucket) >= BUCKET_ELEMENTS:
                flat = torch.cat([t.reshape(-1) for t in bucket])
                dist.all_reduce(flat, op=dist.ReduceOp.SUM)
                for t, part in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
                    t.copy_(part.view_as(t))
                bucket = []

    def sum(self, value: float, device: torch.device) -> float:
        """Sum of one number, in fp64."""
        if self.size == 1:
            return value
        total = torch.tensor(value, dtype=torch.float64, device=device)
        dist.all_reduce(total, op=dist.ReduceOp.SUM)
        return float(total)

    def all(self, flag: bool, device: torch.device) -> bool:
        """True if the flag is set on every learner."""
        return self.sum(float(not flag), device) == 0.0

    def gather(self, value: Any) -> list[Any]:
        """The (small, picklable) values of all learners, in rank order."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values
