"""What a checkpoint says of adapters and of the model they are on, which it does not hold."""

from __future__ import annotations

from typing import Any

from rllib_llm.on_disk.errors import CheckpointError
from rllib_llm.settings.groups import ModelSettings

__all__ = ["adapter_metadata", "refuse_other_adapter"]


def adapter_metadata(model: ModelSettings, base_hash: str | None) -> dict[str, Any]:
    """Entries of a checkpoint's metadata: nothing for a run that trains all weights.

    base_hash: `rllib_llm.weights.base.base_hash` of the base in the rollout's formats.
    """
    if model.adapter is None:
        return {}
    return {"adapter": model.adapter.spec().to_dict(), "base_hash": base_hash}


def refuse_other_adapter(
    saved: dict[str, Any], model: ModelSettings, same_policy: bool, base_hash: str | None, path: str
) -> None:
    """Compare a checkpoint's metadata with what this run trains.

    same_policy: the base is in the same formats now, so that its hash can be compared.

    Raises:
        CheckpointError: it holds all weights and this run trains adapters, or the other way round; other adapters; or
            adapters of another base.
    """
    own = None if model.adapter is None else model.adapter.spec().to_dict()
    there = saved.get("adapter")
    if there != own:
        raise CheckpointError(
            f"checkpoint {path} holds {_words(there)}, this run trains {_words(own)}: set model.adapter as it was"
        )
    if own is not None and same_policy and saved.get("base_hash") != base_hash:
        raise CheckpointError(
            f"checkpoint {path} holds adapters of a model whose weights hash to {str(saved.get('base_hash'))[:16]}…, "
            f"model.path = {model.path!r} holds weights with {str(base_hash)[:16]}…: give the model that they were "
            "trained on"
        )


def _words(adapter: Any) -> str:
    if not isinstance(adapter, dict):
        return "all weights"
    return "adapters (" + ", ".join(f"{key}: {value}" for key, value in adapter.items()) + ")"
