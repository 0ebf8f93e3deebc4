"""The part of a model's weights that stays where it is while adapters on it are trained, named by one hash."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from precision_policies.adapters import A, B

__all__ = ["base_hash", "is_adapter"]


def is_adapter(name: str) -> bool:
    """Whether a tensor of a weight update is A or B of an adapter."""
    return name.endswith((f".{A}.weight", f".{B}.weight"))


def base_hash(hashes: Mapping[str, str]) -> str:
    """sha256 over names and hashes of all tensors that are not adapters': what an engine must hold to be sent those."""
    lines = "".join(f"{name} {hashes[name]}\n" for name in sorted(hashes) if not is_adapter(name))
    return hashlib.sha256(lines.encode()).hexdigest()
