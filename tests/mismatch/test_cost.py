"""The monitor must stay below 1 % of a step (measured: `python -m benchmarks.host_time`)."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rllib_llm.mismatch import metrics
from tests.counting import calls


class Operations(TorchDispatchMode):
    """Counts the tensor operations that run while it is active."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))


def test_the_number_of_operations_does_not_grow_with_the_tokens() -> None:
    """All metrics and buckets of 700 and of 7 000 tokens (the quickstart's iteration) are the same number of tensor
    operations and of function calls, so the host's part of the cost is constant and no loop runs over tokens."""

    def work(tokens: int) -> tuple[int, int]:
        g = torch.Generator().manual_seed(0)
        rollout = -3 * torch.rand(tokens, generator=g)
        train = (rollout + 1e-3 * torch.randn(tokens, generator=g)).clamp(max=0)
        mask, ids = torch.rand(tokens, generator=g) < 0.9, torch.arange(tokens) // 55
        with Operations() as operations:
            metrics(train, rollout, mask, ids)
        return operations.number, calls(lambda: metrics(train, rollout, mask, ids))

    work(700)  # what is made once
    few, many = work(700), work(7000)
    assert many == few
    assert many[0] < 1000
