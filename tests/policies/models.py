"""Model configs as plain dicts, as config.json gives them (nothing here needs transformers)."""

from __future__ import annotations

from typing import Any

LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
QWEN3_8B: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
}
MOE_100_LAYERS: dict[str, Any] = {
    **QWEN3_8B,
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 1536,
    "num_experts": 128,
    "num_hidden_layers": 100,
}


def small(model_type: str, **changes: Any) -> dict[str, Any]:
    """A model of `model_type` with two layers whose dimensions are multiples of 128."""
    base = {
        "model_type": model_type,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 512,
        "num_experts": 4,
        "num_local_experts": 4,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 256,
    }
    return {**base, **changes}


FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
)
DENSE = FAMILIES[:7]
