"""One arm with one seed: learner, rollout model, and an iteration of reinforcement learning on given samples.

The parts are the product's (`CausalLM`, its export and hashes, losses, corrections, mismatch metrics, guard, optimiser)
and the order is `LLMTorchLearner`'s: log-probs of all samples under the weights that sampled them, then `minibatches`
optimiser steps on parts of the batch. Ray is not involved, which is what lets one process hold all cells.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch

from benchmarks.long_answers import task
from benchmarks.long_answers.batch import Batch, Micro
from benchmarks.long_answers.sampler import Sample, Sampler
from precision_policies import load_policy
from rllib_llm.learner.gradients import Gradients
from rllib_llm.learner.optimizer import PolicyAdamW, lr_factor
from rllib_llm.losses import LossInputs, make_loss
from rllib_llm.losses.advantages import group_advantages, uninformative_groups
from rllib_llm.losses.corrections import active_correction, correction_weights
from rllib_llm.mismatch.guard import Guard
from rllib_llm.mismatch.metrics import metrics as mismatch_metrics
from rllib_llm.models import build_model, load_pretrained
from rllib_llm.weights.format import hash_tensors

UNCORRECTED = {
    "extends": "mixed-bf16-fp8",
    "name": "mixed-uncorrected",
    "correction": {"kind": "none", "upper": None, "accept_uncorrected": True},
}
UNIFIED = {
    "extends": "unified-fp8",
    "name": "unified-fp8",
    "guard": {"action": "warn"},
}
"""The shipped policy ends a run with the first difference; a study goes on and reports how large it was."""
ARMS: dict[str, Any] = {
    "bf16": "bf16",
    "unified-fp8": UNIFIED,
    "mixed-bf16-fp8": "mixed-bf16-fp8",
    "mixed-uncorrected": UNCORRECTED,
}


@dataclass(frozen=True)
class Settings:
    """What all arms share."""

    steps: int = 160
    """operations of a problem"""
    prompts: int = 32
    group: int = 8
    lr: float = 1e-4
    warmup_steps: int = 4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    loss: str = "dapo"
    minibatches: int = 2
    micro_batch_tokens: int = 131072
    slack_tokens: int = 16
    """how much longer than a complete answer an answer may become"""

    @property
    def rows(self) -> int:
        return self.prompts * self.group

    @property
    def limit(self) -> int:
        return task.answer_tokens(self.steps) + self.slack_tokens

    @property
    def capacity(self) -> int:
        return task.prompt_tokens() + self.limit


class Cell:
    """Everything of one arm and seed that an iteration changes, and the iteration."""

    def __init__(
        self, arm: str, seed: int, model: str, settings: Settings, device: torch.device, label: str = ""
    ) -> None:
        self.label = label or arm
        self.arm, self.seed, self.settings, self.device = arm, seed, settings, device
        self.policy = load_policy(ARMS[arm])
        self.model = load_pretrained(model, self.policy, side="train").to(device)
        self.rollout = build_model(self.model.config, self.policy, "rollout").to(device)
        self.sampler = Sampler(self.rollout, settings.rows, settings.capacity, device, task.EOS)
        parameters = list(self.model.parameters())
        self.optimiser = PolicyAdamW(
            parameters, lr=0.0, betas=settings.betas, weight_decay=settings.weight_decay,
            state_dtype=self.policy.optimizer_state_dtype,
        )  # fmt: skip
        self.gradients = Gradients(parameters)
        self.loss = make_loss(settings.loss)
        self.correction = active_correction(self.policy.correction, guard_fired=False)
        self.guard = Guard(self.policy.guard)
        self.iteration = self.optimiser_steps = 0
        self.status, self.reason = "running", ""
        self.sync()

    # ------------------------------------------------------------------ weights

    def sync(self) -> float:
        """Seconds to quantise the weights, load them, and compare what the rollout model then holds with what was made.

        In one process nothing travels, so tensors are hashed where they lie and never leave the device.
        """
        began = time.perf_counter()
        made = dict(self.model.rollout_tensors())
        self.rollout.load_rollout_tensors(made.items())
        sent, held = hash_tensors(made), self.rollout.weight_hashes()
        wrong = [name for name, digest in sent.items() if held.get(name) != digest]
        if wrong or len(sent) != len(held):
            raise RuntimeError(
                f"{self.label}: the rollout model holds other tensors than were made: {wrong[:5]}, "
                f"{len(sent)} made, {len(held)} held"
            )
        return time.perf_counter() - began

    # ------------------------------------------------------------------ one iteration

    def learn(self, problems: task.Problems, sample: Sample) -> dict[str, float]:
        """Mismatch under the weights that sampled, then the optimiser steps; metrics by the names of training."""
        batch = Batch(sample, self.device)
        rewards = task.rewards(problems, sample.completions)
        groups = torch.arange(len(rewards)) // sample.group
        out = self._describe(sample, rewards, groups)
        began = time.perf_counter()
        old = self._logprobs(batch)
        measured = mismatch_metrics(old, batch.rollout, batch.mask, batch.sequence)
        out |= {f"mismatch/{name}": value for name, value in measured.items()}
        out["timers/mismatch"] = time.perf_counter() - began
        self._guard(measured, out)
        began = time.perf_counter()
        advantages = group_advantages(torch.from_numpy(rewards), groups, self.loss.advantage_kind).to(
            self.device
        )
        tally: dict[str, list[Any]] = defaultdict(lambda: [0.0, 0.0])
        for rows in self._parts(len(rewards)):
            self._step(batch, rows, old, advantages, tally)
        out |= {
            f"learners/default_policy/{name}": float(total) / float(count)
            for name, (total, count) in tally.items()
        }
        out["learners/default_policy/num_tokens"] = float(len(batch.targets))
        out["timers/learn"] = time.perf_counter() - began
        out["timers/push_weights"] = self.sync()
        self.iteration += 1
        return out

    def _describe(self, sample: Sample, rewards: np.ndarray, groups: torch.Tensor) -> dict[str, float]:
        lengths = [len(c) for c in sample.completions]
        return {
            "env_runners/episode_return_mean": float(rewards.mean()),
            "env_runners/response_length_mean": float(np.mean(lengths)),
            "env_runners/truncated_share": float(1.0 - sample.ended.mean()),
            "env_runners/num_tokens_sampled": float(sum(lengths)),
            "num_groups_without_signal": float(uninformative_groups(torch.from_numpy(rewards), groups)),
        }

    def _guard(self, measured: dict[str, float], out: dict[str, float]) -> None:
        verdict = self.guard.check(measured)
        out["precision/guard_violations"] = float(verdict.consecutive)
        out["precision/correction_active"] = float(self.correction is not None)
        if verdict.violated:
            print(
                f"{self.label} seed {self.seed} iteration {self.iteration + 1}: {verdict.message}", flush=True
            )
        if verdict.action == "halt":
            self.status, self.reason = "halted", verdict.message

    @torch.no_grad()
    def _logprobs(self, batch: Batch) -> torch.Tensor:
        """fp32, flat: log-probs of the sampled tokens under the weights that sampled them."""
        out = torch.empty_like(batch.rollout)
        for micro in batch.micro_batches(list(range(len(batch.rows))), self.settings.micro_batch_tokens):
            hidden = self.model(micro.packed)[micro.at]
            out[micro.slots] = self.model.token_logprobs(hidden, batch.targets[micro.slots])
        return out

    def _parts(self, count: int) -> list[list[int]]:
        """Rows of each optimiser step: a permutation that depends on seed and iteration only."""
        order = np.random.default_rng([self.seed, self.iteration, 1]).permutation(count)
        return [sorted(part.tolist()) for part in np.array_split(order, self.settings.minibatches)]

    def _step(
        self,
        batch: Batch,
        rows: list[int],
        old: torch.Tensor,
        advantages: torch.Tensor,
        tally: dict[str, list[Any]],
    ) -> None:
        """One optimiser step on some rows."""
        count = float(sum(batch.lengths[r] for r in rows))  # DAPO normalises by tokens
        assert self.loss.normaliser == "tokens", "this study counts tokens"
        self.gradients.zero()
        for micro in batch.micro_batches(rows, self.settings.micro_batch_tokens):
            (self._loss(batch, micro, old, advantages, tally) / count).backward()
            self.gradients.accumulate()
        grads = self.gradients.take()
        norm = self.gradients.unscale_and_norm(grads, 1.0)
        tally["grad_norm"][0] += norm
        tally["grad_norm"][1] += 1.0
        tally["num_skipped_steps"][0] += float(not np.isfinite(norm))
        tally["num_skipped_steps"][1] = 1.0
        if not np.isfinite(norm):
            return
        if norm > self.settings.grad_clip:
            torch._foreach_mul_(list(grads.values()), self.settings.grad_clip / norm)
        lr = self.settings.lr * lr_factor(self.optimiser_steps, self.settings.warmup_steps, "constant", None)
        for group in self.optimiser.param_groups:
            group["lr"] = lr
        self.optimiser.update(grads)
        self.model.forget_operands()
        self.optimiser_steps += 1

    def _loss(
        self,
        batch: Batch,
        micro: Micro,
        old: torch.Tensor,
        advantages: torch.Tensor,
        tally: dict[str, list[Any]],
    ) -> torch.Tensor:
        """Sum of the loss over a micro-batch; its metrics are added to the tally."""
        hidden = self.model(micro.packed)[micro.at]
        logp, entropy = self.model.token_logprobs(hidden, batch.targets[micro.slots], return_entropy=True)
        mask = torch.ones_like(micro.sequence, dtype=torch.bool)
        old_logp, rollout = old[micro.slots], batch.rollout[micro.slots]
        weights = None
        if self.correction is not None:
            weights, statistics = correction_weights(
                self.correction, old_logp, rollout, mask, micro.sequence, len(micro.rows)
            )
            for name in ("fraction_high", "weight_min", "raw_max"):
                if name in statistics:
                    tally[f"correction_{name}"][0] += statistics[name] * len(mask)
                    tally[f"correction_{name}"][1] += len(mask)
        inputs = LossInputs(
            logp=logp, old_logp=old_logp, rollout_logp=rollout,
            advantages=advantages[micro.rows][micro.sequence], mask=mask, sequence_ids=micro.sequence,
            num_sequences=len(micro.rows), entropy=entropy.detach(), correction_weights=weights,
        )  # fmt: skip
        result = self.loss(inputs)
        for name, (total, number) in result.metrics.items():
            tally[name][0] += total
            tally[name][1] += number
        return result.loss_sum

    # ------------------------------------------------------------------ state

    def save(self, directory: Path) -> None:
        """Master weights and moments bit by bit, and the counters; a later `restore` goes on from there."""
        directory.mkdir(parents=True, exist_ok=True)
        tensors = {f"model.{k}": v.detach().cpu().contiguous() for k, v in self.model.named_parameters()}
        optimiser = self.optimiser.exact_state()
        entries = optimiser["state"]
        for i, entry in enumerate(entries):
            tensors |= {f"optimiser.{i}.{k}": v for k, v in entry.items() if torch.is_tensor(v)}
        facts = {
            "settings": dataclasses.asdict(self.settings), "fingerprint": self.policy.fingerprint,
            "iteration": self.iteration, "optimiser_steps": self.optimiser_steps, "status": self.status,
            "reason": self.reason, "steps": [e.get("step", 0) for e in entries],
            "moments": optimiser["state_dtype"], "guard": self.guard.get_state(),
        }  # fmt: skip
        temporary = directory / f"{self.label}-{self.seed}.partial"
        safetensors.torch.save_file(tensors, temporary, {"facts": json.dumps(facts)})
        temporary.replace(self._file(directory))

    def restore(self, directory: Path) -> bool:
        """Whether there was a state to go on from. ValueError if it is of other settings or another policy."""
        path = self._file(directory)
        if not path.is_file():
            return False
        with safetensors.safe_open(path, "pt") as file:
            facts = json.loads(file.metadata()["facts"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
        mine = {"settings": dataclasses.asdict(self.settings), "fingerprint": self.policy.fingerprint}
        mine = json.loads(json.dumps(mine))
        other = [key for key, value in mine.items() if facts[key] != value]
        if other:
            raise ValueError(f"{path} is of another {' and '.join(other)}; give another --state directory")
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(tensors[f"model.{name}"])
        entries: list[dict[str, Any]] = [{"step": step} if step else {} for step in facts["steps"]]
        for name, tensor in tensors.items():
            part, _, key = name.partition(".")
            if part == "optimiser":
                position, _, key = key.partition(".")
                entries[int(position)][key] = tensor
        self.optimiser.set_exact_state({"state": entries, "state_dtype": facts["moments"]})
        self.iteration, self.optimiser_steps = facts["iteration"], facts["optimiser_steps"]
        self.status, self.reason = facts["status"], facts["reason"]
        self.guard.set_state(facts["guard"])
        self.model.forget_operands()
        self.sync()
        return True

    def _file(self, directory: Path) -> Path:
        return directory / f"{self.label}-{self.seed}.safetensors"
