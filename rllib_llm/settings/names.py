"""Names of settings: what there is, what RLlib calls it, what it was called or is called elsewhere."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from precision_policies.coerce import bounds_in_words, describe, hints
from precision_policies.errors import MISSING, Violation
from rllib_llm.settings.groups import SECTIONS

__all__ = [
    "ATTRIBUTES",
    "RENAMED",
    "SHORTHANDS",
    "Key",
    "all_keys",
    "dotted",
    "renamed",
    "unknown",
]

SHORTHANDS = {"precision": "precision.policy", "model": "model.path", "env": "env.name"}
"""A section that is given as one value means this setting."""

ATTRIBUTES = {
    "env.name": "env",
    "env.config": "env_config",
    "env.step_timeout_s": "env_step_timeout_s",
    "evaluation.interval": "evaluation_interval",
    "evaluation.prompts": "evaluation_duration",
    "evaluation.num_env_runners": "evaluation_num_env_runners",
    "run.seed": "seed",
    "run.resources.num_env_runners": "num_env_runners",
    "run.resources.num_learners": "num_learners",
    "run.resources.cpus_for_trainer": "num_cpus_for_main_process",
    "run.resources.cpus_per_env_runner": "num_cpus_per_env_runner",
    "run.resources.gpus_per_env_runner": "num_gpus_per_env_runner",
    "run.resources.cpus_per_learner": "num_cpus_per_learner",
    "run.resources.gpus_per_learner": "num_gpus_per_learner",
}
"""Settings that are attributes of RLlib's AlgorithmConfig, and the arguments of its fluent methods."""

RENAMED = {
    "precision_config": "precision",
    "llm": "model",
    "rollout_config": "rollout",
    "grpo": "train",
    "training": "train",
    "lr": "train.lr",
    "grad_clip": "train.grad_clip",
    "num_epochs": "train.num_epochs",
}
"""Sections that had another name, and settings that RLlib keeps outside of a section."""

# Names of the same settings in TRL, verl, Hugging Face's Trainer and vLLM.
_ELSEWHERE = {
    "learning_rate": "train.lr",
    "beta": "train.kl_coeff",
    "kl_loss_coef": "train.kl_coeff",
    "kl_coef": "train.kl_coeff",
    "kl_beta": "train.kl_coeff",
    "epsilon": "train.clip_low",
    "epsilon_high": "train.clip_high",
    "clip_ratio": "train.clip_low",
    "clip_ratio_low": "train.clip_low",
    "clip_ratio_high": "train.clip_high",
    "clip_eps": "train.clip_low",
    "clip_param": "train.clip_low",
    "loss_type": "train.loss",
    "adv_estimator": "train.advantages",
    "entropy_coef": "train.entropy_coeff",
    "max_grad_norm": "train.grad_clip",
    "gradient_clip": "train.grad_clip",
    "num_iterations": "train.num_epochs",
    "ppo_epochs": "train.num_epochs",
    "num_train_epochs": "train.num_epochs",
    "lr_scheduler_type": "train.lr_decay",
    "adam_epsilon": "train.eps",
    "adam_beta1": "train.betas",
    "adam_beta2": "train.betas",
    "num_generations": "rollout.group_size",
    "rollout_n": "rollout.group_size",
    "n": "rollout.group_size",
    "max_completion_length": "rollout.max_new_tokens",
    "max_response_length": "rollout.max_new_tokens",
    "max_tokens": "rollout.max_new_tokens",
    "min_tokens": "rollout.min_new_tokens",
    "max_prompt_length": "rollout.max_prompt_tokens",
    "batch_size": "rollout.prompts_per_iteration",
    "train_batch_size": "rollout.prompts_per_iteration",
    "per_device_train_batch_size": "rollout.prompts_per_iteration",
    "gradient_accumulation_steps": "train.micro_batch_tokens",
    "ppo_micro_batch_size": "train.micro_batch_tokens",
    "model_name_or_path": "model.path",
    "pretrained": "model.path",
    "ref_model": "model.reference_path",
    "max_model_len": "model.max_sequence_length",
    "peft_config": "model.adapter",
    "lora_rank": "model.adapter",
    "lora_alpha": "model.adapter",
    "target_modules": "model.adapter",
    "enable_gradient_checkpointing": "model.gradient_checkpointing",
    "policy": "precision.policy",
    "dtype": "precision.policy",
    "quantization": "precision.policy",
    "task": "env.name",
    "eval_steps": "evaluation.interval",
    "steps": "run.iterations",
    "max_steps": "run.iterations",
    "training_iteration": "run.iterations",
    "save_steps": "run.checkpoint_every",
    "save_total_limit": "run.keep_checkpoints",
    "output_dir": "run.directory",
    "num_workers": "run.resources.num_env_runners",
    "num_gpus": "run.resources.gpus_per_learner",
}


class Key(NamedTuple):
    """A setting: dotted name, annotation, metadata of its field, default. A section has no default (MISSING)."""

    name: str
    hint: Any
    metadata: Mapping[str, Any]
    default: Any

    @property
    def kind(self) -> str:
        """Allowed values in words, with the range: `a number, > 0`, `k1 | k2 | k3`."""
        if self.default is MISSING:
            return "a section"
        words = self.metadata.get("choices") or describe(self.hint)
        limits = bounds_in_words(self.metadata)
        return f"{words}, {limits}" if limits else words


def all_keys() -> dict[str, Key]:
    """Every setting and section by its dotted name, in the order of a file."""
    name = Key(
        "name", str, {"doc": "how the experiment is called; begins the name of its directory"}, "experiment"
    )
    return {"name": name, **{key.name: key for part, cls in SECTIONS.items() for key in _keys(part, cls)}}


def _keys(path: str, cls: type) -> Iterator[Key]:
    yield Key(path, cls, {"doc": cls.__doc__ or ""}, MISSING)
    instance = cls()
    for field in dataclasses.fields(cls):
        hint = hints(cls)[field.name]
        if dataclasses.is_dataclass(hint):
            yield from _keys(f"{path}.{field.name}", hint)  # type: ignore[arg-type]
        else:
            yield Key(f"{path}.{field.name}", hint, field.metadata, getattr(instance, field.name))


def dotted(attribute: str) -> str:
    """The dotted name of a setting that RLlib keeps as `attribute`; another attribute's name as it is."""
    return _DOTTED.get(attribute, attribute)


_DOTTED = {attribute: name for name, attribute in ATTRIBUTES.items()}


def renamed(name: str) -> str | None:
    """What `name`, dotted or with slashes, is called now; None for one that never had another name."""
    first, slash, rest = name.replace("/", ".").partition(".")
    now = RENAMED.get(first)
    return None if now is None else f"{now}{'.' if slash else ''}{rest}"


def unknown(name: str, value: object) -> Violation:
    """A setting that there is not, with the one that was meant."""
    now = renamed(name)
    if now is not None and (now in all_keys() or "." not in name.replace("/", ".")):
        return Violation(name, value, f"is called {now}", f"write {now}")
    return Violation(name, value, "no such setting", closest(name))


def closest(name: str) -> str:
    """`closest: train.lr (a number)`: the same name elsewhere first, a similar one of the section, then of any."""
    known = all_keys()
    section, _, leaf = name.rpartition(".")
    here = [key for key in known if key.rpartition(".")[0] == section]
    same = [key for key in known if key.rpartition(".")[2] == leaf]
    near = (
        [_ELSEWHERE[word] for word in difflib.get_close_matches(leaf, _ELSEWHERE, n=1, cutoff=0.85)]
        or same
        or difflib.get_close_matches(name, here, n=1, cutoff=0.6)
        or difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    )
    if near:
        return f"closest: {near[0]} ({known[near[0]].kind})"
    if here:
        return f"{f'keys of {section}' if section else 'sections'}: {', '.join(k.rpartition('.')[2] for k in here)}"
    return f"sections: {', '.join(SECTIONS)}"
