"""What verification makes anew: hashes of files, and the rollout's tensors from the masters."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from precision_policies import Plan, PrecisionPolicy
from rllib_llm.models.layers import rollout_tensors
from rllib_llm.models.safetensor_files import read_tensors

__all__ = ["derived_rollout", "file_sha256"]


def file_sha256(path: Path) -> str:
    """sha256 (hex) of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def derived_rollout(
    plan: Plan, policy: PrecisionPolicy, files: Mapping[str, Path], names: list[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of everything that a rollout engine holds, made from exported masters, one master at a time.

    The function is the learner's own (`rllib_llm.models.layers.rollout_tensors`). It rounds masters to the compute
    dtype first, so masters that were exported in that dtype give the same bits.

    files: tensor name -> safetensors file. names: the masters to take.
    """
    for name, master in read_tensors(files, names):
        module, suffix = name.rsplit(".", 1)
        for part, value in rollout_tensors(plan[module], policy, suffix, master).items():
            yield f"{module}.{part}", value
