"""The hash of plain data (fingerprints of policies, hashes of plans), and the comparison of two sides' hashes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

__all__ = ["canonical_hash", "differing"]


def canonical_hash(data: Any) -> str:
    """sha256 (hex) of JSON with sorted keys and no spaces: the same in every process and Python."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def differing(ours: Mapping[str, str], theirs: Mapping[str, str]) -> dict[str, tuple[str | None, str | None]]:
    """What two sides state otherwise, or only one of them states: name -> (ours, theirs), sorted by name.

    Args:
        ours, theirs: name -> hash (or any text that two sides must agree on), such as of the tensors that were sent
            and of those that are held.

    Returns:
        None stands for a name that a side does not have. A caller that asks for less leaves such entries out.
    """
    pairs = ((name, (ours.get(name), theirs.get(name))) for name in sorted(ours.keys() | theirs.keys()))
    return {name: (mine, other) for name, (mine, other) in pairs if mine != other}
