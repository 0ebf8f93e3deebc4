"""`LLMTorchLearner`: one iteration's samples in, optimiser steps and exact weights out."""

from __future__ import annotations

import logging
from collections.abc import Callable
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
from rllib_llm.engines.base import CHECKPOINT_VERSION
from rllib_llm.errors import LearnerMemoryError
from rllib_llm.learner.collective import Collective
from rllib_llm.learner.digest import state_digest
from rllib_llm.learner.gradients import Gradients
from rllib_llm.learner.iteration import Iteration, Scores, TrainInput
from rllib_llm.learner.micro_batch import MicroBatch, Shard, cut_by_tokens
from rllib_llm.learner.module import CausalLMModule, low_halves
from rllib_llm.learner.optimizer import LossScaler, PolicyAdamW, lr_factor
from rllib_llm.learner.rollout_distribution import rollout_distribution
from rllib_llm.learner.signals import advantages_with_kl, measured_noise
from rllib_llm.learner.weights import WeightSource
from rllib_llm.losses import LossInputs, calibrated
from rllib_llm.losses.chosen import advantage_kind, build_loss, correction_of, kl_is_reward
from rllib_llm.losses.corrections import correction_from_plain, correction_weights, plain_correction
from rllib_llm.on_disk.checkpoint import LEARNER_STATE, MODULE_FOLDER, OPTIMIZER_STATE, opened
from rllib_llm.on_disk.state_file import read_state, write_state
from rllib_llm.process.allocator import keep_freed_memory

__all__ = ["LLMTorchLearner"]

logger = logging.getLogger(__name__)

_OWN_STATE = "rllib_llm"


class LLMTorchLearner(TorchLearner):
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
        self.micro_batch_tokens = self.settings.train.micro_batch_tokens  # lowered where memory ran out
        self.forced_correction: Any = None  # set by the guard
        scaling = self.settings.policy.loss_scaling
        self.scaler = LossScaler(scaling.initial, scaling.growth_interval) if scaling else LossScaler()
        self.loss = build_loss(self.settings)
        self._iteration: Iteration | None = None  # until the driver has taken its log-probs
        super().build()
        if self._device.type == "cpu":
            keep_freed_memory()
        self.distribution = rollout_distribution(self.settings.rollout, self.lm_module.lm)
        self.weight_source = WeightSource(self.lm_module.lm, self.settings.policy, self._device)
        self.collective = Collective(self.config.num_learners)
        self._lr_schedule = Scheduler(fixed_value_or_schedule=self.config.lr, framework="torch")
        self._base_lr = self._lr_schedule.get_current_value()
        self._assert_ranks_agree()

    def _assert_ranks_agree(self) -> None:
        digests = self.collective.gather(self.digest())
        if len(set(digests)) > 1:
            raise RuntimeError(
                f"learners start from different weights or optimizer states (digests {digests}); "
                f"all must read the same model.path = {self.settings.model.path!r}."
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
        train, policy = self.settings.train, self.settings.policy
        optimizer = PolicyAdamW(
            params,
            lr=0.0,  # set before every step
            betas=train.betas,
            eps=train.eps,
            weight_decay=train.weight_decay,
            state_dtype=policy.optimizer_state_dtype,
            low_halves=low_halves(self._module[module_id].lm),
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

    @property
    def weights_version(self) -> int:
        """Version under which the present weights are exported."""
        version: int = CHECKPOINT_VERSION + 1 + self._weights_seq_no
        return version

    # ---------------------------------------------------------------- the update

    @override(TorchLearner)
    def _uncompiled_update(
        self, batch: dict[str, Any], **kwargs: Any
    ) -> tuple[Any, dict[str, torch.Tensor], Any]:
        [(module_id, columns)] = batch.items()
        with self.collective.failing_together():
            return self._train_on(module_id, Shard.from_columns(columns))

    def _train_on(self, module_id: str, shard: Shard) -> tuple[Any, dict[str, torch.Tensor], Any]:
        epochs, steps = shard.minibatch.shape[1], self.settings.train.minibatches_per_epoch
        # With one step the loss's own forward pass is the policy that sampled: its log-probs are kept.
        old_is_fixed = epochs * steps > 1 or kl_is_reward(self.settings.train)
        iteration = self._iteration = Iteration(shard, self.loss, old_is_fixed)
        if old_is_fixed:
            self._prepare(module_id, iteration)
        for epoch in range(epochs):
            for step in range(steps):
                rows = torch.nonzero(shard.minibatch[:, epoch] == step).flatten().tolist()
                self._optimizer_step(module_id, iteration, rows)
        loss = self._log(module_id, iteration)
        return {}, {module_id: torch.tensor(loss)}, {}

    def _micro_batches(self, shard: Shard, rows: list[int]) -> list[MicroBatch]:
        groups = cut_by_tokens(rows, shard.lengths.tolist(), self.micro_batch_tokens)
        return [MicroBatch.of(shard, group) for group in groups]

    def _input(self, micro: MicroBatch, count: float = 1.0) -> TrainInput:
        return TrainInput(micro, self.distribution, self.settings.train.entropy_coeff != 0.0, count)

    def _fitting(
        self, iteration: Iteration, rows: list[int], work: Callable[[list[MicroBatch]], None]
    ) -> None:
        """`work` on the micro-batches of `rows`, from their start again with half as many tokens where memory runs out.

        What fits is known after that, and stays. Nothing inside may wait for other learners: they do not start again.
        Raises LearnerMemoryError where a micro-batch holds one sequence and does not fit.
        """
        while True:
            tally, micro_batches = iteration.tally.copy(), self._micro_batches(iteration.shard, rows)
            try:
                work(micro_batches)
                return
            except torch.OutOfMemoryError as error:
                iteration.tally, reason = tally, " ".join(str(error).split())
            self.gradients.zero()
            most = max(int(micro.packed.cu_seqlens[-1]) for micro in micro_batches)
            if all(micro.num_sequences == 1 for micro in micro_batches):
                raise LearnerMemoryError(
                    f"the learner's memory does not hold one micro-batch of one sequence ({most} tokens): {reason}. "
                    "Set model.gradient_checkpointing=true or lower rollout.max_new_tokens: more learners do not "
                    "divide a sequence."
                )
            # at least as many as the longest sequence has: that one cannot be cut
            self.micro_batch_tokens = min(self.micro_batch_tokens, most) // 2
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            logger.warning(
                "The learner ran out of memory in a micro-batch of up to %d tokens; it goes on with "
                "train.micro_batch_tokens = %d (the gradient is the same up to its order of summation). %s",
                most,
                self.micro_batch_tokens,
                reason,
            )

    @torch.no_grad()
    def _prepare(self, module_id: str, iteration: Iteration) -> None:
        """What needs the whole batch under the weights that sampled it: log-probs, clip calibration, KL as reward."""
        micro_batches = self._micro_batches(iteration.shard, list(range(len(iteration.shard.lengths))))
        for micro in micro_batches:
            scores: Scores = self.module.forward_train({module_id: self._input(micro)})[module_id]
            iteration.train_logp[micro.slots] = scores.logp.float()
        calibration, train = self.settings.policy.clip_calibration, self.settings.train
        if calibration.enabled:
            noise = measured_noise(self.loss, micro_batches, iteration.train_logp, self.collective)
            iteration.loss = calibrated(self.loss, noise, calibration.strength, old_is_rollout=False)
            iteration.tally.add(names.CLIP_LOW, iteration.loss.clip_low, 1.0)
            iteration.tally.add(names.CLIP_HIGH, iteration.loss.clip_high, 1.0)
        if kl_is_reward(train):
            iteration.advantages = advantages_with_kl(
                micro_batches,
                iteration.train_logp,
                lambda micro: self.lm_module.reference_logprobs(micro, self.distribution),
                train.kl_coeff,
                train.kl_estimator,
                advantage_kind(train) == "reinforce++",
                self.collective,
            )

    def _optimizer_step(self, module_id: str, iteration: Iteration, rows: list[int]) -> None:
        micro_batches, loss = self._micro_batches(iteration.shard, rows), iteration.loss
        local = sum(float(loss.count(m.mask, m.sequence_ids, m.num_sequences)) for m in micro_batches)
        count = self.collective.sum(local, self._device)
        if count == 0.0:
            return
        self._fitting(iteration, rows, lambda parts: self._backward(module_id, iteration, parts, count))
        self._apply_gradients(iteration, count)

    def _backward(
        self, module_id: str, iteration: Iteration, micro_batches: list[MicroBatch], count: float
    ) -> None:
        """Gradients of the loss, from zero."""
        self.gradients.zero()
        iteration.kept_count = 0.0
        for micro in micro_batches:
            batch = self._input(micro, count)
            scores: Scores = self.module.forward_train({module_id: batch})[module_id]
            part = self.compute_loss_for_module(
                module_id=module_id, config=self.config, batch=batch, fwd_out=scores
            )
            (part * self.scaler.scale).backward()
            self.gradients.accumulate()
            iteration.tally.add(names.NUM_MICRO_BATCHES, 1.0, 0.0)

    @override(Learner)
    def compute_loss_for_module(
        self, *, module_id: str, config: Any, batch: TrainInput, fwd_out: Scores
    ) -> torch.Tensor:
        """This micro-batch's part of the loss, already divided by the count of all learners; adds its metrics."""
        iteration, micro = self._iteration, batch.micro_batch
        assert iteration is not None, "a loss is computed while an iteration is under way"
        if not iteration.old_is_fixed:
            iteration.train_logp[micro.slots] = fwd_out.logp.detach().float()
        old_logp = iteration.train_logp[micro.slots]
        correction, weights = self.forced_correction or correction_of(self.settings), None
        if correction is not None:
            weights, _ = correction_weights(
                correction,
                old_logp,
                micro.rollout_logprobs,
                micro.mask,
                micro.sequence_ids,
                micro.num_sequences,
            )
        mask = micro.mask
        if weights is not None:
            kept_mask = mask.bool() & (weights != 0)
            iteration.kept_count += float(self.loss.count(kept_mask, micro.sequence_ids, micro.num_sequences))
            if getattr(correction, "divisor", "all") == "kept":
                # What is kept is known after the forward passes: divided by all here, set right in _apply_gradients.
                mask = kept_mask
        reference = None
        if self.lm_module.reference is not None:
            reference = self.lm_module.reference_logprobs(micro, batch.distribution)
        out = iteration.loss(
            LossInputs(
                logp=fwd_out.logp,
                old_logp=old_logp,
                rollout_logp=micro.rollout_logprobs,
                advantages=iteration.advantages_of(micro),
                mask=mask,
                sequence_ids=micro.sequence_ids,
                num_sequences=micro.num_sequences,
                ref_logp=reference,
                entropy=fwd_out.entropy,
                correction_weights=weights,
            )
        )
        for name, (total, number) in out.metrics.items():
            iteration.tally.add(name, total, number)
        loss = out.loss_sum / batch.count
        iteration.tally.add(names.LOSS, loss.detach(), 0.0)
        return loss

    def _apply_gradients(self, iteration: Iteration, count: float) -> None:
        """Sums the gradients over the learners, then clips and steps, or skips if anything is not finite.

        count: what the losses were divided by; a correction with divisor "kept" has them divided by what it kept.
        """
        grads = self.gradients.take()
        self.collective.sum_(list(grads.values()))
        correction = self.forced_correction or correction_of(self.settings)
        if correction is not None:
            kept = self.collective.sum(iteration.kept_count, self._device)
            if kept == 0.0:  # nothing to learn from: a step would be of momentum and weight decay alone
                self._skip(iteration, f"the correction {correction!r} rejected every sample")
                return
            if getattr(correction, "divisor", "all") == "kept":
                torch._foreach_mul_(list(grads.values()), count / kept)
        norm = self.gradients.unscale_and_norm(grads, self.scaler.scale)
        finite = self.collective.all(bool(np.isfinite(norm)), self._device)
        self.scaler.update(finite)
        if not finite:
            self._skip(iteration, self._not_finite(grads))
            return
        clip = self.config.grad_clip
        clipping = clip / norm if clip is not None and norm > clip else 1.0
        train = self.settings.train
        factor = lr_factor(self.optimizer_steps, train.warmup_steps, train.lr_decay, train.total_steps)
        lr = self._base_lr * factor
        self._set_optimizer_lr(self.optimizer, lr)
        self.optimizer.update(grads, clipping, self.gradients.release)
        self.optimizer_steps += 1
        iteration.tally.add(names.GRAD_NORM, norm, 1.0)
        iteration.tally.add(names.LEARNING_RATE, lr, 1.0)

    def _skip(self, iteration: Iteration, why: str) -> None:
        """Counts and explains an optimiser step that is not made."""
        self.skipped_steps += 1
        iteration.tally.add(names.NUM_SKIPPED_STEPS, 1.0, 0.0)
        logger.warning("optimiser step skipped (%d so far): %s", self.skipped_steps, why)

    def _not_finite(self, grads: dict[torch.nn.Parameter, torch.Tensor]) -> str:
        """Which gradients are not finite, and what to look at."""
        of = {param: name for name, param in self.lm_module.named_parameters()}
        bad = [of.get(param, "?") for param, grad in grads.items() if not bool(torch.isfinite(grad).all())]
        where = f"first in {bad[0]}" if bad else "on another learner"
        loss_scale = f", the loss scale is now {self.scaler.scale:g}" if self.scaler.growth_interval else ""
        return (
            f"{len(bad)} of {len(grads)} gradients are not finite ({where}){loss_scale}. Seldom it is a spike. "
            "Where it comes often, look at the loss, at train.kl_coeff and train.entropy_coeff, and at the policy's "
            "gradient formats."
        )

    # ---------------------------------------------------------------- metrics

    def _log(self, module_id: str, iteration: Iteration) -> float:
        """Logs the metrics of all learners together, the same values on each; returns the loss."""
        per_step = {names.GRAD_NORM, names.LEARNING_RATE, names.NUM_SKIPPED_STEPS}
        values = iteration.tally.merged(self.collective, per_step)
        values.setdefault(names.NUM_SKIPPED_STEPS, 0.0)
        values[names.NUM_TOKENS] = self.collective.sum(float(iteration.shard.trained.sum()), self._device)
        values[names.NUM_OPTIMIZER_STEPS] = self.optimizer_steps
        values[names.NUM_SKIPPED_STEPS_LIFETIME] = self.skipped_steps
        values[names.LOSS_SCALE] = self.scaler.scale
        for name, value in values.items():
            self.metrics.log_value((module_id, name), float(value), window=1)
        return values.get(names.LOSS, 0.0)

    def take_train_logprobs(self) -> list[tuple[int, np.ndarray]]:
        """`Iteration.train_logprobs` of the last update, once: its samples are forgotten then."""
        iteration, self._iteration = self._iteration, None
        assert iteration is not None, "an update comes first"
        return iteration.train_logprobs()

    # ---------------------------------------------------------------- state

    def digest(self) -> str:
        """Fingerprint of weights and optimizer state: equal if and (for practical purposes) only if both are."""
        tensors = dict(self.lm_module.lm.state_dict())
        for i, param in enumerate(self.gradients.params):
            state = self.optimizer.state.get(param, {})
            tensors |= {f"optimizer.{i}.{k}": v for k, v in state.items() if torch.is_tensor(v)}
        return state_digest(tensors)

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
                "forced_correction": plain_correction(self.forced_correction),
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
            self.forced_correction = correction_from_plain(own["forced_correction"])

    @override(Learner)
    def save_to_path(
        self, path: Any = None, *, state: Any = None, filesystem: Any = None, use_msgpack: bool = False
    ) -> str:
        """JSON and safetensors (`rllib_llm.on_disk.state_file`) instead of RLlib's pickles.

        Raises StateFileError for a state that is not plain.
        """
        fs, folder = opened(str(path), filesystem)
        state = self.get_state(not_components=COMPONENT_RL_MODULE) if state is None else dict(state)
        weights = state.pop(COMPONENT_RL_MODULE, {}).get(DEFAULT_MODULE_ID)
        self.lm_module.save_to_path((folder / MODULE_FOLDER).as_posix(), state=weights, filesystem=fs)
        write_state(fs, folder, OPTIMIZER_STATE, state.pop(COMPONENT_OPTIMIZER))
        write_state(fs, folder, LEARNER_STATE, state)
        return folder.as_posix()

    @override(Learner)
    def restore_from_path(
        self, path: Any, *, component: str | None = None, filesystem: Any = None, **kwargs: Any
    ) -> None:
        """Inverse of `save_to_path`; component: "rl_module" or "rl_module/default_policy", whose folder `path` is."""
        fs, folder = opened(str(path), filesystem)
        if component is not None:
            parts = {str(MODULE_FOLDER): folder, COMPONENT_RL_MODULE: folder / DEFAULT_MODULE_ID}
            if component not in parts:
                raise ValueError(f"component {component!r} of a learner: one of {', '.join(parts)}")
            self.lm_module.restore_from_path(parts[component].as_posix(), filesystem=fs)
            return
        state = read_state(fs, folder, LEARNER_STATE)
        state[COMPONENT_OPTIMIZER] = read_state(fs, folder, OPTIMIZER_STATE)
        self.lm_module.restore_from_path((folder / MODULE_FOLDER).as_posix(), filesystem=fs)
        self.set_state(state)

    @override(TorchLearner)
    def _get_optimizer_state(self) -> dict[str, Any]:
        return {COMPONENT_OPTIMIZER: self.optimizer.exact_state()}

    @override(TorchLearner)
    def _set_optimizer_state(self, state: dict[str, Any]) -> None:
        allowed = self.settings.precision.allow_precision_change
        self.optimizer.set_exact_state(state[COMPONENT_OPTIMIZER], cast=allowed)
