"""Time of the host for what a training run does beside the tensors: `python -m benchmarks.host_time`.

The numbers of docs/policies.md, "Measured"; of one operator's dispatch beside `torch.library.custom_op`; and of the
monitor's metrics (docs/mismatch.md). Tests bound the same things as numbers of calls, which no machine changes.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from precision_kernels.registration import fake, operator
from precision_policies import load_policy
from precision_policies.graph_compare import compare
from rllib_llm.mismatch import metrics
from tests.policies.models import MOE_100_LAYERS, QWEN3_8B


def timed(call: Callable[[], Any], repeats: int) -> str:
    """Median CPU and wall time of `repeats` calls."""
    cpu, wall = [], []
    for _ in range(repeats):
        started = time.process_time(), time.perf_counter()
        call()
        cpu.append(time.process_time() - started[0])
        wall.append(time.perf_counter() - started[1])
    return f"CPU {statistics.median(cpu) * 1e3:8.1f} ms   wall {statistics.median(wall) * 1e3:8.1f} ms"


def policies() -> None:
    """Loading, resolving and comparing policies."""
    policy = load_policy("unified-fp8")
    exempting = load_policy(
        {
            "extends": "unified-fp8",
            "exempt": {"modules": ["**.o_proj"], "first_layers": 1},
            "ragged": "exempt",
        }
    )
    print(f"Python {platform.python_version()}")
    print("load a shipped policy                   ", timed(lambda: load_policy("unified-fp8"), 15))
    for title, config in (("36 layers", QWEN3_8B), ("100-layer MoE", MOE_100_LAYERS)):
        print(f"{title:14}: plan and hash            ", timed(lambda c=config: policy.resolve(c).hash, 7))
        print(f"{title:14}: with exemptions          ", timed(lambda c=config: exempting.resolve(c).hash, 7))
    print("36 layers: both graphs, compared        ", timed(lambda: compare(policy, QWEN3_8B), 5))


def dispatch() -> None:
    """A call of an operator of ours and of a custom_op, around a body that does nothing but make a tensor."""

    def body(x: torch.Tensor, w: torch.Tensor, eps: float) -> torch.Tensor:
        return torch.empty(1)

    ours = operator("benchmark_body")(body)
    fake(ours)(lambda x, w, eps: x.new_empty(1))
    theirs = torch.library.custom_op("benchmark_registration::body", body, mutates_args=())
    arguments = torch.ones(2), torch.ones(2), 1e-6
    with torch.no_grad():
        for title, call in (("body", body), ("operator", ours), ("custom_op", theirs)):
            print(f"200 calls: {title:29}", timed(lambda c=call: [c(*arguments) for _ in range(200)], 20))


def monitor() -> None:
    """All mismatch metrics and buckets of the quickstart's iteration (7 000 tokens)."""
    g = torch.Generator().manual_seed(0)
    rollout = -3 * torch.rand(7000, generator=g)
    train = (rollout + 1e-3 * torch.randn(7000, generator=g)).clamp(max=0)
    mask, ids = torch.rand(7000, generator=g) < 0.9, torch.arange(7000) // 55
    print("mismatch metrics of 7 000 tokens        ", timed(lambda: metrics(train, rollout, mask, ids), 10))


def main() -> None:
    """Print one line per measurement."""
    policies()
    dispatch()
    monitor()


if __name__ == "__main__":
    main()
