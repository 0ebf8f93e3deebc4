"""What a learner hands to the env runners: its weights in the format that the policy's rollout side holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import ray
import torch

from rllib_llm.process.attest import build_attestation
from rllib_llm.sync.export import export_manifest, export_weights
from rllib_llm.sync.receiver import InProcessUpdate
from rllib_llm.sync.stream import StreamOffer, WeightSender
from rllib_llm.sync.topology import Place, Transport, place_of

if TYPE_CHECKING:
    from precision_policies import Attestation, PrecisionPolicy
    from rllib_llm.models.causal_lm import CausalLM
    from rllib_llm.sync.verify import WeightManifest

__all__ = ["ExportedWeights", "WeightSource"]


@dataclass(frozen=True)
class ExportedWeights:
    """A `WeightUpdate` (or a reference to it in the object store) and what its receipts must say."""

    update: Any
    version: int
    hashes: dict[str, str]


class WeightSource:
    """What env runners get from a learner: its weights in the rollout's format, and its attestation.

    Methods that read the weights take the version under which the present ones are exported.

    Args:
        lm: the learner's model; its weights change between calls.
        device: what the learner computes on.
    """

    def __init__(self, lm: CausalLM, policy: PrecisionPolicy, device: torch.device):
        self._lm, self._policy, self._device = lm, policy, device
        self._sender: WeightSender | None = None
        self._earlier: WeightManifest | None = None  # of a model with adapters, whose base stays
        self._of_adapters: set[str] = set()  # pushes under way that bring adapters alone

    def exported(self, version: int, *, by_reference: bool, base: str | None = None) -> ExportedWeights:
        """Quantises the weights once, into host memory.

        base: the adapters alone, for engines that hold this base.
        by_reference: put them into Ray's object store from this process, so that they neither pass
        through the driver nor are copied per runner.
        """
        update = export_weights(self._lm, version, base)
        handle = ray.put(update) if by_reference else update
        return ExportedWeights(handle, update.version, dict(update.hashes))

    def place(self) -> Place:
        """Where the weights are."""
        return place_of(next(self._lm.parameters()).device)

    def manifest(self, version: int) -> WeightManifest:
        """What the present weights are, with a hash for each; no bytes."""
        manifest = export_manifest(self._lm, version, self._earlier)
        self._earlier = None if self._lm.plan.adapter is None else manifest
        return manifest

    def in_process_update(self, manifest: WeightManifest) -> InProcessUpdate:
        """The present weights for an engine in this process; the manifest must be of them."""
        return InProcessUpdate(manifest, partial(self._read_again, manifest.base is not None))

    def offer(
        self, manifest: WeightManifest, transport: Transport, engines: Sequence[str], timeout_s: float
    ) -> list[StreamOffer]:
        """Begin a streamed push of the present weights to engines (`Place.identity`); see `WeightSender.offer`."""
        if self._sender is None:
            device = next(self._lm.parameters()).device
            self._sender = WeightSender(device, ray.util.get_node_ip_address(), timeout_s)
        offers = self._sender.offer(manifest, transport, engines)
        if manifest.base is not None:
            self._of_adapters.add(offers[0].push)
        return offers

    def send(self, push: str) -> None:
        """Deliver the bytes of an offered push; blocks until every engine holds them; see `WeightSender.send`."""
        assert self._sender is not None, "offer comes first"
        adapters_only = push in self._of_adapters
        self._of_adapters.discard(push)
        self._sender.send(push, partial(self._read_again, adapters_only))

    def _read_again(self, adapters_only: bool) -> Iterable[tuple[str, torch.Tensor]]:
        """The tensors of which a manifest was made, quantised for that."""
        return self._lm.rollout_tensors(again=True, adapters_only=adapters_only)

    def attest(self) -> Attestation:
        """What the training side runs with, stated by this process."""
        return build_attestation("train", self._policy, self._lm.plan, self._device)
