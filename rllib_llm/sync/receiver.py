"""An engine takes an update whose bytes come in pieces: nothing is applied before everything is verified.

The bytes are read twice, through one bounded buffer: first to compute every tensor's hash, then to copy. So a push
needs no second copy of the weights, and still refuses as a whole. After the copy the engine hashes what it holds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from precision_kernels.autograd.operators import tensor_digest
from precision_kernels.reference.digest import flat_bytes
from rllib_llm.errors import EngineError
from rllib_llm.models.causal_lm import CausalLM
from rllib_llm.sync.base import expected_specs
from rllib_llm.sync.layout import nbytes
from rllib_llm.sync.packed import WeightSyncError
from rllib_llm.sync.topology import WeightTransportError
from rllib_llm.sync.verify import ScaleRange, WeightManifest, WeightReceipt, hash_problems, verify_manifest
from rllib_llm.weights.format import SCALE_SUFFIX, TensorSpec, dtype_name, hash_tensors, tensor_hash

Batch = list[tuple[str, int, torch.Tensor]]
"""(name, first byte within that tensor, uint8 bytes): parts of tensors that can be read until the next batch."""


_BATCH_BYTES = 256 << 20
"""Tensors of one process are hashed so many bytes at a time: a call for each of an 8B model's 650 takes 0.1 s."""


class MixedWeightsError(EngineError):
    """An update broke off, or was damaged, after the first of its bytes was applied: the engine has no weights."""


class Incoming(ABC):
    """An update on its way to this process."""

    manifest: WeightManifest

    @abstractmethod
    def batches(self) -> Iterator[Batch]:
        """All bytes once; called twice.

        Raises:
            WeightTransportError: they do not come.
        """

    @abstractmethod
    def agree(self, phase: str) -> None:
        """Say that this engine has completed `phase` and wait for the others; WeightTransportError if they do not."""

    @abstractmethod
    def refuse(self, why: str) -> None:
        """Say that this engine does not go on."""

    @abstractmethod
    def finished(self) -> None:
        """Say that this engine holds the weights."""

    @abstractmethod
    def close(self) -> None:
        """Give buffers back."""


@dataclass(frozen=True)
class InProcessUpdate(Incoming):
    """An update of a learner in the engine's own process.

    Attributes:
        source: yields (name, tensor) of all tensors, the same bits each time; on the engine's device or another.
    """

    manifest: WeightManifest
    source: Callable[[], Iterable[tuple[str, torch.Tensor]]]

    def batches(self) -> Iterator[Batch]:
        batch: Batch = []
        size = 0
        for name, tensor in self.source():
            if self.manifest.specs.get(name) != TensorSpec(dtype_name(tensor.dtype), tuple(tensor.shape)):
                raise WeightTransportError(f"{name}: not in the manifest with this dtype and shape")
            batch.append((name, 0, flat_bytes(tensor)))
            size += batch[-1][2].numel()
            if size >= _BATCH_BYTES:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    def agree(self, phase: str) -> None:
        pass

    def refuse(self, why: str) -> None:
        pass

    def finished(self) -> None:
        pass

    def close(self) -> None:
        pass


def receive(
    incoming: Incoming, model: CausalLM, begin: Callable[[], None], finish: Callable[[int], None]
) -> WeightReceipt:
    """Verify an incoming update, copy it over the buffers of `model` in place, and hash what is then held.

    Args:
        model: side "rollout".
        begin: called before the first byte is applied; from then on the weights are a mixture.
        finish: called with the version after the last.

    Raises:
        WeightSyncError: refused, or it did not arrive; nothing has been applied.
        MixedWeightsError: it broke off later, or the engine holds other bytes than were sent.
    """
    _verify(incoming, model)
    held = _apply(incoming, model, begin, finish)
    return WeightReceipt(incoming.manifest.version, model.policy.fingerprint, model.plan.hash, held)


def _verify(incoming: Incoming, model: CausalLM) -> None:
    """The first reading: nothing is applied."""
    manifest = incoming.manifest
    try:
        expected = expected_specs(model, manifest.base, manifest.version)
        verify_manifest(manifest, expected, model.policy.fingerprint, model.plan.hash)
        incoming.agree("ready")
        hashes, scales = _first_reading(incoming, next(model.buffers()).device)
        problems = hash_problems(hashes, manifest.hashes)
        allowed = ScaleRange.of(model.policy)
        problems += [p for name, values in scales.items() for p in allowed.problems(name, values)]
        if problems:
            raise WeightSyncError(problems, manifest.version)
        incoming.agree("verified")
    except BaseException as error:
        incoming.refuse(str(error))
        incoming.close()
        if isinstance(error, WeightTransportError):
            raise WeightSyncError([str(error)], manifest.version) from error
        raise


def _apply(
    incoming: Incoming, model: CausalLM, begin: Callable[[], None], finish: Callable[[int], None]
) -> dict[str, str]:
    """The second reading; hashes of what the model then holds."""
    manifest = incoming.manifest
    try:
        begin()
        _copy(incoming, model)
        held = hash_tensors(dict(model.named_buffers()))
        problems = hash_problems({name: held[name] for name in manifest.hashes}, manifest.hashes)
        if problems:
            raise MixedWeightsError(
                "the engine holds other bytes than it verified: " + "; ".join(problems[:5])
            )
        incoming.finished()
        finish(manifest.version)
    except BaseException as error:
        incoming.refuse(str(error))
        if isinstance(error, WeightTransportError):
            raise MixedWeightsError(
                f"version {manifest.version} broke off while it was applied: {error}"
            ) from error
        raise
    finally:
        incoming.close()
    return held


def _first_reading(
    incoming: Incoming, device: torch.device
) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """From one reading of the bytes: hashes of all tensors of the manifest, made on `device`, and all scales, fp32."""
    specs: Mapping[str, TensorSpec] = incoming.manifest.specs
    rows = {name: row for row, name in enumerate(specs)}
    lanes = torch.zeros(len(specs), 2, dtype=torch.int64, device=device)
    scales = {
        name: torch.empty(nbytes(spec), dtype=torch.uint8)
        for name, spec in specs.items()
        if name.endswith(SCALE_SUFFIX)
    }
    for batch in incoming.batches():
        parts = tensor_digest([data.to(device) for _, _, data in batch], [start for _, start, _ in batch])
        lanes.index_add_(0, torch.tensor([rows[name] for name, _, _ in batch], device=device), parts)
        for name, start, data in batch:
            if name in scales:
                scales[name][start : start + data.numel()].copy_(data)
    hashes = {
        name: tensor_hash(pair, specs[name].dtype, specs[name].shape)
        for name, pair in zip(specs, lanes.tolist(), strict=True)
    }
    return hashes, {name: data.view(torch.float32) for name, data in scales.items()}


def _copy(incoming: Incoming, model: CausalLM) -> None:
    held = dict(model.named_buffers())
    with torch.no_grad():
        for batch in incoming.batches():
            for name, start, data in batch:
                _bytes_in_place(name, held[name])[start : start + data.numel()].copy_(data)
    # What was derived from the old bytes is forgotten.
    model.load_rollout_tensors((), adapters_only=incoming.manifest.base is not None)


def _bytes_in_place(name: str, buffer: torch.Tensor) -> torch.Tensor:
    if not buffer.is_contiguous():
        raise MixedWeightsError(
            f"{name} does not lie in one piece in this engine and cannot be written in place"
        )
    return buffer.view(-1).view(torch.uint8)
