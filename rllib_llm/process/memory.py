"""How much memory a process has taken at most."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

from rllib_llm import metric_names as names

__all__ = ["peak_memory"]

_GIB = 2.0**30


def peak_memory() -> dict[str, float]:
    """Peaks of this process since it began, in GiB: resident main memory, and what torch allocated on its GPUs.

    Without a GPU in use there is no such entry: 0 would be a measurement.
    """
    peaks = {names.RSS_PEAK: _rss_peak_bytes() / _GIB}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        used = (torch.cuda.max_memory_allocated(i) for i in range(torch.cuda.device_count()))
        peaks[names.CUDA_PEAK] = max(used) / _GIB
    return peaks


def _rss_peak_bytes() -> float:
    """VmHWM where there is /proc: Linux hands ru_maxrss on to a process's children, which start at their parent's."""
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return float(line.split()[1]) * 1024
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(used) * (1 if sys.platform == "darwin" else 1024)
