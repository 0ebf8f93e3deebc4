"""The weight update as data: tensors as bytes, a hash for each, a version.

torch 2.13 cannot pickle float8 tensors, so a tensor travels as a flat uint8 numpy array with its dtype name
and shape; numpy arrays pass through Ray's object store without a copy. Nothing here needs a GPU, Ray or a
model.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from precision_kernels.autograd.operators import tensor_digest
from rllib_llm.errors import RllibLLMError
from rllib_llm.weights.format import DTYPES, dtype_name, tensor_hash

HASH_BYTES = 256 << 20
"""Most bytes of a host tensor that are copied to a GPU at a time to be hashed there."""


class WeightSyncError(RllibLLMError, RuntimeError):
    """A weight update that was refused; nothing of it has been applied. Lists every violation."""

    def __init__(self, violations: Iterable[str], version: int | None = None) -> None:
        self.violations = tuple(violations)
        self.version = version
        head = "weight update refused" if version is None else f"weight update, version {version}, refused"
        lines = "\n".join(f"  - {v}" for v in self.violations)
        super().__init__(
            f"{head}; the engine keeps what it held. {len(self.violations)} violation(s):\n{lines}"
        )

    def __reduce__(self) -> tuple[type, tuple[tuple[str, ...], int | None]]:
        return type(self), (self.violations, self.version)


@dataclass(frozen=True)
class PackedTensor:
    """One tensor as bytes.

    Attributes:
        data: uint8 [nbytes], row-major, little-endian.
        dtype: a key of `DTYPES`.
        shape: the tensor's shape.
    """

    data: np.ndarray
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def pack(cls, tensor: torch.Tensor) -> PackedTensor:
        """Copy `tensor` (any device) into host bytes. The copy is owned: later changes of `tensor` do not
        reach it."""
        host = tensor.detach().to("cpu", copy=True).contiguous()
        data = host.reshape(-1).view(torch.uint8).numpy()
        return cls(data, dtype_name(tensor.dtype), tuple(tensor.shape))

    def as_bytes(self) -> torch.Tensor:
        """uint8 [nbytes] on the CPU that shares `data`. Only to be read: `data` may be read-only memory."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return torch.from_numpy(np.ascontiguousarray(self.data))

    def view(self) -> torch.Tensor:
        """The tensor on the CPU, sharing `data`. Only to be read, and not to be kept: it may be evicted."""
        return self.as_bytes().view(DTYPES[self.dtype]).view(self.shape)

    def unpack(self) -> torch.Tensor:
        """A new CPU tensor that owns its memory."""
        return self.view().clone()

    def hash(self, device: torch.device | str = "cpu") -> str:
        """What `hash_tensors` gives for the tensor itself; computed on `device`, through a copy of at most
        `HASH_BYTES` of it.
        """
        data = self.as_bytes()
        starts = list(range(0, data.numel(), HASH_BYTES)) or [0]
        lanes = [tensor_digest([data[s : s + HASH_BYTES].to(device)], [s])[0] for s in starts]
        return tensor_hash(torch.stack(lanes).sum(0).tolist(), self.dtype, self.shape)

    def problems(self) -> list[str]:
        """What is wrong with this tensor on its own: unknown dtype, wrong number of bytes; empty if
        nothing."""
        if self.dtype not in DTYPES:
            return [f"dtype {self.dtype!r} is not one of {', '.join(DTYPES)}"]
        if self.data.dtype != np.uint8 or self.data.ndim != 1:
            return [f"data is {self.data.dtype}{list(self.data.shape)}, not flat uint8"]
        expected = math.prod(self.shape) * DTYPES[self.dtype].itemsize
        if self.data.nbytes != expected:
            return [f"{self.data.nbytes} bytes for {self.dtype}{list(self.shape)}, which has {expected}"]
        return []


@dataclass(frozen=True)
class WeightUpdate:
    """All weights of one version, in checkpoint names.

    Attributes:
        version: counts the learner's exports; samples carry it.
        policy_fingerprint, plan_hash: under which policy and plan the bytes were made.
        tensors: name -> tensor; a quantised weight is ``X.weight`` (e4m3) and ``X.weight_scale_inv`` (fp32).
        hashes: name -> hash (`tensor_hash`), made by the sender.
        base: of an update of adapters alone, the hash of the weights that they are on (`rllib_llm.sync.base`).
    """

    version: int
    policy_fingerprint: str
    plan_hash: str
    tensors: Mapping[str, PackedTensor]
    hashes: Mapping[str, str]
    base: str | None = None

    @property
    def nbytes(self) -> int:
        return sum(t.data.nbytes for t in self.tensors.values())

    def split(self, max_bytes: int) -> Iterator[WeightChunk]:
        """Chunks of at most `max_bytes` (a larger tensor is a chunk of its own), for transports with
        bounded memory."""
        groups: list[list[str]] = [[]]
        size = 0
        for name, tensor in self.tensors.items():
            if groups[-1] and size + tensor.data.nbytes > max_bytes:
                groups.append([])
                size = 0
            groups[-1].append(name)
            size += tensor.data.nbytes
        for index, names in enumerate(groups):
            part = {n: self.tensors[n] for n in names}
            hashes = {n: self.hashes[n] for n in names}
            yield WeightChunk(
                self.version,
                self.policy_fingerprint,
                self.plan_hash,
                index,
                len(groups),
                part,
                hashes,
                self.base,
            )

    @classmethod
    def assemble(cls, chunks: Iterable[WeightChunk]) -> WeightUpdate:
        """Put chunks (in any order) back together.

        Raises:
            WeightSyncError: a chunk is missing or twice, a tensor is in two chunks, or chunks of two
                updates are mixed.
        """
        parts = sorted(chunks, key=lambda c: c.index)
        if not parts:
            raise WeightSyncError(["no chunk arrived"])
        first = parts[0]
        problems = _chunk_problems(parts)
        if problems:
            raise WeightSyncError(problems, first.version)
        tensors = {name: t for part in parts for name, t in part.tensors.items()}
        hashes = {name: h for part in parts for name, h in part.hashes.items()}
        return cls(first.version, first.policy_fingerprint, first.plan_hash, tensors, hashes, first.base)


@dataclass(frozen=True)
class WeightChunk:
    """Part `index` of `count` of a `WeightUpdate`; the other fields are those of the update."""

    version: int
    policy_fingerprint: str
    plan_hash: str
    index: int
    count: int
    tensors: Mapping[str, PackedTensor]
    hashes: Mapping[str, str]
    base: str | None = None


def _chunk_problems(parts: list[WeightChunk]) -> list[str]:
    first = parts[0]
    identity = (first.version, first.policy_fingerprint, first.plan_hash, first.count, first.base)
    problems = [
        f"chunk {p.index} is of (version, policy, plan, count, base) {key}, chunk {first.index} of {identity}"
        for p in parts
        if (key := (p.version, p.policy_fingerprint, p.plan_hash, p.count, p.base)) != identity
    ]
    indices = [p.index for p in parts]
    problems += [f"chunk {i} of {first.count} is missing" for i in range(first.count) if i not in indices]
    problems += [
        f"chunk {i} arrived {indices.count(i)} times" for i in sorted(set(indices)) if indices.count(i) > 1
    ]
    seen: dict[str, int] = {}
    for part in parts:
        for name in part.tensors:
            if name in seen and seen[name] != part.index:
                problems.append(f"{name} is in chunk {seen[name]} and in chunk {part.index}")
            seen[name] = part.index
    return problems
