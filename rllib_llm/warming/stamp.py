"""What has been compiled already: one small file per list of kernels, in the cache that holds them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from precision_kernels.sources import modules_hash
from precision_policies.hashing import canonical_hash
from rllib_llm.on_disk.atomic import write_whole
from rllib_llm.process.attest import library_versions
from rllib_llm.process.kernel_cache import compiled_kernels
from rllib_llm.warming.products import Product

__all__ = ["Stamp", "gpu_of_this_machine", "versions"]

_FOLDER = "rllib_llm"


def gpu_of_this_machine() -> str | None:
    """Name and compute capability of the GPU that a process of this machine takes; None without one.

    Asked of the driver's own tool: torch would start CUDA in this process, which the trainer's must not have done.
    """
    tool = shutil.which("nvidia-smi")
    if tool is None or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return None
    command = [tool, "--query-gpu=name,compute_cap", "--format=csv,noheader"]
    asked = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line.strip() for line in asked.stdout.splitlines() if line.strip()]
    return lines[0] if asked.returncode == 0 and lines else None


def versions() -> dict[str, str]:
    """Everything installed that decides which kernels are compiled, and from what."""
    sources = modules_hash("precision_kernels.hopper.cublaslt", "precision_kernels.hopper.flash_attention")
    return library_versions() | {"nvcc": _nvcc(), "kernels": sources}


def _nvcc() -> str:
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    path = shutil.which("nvcc") or shutil.which("nvcc", path=str(Path(home) / "bin"))
    if path is None:
        return "none"
    said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout.split("\n")
    return next((line.strip() for line in reversed(said) if line.strip()), "unknown")


class Stamp:
    """Says whether a list of kernels lies in a cache.

    Args:
        cache: DeepGEMM's directory.
        part: which kernels, "products" or "learner".
        found: GPU, versions and whatever else decides them; plain data.
    """

    def __init__(self, cache: Path, part: str, products: Sequence[Product], found: Mapping[str, Any]) -> None:
        self._cache = cache
        listed = canonical_hash([asdict(product) for product in products])
        self._identity = {"part": part, "products": listed, **found}
        self.file = cache / _FOLDER / f"{part}-{canonical_hash(self._identity)[:16]}.json"

    @property
    def valid(self) -> bool:
        """Whether this was written for the same things, and no kernel has been taken away since."""
        try:
            said = json.loads(self.file.read_text(encoding="utf-8"))
            return said["identity"] == self._identity and said["kernels"] <= compiled_kernels(self._cache)
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def write(self) -> None:
        """State that the kernels are there now."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        said = {"identity": self._identity, "kernels": compiled_kernels(self._cache)}
        write_whole(self.file, json.dumps(said, indent=1) + "\n")
