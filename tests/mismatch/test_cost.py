"""The monitor must stay below 1 % of a step."""

from __future__ import annotations

import time

import torch

from rllib_llm.mismatch import metrics


def test_seven_thousand_tokens_cost_less_than_one_percent_of_a_step() -> None:
    """The quickstart's iteration (7 000 tokens) takes seconds; all metrics and buckets take about 1 ms here.

    The bound is 30 ms (1 % of 3 s) and the best of ten runs, because the machine may be busy.
    """
    g = torch.Generator().manual_seed(0)
    rollout = -3 * torch.rand(7000, generator=g)
    train = (rollout + 1e-3 * torch.randn(7000, generator=g)).clamp(max=0)
    mask, ids = torch.rand(7000, generator=g) < 0.9, torch.arange(7000) // 55
    times = []
    for _ in range(10):
        start = time.perf_counter()
        metrics(train, rollout, mask, ids)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.030
