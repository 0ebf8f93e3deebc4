"""Supervised warm start: the model learns to calculate, and to slip as often as the demonstrations do."""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.long_answers import task
from benchmarks.long_answers.sampler import Sampler, generate
from precision_policies import load_policy
from rllib_llm.models import PackedBatch, build_model, load_pretrained, save_pretrained


def steps_of_batch(rng: np.random.Generator, progress: float, longest: int) -> int:
    """Chain length of one batch: short ones first, then half of the batches up to `longest`."""
    short, middle = max(2, longest // 16), max(3, longest // 4)
    if progress < 0.25:
        return int(rng.integers(2, short + 1))
    if rng.random() < 0.4:
        return int(rng.integers(2, middle + 1))
    return int(rng.integers(middle, longest + 1))


def batch(
    rng: np.random.Generator, steps: int, tokens: int, slip: float, device: torch.device
) -> tuple[PackedBatch, torch.Tensor, torch.Tensor]:
    """Packed demonstrations of about `tokens` tokens, where a target is predicted, and the targets."""
    width = task.prompt_tokens(steps) + task.answer_tokens(steps)
    problems = task.draw(rng, max(1, tokens // width), steps)
    rows = np.concatenate([problems.prompts(), problems.answers(problems.values(slip, rng))], axis=1)
    ids = torch.from_numpy(rows).to(device)
    n = len(ids)
    packed = PackedBatch(
        ids.flatten(),
        torch.arange(width, device=device).repeat(n),
        torch.arange(n + 1, device=device) * width,
    )
    inside = torch.arange(task.prompt_tokens(steps) - 1, width - 1, device=device)
    at = (torch.arange(n, device=device)[:, None] * width + inside).flatten()
    return packed, at, packed.input_ids[at + 1]


def pass_at_1(model: str, steps: int, device: torch.device, rows: int = 128) -> float:
    """Share of right answers to `rows` problems of `steps` steps, one each at temperature 1, in BF16."""
    problems = task.draw(np.random.default_rng(7), rows, steps)
    rollout = load_pretrained(model, load_policy("bf16"), side="rollout").to(device)
    limit = task.answer_tokens(steps) + 16
    sampler = Sampler(rollout, rows, task.prompt_tokens(steps) + limit, device, task.EOS)
    [sample] = generate([sampler], [problems.prompts()], 1, limit, [[7]])
    return float(task.rewards(problems, sample.completions).mean())


def pretrain(args: argparse.Namespace) -> dict[str, Any]:
    """Train from random weights until `steps` or `seconds` are used up; saves BF16 weights in HF format."""
    device = torch.device(args.device)
    model = build_model(task.model_config(**json.loads(args.config)), "bf16", "train")
    model.initialise(args.seed)
    model.to(device)
    optimiser = torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.05, foreach=True
    )
    rng, began, seen, history = np.random.default_rng(args.seed), time.time(), 0, []
    loss = torch.zeros(())
    for step in range(args.steps):
        if step == 3:
            began = time.time()  # the first steps compile kernels
        progress = max(step / args.steps, (time.time() - began) / args.seconds)
        if progress >= 1.0:
            break
        factor = min(1.0, (step + 1) / 50) * (0.05 + 0.475 * (1 + math.cos(math.pi * progress)))
        for group in optimiser.param_groups:
            group["lr"] = args.lr * factor
        length = steps_of_batch(rng, progress, args.longest)
        packed, at, targets = batch(rng, length, args.batch_tokens, args.slip, device)
        loss = -model.token_logprobs(model(packed)[at], targets).mean()
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        seen += len(packed.input_ids)
        if step % args.log_every == 0:
            history.append({"step": step, "chain": length, "loss": round(loss.item(), 5)})
            print(json.dumps(history[-1] | {"seconds": round(time.time() - began, 1)}), flush=True)
    made = {"steps": step + 1, "tokens": seen, "seconds": round(time.time() - began, 1), "slip": args.slip,
            "parameters": sum(p.numel() for p in model.parameters()), "last_loss": loss.item()}  # fmt: skip
    save_pretrained(model.to("cpu"), Path(args.out))
    made["pass_at_1"] = {str(k): pass_at_1(args.out, k, device) for k in args.measure}
    (Path(args.out) / "pretraining.json").write_text(
        json.dumps(
            {"arguments": {k: v for k, v in vars(args).items() if k != "run"}, **made, "history": history}
        )
    )
    print(json.dumps(made), flush=True)
    return made
