"""Supervised warm start: the model learns to calculate, and to slip as often as the demonstrations do.

transformers' Qwen3 in FP32, which one CPU core trains in minutes; precision is the question of the study, not of this.
"""

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
from rllib_llm.models import load_pretrained


class Curriculum:
    """Length of the longest chain: 2 % more after every batch while the running loss is near what slips cost."""

    def __init__(self, longest: int, slip: float, first: int = 8) -> None:
        self.longest, self.enough = longest, 0.1 + 4.0 * slip
        self.limit, self.loss = float(first), 2.0

    def length(self, rng: np.random.Generator) -> int:
        """Half of the batches at the limit, half anywhere below."""
        limit = min(self.longest, int(self.limit))
        return int(rng.integers(2, limit + 1)) if rng.random() < 0.5 else limit

    def learned(self, loss: float) -> None:
        self.loss = 0.95 * self.loss + 0.05 * loss
        if self.loss < self.enough:
            self.limit = min(float(self.longest), self.limit * 1.02 + 0.05)


def batch(
    rng: np.random.Generator, steps: int, tokens: int, slip: float, device: torch.device
) -> tuple[torch.Tensor, int]:
    """Demonstrations int64 [n, W] of about `tokens` tokens, and where the last token of their prompts is.

    A third are problems of `steps` steps, the others the first `steps` + 1 steps of longer ones: every label is met
    at every length.
    """
    width = task.prompt_tokens() + task.answer_tokens(steps)
    count = max(1, tokens // width)
    longer = rng.integers(steps, task.LONGEST, count) + 1
    problems = task.draw(rng, count, np.where(np.arange(count) % 3 == 0, steps, longer))
    values = problems.values(steps + 1, slip, rng)
    rows = np.concatenate([problems.prompts(), problems.working(values)], axis=1)
    whole = problems.steps == steps
    rows[whole, -3:] = np.array([task.HASH, 0, task.EOS])
    rows[whole, -2] = task.DIGITS + values[whole, -2]
    return torch.from_numpy(rows).to(device), task.prompt_tokens() - 1


def answer_loss(model: Any, ids: torch.Tensor, last: int) -> torch.Tensor:
    """Mean cross-entropy of the answers' tokens."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, last:-1]
    return torch.nn.functional.cross_entropy(
        model.lm_head(hidden).flatten(0, 1), ids[:, last + 1 :].flatten()
    )


def pass_at_1(model: str, steps: int, device: torch.device, rows: int = 128) -> float:
    """Share of right answers to `rows` problems of `steps` steps, one each at temperature 1, in BF16."""
    problems = task.draw(np.random.default_rng(7), rows, steps)
    rollout = load_pretrained(model, load_policy("bf16"), side="rollout").to(device)
    limit = task.answer_tokens(steps) + 16
    sampler = Sampler(rollout, rows, task.prompt_tokens() + limit, device, task.EOS)
    [sample] = generate([sampler], [problems.prompts()], 1, limit, [[7]])
    return float(task.rewards(problems, sample.completions).mean())


def learning_rate(args: argparse.Namespace, step: int, progress: float) -> float:
    """Warm-up, `hold` of the time at the full rate, then a cosine down to a twentieth."""
    decay = max(0.0, progress - args.hold) / (1.0 - args.hold)
    return float(args.lr * min(1.0, (step + 1) / 100) * (0.05 + 0.475 * (1.0 + math.cos(math.pi * decay))))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", required=True)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=330.0)
    parser.add_argument("--lr", type=float, default=2e-3)
    slip = "probability that a demonstrated step is wrong"
    parser.add_argument("--slip", type=float, default=0.005, help=slip)
    parser.add_argument("--longest", type=int, default=160, help="steps of the longest problem")
    parser.add_argument("--first", type=int, default=10, help="steps of the longest problem at first")
    parser.add_argument("--hold", type=float, default=0.6, help="share of the time at the full learning rate")
    parser.add_argument("--start", help="directory of a model to go on from")
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--config", default="{}", help="JSON, changes to task.model_config")
    parser.add_argument("--seed", type=int, default=0)
    lengths = "lengths whose pass rate is reported"
    parser.add_argument("--measure", nargs="*", type=int, default=[], help=lengths)
    parser.add_argument("--log-every", type=int, default=100)


def first_model(args: argparse.Namespace) -> Any:
    """FP32, with random weights or those of `start`."""
    from transformers import Qwen3ForCausalLM

    if args.start:
        return Qwen3ForCausalLM.from_pretrained(args.start, dtype=torch.float32)
    return Qwen3ForCausalLM(task.model_config(**json.loads(args.config))).float()


def pretrain(args: argparse.Namespace) -> dict[str, Any]:
    """Train from random weights, or those of `start`, until `steps` or `seconds` are used up.

    Saves BF16 weights in HF format and `pretraining.json`.
    """
    torch.manual_seed(args.seed)
    device = torch.device(args.device)
    model = first_model(args).to(device)
    optimiser = torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.02, foreach=True
    )
    rng, curriculum = np.random.default_rng(args.seed), Curriculum(args.longest, args.slip, args.first)
    began, step, seen, history = time.time(), 0, 0, []
    while (progress := max(step / args.steps, (time.time() - began) / args.seconds)) < 1.0:
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(args, step, progress)
        ids, last = batch(rng, curriculum.length(rng), args.batch_tokens, args.slip, device)
        loss = answer_loss(model, ids, last)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        curriculum.learned(loss.item())
        step, seen = step + 1, seen + ids.numel()
        if step % args.log_every == 0:
            history.append({"step": step, "limit": int(curriculum.limit), "loss": round(curriculum.loss, 5)})
            print(json.dumps(history[-1] | {"seconds": round(time.time() - began, 1)}), flush=True)
    made = {"steps": step, "tokens": seen, "seconds": round(time.time() - began, 1), "slip": args.slip,
            "parameters": sum(p.numel() for p in model.parameters()), "limit": int(curriculum.limit),
            "loss": curriculum.loss}  # fmt: skip
    model.bfloat16().save_pretrained(Path(args.out))
    made["pass_at_1"] = {str(k): pass_at_1(args.out, k, device) for k in args.measure}
    arguments = {k: v for k, v in vars(args).items() if k != "run"}
    described = {"arguments": arguments, **made, "history": history}
    (Path(args.out) / "pretraining.json").write_text(json.dumps(described))
    print(json.dumps(made), flush=True)
    return made
