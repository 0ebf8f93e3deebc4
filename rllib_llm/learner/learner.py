"""`LLMTorchLearner`: one iteration's samples in, optimiser steps and exact weights out."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from ray.rllib.core import COMPONENT_OPTIMIZER, COMPONENT_RL_MODULE, DEFAULT_MODULE_ID
from ray.rllib.core.learner.learner import Learner
from ray.rllib.core.learner.torch.torch_learner import TorchLearner
from ray.rllib.utils.annotations import override
from ray.rllib.utils.metrics import NUM_ENV_STEPS_SAMPLED_LIFETIME
from ray.rllib.utils.schedules.scheduler import Scheduler

from rllib_llm import metric_names as names
from rllib_llm.algorithm.losses import advantage_kind, build_loss, correction_of, kl_is_reward
from rllib_llm.corrections import correction_weights
from rllib_llm.learner.batch import MicroBatch, Shard, cut_by_tokens
from rllib_llm.learner.collective import Collective
from rllib_llm.learner.digest import tensor_digest
from rllib_llm.learner.gradients import Gradients
from rllib_llm.learner.law import RolloutLaw
from rllib_llm.learner.module import CausalLMModule
from rllib_llm.learner.optimizer import LossScaler, PolicyAdamW, lr_factor
from rllib_llm.learner.signals import advantages_with_kl, measured_noise
from rllib_llm.learner.tally import Tally
from rllib_llm.learner.weights import WeightSource
from rllib_llm.losses import LossInputs, calibrated

__all__ = ["LLMTorchLearner"]

_OWN_STATE = "rllib_llm"


class LLMTorchLearner(WeightSource):
    """Policy-gradient updates on packed micro-batches.

    The gradient of an optimiser step is sum(loss terms of all learners' tokens) / count(all learners),
    so neither the number of learners nor `micro_batch_tokens` changes it (beyond fp32 summation order).
    A step whose gradient is not finite anywhere is skipped on every learner and counted.
    """

    @override(TorchLearner)
    def build(self) -> None:
        if self._is_built:
            return
        self.settings = self.config.settings()
        self.optimizer_steps = 0
        self.skipped_steps = 0
        self.forced_correction: Any = None  # set by the guard
        scaling = self.settings.policy.loss_scaling
        self.scaler = LossScaler(scaling.initial, scaling.growth_interval) if scaling else LossScaler()
        self.loss = self._uncalibrated = build_loss(self.settings)
        super().build()
        self.law = RolloutLaw(self.settings.rollout, self.lm_module.lm)
        self.collective = Collective(self.config.num_learners)
        self._lr_schedule = Scheduler(fixed_value_or_schedule=self.config.lr, framework="torch")
        self._base_lr = self._lr_schedule.get_current_value()
        self._assert_ranks_agree()

    def _assert_ranks_agree(self) -> None:
        digests = self.collective.gather(self.digest())
        if len(set(digests)) > 1:
            raise RuntimeError(
                f"learners start from different weights or optimizer states (digests {digests}); "
                f"all must read the same llm.path = {self.settings.model.path!r}."
            )

    @override(TorchLearner)
    def _make_modules_ddp_if_necessary(self) -> None:
        """Nothing: `Collective` sums the gradients (its docstring says why not DistributedDataParallel)."""

    @property
    def lm_module(self) -> CausalLMModule:
        return self.module[DEFAULT_MODULE_ID]

    @override(TorchLearner)
    def configure_optimizers_for_module(self, module_id: str, config: Any = None) -> None:
        params = [p for p in self._module[module_id].parameters() if p.requires_grad]
        grpo, policy = self.settings.grpo, self.settings.policy
        optimizer = PolicyAdamW(
            params,
            lr=0.0,  # set before every step
            betas=grpo.betas,
            eps=grpo.eps,
            weight_decay=grpo.weight_decay,
            state_dtype=getattr(torch, policy.optimizer_state_dtype),
        )
        self.register_optimizer(module_id=module_id, optimizer=optimizer, params=params)
        self.optimizer, self.gradients = optimizer, Gradients(params)

    @override(Learner)
    def before_gradient_based_update(self, *, timesteps: dict[str, Any]) -> None:
        super().before_gradient_based_update(timesteps=timesteps)
        self._base_lr = self._lr_schedule.update(timestep=timesteps.get(NUM_ENV_STEPS_SAMPLED_LIFETIME, 0))

    @override(TorchLearner)
    def after_gradient_based_update(self, *, timesteps: dict[str, Any]) -> None:
        """RLlib would log the optimiser's lr here; `_log` does, under `names.LEARNING_RATE`."""

    # ---------------------------------------------------------------- the update

    @override(TorchLearner)
    def _uncompiled_update(
        self, batch: dict[str, Any], **kwargs: Any
    ) -> tuple[Any, dict[str, torch.Tensor], Any]:
        [(module_id, columns)] = batch.items()
        with self.collective.failing_together():
            return self._train_on(module_id, Shard.from_columns(columns))

    def _train_on(self, module_id: str, shard: Shard) -> tuple[Any, dict[str, torch.Tensor], Any]:
        epochs, steps = shard.minibatch.shape[1], self.settings.grpo.minibatches_per_epoch
        self._tally = Tally()
        self._shard = shard
        # With one step the loss's own forward pass is the policy that sampled: its log-probs are kept.
        self._train_logp = torch.zeros_like(shard.rollout_logprobs, dtype=torch.float32)
        self._fixed_old = epochs * steps > 1 or kl_is_reward(self.settings.grpo)
        self._advantages: torch.Tensor | None = None  # flat, where they are not those of the driver
        if self._fixed_old:
            self._fill_train_logprobs(shard)
            self._prepare_batch(shard)
        for epoch in range(epochs):
            for step in range(steps):
                rows = torch.nonzero(shard.minibatch[:, epoch] == step).flatten().tolist()
                self._optimizer_step(module_id, shard, rows)
        loss = self._log(module_id, shard)
        return {}, {module_id: torch.tensor(loss)}, {}

    def _micro_batches(self, shard: Shard, rows: list[int]) -> list[MicroBatch]:
        groups = cut_by_tokens(rows, shard.lengths.tolist(), self.settings.grpo.micro_batch_tokens)
        return [MicroBatch.of(shard, group) for group in groups]

    def _inputs(self, micro: MicroBatch) -> dict[str, Any]:
        grad = self.settings.grpo.entropy_coeff != 0.0
        return {"micro_batch": micro, "law": self.law.of(micro), "entropy_with_grad": grad}

    @torch.no_grad()
    def _fill_train_logprobs(self, shard: Shard) -> None:
        for micro in self._micro_batches(shard, list(range(len(shard.lengths)))):
            fwd = self.module.forward_train({DEFAULT_MODULE_ID: self._inputs(micro)})
            self._train_logp[micro.slots] = fwd[DEFAULT_MODULE_ID]["logp"].float()

    def _prepare_batch(self, shard: Shard) -> None:
        """What needs the whole batch under the weights that sampled it: clip calibration, KL as reward."""
        micro_batches = self._micro_batches(shard, list(range(len(shard.lengths))))
        calibration, grpo = self.settings.policy.clip_calibration, self.settings.grpo
        if calibration.enabled:
            noise = measured_noise(self._uncalibrated, micro_batches, self._train_logp, self.collective)
            self.loss = calibrated(self._uncalibrated, noise, calibration.strength, old_is_rollout=False)
            self._tally.add(names.CLIP_LOW, self.loss.clip_low, 1.0)
            self._tally.add(names.CLIP_HIGH, self.loss.clip_high, 1.0)
        if kl_is_reward(grpo):
            self._advantages = advantages_with_kl(
                micro_batches,
                self._train_logp,
                lambda micro: self.lm_module.reference_logprobs(micro, self.law.of(micro)),
                grpo.kl_coeff,
                grpo.kl_estimator,
                advantage_kind(grpo) == "reinforce++",
                self.collective,
            )

    def _optimizer_step(self, module_id: str, shard: Shard, rows: list[int]) -> None:
        micro_batches = self._micro_batches(shard, rows)
        local = sum(float(self.loss.count(m.mask, m.sequence_ids, m.num_sequences)) for m in micro_batches)
        count = self.collective.sum(local, self._device)
        if count == 0.0:
            return
        self.gradients.zero()
        for micro in micro_batches:
            inputs = self._inputs(micro) | {"count": count}
            fwd = self.module.forward_train({module_id: inputs})[module_id]
            loss = self.compute_loss_for_module(
                module_id=module_id, config=self.config, batch=inputs, fwd_out=fwd
            )
            (loss * self.scaler.scale).backward()
            self.gradients.accumulate()
            self._tally.add(names.NUM_MICRO_BATCHES, 1.0, 0.0)
        self._apply()

    @override(Learner)
    def compute_loss_for_module(
        self, *, module_id: str, config: Any, batch: dict[str, Any], fwd_out: dict[str, Any]
    ) -> torch.Tensor:
        """This micro-batch's part of the loss, already divided by the count of all learners; adds its metrics."""
        micro, logp = batch["micro_batch"], fwd_out["logp"]
        if not self._fixed_old:
            self._train_logp[micro.slots] = logp.detach().float()
        old_logp = self._train_logp[micro.slots]
        correction, weights = self._correction(), None
        if correction is not None:
            weights, _ = correction_weights(
                correction,
                old_logp,
                micro.rollout_logprobs,
                micro.mask,
                micro.sequence_ids,
                micro.num_sequences,
            )
        reference = None
        if self.lm_module.reference is not None:
            reference = self.lm_module.reference_logprobs(micro, batch["law"])
        out = self.loss(
            LossInputs(
                logp=logp,
                old_logp=old_logp,
                rollout_logp=micro.rollout_logprobs,
                advantages=micro.advantages if self._advantages is None else self._advantages[micro.slots],
                mask=micro.mask,
                sequence_ids=micro.sequence_ids,
                num_sequences=micro.num_sequences,
                ref_logp=reference,
                entropy=fwd_out["entropy"],
                correction_weights=weights,
            )
        )
        for name, (total, number) in out.metrics.items():
            self._tally.add(name, total, number)
        loss = out.loss_sum / batch["count"]
        self._tally.add(names.LOSS, loss.detach(), 0.0)
        return loss

    def _correction(self) -> Any:
        return self.forced_correction or correction_of(self.settings)

    def _apply(self) -> None:
        """Sums the gradients over the learners, then clips and steps, or skips if anything is not finite."""
        grads = self.gradients.take()
        self.collective.sum_(list(grads.values()))
        norm = self.gradients.unscale_and_norm(grads, self.scaler.scale)
        finite = self.collective.all(bool(np.isfinite(norm)), self._device)
        self.scaler.update(finite)
        if not finite:
            self.skipped_steps += 1
            self._tally.add(names.NUM_SKIPPED_STEPS, 1.0, 0.0)
            return
        clip = self.config.grad_clip
        if clip is not None and norm > clip:
            torch._foreach_mul_(list(grads.values()), clip / norm)
        grpo = self.settings.grpo
        factor = lr_factor(self.optimizer_steps, grpo.warmup_steps, grpo.lr_decay, grpo.total_steps)
        self._lr = self._base_lr * factor
        self._set_optimizer_lr(self.optimizer, self._lr)
        self.optimizer.update(grads)
        self.optimizer_steps += 1
        self._tally.add(names.GRAD_NORM, norm, 1.0)
        self._tally.add(names.LEARNING_RATE, self._lr, 1.0)

    # ---------------------------------------------------------------- metrics

    def _log(self, module_id: str, shard: Shard) -> float:
        """Logs the metrics of all learners together, the same values on each; returns the loss."""
        per_step = {names.GRAD_NORM, names.LEARNING_RATE, names.NUM_SKIPPED_STEPS}
        values = self._tally.merged(self.collective, per_step)
        values.setdefault(names.NUM_SKIPPED_STEPS, 0.0)
        values[names.NUM_TOKENS] = self.collective.sum(float(shard.trained.sum()), self._device)
        values[names.NUM_OPTIMIZER_STEPS] = self.optimizer_steps
        values[names.NUM_SKIPPED_STEPS_LIFETIME] = self.skipped_steps
        values[names.LOSS_SCALE] = self.scaler.scale
        for name, value in values.items():
            self.metrics.log_value((module_id, name), float(value), window=1)
        return values.get(names.LOSS, 0.0)

    def take_train_logprobs(self) -> list[tuple[int, np.ndarray]]:
        """(sequence index, float32 [C] log-probs of its trained tokens under the weights that sampled), once."""
        shard, logp = self._shard, self._train_logp
        out = []
        for row, (start, length) in enumerate(
            zip(shard.starts.tolist(), shard.lengths.tolist(), strict=True)
        ):
            part = slice(start, start + length)
            out.append((int(shard.sequence_index[row]), logp[part][shard.trained[part].bool()].cpu().numpy()))
        del self._shard, self._train_logp
        return out

    # ---------------------------------------------------------------- state

    def digest(self) -> str:
        """Fingerprint of weights and optimizer state: equal if and (for practical purposes) only if both are."""
        tensors = dict(self.lm_module.lm.state_dict())
        for i, param in enumerate(self.gradients.params):
            state = self.optimizer.state.get(param, {})
            tensors |= {f"optimizer.{i}.{k}": v for k, v in state.items() if torch.is_tensor(v)}
        return tensor_digest(tensors)

    @override(Learner)
    def get_state(
        self, components: Any = None, *, not_components: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        state = super().get_state(components, not_components=not_components, **kwargs)
        if self._check_component(_OWN_STATE, components, not_components):
            state[_OWN_STATE] = {
                "optimizer_steps": self.optimizer_steps,
                "skipped_steps": self.skipped_steps,
                "scaler": self.scaler.get_state(),
                "forced_correction": self.forced_correction,
            }
        return state

    @override(Learner)
    def set_state(self, state: dict[str, Any]) -> None:
        """Unlike RLlib's, takes the weights whatever their sequence number: a rollback has a lower one."""
        if COMPONENT_RL_MODULE in state:
            self.module.set_state(state[COMPONENT_RL_MODULE])
        super().set_state({k: v for k, v in state.items() if k != COMPONENT_RL_MODULE})
        if own := state.get(_OWN_STATE):
            self.optimizer_steps, self.skipped_steps = own["optimizer_steps"], own["skipped_steps"]
            self.scaler.set_state(own["scaler"])
            self.forced_correction = own["forced_correction"]

    @override(TorchLearner)
    def _get_optimizer_state(self) -> dict[str, Any]:
        return {COMPONENT_OPTIMIZER: self.optimizer.exact_state()}

    @override(TorchLearner)
    def _set_optimizer_state(self, state: dict[str, Any]) -> None:
        allowed = self.settings.precision.allow_precision_change
        self.optimizer.set_exact_state(state[COMPONENT_OPTIMIZER], cast=allowed)
