"""The numbers of docs/policies.md, "Measured": `python -m tests.policies.measure`."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

from precision_policies import load_policy
from precision_policies.graph_compare import compare
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


def main() -> None:
    """Print one line per measurement."""
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


if __name__ == "__main__":
    main()
