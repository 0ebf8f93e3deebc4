"""From the learner's model to a `WeightUpdate`: weights are quantised once, here, for every engine."""

from __future__ import annotations

import torch

from rllib_llm.models.causal_lm import CausalLM
from rllib_llm.sync.packed import PackedTensor, WeightUpdate
from rllib_llm.sync.verify import WeightManifest
from rllib_llm.weights.format import TensorSpec, dtype_name, hash_tensors


def export_weights(model: CausalLM, version: int, base: str | None = None) -> WeightUpdate:
    """The weights of `model` (train side) as an engine holds them, in host memory.

    A linear that is fp8 on both sides is exported as the very codes and scales that the learner's forward
    multiplies by; everything else is the master rounded to the compute dtype (then quantised, if only the rollout
    is fp8). Names are those of checkpoints: ``X.weight``, ``X.weight_scale_inv``, ``X.bias``.

    Args:
        model: side "train".
        version: number of this export, > 0; engines report it with every sample.
        base: export the adapters alone, for engines that hold the base with this hash (`rllib_llm.sync.base`).
    """
    _check_version(version)
    tensors: dict[str, PackedTensor] = {}
    hashes: dict[str, str] = {}
    for name, tensor in model.rollout_tensors(adapters_only=base is not None):
        hashes |= hash_tensors({name: tensor})
        tensors[name] = PackedTensor.pack(tensor)
    return WeightUpdate(version, model.policy.fingerprint, model.plan.hash, tensors, hashes, base)


def export_manifest(model: CausalLM, version: int, earlier: WeightManifest | None = None) -> WeightManifest:
    """What `export_weights` would say of its tensors, hashed where they lie; the tensors themselves are dropped.

    earlier: of the same model with other adapters, from which everything about its frozen base is taken.
    """
    _check_version(version)
    specs: dict[str, TensorSpec] = {}
    hashes: dict[str, str] = {}
    pending: dict[str, torch.Tensor] = {}
    held = 0
    if earlier is not None:  # in its order, which is that of the tensors
        specs, hashes = dict(earlier.specs), dict(earlier.hashes)
    for name, tensor in model.rollout_tensors(adapters_only=earlier is not None):
        specs[name] = TensorSpec(dtype_name(tensor.dtype), tuple(tensor.shape))
        pending[name] = tensor
        held += tensor.numel() * tensor.element_size()
        if held > _PENDING_BYTES:  # many per wait for the GPU, but not all weights in memory at once
            hashes |= hash_tensors(pending)
            pending, held = {}, 0
    hashes |= hash_tensors(pending)
    return WeightManifest(version, model.policy.fingerprint, model.plan.hash, specs, hashes)


_PENDING_BYTES = 1 << 30


def _check_version(version: int) -> None:
    if version < 1:
        raise ValueError(
            f"version={version}: exports count from 1 (0 is a checkpoint loaded by an engine itself)"
        )
