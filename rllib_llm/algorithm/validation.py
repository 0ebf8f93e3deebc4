"""Every rule that a GRPOConfig must satisfy before anything is built; each violation is one sentence."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from precision_policies import PolicyError, load_policy
from rllib_llm.algorithm.engine_rules import engine_violations, model_limit_violations
from rllib_llm.algorithm.settings import GROUPS, closest, parse, parse_rest

if TYPE_CHECKING:
    from rllib_llm.algorithm.config import GRPOConfig
    from rllib_llm.algorithm.settings import GRPOSettings, ModelSettings, PrecisionSettings, RolloutSettings

__all__ = ["config_violations"]

# RLlib settings that would be accepted and then have no effect: name -> (only allowed value, what to use).
_WITHOUT_EFFECT = {
    "minibatch_size": (None, "training(minibatches_per_epoch=...)"),
    "train_batch_size": (32, "rollout(prompts_per_iteration=..., group_size=...)"),
    "_train_batch_size_per_learner": (None, "rollout(prompts_per_iteration=..., group_size=...)"),
    "num_envs_per_env_runner": (1, "rollout(prompts_per_iteration=...): one engine batches all prompts"),
    "num_aggregator_actors_per_learner": (0, "nothing: there are no learner connectors to run"),
    "gamma": (0.99, "nothing: the return of an episode is the plain sum of its rewards"),
    "clip_rewards": (None, "the environment's own reward weights"),
    "grad_clip_by": ("global_norm", "grad_clip_by='global_norm'"),
    "torch_skip_nan_gradients": (False, "nothing: a step with a non-finite gradient is always skipped"),
    "torch_compile_learner": (False, "nothing: the learner's kernels are chosen by the precision policy"),
    "evaluation_parallel_to_training": (False, "sequential evaluation: engines hold one weights version"),
    "evaluation_duration_unit": ("episodes", "evaluation_duration_unit='episodes'"),
    "framework_str": ("torch", "framework('torch')"),
    "enable_rl_module_and_learner": (True, "RLlib's new API stack"),
    "enable_env_runner_and_connector_v2": (True, "RLlib's new API stack"),
}
# Attributes RLlib adds to a config after construction.
_ADDED_BY_RLLIB = {"class", "worker_index", "simple_optimizer", "__stdout_file__", "__stderr_file__"}


def config_violations(config: GRPOConfig) -> list[str]:
    """All violations, in the order a reader would fix them: names, types, values, combinations."""
    violations = _unknown_attributes(config)
    for name, (allowed, instead) in _WITHOUT_EFFECT.items():
        if config.__dict__[name] != allowed:
            shown = name.lstrip("_").removesuffix("_str")
            violations.append(
                f"{shown} = {config.__dict__[name]!r} has no effect in {type(config).__name__}; use {instead}."
            )
    parsed: dict[str, Any] = {}
    ill_typed: set[str] = set()
    for group, cls in GROUPS.items():
        parsed[group], found = parse(cls, getattr(config, group), group)
        violations += found
        if parsed[group] is None:
            parsed[group], bad = parse_rest(cls, getattr(config, group))
            ill_typed |= bad
    further = _model(parsed["llm"])
    further += _reference(parsed["llm"], parsed["grpo"])
    further += _rollout(parsed["rollout_config"])
    further += model_limit_violations(parsed["llm"], parsed["rollout_config"])
    further += _training(config, parsed["grpo"], parsed["rollout_config"])
    further += _precision(parsed["precision_config"], parsed["rollout_config"])
    further += _registered_policy(parsed["llm"], parsed["precision_config"])
    # what speaks of an ill-typed setting speaks of its default, which nobody chose
    violations += [text for text in further if ill_typed.isdisjoint(re.findall(r"\w+", text))]
    if not config.explore and not config.in_evaluation:
        violations.append(
            "explore = False: greedy answers of one group are all equal, there is nothing to learn from them."
        )
    if config.evaluation_config and not config.evaluation_num_env_runners:
        violations.append(
            f"evaluation_config = {config.evaluation_config!r} has no effect without evaluation runners of its own: "
            "set evaluation_num_env_runners >= 1, or rollout(eval_temperature=..., eval_samples=...)."
        )
    if config.evaluation_duration == "auto":
        violations.append("evaluation_duration = 'auto' needs parallel evaluation; set a number of prompts.")
    return violations


def _unknown_attributes(config: GRPOConfig) -> list[str]:
    known = set(vars(type(config)())) | _ADDED_BY_RLLIB
    return [
        f"{type(config).__name__} has no setting {name!r}{closest(name, known)}."
        for name in vars(config)
        if name not in known
    ]


def _model(llm: ModelSettings) -> list[str]:
    if llm.path is None:
        return [
            "llm.path is not set: choose a model with .model('tiny-chain') or .model('/path/to/hf_model')."
        ]
    from rllib_llm.models.paths import resolve_model_path

    violations = []
    for key, path in (("llm.path", llm.path), ("llm.reference_path", llm.reference_path)):
        try:
            if path is not None:
                resolve_model_path(path)
        except (FileNotFoundError, ValueError) as error:
            violations.append(f"{key} = {path!r}: {error}")
    if llm.max_sequence_length is not None and llm.max_sequence_length < 2:
        violations.append(f"llm.max_sequence_length = {llm.max_sequence_length} must be at least 2.")
    return violations


def _registered_policy(llm: ModelSettings, precision: PrecisionSettings) -> list[str]:
    """A registered model may not be trained on, and so sampled from, under a policy other than its own."""
    from rllib_llm.models.paths import resolve_model_path
    from rllib_llm.registry.errors import RegistryError
    from rllib_llm.registry.owner import OtherPolicyError, refuse_other_policy

    try:
        policy, path = load_policy(precision.policy), resolve_model_path(llm.path or "")
    except (PolicyError, OSError, ValueError):
        return []  # said elsewhere
    override = "set precision_config.allow_precision_change = true"
    try:
        refuse_other_policy(path, policy, precision.allow_precision_change, override=override)
    except (OtherPolicyError, RegistryError) as error:
        return [f"llm.path: {error}"]
    return []


def _reference(llm: ModelSettings, grpo: GRPOSettings) -> list[str]:
    if llm.reference_path is None or grpo.kl_coeff != 0.0:
        return []
    return [
        f"llm.reference_path = {llm.reference_path!r} has no effect with grpo.kl_coeff = 0: set the weight of the KL "
        "to that model."
    ]


def _rollout(rollout: RolloutSettings) -> list[str]:
    v = []
    for key in (
        "group_size",
        "prompts_per_iteration",
        "max_new_tokens",
        "max_turns",
        "eval_samples",
        "max_empty_samples",
    ):
        if getattr(rollout, key) < 1:
            v.append(f"rollout_config.{key} = {getattr(rollout, key)} must be at least 1.")
    if rollout.max_new_tokens >= 2**31:  # the context ends an answer before; numbers of tensors are smaller
        v.append(f"rollout_config.max_new_tokens = {rollout.max_new_tokens} must be below 2**31.")
    for key in ("restart_timeout_s", "push_timeout_s"):
        if getattr(rollout, key) <= 0.0:
            v.append(f"rollout_config.{key} = {getattr(rollout, key)} must be > 0 seconds.")
    if rollout.max_prompt_tokens is not None and rollout.max_prompt_tokens < 1:
        v.append(
            f"rollout_config.max_prompt_tokens = {rollout.max_prompt_tokens} must be at least 1, or None: no limit."
        )
    if not 0 <= rollout.min_new_tokens <= rollout.max_new_tokens:
        v.append(
            f"rollout_config.min_new_tokens = {rollout.min_new_tokens} must be between 0 and "
            f"max_new_tokens = {rollout.max_new_tokens}."
        )
    if rollout.min_new_tokens and rollout.max_turns > 1:
        v.append(
            f"rollout_config.min_new_tokens = {rollout.min_new_tokens} with max_turns = {rollout.max_turns}: "
            "the learner cannot tell where an answer begins when an environment adds nothing between two; use one."
        )
    return v + _distribution(rollout) + engine_violations(rollout)


def _distribution(rollout: RolloutSettings) -> list[str]:
    """Which distribution is sampled, in training and in evaluation."""
    v = []
    if not 0.0 < rollout.temperature < float("inf"):
        v.append(
            f"rollout_config.temperature = {rollout.temperature} must be > 0 and finite: a greedy sample has no "
            "log-probability to train on. Greedy evaluation is rollout_config.eval_temperature = 0."
        )
    if not 0.0 < rollout.top_p <= 1.0:
        v.append(f"rollout_config.top_p = {rollout.top_p} must be in (0, 1].")
    if rollout.top_k < 0:
        v.append(f"rollout_config.top_k = {rollout.top_k} must be >= 0 (0 switches it off).")
    if not 0.0 <= rollout.eval_temperature < float("inf"):
        v.append(
            f"rollout_config.eval_temperature = {rollout.eval_temperature} must be finite and >= 0 (0 is greedy)."
        )
    if rollout.eval_temperature == 0.0 and rollout.eval_samples > 1:
        v.append(
            f"rollout_config.eval_samples = {rollout.eval_samples} with eval_temperature = 0 would repeat one greedy "
            "answer; set eval_temperature > 0 or eval_samples = 1."
        )
    return v


def _training(config: GRPOConfig, grpo: GRPOSettings, rollout: RolloutSettings) -> list[str]:
    from rllib_llm.algorithm.losses import loss_violations

    v = loss_violations(grpo, rollout)
    samples = rollout.prompts_per_iteration * rollout.group_size
    steps = grpo.minibatches_per_epoch
    if steps < 1:
        v.append(f"grpo.minibatches_per_epoch = {steps} must be at least 1.")
    elif samples % steps:
        v.append(
            f"grpo.minibatches_per_epoch = {steps} must divide prompts_per_iteration x group_size = "
            f"{rollout.prompts_per_iteration} x {rollout.group_size} = {samples}, or steps would weigh "
            "samples unequally."
        )
    numbers = _rllibs_numbers(config)
    if any(type(n) is not int for n in (config.num_learners, config.num_env_runners)):
        return v + numbers + _optimiser(grpo)  # the rest would compare with them
    learners = max(1, config.num_learners)
    if steps >= 1 and samples < learners * steps:
        v.append(
            f"{samples} samples per iteration cannot feed num_learners = {learners} x {steps} minibatches."
        )
    if config.num_env_runners > rollout.prompts_per_iteration:
        v.append(
            f"num_env_runners = {config.num_env_runners} exceeds rollout_config.prompts_per_iteration = "
            f"{rollout.prompts_per_iteration}: some runners would never sample."
        )
    if not 0 <= grpo.overlong_buffer <= rollout.max_new_tokens:
        v.append(
            f"grpo.overlong_buffer = {grpo.overlong_buffer} must be between 0 and rollout_config.max_new_tokens = "
            f"{rollout.max_new_tokens}."
        )
    return v + numbers + _optimiser(grpo)


def _optimiser(grpo: GRPOSettings) -> list[str]:
    v = []
    if grpo.micro_batch_tokens < 1:
        v.append(f"grpo.micro_batch_tokens = {grpo.micro_batch_tokens} must be at least 1.")
    for key in ("weight_decay", "eps", "warmup_steps", "overlong_penalty"):
        if not _number(getattr(grpo, key), at_least=0):
            v.append(f"grpo.{key} = {getattr(grpo, key)} must be finite and >= 0.")
    if not all(0.0 <= beta < 1.0 for beta in grpo.betas):
        v.append(f"grpo.betas = {grpo.betas} must be in [0, 1).")
    if (grpo.lr_decay == "constant") != (grpo.total_steps is None):
        v.append(
            f"grpo.lr_decay = {grpo.lr_decay!r} with grpo.total_steps = {grpo.total_steps}: a decay needs the number "
            "of optimiser steps at which it ends, 'constant' takes none."
        )
    if grpo.max_sample_rounds < 1:
        v.append(f"grpo.max_sample_rounds = {grpo.max_sample_rounds} must be at least 1.")
    return v


def _rllibs_numbers(config: GRPOConfig) -> list[str]:
    """RLlib's own settings that it takes as they are, and that would end, or spoil, a run later."""
    v: list[str] = []
    lr: Any = config.lr
    clip, seed = config.grad_clip, config.seed
    scheduled = isinstance(lr, (list, tuple))  # RLlib's own kind of schedule, which RLlib checks further
    if scheduled and any(not isinstance(point, (list, tuple)) or len(point) != 2 for point in lr):
        v.append(f"lr = {lr!r} must be a schedule of pairs [timestep, learning rate], or a number.")
    if not scheduled and not _number(lr, at_least=0.0):
        v.append(f"lr = {lr!r} must be a finite number >= 0.")
    if clip is not None and (not _number(clip, at_least=0.0) or clip == 0):
        v.append(f"grad_clip = {clip!r} must be a finite number > 0, or None: do not clip.")
    if seed is not None and (type(seed) is not int or not 0 <= seed < 2**32):
        v.append(f"seed = {seed!r} must be a whole number from 0 to 2**32 - 1 (numpy takes no other).")
    for key in ("num_learners", "num_env_runners"):
        value = getattr(config, key)
        if type(value) is not int or value < 0:
            v.append(f"{key} = {value!r} must be a whole number >= 0.")
    if type(config.num_epochs) is not int or config.num_epochs < 1:
        v.append(f"num_epochs = {config.num_epochs!r} must be a whole number >= 1.")
    return v


def _number(value: object, at_least: float) -> bool:
    return (
        isinstance(value, (int, float)) and not isinstance(value, bool) and at_least <= value < float("inf")
    )


def _precision(precision: PrecisionSettings, rollout: RolloutSettings) -> list[str]:
    try:
        policy = load_policy(precision.policy)
    except (PolicyError, OSError) as error:
        return [f"precision_config.policy: {error}"]
    truncated = rollout.top_p < 1.0 or rollout.top_k > 0
    if truncated and policy.logprobs.truncation == "refuse":
        return [
            f"rollout_config.top_p = {rollout.top_p}, top_k = {rollout.top_k}: policy {policy.name!r} has "
            "logprobs.truncation = 'refuse'. Sample from the whole distribution, or use a policy that renormalises."
        ]
    return []
