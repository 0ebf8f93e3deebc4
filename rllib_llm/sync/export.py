"""From the learner's model to a `WeightUpdate`: weights are quantised once, here, for every engine."""

from __future__ import annotations

from rllib_llm.models.causal_lm import CausalLM
from rllib_llm.sync.packed import PackedTensor, WeightUpdate, hash_tensors


def export_weights(model: CausalLM, version: int) -> WeightUpdate:
    """The weights of `model` (train side) as an engine holds them.

    A linear that is fp8 on both sides is exported as the very codes and scales that the learner's forward
    multiplies by; everything else is the master rounded to the compute dtype (then quantised, if only the rollout
    is fp8). Names are those of checkpoints: ``X.weight``, ``X.weight_scale_inv``, ``X.bias``.

    Args:
        model: side "train".
        version: number of this export, > 0; engines report it with every sample.
    """
    if version < 1:
        raise ValueError(
            f"version={version}: exports count from 1 (0 is a checkpoint loaded by an engine itself)"
        )
    tensors: dict[str, PackedTensor] = {}
    hashes: dict[str, str] = {}
    for name, tensor in model.rollout_tensors():
        hashes |= hash_tensors({name: tensor})
        tensors[name] = PackedTensor.pack(tensor)
    return WeightUpdate(version, model.policy.fingerprint, model.plan.hash, tensors, hashes)
