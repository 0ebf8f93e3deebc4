"""A fast fingerprint of tensors, to notice that a restore or a broadcast did not arrive."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

from precision_kernels.autograd.operators import tensor_digest

__all__ = ["state_digest"]


def state_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Hex digest over names, dtypes, shapes and, per tensor, the checksum of its bytes.

    Checksums are made where the tensors live, at memory speed (`precision_kernels.reference.digest`; sha256 over 100 GB
    takes minutes). Not a defence against forgery.
    """
    lanes: dict[str, list[int]] = {}
    for device in {t.device for t in tensors.values()}:
        here = [name for name, t in tensors.items() if t.device == device]
        lanes |= dict(zip(here, tensor_digest([tensors[name] for name in here]).tolist(), strict=True))
    digest = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name]
        digest.update(f"{name}|{value.dtype}|{tuple(value.shape)}|{lanes[name]}\n".encode())
    return digest.hexdigest()
