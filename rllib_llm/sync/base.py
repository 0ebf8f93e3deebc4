"""Updates of adapters alone: an engine takes them if it holds the very base that they were trained on.

The base is pushed once, with the first update. Later updates name it by its hash, and the engine compares that with a
hash of what it then holds, before any byte is applied. After the update it states hashes of everything it holds.
"""

from __future__ import annotations

from collections.abc import Mapping

from rllib_llm.models.causal_lm import CausalLM
from rllib_llm.sync.packed import WeightSyncError
from rllib_llm.weights.base import base_hash, is_adapter
from rllib_llm.weights.format import TensorSpec, hash_tensors

__all__ = ["expected_specs", "holds_base", "own_base_hash"]


def own_base_hash(model: CausalLM) -> str:
    """`base_hash` of what a rollout model holds now, from its memory."""
    return base_hash(hash_tensors({n: t for n, t in model.named_buffers() if not is_adapter(n)}))


def holds_base(model: CausalLM, base: str) -> bool:
    """Whether a rollout model could take an update of adapters that were trained on this base."""
    return model.plan.adapter is not None and own_base_hash(model) == base


def expected_specs(model: CausalLM, base: str | None, version: int) -> Mapping[str, TensorSpec]:
    """What an update must bring: everything, or, if it names a base that the model holds, the adapters.

    Raises:
        WeightSyncError: the model holds another base, or has no adapters.
    """
    specs = model.weight_specs()
    if base is None:
        return specs
    if model.plan.adapter is None:
        raise WeightSyncError(
            ["adapters came, and this engine was built without: give both sides one"], version
        )
    held = own_base_hash(model)
    if held != base:
        problem = (
            f"the adapters are on a base with hash {base[:16]}…, this engine holds {held[:16]}…: push all "
            "weights first"
        )
        raise WeightSyncError([problem], version)
    return {name: spec for name, spec in specs.items() if is_adapter(name)}
