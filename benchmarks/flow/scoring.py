"""The learner's log-probs of sampled tokens, held against what an engine reported."""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

Sampled = tuple[list[int], Any, Any]
"""Prompt ids, answer ids [L], log-probs fp32 [L] (both numpy or lists)."""


def compare(model: Any, args: argparse.Namespace, samples: list[Sampled], sampling: Any) -> dict[str, Any]:
    """Delta = learner - engine per token, summarised. sampling: has temperature, top_k, top_p."""
    begin = time.time()
    deltas, group, size = [], [], 0
    for sample in [*samples, None]:
        length = 0 if sample is None else len(sample[0]) + len(sample[1])
        if group and (sample is None or size + length > args.packed_tokens):
            deltas += _score(model, args, group, sampling)
            group, size = [], 0
        if sample is not None:
            group.append(sample)
            size += length
    delta = torch.cat(deltas).double()
    return {
        "tokens": len(delta),
        "sequences": len(samples),
        "longest_answer": max(len(ids) for _, ids, _ in samples),
        "longest_prompt": max(len(p) for p, _, _ in samples),
        "max_abs": delta.abs().max().item(),
        "mean_abs": delta.abs().mean().item(),
        "k3": (delta.exp() - 1 - delta).mean().item(),
        "bit_equal_share": (delta == 0).double().mean().item(),
        "mean_logprob": sum(float(sum(lp)) for _, _, lp in samples) / len(delta),
        "score_s": time.time() - begin,
    }


def _score(model: Any, args: argparse.Namespace, group: list[Sampled], sampling: Any) -> list[torch.Tensor]:
    from rllib_llm.models import PackedBatch

    sequences = [[*p, *map(int, ids)] for p, ids, _ in group]
    batch = PackedBatch.from_sequences(sequences).to(torch.device(args.device))
    with torch.no_grad():
        targets = torch.roll(batch.input_ids, -1)
        logp = model.token_logprobs(
            model(batch), targets, sampling.temperature, sampling.top_k, sampling.top_p
        ).cpu()
    bounds = batch.cu_seqlens.tolist()
    return [
        logp[start + len(p) - 1 : stop - 1] - torch.as_tensor(lp, dtype=torch.float32)
        for (p, _, lp), start, stop in zip(group, bounds[:-1], bounds[1:], strict=True)
    ]


def warm_up(model: Any, args: argparse.Namespace, sequences: list[list[int]], backward: bool) -> None:
    """One forward of the packed sequences, with a backward if wanted, for what it compiles."""
    from rllib_llm.models import PackedBatch

    batch = PackedBatch.from_sequences(sequences).to(torch.device(args.device))
    with torch.set_grad_enabled(backward):
        logp = model.token_logprobs(model(batch), torch.roll(batch.input_ids, -1))
        if backward:
            logp.mean().backward()
            model.zero_grad(set_to_none=True)


def policy_gradient_steps(model: Any, args: argparse.Namespace, steps: int, prompts: list[list[int]]) -> None:
    """Real optimiser steps (AdamW, masters and states in the policy's dtypes) with random advantages."""
    from rllib_llm.models import PackedBatch

    # Fused: at 8B the temporaries of a step over all parameters at once would not fit beside the engine.
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=args.device == "cuda")
    chosen = [p for p in prompts if len(p) > 64][:16] or prompts[:4]
    batch = PackedBatch.from_sequences(chosen).to(torch.device(args.device))
    advantages = torch.randn(len(batch.input_ids), device=args.device)
    for _ in range(steps):
        logp = model.token_logprobs(model(batch), torch.roll(batch.input_ids, -1))
        (-(logp * advantages).mean()).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert torch.isfinite(norm), "gradient is not finite"
        optimiser.step()
        optimiser.zero_grad()
