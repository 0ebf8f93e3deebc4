"""What a learner hands to the env runners: its weights in the format that the policy's rollout side holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray.rllib.core.learner.torch.torch_learner import TorchLearner

from rllib_llm.attest import build_attestation
from rllib_llm.engines.base import CHECKPOINT_VERSION
from rllib_llm.sync.export import export_weights

if TYPE_CHECKING:
    from precision_policies import Attestation

__all__ = ["ExportedWeights", "WeightSource"]


@dataclass(frozen=True)
class ExportedWeights:
    """A `WeightUpdate` (or a reference to it in the object store) and what its receipts must say."""

    update: Any
    version: int
    hashes: dict[str, str]


class WeightSource(TorchLearner):
    """The part of `LLMTorchLearner` that env runners depend on: export and attestation."""

    def exported(self, *, by_reference: bool) -> ExportedWeights:
        """Quantises the weights once.

        by_reference: put them into Ray's object store from this process, so that they neither pass
        through the driver nor are copied per runner.
        """
        version = CHECKPOINT_VERSION + 1 + self._weights_seq_no
        update = export_weights(self.lm_module.lm, version)
        handle = ray.put(update) if by_reference else update
        return ExportedWeights(handle, version, dict(update.hashes))

    def attest(self) -> Attestation:
        """What the training side runs with, stated by this process."""
        lm = self.lm_module.lm
        return build_attestation("train", self.settings.policy, lm.plan, self._device)
