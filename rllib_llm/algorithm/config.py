"""`GRPOConfig`: RLlib's AlgorithmConfig with the groups that reinforcement learning on a language model needs."""

from __future__ import annotations

import inspect
import os
from dataclasses import dataclass
from typing import Any

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig, NotProvided
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.utils.annotations import override

from precision_policies import PrecisionPolicy, load_policy
from rllib_llm.algorithm.settings import (
    GROUPS,
    GRPOSettings,
    ModelSettings,
    PrecisionSettings,
    RolloutSettings,
    closest,
    defaults,
    parse,
)
from rllib_llm.algorithm.validation import config_violations
from rllib_llm.registry.reference import is_registered

__all__ = ["GRPOConfig", "Settings"]


@dataclass(frozen=True)
class Settings:
    """The four groups of a valid config, typed."""

    precision: PrecisionSettings
    model: ModelSettings
    rollout: RolloutSettings
    grpo: GRPOSettings
    policy: PrecisionPolicy


class _ModelGroup(dict):
    """RLlib's legacy `config.model` dict, which is also the fluent group `config.model(path)`.

    AlgorithmConfig.__init__ stores a dict under the name `model` in every instance, which would hide a
    method of that name; a data descriptor on the class is looked up before the instance.
    """

    def __init__(self, config: GRPOConfig, legacy: dict):
        super().__init__(legacy)
        self._config, self._legacy = config, legacy

    def update(
        self, *args: Any, **kwargs: Any
    ) -> None:  # RLlib: `config.training(model=...)` updates in place
        super().update(*args, **kwargs)
        self._legacy.update(*args, **kwargs)

    def __call__(
        self,
        path: str | Any = NotProvided,
        *,
        gradient_checkpointing: bool = NotProvided,
        reference_path: str | None = NotProvided,
        max_sequence_length: int | None = NotProvided,
    ) -> GRPOConfig:
        """Sets the model to train: see `ModelSettings` for each argument."""
        return self._config._update_group(
            "llm",
            path=path,
            gradient_checkpointing=gradient_checkpointing,
            reference_path=reference_path,
            max_sequence_length=max_sequence_length,
        )


class _ModelGroupDescriptor:
    def __get__(self, config: GRPOConfig | None, owner: type) -> Any:
        return self if config is None else _ModelGroup(config, config.__dict__["model"])

    def __set__(self, config: GRPOConfig, value: dict) -> None:
        config.__dict__["model"] = value


class GRPOConfig(AlgorithmConfig):
    """Configuration of `GRPO`.

    ```python
    algo = (
        GRPOConfig()
        .precision("unified-fp8")
        .model("tiny-chain")
        .environment("reasoning_gym", env_config={"task": "chain_sum"})
        .rollout(group_size=8, max_new_tokens=64)
        .training(lr=3e-4)
        .build_algo()
    )
    ```
    Every group is a plain dict attribute (`precision_config`, `llm`, `rollout_config`, `grpo`), so Tune
    can search any key: `{"rollout_config": {"temperature": tune.uniform(0.6, 1.0)}}`. `validate` refuses
    unknown attributes and keys and lists all violations in one error.
    """

    model = _ModelGroupDescriptor()

    def __init__(self, algo_class: type | None = None):
        from rllib_llm.algorithm.evaluation import evaluate_text
        from rllib_llm.algorithm.grpo import GRPO
        from rllib_llm.env_runner import LLMEnvRunner

        super().__init__(algo_class=algo_class or GRPO)
        self.precision_config = defaults(PrecisionSettings)
        self.llm = defaults(ModelSettings)
        self.rollout_config = defaults(RolloutSettings)
        self.grpo = defaults(GRPOSettings)

        self.env = "reasoning_gym"
        self.env_runner_cls = LLMEnvRunner
        self.lr = 1e-6
        self.grad_clip = 1.0
        self.grad_clip_by = "global_norm"
        self.num_epochs = 1
        self.seed = 0
        # A second engine in the driver would cost the memory of one more model.
        self.create_local_env_runner = False
        # RLlib drops a slow sample after 60 s (train) or 120 s (evaluation) without an error.
        self.sample_timeout_s = None
        self.evaluation_sample_timeout_s = None
        # RLlib waits 60 s after each error of a runner before the actor restarts.
        self.delay_between_env_runner_restarts_s = 1.0
        # RLlib's own weight sync drops a push while an earlier one is in flight, at the default of 1.
        # Weights travel by WeightSync, which blocks; this covers RLlib's state messages.
        self.max_requests_in_flight_per_env_runner = 3
        # No connectors, so no connector state to merge after every iteration.
        self.add_default_connectors_to_env_to_module_pipeline = False
        self.add_default_connectors_to_module_to_env_pipeline = False
        self.add_default_connectors_to_learner_pipeline = False
        self._dont_auto_sync_env_runner_states = True
        self.evaluation_duration = 64
        self.custom_evaluation_function = evaluate_text

    # ---------------------------------------------------------------- fluent groups

    def precision(
        self,
        policy: str | dict | PrecisionPolicy = NotProvided,
        *,
        allow_precision_change: bool = NotProvided,
    ) -> GRPOConfig:
        """Sets the precision policy: a name, a path, a dict, a PrecisionPolicy or a Tune search space."""
        if isinstance(policy, PrecisionPolicy):
            policy = policy.to_dict()
        return self._update_group(
            "precision_config", policy=policy, allow_precision_change=allow_precision_change
        )

    def rollout(self, **settings: Any) -> GRPOConfig:
        """Sets how completions are sampled: see `RolloutSettings` for every keyword."""
        return self._update_group("rollout_config", **settings)

    @override(AlgorithmConfig)
    def training(self, **settings: Any) -> GRPOConfig:
        """Sets loss and optimiser: `GRPOSettings`, and RLlib's own lr, num_epochs, grad_clip."""
        ours = {k: v for k, v in settings.items() if k in defaults(GRPOSettings)}
        theirs = {k: v for k, v in settings.items() if k not in ours}
        known = set(inspect.signature(AlgorithmConfig.training).parameters) - {"self"}
        if unknown := sorted(set(theirs) - known):
            names = "; ".join(f"{k}{closest(k, known | set(defaults(GRPOSettings)))}" for k in unknown)
            raise ValueError(f"GRPOConfig.training() has no argument: {names}.")
        super().training(**theirs)
        return self._update_group("grpo", **ours)

    def _update_group(self, group: str, **settings: Any) -> GRPOConfig:
        known = defaults(GROUPS[group])
        if unknown := sorted(set(settings) - set(known)):
            names = "; ".join(f"{k}{closest(k, known)}" for k in unknown)
            raise ValueError(f"GRPOConfig.{group} has no key: {names}. Keys: {', '.join(known)}.")
        values = {k: v for k, v in settings.items() if v is not NotProvided}
        setattr(self, group, {**getattr(self, group), **values})
        return self

    # ---------------------------------------------------------------- Tune dicts

    @override(AlgorithmConfig)
    def update_from_dict(self, config_dict: dict[str, Any]) -> GRPOConfig:
        """Applies a (partial) dict, as Tune and `evaluation_config` do.

        Unlike RLlib's, it merges into the groups instead of replacing them, understands nested keys
        ("rollout_config/temperature"), and takes the fluent names `precision`, `model` and `rollout`.
        """
        plain: dict[str, Any] = {}
        for key, value in config_dict.items():
            group, _, nested = key.partition("/")
            group = {"precision": "precision_config", "rollout": "rollout_config"}.get(group, group)
            if group == "model" and not _is_legacy_model(value):
                group = "llm"
            if group not in GROUPS:
                plain[key] = value
            elif nested:
                setattr(self, group, {**getattr(self, group), nested: value})
            elif isinstance(value, dict):
                setattr(self, group, {**getattr(self, group), **value})
            else:  # {"precision": "bf16"}, {"model": "tiny-chain"}
                first = next(iter(defaults(GROUPS[group])))
                setattr(self, group, {**getattr(self, group), first: value})
        super().update_from_dict(plain)
        return self

    # ---------------------------------------------------------------- reading

    def settings(self) -> Settings:
        """The groups as typed, frozen objects, with the loaded policy.

        Raises ValueError listing every unknown key and ill-typed value, PolicyError for a bad policy.
        """
        parsed: list[Any] = []
        violations: list[str] = []
        for group, cls in GROUPS.items():
            value, found = parse(cls, getattr(self, group), group)
            parsed.append(value)
            violations += found
        if violations:
            raise ValueError("\n".join(violations))
        precision, model, rollout, grpo = parsed
        return Settings(precision, model, rollout, grpo, load_policy(precision.policy))

    @property
    def num_samples_per_iteration(self) -> int:
        return self.rollout_config["prompts_per_iteration"] * self.rollout_config["group_size"]

    # ---------------------------------------------------------------- RLlib's hooks

    @override(AlgorithmConfig)
    def validate(self) -> None:
        """Raises ValueError with every violation found, RLlib's own included."""
        if not self._validate_config:
            return
        violations = config_violations(self)
        try:
            super().validate()
        except ValueError as error:
            violations.append(str(error).split("\nTo suppress all validation errors")[0])
        except TypeError:  # RLlib computes with values that our rules have refused
            if not violations:
                raise
        if violations:
            lines = "\n".join(f"  {i}. {text}" for i, text in enumerate(violations, 1))
            raise ValueError(f"{type(self).__name__}: {len(violations)} problem(s)\n{lines}")
        self._pin_policy()
        self._pin_model()

    def _pin_policy(self) -> None:
        """Replaces a policy file by its content: other machines need not have the file."""
        policy = self.precision_config["policy"]
        if isinstance(policy, str) and (os.sep in policy or policy.endswith((".yaml", ".yml"))):
            self.__dict__["precision_config"] = {
                **self.precision_config,
                "policy": load_policy(policy).to_dict(),
            }

    def _pin_model(self) -> None:
        """Replaces registered models by their directories: an alias may move, and workers have other directories."""
        if not any(is_registered(self.llm[key]) for key in ("path", "reference_path")):
            return
        from rllib_llm.registry.resolve import local_path

        directories = {key: local_path(self.llm[key]) for key in ("path", "reference_path")}
        self.__dict__["llm"] = {**self.llm, **directories}

    @property
    @override(AlgorithmConfig)
    def _model_config_auto_includes(self) -> dict[str, Any]:
        return {
            "llm": self.llm,
            "precision_config": self.precision_config,
            "needs_reference": self.grpo["kl_coeff"] != 0.0,
        }

    @override(AlgorithmConfig)
    def get_default_rl_module_spec(self) -> RLModuleSpec:
        from rllib_llm.learner.module import CausalLMModule

        return RLModuleSpec(module_class=CausalLMModule)

    @override(AlgorithmConfig)
    def get_default_learner_class(self) -> type:
        from rllib_llm.learner.learner import LLMTorchLearner

        return LLMTorchLearner


def _is_legacy_model(value: Any) -> bool:
    """True for RLlib's MODEL_DEFAULTS-like dict, which `to_dict()` puts under "model"."""
    return isinstance(value, dict) and not set(value) <= set(defaults(ModelSettings))
