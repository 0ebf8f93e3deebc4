"""Small models of every supported kind, with dimensions that are not multiples of 128, and what tests do with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from precision_policies import PrecisionPolicy, load_policy
from rllib_llm.models import CausalLM, PackedBatch, build_model

_SIZES = {"num_hidden_layers": 2, "max_position_embeddings": 512, "initializer_range": 0.1, "eos_token_id": 2}


def _llama() -> LlamaConfig:
    """Untied, GQA 3:1, hidden 192."""
    return LlamaConfig(
        hidden_size=192, num_attention_heads=3, num_key_value_heads=1, intermediate_size=160, vocab_size=130,
        tie_word_embeddings=False, **_SIZES,
    )  # fmt: skip


def _llama3() -> LlamaConfig:
    """Tied, llama3 rope scaling, biases everywhere, head_dim that is not hidden / heads."""
    rope = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    return LlamaConfig(
        hidden_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=48, intermediate_size=200,
        vocab_size=257, tie_word_embeddings=True, attention_bias=True, mlp_bias=True, rope_parameters=rope, **_SIZES,
    )  # fmt: skip


def _qwen2() -> Qwen2Config:
    """q/k/v biases, untied, hidden 576 / 9 heads as SmolLM2 has them."""
    return Qwen2Config(
        hidden_size=576, num_attention_heads=9, num_key_value_heads=3, intermediate_size=320, vocab_size=128,
        tie_word_embeddings=False, **_SIZES,
    )  # fmt: skip


def _qwen3() -> Qwen3Config:
    """q/k norms, tied, multiples of 128: the shape of the shipped tiny model."""
    return Qwen3Config(
        hidden_size=128, num_attention_heads=2, num_key_value_heads=1, head_dim=64, intermediate_size=128,
        vocab_size=128, tie_word_embeddings=True, **_SIZES,
    )  # fmt: skip


CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": _llama,
    "llama3-rope-biases": _llama3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
}


def fp32_policy() -> PrecisionPolicy:
    """Everything in fp32: for comparison with transformers, whose fp32 has no other rounding points."""
    tree: dict[str, Any] = load_policy("bf16").to_dict()

    def widen(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: widen(value) for key, value in node.items()}
        return {"bf16": "fp32", "bfloat16": "float32"}.get(node, node) if isinstance(node, str) else node

    return PrecisionPolicy.from_dict(widen(tree) | {"name": "all-fp32"})


def fp32_policy_with_fp8_linears(backward: str) -> PrecisionPolicy:
    """FP8 GEMMs between fp32 operators: without bf16 noise, codes are those of an exact evaluation.

    backward: "fp8" or "fp32", the format of dgrad and wgrad.
    """
    tree: dict[str, Any] = fp32_policy().to_dict()
    tree["linear"] |= {"train_forward": "fp8", "rollout_forward": "fp8", "saved": "fp8"}
    tree["linear"] |= {"dgrad": backward, "wgrad": backward}
    return PrecisionPolicy.from_dict(tree | {"name": f"fp8-in-fp32-{backward}-backward"})


def make_model(kind: str, policy: Any, seed: int = 0, **options: Any) -> CausalLM:
    """A train-side model with random weights in which norms, biases and q/k norms matter."""
    return fill(build_model(CONFIGS[kind](), policy, "train", **options), seed)


def fill(model: CausalLM, seed: int = 0) -> CausalLM:
    """Random weights in which norms, biases and q/k norms matter."""
    model.initialise(seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                parameter.add_(noise, alpha=0.2)
            elif name.endswith("bias"):
                parameter.add_(noise, alpha=0.1)
    return model


def transformers_twin(model: CausalLM, dtype: torch.dtype) -> Any:
    """The transformers model of the same config and master weights, eager attention."""
    twin = AutoModelForCausalLM.from_config(model.config, attn_implementation="eager", dtype=dtype)
    missing, unexpected = twin.load_state_dict(model.state_dict(), strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    twin.tie_weights()
    return twin.to(dtype).eval()


def random_sequences(lengths: Sequence[int], vocab: int, seed: int = 0) -> list[list[int]]:
    """Token ids from 3 up (0..2 are special), one list per length."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab, (n,), generator=generator).tolist() for n in lengths]


def next_tokens(batch: PackedBatch) -> torch.Tensor:
    """int64 [T]: the token after each position; the last position of a sequence gets the first token of the batch."""
    return torch.roll(batch.input_ids, -1)
