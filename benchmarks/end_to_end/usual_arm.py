"""One visit of the usual stack: vLLM as it comes, transformers and torch's AdamW, everything in BF16.

The loss is the one that the other arms have by default with one step per batch: advantages of a group, the ratio's
gradient at 1. Answers are of one length, so batches need no padding.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = (
    "0"  # the engine's model is then in this process, for its weights
)

import torch
from model import coin, prompt_text


class UsualStack:
    """Engine, model and optimiser."""

    def __init__(self, task: dict[str, Any]) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from vllm import LLM, SamplingParams

        self.task, cuda = task, task["device"] == "cuda"
        self.tokenizer = AutoTokenizer.from_pretrained(task["model"])
        self.llm = LLM(
            task["model"], dtype="bfloat16", seed=0, kv_cache_memory_bytes=task["kv_gib"] << 30,
            max_num_seqs=task["sequences"], max_model_len=task["prompt"] + task["answer"] + 8,
        )  # fmt: skip
        self.sampling = SamplingParams(
            n=task["group"], max_tokens=task["answer"], ignore_eos=True, temperature=1.0
        )
        model = AutoModelForCausalLM.from_pretrained(
            task["model"], dtype=torch.bfloat16, attn_implementation="sdpa"
        )
        self.model = model.to(task["device"]).train()
        self.model.gradient_checkpointing_enable()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-6, betas=(0.9, 0.99), weight_decay=0.0, fused=cuda
        )

    def sample(self, iteration: int) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 [answers, tokens] of prompts with answers, and their float32 [answers] rewards."""
        count = self.task["prompts"]
        texts = [prompt_text(self.task["prompt"], "usual", iteration * count + i) for i in range(count)]
        ids = self.tokenizer(texts)["input_ids"]
        outputs = self.llm.generate([{"prompt_token_ids": i} for i in ids], self.sampling, use_tqdm=False)
        rows = [
            [*prompt, *answer.token_ids]
            for prompt, output in zip(ids, outputs, strict=True)
            for answer in output.outputs
        ]
        answers = [answer for output in outputs for answer in output.outputs]
        rewards = [coin(self.tokenizer.decode(answer.token_ids)) for answer in answers]
        return torch.tensor(rows), torch.tensor(rewards)

    def learn(self, rows: torch.Tensor, rewards: torch.Tensor) -> None:
        """One optimiser step on all answers, in micro-batches of about the arms' size."""
        groups = rewards.view(-1, self.task["group"])
        advantages = (groups - groups.mean(1, keepdim=True)).reshape(-1).to(self.task["device"])
        size = max(1, self.task["micro_batch_tokens"] // rows.shape[1])
        trained = len(rows) * self.task["answer"]
        for batch, weight in zip(rows.split(size), advantages.split(size), strict=True):
            ids = batch.to(self.task["device"])
            kept = self.task["answer"] + 1
            logits = self.model(ids, logits_to_keep=kept, use_cache=False).logits[:, :-1].float()
            logp = -torch.nn.functional.cross_entropy(
                logits.reshape(-1, logits.shape[-1]),
                ids[:, -self.task["answer"] :].reshape(-1),
                reduction="none",
            ).view(len(ids), -1)
            loss = -(torch.exp(logp - logp.detach()) * weight[:, None]).sum() / trained
            loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def push(self) -> None:
        """The model's weights into the engine's, and nothing kept of the old ones."""
        self.llm.apply_model(lambda engine: engine.load_weights(self.model.named_parameters()) and None)
        self.llm.reset_prefix_cache()


def synchronised() -> float:
    """Now, when everything on the GPU is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.time()


def main(task: dict[str, Any]) -> None:
    """Build, train, append rows."""
    stack = UsualStack(task)
    print(f"built {time.time() - task['begun']:.1f} s after the start", flush=True)
    for iteration in range(1, task["iterations"] + 1):
        times = [synchronised()]
        rows, rewards = stack.sample(iteration)
        times.append(synchronised())
        stack.learn(rows, rewards)
        times.append(synchronised())
        stack.push()
        times.append(synchronised())
        spans = [after - before for before, after in itertools.pairwise(times)]
        peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
        row = {
            "arm": task["arm"], "turn": task["turn"], "iteration": iteration, "seconds": times[-1] - times[0],
            "since_start_s": time.time() - task["begun"],
            "phases": dict(zip(("sample", "learn", "push_weights"), spans, strict=True)),
            "tokens": float(len(rows) * task["answer"]), "mismatch": {}, "memory": {"both_cuda_peak_gib": peak},
        }  # fmt: skip
        print(json.dumps(row), flush=True)
        with Path(task["rows"]).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
