"""`GRPO`: RLlib's Algorithm around one iteration of reinforcement learning on a language model."""

from __future__ import annotations

import logging
import pathlib
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.core import (
    COMPONENT_ENV_RUNNER,
    COMPONENT_ENV_TO_MODULE_CONNECTOR,
    COMPONENT_EVAL_ENV_RUNNER,
    COMPONENT_LEARNER_GROUP,
    COMPONENT_MODULE_TO_ENV_CONNECTOR,
)
from ray.rllib.core.learner.training_data import TrainingData
from ray.rllib.utils.annotations import override
from ray.rllib.utils.checkpoints import CHECKPOINT_VERSION_LEARNER_AND_ENV_RUNNER
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
from rllib_llm.algorithm import usage
from rllib_llm.algorithm.adapter_checkpoints import adapter_metadata, refuse_other_adapter
from rllib_llm.algorithm.checkpoints import (
    BAD_STATE,
    EnvironmentStates,
    LearnerFiles,
    learner_part,
    plain_config,
    write_checkpoint,
)
from rllib_llm.algorithm.colocate import asleep
from rllib_llm.algorithm.config import GRPOConfig
from rllib_llm.algorithm.fleet import runner_ids
from rllib_llm.algorithm.monitor import PrecisionHalt, PrecisionMonitor
from rllib_llm.algorithm.placement import require_placeable, with_engine
from rllib_llm.algorithm.preflight import preflight
from rllib_llm.algorithm.samples import report
from rllib_llm.algorithm.sampling import Collected, NoSamplesError, collect
from rllib_llm.algorithm.sampling_results import drop_unmeasured, log_sampling
from rllib_llm.algorithm.sharding import assign_minibatches, make_shards
from rllib_llm.algorithm.tune_dicts import show_in_place
from rllib_llm.algorithm.weight_sync import WeightSync
from rllib_llm.losses import overlong_penalty
from rllib_llm.losses.advantages import group_advantages
from rllib_llm.losses.chosen import advantage_kind, correction_of, guarded_correction, kl_is_reward
from rllib_llm.losses.corrections import correction_from_plain, plain_correction
from rllib_llm.on_disk.checkpoint import (
    ALGORITHM_STATE,
    LEARNER_FOLDER,
    CheckpointError,
    absolute,
    opened,
    precision_metadata,
    read_metadata,
    refuse_precision_change,
    refuse_unknown_files,
    verify_files,
)
from rllib_llm.on_disk.state_file import read_state
from rllib_llm.rollout.episode import TextEpisode

__all__ = ["GRPO"]

logger = logging.getLogger(__name__)

_OWN_STATE = "rllib_llm"
_CONNECTORS = (COMPONENT_ENV_TO_MODULE_CONNECTOR, COMPONENT_MODULE_TO_ENV_CONNECTOR)  # text needs none


class GRPO(Algorithm):
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
        """What a trial reserves. Raises PlacementError where the Ray that runs can never give it: Tune would wait.

        Tune asks once a trial's config is drawn, so that `show_in_place` has its only chance here.
        """
        if isinstance(config, dict):
            show_in_place(config)
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
        self.environment_states = EnvironmentStates()
        preflight(self.config)
        try:
            super().setup(config)
        except IndexError as error:
            raise RuntimeError(
                "no env runner survived its construction. The actors' logs have the reason; often rllib_llm is not "
                "importable on the workers (pip install it there, or pass it in runtime_env)."
            ) from error
        self.learner_files = LearnerFiles(self.learner_group)
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
        rollout, train = self.settings.rollout, self.settings.train
        collected, self.next_prompt = collect(
            self.env_runner_group,
            self.next_prompt,
            rollout.prompts_per_iteration,
            self.weights.version,
            self.config.sample_timeout_s or self.settings.rollout.sample_timeout_s,
            train.max_sample_rounds if train.dynamic_sampling else 1,
        )
        advantage = advantage_kind(self.settings.train)
        log_sampling(self.metrics, collected, self.consecutive_empty, advantage)
        if collected.episodes:
            self.consecutive_empty = 0
            return collected
        self.consecutive_empty += 1
        if self.consecutive_empty >= rollout.max_empty_samples:
            raise NoSamplesError(
                f"{self.consecutive_empty} iterations in a row gave no usable sample (rollout.max_empty_samples "
                f"= {rollout.max_empty_samples}); refused because of their weights version: {collected.refused}, "
                f"problems without an answer: {len(collected.lost)}, groups dropped by dynamic sampling because "
                f"their rewards were all equal: {collected.uninformative}. Last errors:\n"
                + "\n".join([*collected.errors[-2:], *collected.lost_samples[-1:]] or ["none reported"])
            )
        return collected

    def advantages(self, episodes: Sequence[TextEpisode]) -> np.ndarray:
        """float32 [S], one advantage per episode. Override for another credit assignment."""
        rewards = torch.tensor([e.reward for e in episodes], dtype=torch.float64)
        train, rollout = self.settings.train, self.settings.rollout
        if train.overlong_buffer:
            lengths = torch.tensor([e.num_trained_tokens for e in episodes])
            limit = rollout.max_new_tokens * rollout.max_turns
            penalty = overlong_penalty(lengths, limit, train.overlong_buffer, train.overlong_penalty)
            self.metrics.log_value(names.OVERLONG_PENALTY_MEAN, float(penalty.mean()), window=1)
            rewards = rewards + penalty
        if kl_is_reward(train) and advantage_kind(train) == "reinforce++":
            return rewards.float().numpy()  # normalised by the learners, once the KL is in
        kind, groups = advantage_kind(train), torch.tensor([e.group_id for e in episodes])
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
            self.settings.train.minibatches_per_epoch,
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

        Waits up to `rollout.restart_timeout_s` when none is left: an iteration without any runner samples
        nothing, and `max_empty_samples` of those would end the run before an engine has had time to start.
        """
        restored: list[int] = []
        deadline = time.monotonic() + self.settings.rollout.restart_timeout_s
        while True:
            found = list(env_runner_group.probe_unhealthy_env_runners() or [])
            if found:
                self._counters["total_num_restored_workers"] += len(found)
                self.weights.push(env_runner_group, found)
                self.environment_states.send(env_runner_group, found)
                restored += found
            # A runner can be lost again while it is served: Ray answers calls of a restarting actor with errors.
            if runner_ids(env_runner_group) or time.monotonic() > deadline:
                return restored
            time.sleep(1.0)

    # ---------------------------------------------------------------- checkpoints

    @classmethod
    @override(Algorithm)
    def from_checkpoint(cls, path: Any, filesystem: Any = None, **kwargs: Any) -> Any:
        """A new algorithm from a checkpoint. Relative paths are taken from the working directory.

        RLlib unpickles class and config (CLASS_FILE), once every file has the hash that the manifest says. So whoever
        can write a whole checkpoint can run code here: load those only that you would run a program of
        (docs/checkpoints.md). Nothing else of ours unpickles.

        Raises CheckpointError for files that are missing, changed or not the checkpoint's.
        """
        if isinstance(path, (str, pathlib.Path)):
            path = str(path) if filesystem is not None else absolute(path)
            verify_files(path, filesystem)
        else:  # Ray's Checkpoint
            verify_files(path.path, path.filesystem)
        return super().from_checkpoint(path, filesystem, **kwargs)

    @override(Algorithm)
    def get_metadata(self) -> dict[str, Any]:
        plain, objects = plain_config(self.config)
        return super().get_metadata() | precision_metadata(
            self.settings.policy,
            model=self.settings.model.path,
            **adapter_metadata(self.settings.model, self.weights.base_hash),
            weights_version=self.weights.version,
            learner_digest=self.learner_files.digest(),
            training_iteration=self.iteration,
            config=plain,
            config_objects=objects,
        )

    @override(Algorithm)
    def save_to_path(
        self, path: Any = None, *, state: Any = None, filesystem: Any = None, use_msgpack: bool = False
    ) -> str:
        """Writes a checkpoint and checks that it is complete. Relative paths are taken from the working directory.

        Raises CheckpointError when a learner did not write its files, StateFileError when a state is not plain.
        """
        if state is not None:
            raise ValueError(
                "GRPO.save_to_path(state=...): only what is trained now is written; leave it out."
            )
        path = tempfile.mkdtemp() if path is None else path
        fs, root = opened(str(path) if filesystem is not None else str(absolute(path)), filesystem)
        metadata = self.get_metadata() | {
            "checkpoint_version": str(CHECKPOINT_VERSION_LEARNER_AND_ENV_RUNNER)
        }
        own = self.get_state(not_components=[COMPONENT_LEARNER_GROUP, *_CONNECTORS])
        built_of = {"class": type(self), "ctor_args_and_kwargs": self.get_ctor_args_and_kwargs()}
        write_checkpoint(fs, root, metadata, built_of, own, self.learner_files)
        return root.as_posix()

    @override(Trainable)
    def restore(self, checkpoint_path: Any) -> None:
        """As Tune's, which would unpickle a `_dict_checkpoint.pkl` that lies in a checkpoint: nothing may be added."""
        found = getattr(checkpoint_path, "checkpoint", checkpoint_path)
        if isinstance(found, (str, pathlib.Path)):
            refuse_unknown_files(str(absolute(found)))
        else:
            refuse_unknown_files(found.path, found.filesystem)
        super().restore(checkpoint_path)

    @override(Algorithm)
    def restore_from_path(
        self, path: Any, *args: Any, component: str | None = None, filesystem: Any = None, **kwargs: Any
    ) -> None:
        """Restores, checks that the learners hold what was saved, and pushes the weights to every runner.

        component: "learner_group", or a part of it, of which `path` then is; only that is restored.

        Raises PrecisionChangeError for a checkpoint of another policy (unless allowed), CheckpointError for an
        incomplete, changed or damaged one. Nothing is unpickled.
        """
        fs, root = opened(str(path) if filesystem is not None else str(absolute(path)), filesystem)
        if component is not None:
            self.learner_files.restore(fs, *learner_part(root, component))
        else:
            verify_files(root.as_posix(), fs)
            saved = read_metadata(root.as_posix(), fs)
            allow = self.settings.precision.allow_precision_change
            same_policy = refuse_precision_change(saved, self.settings.policy, allow, str(path))
            refuse_other_adapter(saved, self.settings.model, same_policy, self.weights.base_hash, str(path))
            try:
                state = read_state(fs, root, ALGORITHM_STATE)
                self.learner_files.restore(fs, root / LEARNER_FOLDER)
                self._set_saved_state(state)
            except CheckpointError:
                raise
            except BAD_STATE as error:
                raise CheckpointError(
                    f"checkpoint {path} cannot be restored ({type(error).__name__}: {error}): it is of another model, "
                    "environment or version of Ray or rllib_llm. Go on from another one."
                ) from error
            if same_policy:
                self.learner_files.require(saved["learner_digest"], str(path))
        self._after_restore()

    def _set_saved_state(self, state: dict[str, Any]) -> None:
        """`set_state`, with the state of local runners only where there are such: a resume may have others."""
        for name, runner in (
            (COMPONENT_ENV_RUNNER, self.env_runner),
            (COMPONENT_EVAL_ENV_RUNNER, self.eval_env_runner),
        ):
            saved = state.pop(name, None)
            if runner is not None and saved is not None:
                runner.set_state(saved)
        self.set_state(state)

    def _after_restore(self) -> None:
        self.weights.learner_changed()
        self.push_weights()
        for group in (self.env_runner_group, self.eval_env_runner_group):
            if group is not None:
                self.environment_states.send(group)

    @override(Algorithm)
    def get_state(
        self, components: Any = None, *, not_components: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        state = super().get_state(components, not_components=not_components, **kwargs)
        if self._check_component(_OWN_STATE, components, not_components):
            state[_OWN_STATE] = {
                "next_prompt": self.next_prompt,
                "consecutive_empty": self.consecutive_empty,
                "guard": self.monitor.guard.get_state(),
                "forced_correction": plain_correction(self.forced_correction),
                "environments": self.environment_states.gather(self.env_runner_group),
            }
        return state

    @override(Algorithm)
    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        if own := state.get(_OWN_STATE):
            self.next_prompt = own["next_prompt"]
            self.consecutive_empty = own["consecutive_empty"]
            self.monitor.guard.set_state(own["guard"])
            self.force_correction(correction_from_plain(own["forced_correction"]))
            self.environment_states.by_runner = dict(own["environments"])
        if COMPONENT_LEARNER_GROUP in state:  # of a checkpoint, the learners come from their own files
            self._after_restore()

    # ---------------------------------------------------------------- metrics

    def _timed(self, name: str) -> Any:
        """Times a block of the iteration; RLlib's default would report a mean over about a hundred iterations."""
        return self.metrics.log_time((TIMERS, name), reduce="mean", window=1)

    @override(Algorithm)
    def _compile_iteration_results(self, *, train_results: Any, eval_results: Any) -> dict[str, Any]:
        """Without the evaluation of an earlier iteration: RLlib reports it again in the iteration that follows."""
        results = super()._compile_iteration_results(train_results=train_results, eval_results=eval_results)
        if not eval_results:
            results.pop(EVALUATION_RESULTS, None)
        drop_unmeasured(results)
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


def _take_train_logprobs(learner: Any) -> Any:
    return learner.take_train_logprobs()


def _set_correction(learner: Any, correction: Any) -> None:
    learner.forced_correction = correction
