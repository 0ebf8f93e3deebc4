"""Weights as named tensors: the dtypes that are sent, the name of a weight's scales, and the hash of a tensor."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from precision_kernels.autograd.operators import tensor_digest

__all__ = ["DTYPES", "SCALE_SUFFIX", "TensorSpec", "dtype_name", "hash_tensors", "tensor_hash"]

DTYPES: dict[str, torch.dtype] = {
    "float8_e4m3fn": torch.float8_e4m3fn,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
SCALE_SUFFIX = (
    "_scale_inv"  # X.weight (codes) + X.weight_scale_inv (what a code is multiplied by): DeepSeek, vLLM
)


@dataclass(frozen=True)
class TensorSpec:
    """dtype name (`DTYPES`) and shape that a receiver expects under a name."""

    dtype: str
    shape: tuple[int, ...]


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` -> ``"bfloat16"``; TypeError for a dtype that is not sent (see `DTYPES`)."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise TypeError(f"dtype {name} is not sent in weight updates; sent are {', '.join(DTYPES)}")
    return name


def tensor_hash(lanes: Sequence[int], dtype: str, shape: Sequence[int]) -> str:
    """The hash (64 hex digits) of a tensor: sha256 over dtype, shape and the lanes of its bytes.

    The lanes are a checksum (`precision_kernels.reference.digest`), made at memory bandwidth where the tensor lies,
    with equal bits on CPU and GPU. So the hash finds errors; somebody who wants to can construct a collision.
    """
    text = f"{dtype}{list(shape)}".encode()
    return hashlib.sha256(text + struct.pack("<2q", *lanes)).hexdigest()


def hash_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Name -> hash of tensors, each made on its own device; the CPU waits for a GPU once."""
    hashes: dict[str, str] = {}
    for device in {t.device for t in tensors.values()}:
        here = {name: t for name, t in tensors.items() if t.device == device}
        lanes = tensor_digest(list(here.values())).tolist()
        for (name, tensor), pair in zip(here.items(), lanes, strict=True):
            hashes[name] = tensor_hash(pair, dtype_name(tensor.dtype), tuple(tensor.shape))
    return {name: hashes[name] for name in tensors}
