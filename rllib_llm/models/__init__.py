"""Language models built from precision_kernels operators, for learner and engine.

Names are loaded when first used: where a model lies can be asked without importing torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rllib_llm.models.batch import PackedBatch
    from rllib_llm.models.causal_lm import CausalLM, build_model
    from rllib_llm.models.checkpoint import load_config, load_pretrained, load_tokenizer, save_pretrained
    from rllib_llm.models.kv_cache import DecoderCache
    from rllib_llm.models.paths import resolve_model_path

__all__ = [
    "CausalLM",
    "DecoderCache",
    "PackedBatch",
    "build_model",
    "load_config",
    "load_pretrained",
    "load_tokenizer",
    "resolve_model_path",
    "save_pretrained",
]

_HOMES = {
    "CausalLM": "causal_lm",
    "DecoderCache": "kv_cache",
    "PackedBatch": "batch",
    "build_model": "causal_lm",
    "load_config": "checkpoint",
    "load_pretrained": "checkpoint",
    "load_tokenizer": "checkpoint",
    "resolve_model_path": "paths",
    "save_pretrained": "checkpoint",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}; public names: {', '.join(__all__)}"
        )
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
