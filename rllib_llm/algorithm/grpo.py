"""`GRPO`: RLlib's Algorithm around one iteration of reinforcement learning on a language model."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from typing import Any

import numpy as np
import torch
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.core.learner.training_data import TrainingData
from ray.rllib.utils.annotations import override
from ray.rllib.utils.metrics import (
    ENV_RUNNER_RESULTS,
    EVALUATION_RESULTS,
    LEARNER_RESULTS,
    NUM_ENV_STEPS_SAMPLED_LIFETIME,
    TIMERS,
)
from ray.tune import PlacementGroupFactory
from ray.tune.trainable import Trainable

from rllib_llm import metric_names as names
from rllib_llm.advantages import group_advantages
from rllib_llm.algorithm import usage
from rllib_llm.algorithm.colocate import asleep
from rllib_llm.algorithm.config import GRPOConfig
from rllib_llm.algorithm.durable import Durable
from rllib_llm.algorithm.fleet import runner_ids
from rllib_llm.algorithm.losses import advantage_kind, correction_of, guarded_correction, kl_is_reward
from rllib_llm.algorithm.monitor import PrecisionHalt, PrecisionMonitor
from rllib_llm.algorithm.placement import require_placeable, with_engine
from rllib_llm.algorithm.preflight import preflight
from rllib_llm.algorithm.sampling import Collected, NoSamplesError, collect, groups_without_signal
from rllib_llm.algorithm.sharding import assign_minibatches, make_shards
from rllib_llm.algorithm.weight_sync import WeightSync
from rllib_llm.episode import TextEpisode
from rllib_llm.losses import overlong_penalty
from rllib_llm.tracking.samples import report

__all__ = ["GRPO"]

logger = logging.getLogger(__name__)

# Results whose keys depend on what the iteration met: buckets, environments, rewards by name.
_SOMETIMES_MEASURED = (
    (names.MISMATCH,),
    (names.CORRECTION,),
    (ENV_RUNNER_RESULTS, names.REWARDS),
    (EVALUATION_RESULTS, ENV_RUNNER_RESULTS, names.REWARDS),
)


class GRPO(Durable):
    """Group-relative policy optimisation (arXiv 2402.03300) and its relatives, by `GRPOConfig.training(loss=...)`.

    One iteration: sample groups of completions with known weights, turn rewards into advantages, shard by
    tokens, update, measure the train-rollout mismatch, push the new weights and have every runner confirm them.
    """

    @classmethod
    @override(Algorithm)
    def get_default_config(cls) -> GRPOConfig:
        return GRPOConfig()

    @classmethod
    @override(Algorithm)
    def default_resource_request(cls, config: Any) -> PlacementGroupFactory:
        """What a trial reserves. Raises PlacementError where the Ray that runs can never give it: Tune would wait."""
        request = super().default_resource_request(config)
        settings = cls.get_default_config().update_from_dict(config)
        bundles = with_engine(settings, [{}] * request.head_bundle_is_empty + request.bundles)
        require_placeable(bundles)
        return PlacementGroupFactory(bundles, strategy=request.strategy)

    @override(Algorithm)
    def setup(self, config: GRPOConfig) -> None:
        self.settings = self.config.settings()
        self.next_prompt = 0
        self.consecutive_empty = 0
        self.last_episodes: Sequence[TextEpisode] = ()
        self.forced_correction: Any = None
        self.monitor = PrecisionMonitor(self.settings.policy)
        preflight(self.config)
        try:
            super().setup(config)
        except IndexError as error:
            raise RuntimeError(
                "no env runner survived its construction. The actors' logs have the reason; often rllib_llm is not "
                "importable on the workers (pip install it there, or pass it in runtime_env)."
            ) from error
        self.weights = WeightSync(
            self.learner_group,
            self.settings.policy,
            self.settings.rollout.push_timeout_s,
            self.settings.rollout.weight_transport,
        )
        self.push_weights()
        if self.eval_env_runner_group is not None:
            self.weights.push(self.eval_env_runner_group)
        self.monitor.guard.remember(self.weights.evidence(self.env_runner_group))

    @classmethod
    def _should_create_evaluation_env_runners(cls, eval_config: GRPOConfig) -> bool:
        """Only where asked for: without own runners, evaluation runs on the training runners (see evaluation.py)."""
        return eval_config.evaluation_num_env_runners > 0

    @staticmethod
    def _get_env_id_and_creator(env_specifier: Any, config: Any) -> tuple[Any, Any]:
        """RLlib would look for a gym env of that name; text environments are made by the env runner."""
        return env_specifier, lambda _context: None

    # ---------------------------------------------------------------- one iteration

    @override(Algorithm)
    def training_step(self) -> None:
        with self._timed(names.SAMPLE_TIMER):
            collected = self._sample()
        if not collected.episodes:
            return
        episodes = self.last_episodes = collected.episodes
        with self._timed(names.ADVANTAGE_TIMER):
            advantages = self.advantages(episodes)
        with self._timed(names.LEARN_TIMER), self._engines_asleep():
            self._learn(episodes, advantages)
        with self._timed(names.MISMATCH_TIMER):
            self._watch(episodes)
        with self._timed(names.PUSH_WEIGHTS_TIMER):
            self.push_weights()
        for key, value in usage.of_iteration(self).items():
            self.metrics.log_value(key, value, window=1)

    def _sample(self) -> Collected:
        """This iteration's episodes. Raises NoSamplesError after `max_empty_samples` iterations without any."""
        rollout, grpo = self.settings.rollout, self.settings.grpo
        collected, self.next_prompt = collect(
            self.env_runner_group,
            self.next_prompt,
            rollout.prompts_per_iteration,
            self.weights.version,
            self.config.sample_timeout_s,
            grpo.max_sample_rounds if grpo.dynamic_sampling else 1,
        )
        self._log_sampling(collected)
        if collected.episodes:
            self.consecutive_empty = 0
            return collected
        self.consecutive_empty += 1
        if self.consecutive_empty >= rollout.max_empty_samples:
            raise NoSamplesError(
                f"{self.consecutive_empty} iterations in a row gave no usable sample (rollout_config.max_empty_samples "
                f"= {rollout.max_empty_samples}); refused because of their weights version: {collected.refused}, "
                f"problems without an answer: {len(collected.lost)}, groups dropped by dynamic sampling because "
                f"their rewards were all equal: {collected.uninformative}. Last errors:\n"
                + "\n".join([*collected.errors[-2:], *collected.lost_samples[-1:]] or ["none reported"])
            )
        return collected

    def advantages(self, episodes: Sequence[TextEpisode]) -> np.ndarray:
        """float32 [S], one advantage per episode. Override for another credit assignment."""
        rewards = torch.tensor([e.reward for e in episodes], dtype=torch.float64)
        grpo, rollout = self.settings.grpo, self.settings.rollout
        if grpo.overlong_buffer:
            lengths = torch.tensor([e.num_trained_tokens for e in episodes])
            limit = rollout.max_new_tokens * rollout.max_turns
            penalty = overlong_penalty(lengths, limit, grpo.overlong_buffer, grpo.overlong_penalty)
            self.metrics.log_value(names.OVERLONG_PENALTY_MEAN, float(penalty.mean()), window=1)
            rewards = rewards + penalty
        if kl_is_reward(grpo) and advantage_kind(grpo) == "reinforce++":
            return rewards.float().numpy()  # normalised by the learners, once the KL is in
        kind, groups = advantage_kind(grpo), torch.tensor([e.group_id for e in episodes])
        if kind != "reinforce++" and len(groups.unique()) == len(groups):
            # Reward errors left one answer of each group. The function refuses that; a run goes on and counts it.
            return np.zeros(len(episodes), np.float32)
        return group_advantages(rewards, groups, kind).numpy()

    def _engines_asleep(self) -> AbstractContextManager[None]:
        """What the optimiser steps run in: with `rollout.sleep_while_learning`, engines hold no GPU memory."""
        if not self.settings.rollout.sleep_while_learning:
            return nullcontext()
        groups = [self.env_runner_group, self.eval_env_runner_group]
        return asleep(groups, self.settings.rollout.push_timeout_s)

    def _learn(self, episodes: Sequence[TextEpisode], advantages: np.ndarray) -> None:
        config, group = self.config, self.learner_group
        minibatch = assign_minibatches(
            len(episodes),
            config.num_epochs,
            self.settings.grpo.minibatches_per_epoch,
            seed=self.next_prompt + (config.seed or 0),
        )
        batches = [
            s.to_batch() for s in make_shards(episodes, advantages, max(1, config.num_learners), minibatch)
        ]
        data = TrainingData(batch=batches[0]) if group.is_local else TrainingData(batches=batches)
        steps = self.metrics.peek((ENV_RUNNER_RESULTS, NUM_ENV_STEPS_SAMPLED_LIFETIME), default=0)
        results = group.update(training_data=data, timesteps={NUM_ENV_STEPS_SAMPLED_LIFETIME: steps})
        if len(results) != len(batches):
            raise RuntimeError(
                f"{len(results)} of {len(batches)} learners took part in the update; restore from the last checkpoint."
            )
        self.metrics.aggregate(results, key=LEARNER_RESULTS)
        self.weights.learner_changed()

    def _watch(self, episodes: Sequence[TextEpisode]) -> None:
        """Mismatch metrics of the iteration, and the guard's verdict on them."""
        parts = [r.get() for r in self.learner_group.foreach_learner(_take_train_logprobs)]
        correction = self.forced_correction or correction_of(self.settings)
        seen = self.monitor.observe(episodes, dict(pair for part in parts for pair in part), correction)
        for group, values in ((names.MISMATCH, seen.mismatch), (names.CORRECTION, seen.correction)):
            for name, value in values.items():
                self.metrics.log_value((group, *name.split("/")), value, window=1)
        self.metrics.log_value((names.PRECISION, names.GUARD_VIOLATIONS), seen.verdict.consecutive, window=1)
        self.metrics.log_value(
            (names.PRECISION, names.CORRECTION_ACTIVE), float(correction is not None), window=1
        )
        self.metrics.log_value(
            (names.PRECISION, names.WEIGHTS_VERSION), episodes[0].weights_version, window=1
        )
        if seen.verdict.violated:
            self._act_on(seen.verdict)

    def _act_on(self, verdict: Any) -> None:
        message = self.monitor.explain(verdict, self.weights.evidence(self.env_runner_group))
        if verdict.action == "halt":
            path = self.save_to_path(f"{self.logdir}/halted_at_iteration_{self.iteration + 1}")
            raise PrecisionHalt(f"{message}\n  checkpoint of this moment: {path}")
        logger.warning(message)
        if (
            verdict.action == "correct"
            and correction_of(self.settings) is None
            and self.forced_correction is None
        ):
            self.force_correction(guarded_correction(self.settings))

    def force_correction(self, correction: Any | None) -> None:
        """Applies an importance correction in all later updates, whatever the policy says; None ends that."""
        self.forced_correction = correction
        for result in self.learner_group.foreach_learner(_set_correction, correction=correction):
            result.get()

    # ---------------------------------------------------------------- weights

    def push_weights(self) -> None:
        """Sends the learner's weights to all training runners; returns when each has confirmed them."""
        self.weights.push(self.env_runner_group)

    @override(Algorithm)
    def restore_env_runners(self, env_runner_group: Any) -> list[int]:
        """Gives restarted runners the current weights, the contract check and their environment's state.

        Waits up to `rollout_config.restart_timeout_s` when none is left: an iteration without any runner samples
        nothing, and `max_empty_samples` of those would end the run before an engine has had time to start.
        """
        restored: list[int] = []
        deadline = time.monotonic() + self.settings.rollout.restart_timeout_s
        while True:
            found = list(env_runner_group.probe_unhealthy_env_runners() or [])
            if found:
                self._counters["total_num_restored_workers"] += len(found)
                self.weights.push(env_runner_group, found)
                self.send_env_state(env_runner_group, found)
                restored += found
            # A runner can be lost again while it is served: Ray answers calls of a restarting actor with errors.
            if runner_ids(env_runner_group) or time.monotonic() > deadline:
                return restored
            time.sleep(1.0)

    # ---------------------------------------------------------------- metrics

    def _timed(self, name: str) -> Any:
        """Times a block of the iteration; RLlib's default would report a mean over about a hundred iterations."""
        return self.metrics.log_time((TIMERS, name), reduce="mean", window=1)

    def _log_sampling(self, collected: Collected) -> None:
        if collected.metrics:
            self.metrics.aggregate(collected.metrics, key=ENV_RUNNER_RESULTS)
            tokens = self.metrics.peek((ENV_RUNNER_RESULTS, names.NUM_TOKENS_SAMPLED), default=0)
            self.metrics.log_value(
                (ENV_RUNNER_RESULTS, names.TOKENS_PER_S), tokens / max(collected.seconds, 1e-9), window=1
            )
        for name, value in (
            (names.NUM_SAMPLES_REFUSED, collected.refused),
            (names.NUM_PROMPTS_LOST, len(collected.lost)),
            (names.NUM_SAMPLE_ROUNDS, collected.rounds),
            (names.NUM_EMPTY_SAMPLES, self.consecutive_empty + (not collected.episodes)),
            (
                names.NUM_GROUPS_WITHOUT_SIGNAL,
                collected.uninformative
                + groups_without_signal(collected.episodes, advantage_kind(self.settings.grpo)),
            ),
        ):
            self.metrics.log_value(name, value, window=1)
        if collected.errors:
            logger.warning(
                "%d env runner error(s) this iteration, the last: %s",
                len(collected.errors),
                collected.errors[-1],
            )
        if collected.lost_samples:
            lost = self.metrics.peek((ENV_RUNNER_RESULTS, names.NUM_REWARD_ERRORS), default=0)
            logger.warning(
                "%d sample(s) lost to errors of the environment, the last: %s",
                lost,
                collected.lost_samples[-1],
            )

    @override(Algorithm)
    def _compile_iteration_results(self, *, train_results: Any, eval_results: Any) -> dict[str, Any]:
        """Without the evaluation of an earlier iteration: RLlib reports it again in the iteration that follows."""
        results = super()._compile_iteration_results(train_results=train_results, eval_results=eval_results)
        if not eval_results:
            results.pop(EVALUATION_RESULTS, None)
        for path in _SOMETIMES_MEASURED:
            *parents, last = path
            parent = reduce(lambda tree, key: tree.get(key, {}), parents, results)
            if last in parent:
                parent[last] = _measured(parent[last])
        return results

    @override(Trainable)
    def get_auto_filled_metrics(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Adds what is text and no metric: the policy's name and fingerprint, some samples, the attestations."""
        filled = super().get_auto_filled_metrics(*args, **kwargs)
        policy = self.settings.policy
        filled |= {"precision_policy": policy.name, "precision_fingerprint": policy.fingerprint}
        if (
            "iterations_since_restore" not in filled
        ):  # debug_metrics_only: Tune asks this of a trial that failed
            return filled
        return filled | report(self, self.last_episodes, first=filled["iterations_since_restore"] == 1)


def _measured(tree: dict[str, Any]) -> dict[str, Any]:
    """Without the NaN that RLlib reports for a metric of earlier iterations, and without what is then empty."""
    kept = {k: _measured(v) if isinstance(v, dict) else v for k, v in tree.items()}
    return {k: v for k, v in kept.items() if (bool(v) if isinstance(v, dict) else not np.isnan(v))}


def _take_train_logprobs(learner: Any) -> Any:
    return learner.take_train_logprobs()


def _set_correction(learner: Any, correction: Any) -> None:
    learner.forced_correction = correction
