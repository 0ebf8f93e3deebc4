"""The rollout's tensors as a Hugging Face directory in the standard block-FP8 format.

The format is that of DeepSeek-V3's checkpoints, which vLLM, SGLang and transformers read without any code of ours:
``X.weight`` e4m3 [N, K] and ``X.weight_scale_inv`` fp32 [ceil(N/128), ceil(K/128)], the number that a code is
multiplied by, and ``quantization_config`` in config.json. Activations are quantised when they arrive ("dynamic").
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from precision_policies import Plan, PrecisionPolicy
from rllib_llm.models.checkpoint import MAX_SHARD_BYTES
from rllib_llm.models.paths import CONFIG_FILE
from rllib_llm.models.weight_writer import write_tensors

__all__ = ["has_fp8_rollout", "quantization_config", "serving_obstacles", "write_rollout"]

BLOCK = 128
# The reference layout of vLLM's Llama, Qwen2 and Qwen3: projections that it keeps as one matrix.
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def has_fp8_rollout(plan: Plan) -> bool:
    """Whether any module of the rollout side holds FP8 codes."""
    return any(row.rollout_forward == "fp8" for row in plan)


def quantization_config(plan: Plan) -> dict[str, Any]:
    """The ``quantization_config`` of config.json.

    ``modules_to_not_convert`` names every projection that the plan does not quantise, lm_head included; embeddings and
    norms are never converted by readers of the format.
    """
    plain = [
        row.name for row in plan if row.kind not in ("embedding", "norm") and row.rollout_forward != "fp8"
    ]
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": sorted(plain),
    }


def write_rollout(
    directory: Path,
    tensors: Mapping[str, torch.Tensor],
    masters_config: Mapping[str, Any],
    plan: Plan,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write what a rollout engine holds.

    Args:
        directory: exists; tokenizer files are not written here.
        tensors: name -> CPU tensor, as `CausalLM.rollout_tensors` names them.
        masters_config: config.json of the directory with the masters.
    """
    write_tensors(directory, tensors, max_shard_bytes)
    config = {**masters_config, "quantization_config": quantization_config(plan)}
    (directory / CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def serving_obstacles(plan: Plan, policy: PrecisionPolicy) -> list[str]:
    """Why stock vLLM (0.26 to 0.32) would refuse the FP8 directory or compute other numbers than the policy says.

    Empty when nothing is known against it.
    """
    found = []
    ragged: dict[tuple[int, ...], list[str]] = {}
    for row in plan:
        fused = any(row.name.endswith(part) for group in _FUSED for part in group)
        # A shard of a fused matrix must end at a block; on its own, a ragged output dimension is fine.
        if row.rollout_forward == "fp8" and (row.shape[1] % BLOCK or (fused and row.shape[0] % BLOCK)):
            ragged.setdefault(row.shape, []).append(row.name)
    found += [
        f"{len(names)} projection(s) of shape {list(shape)} (first: {names[0]}): vLLM takes block-FP8 shards of "
        f"multiples of {BLOCK} only; serve the masters, or train with ragged: exempt"
        for shape, names in sorted(ragged.items())
    ]
    if policy.compute_dtype != "bfloat16" and has_fp8_rollout(plan):
        found.append(f"compute_dtype {policy.compute_dtype}: start vLLM with --dtype {policy.compute_dtype}")
    return found
