"""What a learner hands to the env runners: its weights in the format that the policy's rollout side holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
import torch
from ray.rllib.core.learner.torch.torch_learner import TorchLearner

from rllib_llm.attest import build_attestation
from rllib_llm.engines.base import CHECKPOINT_VERSION
from rllib_llm.sync.export import export_manifest, export_weights
from rllib_llm.sync.receiver import InProcessUpdate
from rllib_llm.sync.stream import StreamOffer, WeightSender
from rllib_llm.sync.topology import Place, Transport, place_of

if TYPE_CHECKING:
    from precision_policies import Attestation
    from rllib_llm.sync.verify import WeightManifest

__all__ = ["ExportedWeights", "WeightSource"]


@dataclass(frozen=True)
class ExportedWeights:
    """A `WeightUpdate` (or a reference to it in the object store) and what its receipts must say."""

    update: Any
    version: int
    hashes: dict[str, str]


class WeightSource(TorchLearner):
    """The part of `LLMTorchLearner` that env runners depend on: export and attestation."""

    _weights_place: Place | None = None
    _weight_sender: WeightSender | None = None

    @property
    def weights_version(self) -> int:
        """Version under which the present weights are exported."""
        version: int = CHECKPOINT_VERSION + 1 + self._weights_seq_no
        return version

    def exported(self, *, by_reference: bool) -> ExportedWeights:
        """Quantises the weights once, into host memory.

        by_reference: put them into Ray's object store from this process, so that they neither pass
        through the driver nor are copied per runner.
        """
        update = export_weights(self.lm_module.lm, self.weights_version)
        handle = ray.put(update) if by_reference else update
        return ExportedWeights(handle, update.version, dict(update.hashes))

    def weights_place(self) -> Place:
        """Where the weights are."""
        if self._weights_place is None:
            self._weights_place = place_of(next(self.lm_module.lm.parameters()).device)
        return self._weights_place

    def weights_manifest(self) -> WeightManifest:
        """What the present weights are, with a hash for each; no bytes."""
        return export_manifest(self.lm_module.lm, self.weights_version)

    def in_process_update(self, manifest: WeightManifest) -> InProcessUpdate:
        """The present weights for an engine in this process; the manifest must be of them."""
        return InProcessUpdate(manifest, self._read_again)

    def offer_weights(
        self, manifest: WeightManifest, transport: Transport, engines: Sequence[str], timeout_s: float
    ) -> list[StreamOffer]:
        """Begin a streamed push of the present weights to engines (`Place.identity`); see `WeightSender.offer`."""
        if self._weight_sender is None:
            device = next(self.lm_module.lm.parameters()).device
            self._weight_sender = WeightSender(device, ray.util.get_node_ip_address(), timeout_s)
        return self._weight_sender.offer(manifest, transport, engines)

    def send_weights(self, push: str) -> None:
        """Deliver the bytes of an offered push; blocks until every engine holds them; see `WeightSender.send`."""
        assert self._weight_sender is not None, "offer_weights comes first"
        self._weight_sender.send(push, self._read_again)

    def _read_again(self) -> Iterable[tuple[str, torch.Tensor]]:
        """The tensors of which a manifest was made, quantised for that."""
        return self.lm_module.lm.rollout_tensors(again=True)

    def attest(self) -> Attestation:
        """What the training side runs with, stated by this process."""
        lm = self.lm_module.lm
        return build_attestation("train", self.settings.policy, lm.plan, self._device)
