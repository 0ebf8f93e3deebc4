"""A small learner, engines with its weights, and the difference between them: what the tests of real vLLM share."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from precision_policies import load_policy
from rllib_llm.engines.base import SamplingParams
from rllib_llm.engines.factory import make_engine
from rllib_llm.models import PackedBatch, build_model
from rllib_llm.process.attest import prepare_process

CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SAMPLING = {
    "group": SamplingParams(n=3, max_tokens=20, seed=5, ignore_eos=True),
    "truncated": SamplingParams(
        n=2, max_tokens=20, temperature=0.7, top_k=20, top_p=0.9, seed=1, ignore_eos=True
    ),
    "greedy": SamplingParams(max_tokens=12, temperature=0, ignore_eos=True),
}


def ragged_config(architecture: str) -> Any:
    """Dims that are no multiples of 128 on CPU (q 192, k/v 64, FFN 320); of 128 on a GPU, as DeepGEMM needs."""
    ragged = DEVICE == "cpu"
    sizes = {
        "hidden_size": 192 if ragged else 256,
        "intermediate_size": 320 if ragged else 512,
        "num_attention_heads": 3 if ragged else 4,
        "num_key_value_heads": 1 if ragged else 2,
        "head_dim": 64,
    }
    tied = architecture == "llama"
    extra = {} if architecture != "qwen2" else {"layer_types": ["full_attention"] * 2}
    return CONFIGS[architecture](
        **sizes, **extra, num_hidden_layers=2, vocab_size=192, max_position_embeddings=512, tie_word_embeddings=tied,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip


def random_learner(config: Any, policy: str) -> Any:
    """A learner's model whose distributions are far from uniform (weights three times the usual size)."""
    prepare_process(load_policy(policy), "torch", DEVICE)
    model = build_model(config, policy, "train")
    model.initialise(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(1 if "norm" in name else 3)
            if name.endswith("bias"):
                parameter.normal_(0, 0.5)
    return model.to(DEVICE)


def perturb(model: Any) -> None:
    """What an optimiser step does to the weights, as far as an engine can tell."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)


def prompts(seed: int, count: int = 6) -> list[list[int]]:
    """Prompts of 1 to 150 tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [1, *torch.randint(2, 150, (count - 1,), generator=generator).tolist()]
    return [torch.randint(3, 192, (n,), generator=generator).tolist() for n in lengths]


def deltas(
    model: Any,
    asked: list[list[int]],
    answers: Any,
    params: SamplingParams,
    banned_ids: tuple[int, ...] = (),
) -> np.ndarray:
    """Learner's log-probs (one packed forward) minus the engine's, over all sampled tokens.

    `banned_ids` have probability 0 for the first `params.min_tokens` tokens of each answer.
    """
    truncation = (params.top_k, params.top_p) if params.temperature else (0, 1.0)
    pairs = [(p, c) for p, row in zip(asked, answers, strict=True) for c in row]
    batch = PackedBatch.from_sequences([p + c.token_ids.tolist() for p, c in pairs]).to(torch.device(DEVICE))
    targets = torch.roll(batch.input_ids, -1)
    starts = batch.cu_seqlens.tolist()
    young = torch.zeros(len(targets), dtype=torch.bool)
    for (prompt, _), start, stop in zip(pairs, starts[:-1], starts[1:], strict=True):
        young[start + len(prompt) - 1 : min(start + len(prompt) - 1 + params.min_tokens, stop)] = True
    bans = {"banned_ids": banned_ids, "banned_rows": young.to(DEVICE)} if banned_ids else {}
    with torch.no_grad():
        hidden = model(batch)
        logp = model.token_logprobs(hidden, targets, params.temperature or 1.0, *truncation, **bans)
        logp = logp.cpu().numpy()
    parts = []
    for (prompt, completion), start, stop in zip(pairs, starts[:-1], starts[1:], strict=True):
        parts.append(logp[start + len(prompt) - 1 : stop - 1] - completion.logprobs)
    return np.concatenate(parts)


def start(config: Any, policy: str, **options: Any) -> Any:
    # The share of the GPU is what must be free at the start: others may be computing on it.
    defaults = {
        "kv_cache_bytes": 64 << 20,
        "max_num_seqs": 32,
        "device": DEVICE,
        "gpu_memory_utilization": 0.05,
    }
    return make_engine("vllm", config, policy, **(defaults | options))
