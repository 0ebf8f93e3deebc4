"""Where DeepGEMM keeps the kernels that it compiled, for learner and engine alike."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["CACHE_VARIABLE", "compiled_kernels", "kernel_cache"]

CACHE_VARIABLE = "DG_JIT_CACHE_DIR"


def kernel_cache() -> Path:
    """What `DG_JIT_CACHE_DIR` names, else DeepGEMM's own default (`Compiler` of its csrc/jit/compiler.hpp)."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".deep_gemm")


def compiled_kernels(cache: Path) -> int:
    """How many kernels lie in a cache: each is a directory that DeepGEMM moves there when it is whole."""
    return sum(1 for _ in (cache / "cache").glob("kernel.*"))
