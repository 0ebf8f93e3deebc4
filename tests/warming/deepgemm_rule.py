"""DeepGEMM's choice of a kernel on Hopper, stated again: what of a product decides which kernel is compiled.

After `SM90ArchSpec` of csrc/jit_kernels/heuristics/sm90.hpp and the template arguments in
csrc/jit_kernels/impls/sm90_*.hpp of deepseek-ai/DeepGEMM at 891d57b (which vLLM bundles) and 54e2261; the two choose
alike. Only tests use this: the product calls DeepGEMM and lets it choose.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

SMS = 132
"""An H100 SXM or H200. 78 of an H20 give other kernels by the same rule."""
_SHARED_BYTES = 232448
_MOST_STAGES = 16


@dataclass(frozen=True)
class Call:
    """One GEMM d [m, n] = a [m, k] . b [n, k]^T. kind: "1d2d" (fp8, bf16 out), "1d1d" (fp8, fp32 out), "bf16".
    out_bytes: of an element of d."""

    kind: str
    m: int
    n: int
    k: int
    out_bytes: int = 2

    @property
    def element(self) -> int:
        return 2 if self.kind == "bf16" else 1


Layout = tuple[int, int, int, int]
"""block_m, block_n, cluster_m, cluster_n"""


def kernel(call: Call, compiled: str = "nk", sms: int = SMS) -> tuple[object, ...]:
    """What distinguishes the compiled kernels of calls of one kind: the compiled sizes, tile, cluster and stages."""
    best: tuple[int, Layout, int] | None = None
    for layout, stages in candidates(call, sms):
        cycles = _cycles(call, layout, sms)
        if best is None or cycles < best[0]:
            best = (cycles, layout, stages)
    assert best is not None
    sizes = tuple(getattr(call, name) if name in compiled else 0 for name in "mnk")
    return (call.kind, call.out_bytes, *sizes, *best[1], best[2])


def candidates(call: Call, sms: int) -> list[tuple[Layout, int]]:
    """Every tile that is considered, in the order in which a tie is decided, with its pipeline stages."""
    rows = [64, 128] + [16] * (call.m <= 16) + [32] * (call.m <= 32) + [256] * (call.out_bytes != 4)
    last = {"1d2d": 192, "1d1d": 160, "bf16": 256}[call.kind]
    columns = [16, *range(24, last + 1, 16)] if call.kind == "1d1d" else list(range(16, last + 1, 16))
    depth = 128 // call.element
    found = []
    for cluster_m, cluster_n in ((1, 1), (1, 2), (2, 1)):
        if sms % (cluster_m * cluster_n):
            continue
        for m in rows:
            for n in columns:
                over = n - depth
                if call.kind == "1d2d" and over > 0 and n % over and depth % over:
                    continue
                if m > 128 and n > 128:
                    continue
                stages = _stages(call, m, n, depth)
                if stages < 3 or (m * n < 128 * 192 and stages < 4):
                    continue
                found.append(((m, n, cluster_m, cluster_n), stages))
    return found


def _stages(call: Call, m: int, n: int, depth: int) -> int:
    extra = _aligned(m * n * call.out_bytes, 1024) + _MOST_STAGES * 16
    if call.kind == "1d2d":
        extra += _aligned(-(-call.k // depth) * 4 * (1 if depth % n == 0 else 2), 8)
    each = (m + n) * depth * call.element
    each += 0 if call.kind == "bf16" else _aligned(4 * m, 128)
    each += _aligned(4 * n, 128) if call.kind == "1d1d" else 0
    return min((_SHARED_BYTES - extra) // each, _MOST_STAGES)


def _cycles(call: Call, layout: Layout, sms: int) -> int:
    m, n, cluster_m, cluster_n = layout
    blocks = -(-call.m // m) * -(-call.n // n)
    waves = -(-blocks // sms)
    if cluster_m * cluster_n > 1 and waves <= 1:
        return 2**63 - 1
    l2_rate, l1_rate = int(min(64.0 * sms, 8e6 / 1.3e3)), 128 * sms
    out = m * n * call.out_bytes
    accumulates = 2 if call.kind == "1d1d" else 1
    l2 = call.k * (m // cluster_n + n // cluster_m) * call.element
    l1 = call.k * (m + n) * call.element
    tensor_cores = call.k * (max(64, m) + n) * call.element + out
    l2_cycles = (l2 + out * accumulates) * blocks // l2_rate
    l1_cycles = (l1 + tensor_cores + out * accumulates) * blocks // l1_rate
    efficiency = np.float32(blocks) / np.float32(waves * sms)  # a C++ float, and so is what it divides
    return int(np.float32(max(l1_cycles, l2_cycles)) / efficiency)


def _aligned(value: int, step: int) -> int:
    return -(-value // step) * step
