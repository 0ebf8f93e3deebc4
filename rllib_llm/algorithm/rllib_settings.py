"""Every setting of RLlib's AlgorithmConfig: which ones have an effect here, and what to use instead of the others.

A setting that would be accepted and passed over is worse than one that is refused, so each attribute of RLlib 2.60's
config stands in one of the tables below (a test walks them).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from precision_policies.errors import Violation
from rllib_llm.settings.names import ATTRIBUTES, dotted, renamed, unknown

if TYPE_CHECKING:
    from rllib_llm.algorithm.config import GRPOConfig

__all__ = ["HAS_EFFECT", "WITHOUT_EFFECT", "rllib_violations"]

_NO_GYM = "nothing: environments here are text environments, see docs/environments.md"
_OFFLINE = "nothing: answers are sampled by the engines, there is no offline data"
_OLD = "nothing: it belongs to RLlib's old API stack"
_ONE_MODULE = "nothing: one model is trained"
_CONNECTORS = "nothing: there are no connectors; prompts and answers are text (rollout, env)"
_BATCH = "rollout.prompts_per_iteration and rollout.group_size"
_KERNELS = "nothing: the precision policy chooses the learner's kernels"

HAS_EFFECT = frozenset(
    {
        *ATTRIBUTES.values(),
        *("model", "algo_class", "class", "explore"),
        *("extra_python_environs_for_driver", "extra_python_environs_for_worker"),
        *("placement_strategy", "custom_resources_for_main_process"),
        *("env_runner_cls", "create_local_env_runner", "custom_resources_per_env_runner"),
        *("validate_env_runners_after_construction", "max_requests_in_flight_per_env_runner"),
        "sample_timeout_s",
        *("custom_resources_per_learner", "local_gpu_idx", "max_requests_in_flight_per_learner"),
        *("learner_config_dict", "_learner_class"),
        *("callbacks_class", "callbacks_on_algorithm_init", "callbacks_on_env_runners_recreated"),
        *("callbacks_on_checkpoint_loaded", "callbacks_on_environment_created", "callbacks_on_episode_end"),
        *("callbacks_on_evaluate_start", "callbacks_on_evaluate_end", "callbacks_on_sample_end"),
        *("callbacks_on_episode_created", "callbacks_on_episode_start", "callbacks_on_episode_step"),
        "callbacks_on_train_result",
        *("evaluation_sample_timeout_s", "evaluation_config", "custom_evaluation_function"),
        "evaluation_duration_unit",
        *("min_time_s_per_iteration", "min_sample_timesteps_per_iteration", "stats_cls_lookup"),
        *("log_level", "log_sys_usage"),
        *("restart_failed_env_runners", "ignore_env_runner_failures", "max_num_env_runner_restarts"),
        *("delay_between_env_runner_restarts_s", "num_consecutive_env_runner_failures_tolerance"),
        *("env_runner_health_probe_timeout_s", "env_runner_restore_timeout_s"),
        *("_rl_module_spec", "_use_msgpack_checkpoints", "_validate_config"),
        # RLlib's own notes, which nobody sets
        *("_is_frozen", "in_evaluation", "_prior_exploration_config", "_is_online", "simple_optimizer"),
        *("_per_module_overrides", "sync_filters_on_rollout_workers_timeout_s"),
        *("worker_index", "__stdout_file__", "__stderr_file__"),
    }
)
"""Obeyed: by RLlib, by this package, or by whoever subclasses a class of it."""

# What to use instead -> names. Only the value that a new GRPOConfig has is allowed.
_REFUSED: dict[str, tuple[str, ...]] = {
    "run.resources.gpus_per_learner and run.resources.gpus_per_env_runner": ("num_gpus", "_fake_gpus"),
    "framework('torch')": ("framework_str",),
    "RLlib's new API stack": ("enable_rl_module_and_learner", "enable_env_runner_and_connector_v2"),
    _OLD: (
        *("eager_tracing", "eager_max_retraces", "tf_session_args", "local_tf_session_args"),
        *("enable_tf1_exec_eagerly", "create_env_on_local_worker", "remote_worker_envs"),
        *("remote_env_batch_wait_ms", "sample_collector", "preprocessor_pref", "observation_filter"),
        *("update_worker_filter_stats", "use_worker_filter_stats", "sampler_perf_stats_ema_coef"),
        *("optimizer", "exploration_config", "keep_per_episode_custom_metrics", "fake_sampler"),
        *("metrics_episode_collection_timeout_s", "export_native_model_files"),
        *("_tf_policy_handles_more_than_one_loss", "_disable_preprocessor_api", "_disable_action_flattening"),
        *("_disable_initialize_loss_from_dummy_batch", "replay_sequence_length", "compress_observations"),
    ),
    _KERNELS: (
        *("torch_compile_learner", "torch_compile_learner_what_to_compile"),
        *("torch_compile_learner_dynamo_backend", "torch_compile_learner_dynamo_mode"),
        *("torch_compile_worker", "torch_compile_worker_dynamo_backend", "torch_compile_worker_dynamo_mode"),
    ),
    "nothing: gradients are summed by the learners themselves": ("torch_ddp_kwargs",),
    "nothing: a step with a non-finite gradient is always skipped": ("torch_skip_nan_gradients",),
    "precision.policy, whose loss_scaling says it": ("_torch_grad_scaler_class",),
    "train.lr_decay and train.warmup_steps": ("_torch_lr_scheduler_classes",),
    _NO_GYM: (
        *("observation_space", "action_space", "normalize_actions", "clip_actions", "_is_atari"),
        *("disable_env_checking", "render_env", "action_mask_key", "gym_env_vectorize_mode"),
        *("episodes_to_numpy", "episode_lookback_horizon", "restart_failed_sub_environments"),
    ),
    "the environment's own reward weights": ("clip_rewards",),
    "rollout.prompts_per_iteration: one engine batches all prompts": ("num_envs_per_env_runner",),
    "rollout.max_new_tokens and rollout.max_turns: an episode is always whole": (
        *("rollout_fragment_length", "batch_mode"),
    ),
    _CONNECTORS: (
        *("_env_to_module_connector", "_module_to_env_connector", "_learner_connector"),
        *("add_default_connectors_to_env_to_module_pipeline", "num_aggregator_actors_per_learner"),
        *("add_default_connectors_to_module_to_env_pipeline", "add_default_connectors_to_learner_pipeline"),
        *("merge_env_runner_states", "broadcast_env_runner_states", "use_env_runner_state_server"),
        *("env_runner_state_server_max_concurrency", "max_requests_in_flight_per_aggregator_actor"),
        "_dont_auto_sync_env_runner_states",
    ),
    "nothing: the return of an episode is the plain sum of its rewards": ("gamma",),
    "train.grad_clip, which is of the global norm": ("grad_clip_by",),
    _BATCH: ("_train_batch_size_per_learner", "train_batch_size"),
    "train.minibatches_per_epoch": ("minibatch_size",),
    "nothing: every epoch is shuffled": ("shuffle_batch_per_epoch",),
    "rllib_llm.learner.module.CausalLMModule with model.path, or rl_module(rl_module_spec=...)": (
        "_model_config",
    ),
    "min_sample_timesteps_per_iteration": ("min_train_timesteps_per_iteration",),
    _ONE_MODULE: (
        *("count_steps_by", "policies", "policy_map_capacity", "policy_mapping_fn", "policies_to_train"),
        *("policy_states_are_swappable", "observation_fn", "algorithm_config_overrides_per_module"),
        "checkpoint_trainable_policies_only",
    ),
    _OFFLINE: (
        *("input_", "offline_data_class", "input_read_method", "input_read_method_kwargs"),
        *("input_read_schema", "input_read_episodes", "input_read_sample_batches", "input_read_batch_size"),
        *("input_filesystem", "input_filesystem_kwargs", "input_compress_columns", "input_spaces_jsonable"),
        *("materialize_data", "materialize_mapped_data", "map_batches_kwargs", "iter_batches_kwargs"),
        *("ignore_final_observation", "prelearner_class", "prelearner_buffer_class"),
        *("prelearner_buffer_kwargs", "prelearner_module_synch_period"),
        *("prelearner_use_recorded_module_states", "dataset_num_iters_per_learner", "input_config"),
        *("actions_in_input_normalized", "postprocess_inputs", "shuffle_buffer_size", "output"),
        *("output_config", "output_compress_columns", "output_max_file_size", "output_max_rows_per_file"),
        *("output_write_remaining_data", "output_write_method", "output_write_method_kwargs"),
        *("output_filesystem", "output_filesystem_kwargs", "output_write_episodes", "offline_sampling"),
        *("off_policy_estimation_methods", "ope_split_batch_by_episode"),
        *("offline_evaluation_interval", "num_offline_eval_runners", "offline_evaluation_type"),
        *("offline_eval_runner_class", "offline_loss_for_module_fn", "offline_evaluation_duration"),
        *("offline_evaluation_parallel_to_training", "offline_evaluation_timeout_s"),
        *("num_cpus_per_offline_eval_runner", "num_gpus_per_offline_eval_runner"),
        *("custom_resources_per_offline_eval_runner", "restart_failed_offline_eval_runners"),
        *("ignore_offline_eval_runner_failures", "max_num_offline_eval_runner_restarts"),
        *("offline_eval_runner_restore_timeout_s", "max_requests_in_flight_per_offline_eval_runner"),
        *("validate_offline_eval_runners_after_construction", "offline_eval_runner_health_probe_timeout_s"),
        *("offline_eval_rl_module_inference_only", "broadcast_offline_eval_runner_states"),
        *("offline_eval_batch_size_per_runner", "dataset_num_iters_per_eval_runner"),
        *("callbacks_on_evaluate_offline_start", "callbacks_on_evaluate_offline_end"),
        "callbacks_on_offline_eval_runners_recreated",
    ),
    "sequential evaluation: engines hold one weights version": ("evaluation_parallel_to_training",),
    "evaluation.prompts": (
        *(
            "evaluation_auto_duration_min_env_steps_per_sample",
            "evaluation_force_reset_envs_before_iteration",
        ),
        "evaluation_auto_duration_max_env_steps_per_sample",
    ),
    "rollout.restart_timeout_s": (
        *("evaluation_unhealthy_workers_timeout_s", "evaluation_error_after_n_consecutive_skips"),
    ),
    "nothing: every metric is of one iteration": ("metrics_num_episodes_for_smoothing",),
    "nothing: the norm of the gradient is always logged": ("log_gradients",),
    "nothing: RLlib deprecated it": (
        *("env_task_fn", "enable_connectors", "monitor", "evaluation_num_episodes", "policy_map_cache"),
        *("metrics_smoothing_episodes", "timesteps_per_iteration", "min_iter_time_s", "worker_cls"),
        *("collect_metrics_timeout", "min_time_s_per_reporting", "min_train_timesteps_per_reporting"),
        *("min_sample_timesteps_per_reporting", "input_evaluation", "synchronize_filters"),
        *("enable_async_evaluation", "custom_async_evaluation_function", "_enable_rl_module_api"),
        *("auto_wrap_old_gym_envs", "always_attach_evaluation_results", "buffer_size", "replay_batch_size"),
        *("prioritized_replay", "learning_starts", "replay_mode", "prioritized_replay_alpha"),
        *("prioritized_replay_beta", "prioritized_replay_eps", "_disable_execution_plan_api"),
    ),
}
WITHOUT_EFFECT = {name: instead for instead, names in _REFUSED.items() for name in names}
"""Refused where it differs from a new GRPOConfig: attribute -> what to use instead."""

# What RLlib itself writes into the config of evaluation runners.
_OF_EVALUATION = ("batch_mode", "rollout_fragment_length")
_SHOWN = {"framework_str": "framework", "input_": "input", "_model_config": "model_config"}


def rllib_violations(config: GRPOConfig) -> Iterator[Violation]:
    """Attributes that nobody knows, and settings of RLlib's that would have no effect."""
    for name, value in vars(config).items():
        if name in WITHOUT_EFFECT:
            if not (config.in_evaluation and name in _OF_EVALUATION) and not _as_new(name, value):
                shown = _SHOWN.get(name, name.lstrip("_"))
                yield Violation(shown, value, "has no effect here", f"use {WITHOUT_EFFECT[name]}")
        elif name not in HAS_EFFECT and name not in _own_attributes(type(config)):
            yield _unknown(name, value)


def _unknown(name: str, value: object) -> Violation:
    if name in _known_elsewhere():
        problem = "is no setting of a trial, but of rllib-llm train"
        return Violation(name, value, problem, "set it in a config file, or use Tune's own argument")
    if renamed(name) is None and (near := dotted_attribute(name)):
        return Violation(name, value, "no such setting", f"closest: {near}")
    return unknown(name, value)


def dotted_attribute(name: str) -> str | None:
    """The closest attribute of RLlib's that has an effect, by its dotted name where it has one."""
    import difflib

    near = difflib.get_close_matches(name, HAS_EFFECT, n=1, cutoff=0.75)
    return dotted(near[0]) if near else None


@functools.cache
def _known_elsewhere() -> frozenset[str]:
    from rllib_llm.settings.names import all_keys

    return frozenset(all_keys())


_OWN: dict[type, frozenset[str]] = {}


def _own_attributes(cls: type[GRPOConfig]) -> frozenset[str]:
    """What a new config of the class has: its own sections, and settings that a subclass adds in __init__."""
    if cls not in _OWN:
        _OWN[cls] = frozenset(vars(cls()))
    return _OWN[cls]


@functools.cache
def _new() -> dict[str, Any]:
    from rllib_llm.algorithm.config import GRPOConfig

    return dict(vars(GRPOConfig()))


def _as_new(name: str, value: Any) -> bool:
    expected = _new().get(name)
    if name == "policies":  # RLlib writes the specs out as dicts
        return set(value) == set(expected or ())
    try:
        return bool(value == expected)
    except (TypeError, ValueError, RuntimeError):
        return False
