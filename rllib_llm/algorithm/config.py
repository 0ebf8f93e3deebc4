"""`GRPOConfig`: RLlib's AlgorithmConfig with the sections that reinforcement learning on a language model needs."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from typing import Any, Literal

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig, NotProvided
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.utils.annotations import override

from precision_policies import PrecisionPolicy, load_policy
from precision_policies.errors import Violation
from rllib_llm.algorithm.sections import TrainAttribute, held, known_keywords, section
from rllib_llm.algorithm.tune_dicts import sections_of, set_in
from rllib_llm.algorithm.validation import config_violations
from rllib_llm.errors import SettingsError
from rllib_llm.registry.reference import is_registered
from rllib_llm.settings.groups import (
    GROUPS,
    AdapterSettings,
    CorrectionSettings,
    EnvSettings,
    Settings,
    WeightTransport,
)
from rllib_llm.settings.read import defaults, plain, read

__all__ = ["GRPOConfig"]

# `model` is RLlib's dict of old-stack models: refused at once, as storing it would overwrite a section.
_RLLIBS_TRAINING = tuple(set(inspect.signature(AlgorithmConfig.training).parameters) - {"self", "model"})


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
    Sections `precision`, `model`, `rollout` and `train` are plain dicts (`config.rollout["top_p"]` reads one), so Tune
    can search any key: `{"rollout/temperature": tune.uniform(0.6, 1.0)}`, or nested. `validate` refuses unknown names
    and lists all violations in one error. A setting has the name that it has in a YAML file: `rllib-llm config keys`.
    """

    train = held("train")
    lr = TrainAttribute()
    grad_clip = TrainAttribute()
    num_epochs = TrainAttribute()

    def __init__(self, algo_class: type | None = None):
        from rllib_llm.algorithm.evaluation import evaluate_text
        from rllib_llm.algorithm.grpo import GRPO
        from rllib_llm.rollout.env_runner import LLMEnvRunner

        super().__init__(algo_class=algo_class or GRPO)
        for name, cls in GROUPS.items():
            self.__dict__[name] = defaults(cls)

        self.env = "reasoning_gym"
        self.env_step_timeout_s: float | None = EnvSettings().step_timeout_s
        self.env_runner_cls = LLMEnvRunner
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
        self.evaluation_duration_unit = "prompts"  # each is answered rollout.eval_samples times
        self.custom_evaluation_function = evaluate_text

    # ---------------------------------------------------------------- fluent groups

    @section("precision")
    def precision(
        self,
        policy: str | dict | PrecisionPolicy = NotProvided,
        *,
        allow_precision_change: bool = NotProvided,
    ) -> GRPOConfig:
        """Sets the precision policy: a name, a path, a dict, a PrecisionPolicy or a Tune search space.

        Args:
            policy: name of a shipped policy, path of a YAML file, or the policy itself (default 'unified-fp8')
            allow_precision_change: let a checkpoint be restored under another policy than the one it was written with
                (default False)
        """
        if isinstance(policy, PrecisionPolicy):
            policy = policy.to_dict()
        return self._set("precision", locals())

    @section("model")
    def model(
        self,
        path: str | None = NotProvided,
        *,
        gradient_checkpointing: bool = NotProvided,
        reference_path: str | None = NotProvided,
        max_sequence_length: int | None = NotProvided,
        adapter: AdapterSettings | dict | None = NotProvided,
    ) -> GRPOConfig:
        """Sets the model to train.

        Args:
            path: directory in Hugging Face format, models:/NAME@ALIAS, or a shipped model (tiny-chain) (default None)
            gradient_checkpointing: recompute each layer in backward: less memory, about a third more compute (default
                False)
            reference_path: frozen model for the KL term; null means path, the weights that training starts from
                (default None)
            max_sequence_length: longest prompt plus completion in tokens; null means the model's
                max_position_embeddings (default None)
            adapter: train low-rank adapters on the frozen model, e.g. {rank: 16}; null trains all weights (default
                None)
        """
        return self._set("model", locals())

    @section("rollout")
    def rollout(
        self,
        *,
        engine: str = NotProvided,
        engine_options: dict = NotProvided,
        group_size: int = NotProvided,
        prompts_per_iteration: int = NotProvided,
        max_new_tokens: int = NotProvided,
        min_new_tokens: int = NotProvided,
        temperature: float = NotProvided,
        top_p: float = NotProvided,
        top_k: int = NotProvided,
        stop: tuple[str, ...] = NotProvided,
        stop_token_ids: tuple[int, ...] = NotProvided,
        max_turns: int = NotProvided,
        max_prompt_tokens: int | None = NotProvided,
        eval_temperature: float = NotProvided,
        eval_samples: int = NotProvided,
        max_empty_samples: int = NotProvided,
        sample_timeout_s: float | None = NotProvided,
        restart_timeout_s: float = NotProvided,
        push_timeout_s: float = NotProvided,
        sleep_while_learning: bool = NotProvided,
        weight_transport: WeightTransport = NotProvided,
    ) -> GRPOConfig:
        """Sets how answers are sampled.

        Args:
            engine: what samples: torch (embedded, any device) or vllm (default 'torch')
            engine_options: passed to the engine's constructor (default {})
            group_size: completions sampled for one prompt (default 8)
            prompts_per_iteration: prompts of one training iteration, over all env runners (default 16)
            max_new_tokens: token limit of one answer (of one turn) (default 64)
            min_new_tokens: so many first tokens of an answer end nothing: end-of-sequence and stop ids have
                probability 0 (default 0)
            temperature: divides the logits before sampling (default 1.0)
            top_p: smallest set of tokens with this probability; 1 keeps all (default 1.0)
            top_k: only the k most probable tokens; 0 keeps all (default 0)
            stop: texts that end an answer, besides the end-of-sequence token (default ())
            stop_token_ids: token ids that end an answer (default ())
            max_turns: model turns of one episode; one that has not finished by then is cut off (default 1)
            max_prompt_tokens: longer prompts are errors of the task, counted and skipped; null is no limit (default
                None)
            eval_temperature: temperature of evaluation; 0 is greedy, like explore=False (default 0.0)
            eval_samples: answers per evaluation prompt (pass@1 is their mean) (default 1)
            max_empty_samples: iterations in a row without a usable sample after which training stops with an error
                (default 3)
            sample_timeout_s: seconds for one sample() of an env runner; others take the problems of one that is ended
                (default 7200.0)
            restart_timeout_s: seconds to wait for an env runner when none is left (vLLM takes a minute or two)
                (default 300.0)
            push_timeout_s: seconds an env runner has to confirm new weights (default 600.0)
            sleep_while_learning: engines give their GPU memory back while the learner computes; weights wait in host
                memory (default False)
            weight_transport: how weights reach engines in other processes; the log says what auto chose (default
                'auto')
        """
        return self._set("rollout", locals())

    @override(AlgorithmConfig)
    def environment(
        self, env: Any = NotProvided, *, step_timeout_s: float | None = NotProvided, **rllib: Any
    ) -> GRPOConfig:
        """Sets the task: RLlib's `environment(env, env_config=...)`, and

        Args:
            step_timeout_s: seconds for one call of the environment; a hang costs the episode; null waits (default 60.0)
        """
        if step_timeout_s is not NotProvided:
            self.env_step_timeout_s = step_timeout_s
        super().environment(env, **rllib)
        return self

    @override(AlgorithmConfig)
    @known_keywords("train", *_RLLIBS_TRAINING)
    def training(
        self,
        *,
        lr: float | tuple[tuple[float, float], ...] = NotProvided,
        num_epochs: int = NotProvided,
        grad_clip: float | None = NotProvided,
        loss: str = NotProvided,
        loss_config: dict = NotProvided,
        advantages: str | None = NotProvided,
        scale_rewards: Literal["group", "batch", "none"] | None = NotProvided,
        clip_low: float | None = NotProvided,
        clip_high: float | None = NotProvided,
        kl_coeff: float = NotProvided,
        kl_estimator: Literal["k1", "k2", "k3"] = NotProvided,
        kl_in: Literal["loss", "reward"] = NotProvided,
        entropy_coeff: float = NotProvided,
        minibatches_per_epoch: int = NotProvided,
        micro_batch_tokens: int = NotProvided,
        weight_decay: float = NotProvided,
        betas: tuple[float, float] = NotProvided,
        eps: float = NotProvided,
        warmup_steps: int = NotProvided,
        lr_decay: Literal["constant", "linear", "cosine"] = NotProvided,
        total_steps: int | None = NotProvided,
        dynamic_sampling: bool = NotProvided,
        max_sample_rounds: int = NotProvided,
        overlong_buffer: int = NotProvided,
        overlong_penalty: float = NotProvided,
        correction: CorrectionSettings | dict | None = NotProvided,
        **rllib: Any,
    ) -> GRPOConfig:
        """Sets loss and optimiser; of RLlib's own arguments those that have an effect here.

        Args:
            lr: learning rate, or a schedule of pairs [completions sampled, learning rate] (default 1e-06)
            num_epochs: passes over the samples of an iteration (default 1)
            grad_clip: largest global L2 norm of a gradient; null does not clip (default 1.0)
            loss: policy loss (default 'grpo')
            loss_config: further keyword arguments of that loss (default {})
            advantages: kind of advantages; null takes the loss's own (default None)
            scale_rewards: TRL's choice: what reward minus group mean is divided by; null leaves it to advantages
                (default None)
            clip_low: the ratio is clipped to [1 - clip_low, 1 + clip_high]; null takes the loss's own (default None)
            clip_high: see clip_low (default None)
            kl_coeff: weight of the KL to the frozen reference; 0 builds no reference model (default 0.0)
            kl_estimator: k1 regularises only as reward: as loss its expected gradient is zero (default 'k3')
            kl_in: reward: each token's advantage loses kl_coeff times the KL from it to the end of the answer
                (default 'loss')
            entropy_coeff: weight of the entropy bonus (default 0.0)
            minibatches_per_epoch: optimiser steps per pass over the samples (default 1)
            micro_batch_tokens: tokens of one forward/backward pass; changes memory and speed, not the update (default
                8192)
            weight_decay: of AdamW (default 0.0)
            betas: of AdamW; 0.99 remembers 100 steps, as runs have hundreds; TRL and verl take 0.999 (default (0.9,
                0.99))
            eps: of AdamW (default 1e-08)
            warmup_steps: optimiser steps over which the learning rate rises linearly from lr/warmup_steps to lr
                (default 0)
            lr_decay: how the learning rate falls after the warm-up (default 'constant')
            total_steps: optimiser steps at which lr_decay reaches zero (default None)
            dynamic_sampling: sample on until prompts_per_iteration groups have rewards that differ (DAPO) (default
                False)
            max_sample_rounds: rounds that dynamic sampling may take in one iteration (default 4)
            overlong_buffer: DAPO's soft overlong punishment: tokens before max_new_tokens over which it grows; 0 is
                off (default 0)
            overlong_penalty: the punishment at max_new_tokens (default 1.0)
            correction: replaces the policy's correction, e.g. {kind: none}; null keeps the policy's (default None)
        """
        super().training(**rllib)
        return self._set("train", locals())

    def _set(self, name: str, values: Mapping[str, Any]) -> GRPOConfig:
        """values: a fluent method's `locals()`."""
        given = {
            key: plain(value)
            for key, value in values.items()
            if value is not NotProvided and key not in ("self", "rllib", "__class__")
        }
        setattr(self, name, {**self.__dict__[name], **given})
        return self

    # ---------------------------------------------------------------- dicts

    @override(AlgorithmConfig)
    def update_from_dict(self, config_dict: dict[str, Any]) -> GRPOConfig:
        """Applies a (partial) dict, as Tune and `evaluation_config` do.

        Unlike RLlib's, it merges into the sections instead of replacing them, and takes the names of a YAML file,
        nested or in one ("rollout/temperature", "run/seed"); these win over a nested one, as a search puts them there.
        Names that there are not are kept for `validate`, which lists all of them.
        """
        change = sections_of(config_dict)
        super().update_from_dict(change.attributes)
        for path, value in change.settings:
            name, *rest = path
            setattr(self, name, set_in(self.__dict__[name], rest, value) if rest else value)
        for path, value in change.env_config:
            self.environment(env_config=set_in(self.env_config, path, value))
        for name, value in change.unknown.items():
            self.__dict__[name] = value
        return self

    @override(AlgorithmConfig)
    def get_state(self) -> dict[str, Any]:
        """RLlib's state, which leaves out whatever is -1, with what somebody has set to -1: validation must see it."""
        kept = {
            key: value
            for key, value in vars(self).items()
            if _is_minus_one(value) and not _was_minus_one(key)
        }
        return {**super().get_state(), **kept}

    # ---------------------------------------------------------------- reading

    def settings(self) -> Settings:
        """The sections as typed, frozen objects, with the loaded policy.

        Raises SettingsError listing every unknown key and ill-typed value, PolicyError for a bad policy.
        """
        found: list[Violation] = []
        parts: dict[str, Any] = {
            name: read(cls, self.__dict__[name], name, found, set()) for name, cls in GROUPS.items()
        }
        if found:
            raise SettingsError(type(self).__name__, found)
        return Settings(**parts, policy=load_policy(parts["precision"].policy))

    # ---------------------------------------------------------------- RLlib's hooks

    @override(AlgorithmConfig)
    def validate(self) -> None:
        """Raises SettingsError with every violation found, RLlib's own included."""
        if not self._validate_config:
            return
        found = config_violations(self)
        # RLlib would raise its first; with this in the place of its method it goes on to the next.
        self.__dict__["_value_error"] = lambda text: found.append(Violation("", None, text))
        try:
            super().validate()
        except ValueError as error:
            found.append(Violation("", None, str(error)))
        except (
            TypeError,
            AttributeError,
            KeyError,
        ):  # RLlib computes with values that our rules have refused
            if not found:
                raise
        finally:
            del self.__dict__["_value_error"]
        if found:
            raise SettingsError(type(self).__name__, found)
        self._pin_policy()
        self._pin_model()

    def _pin_policy(self) -> None:
        """Replaces a policy file by its content: other machines need not have the file."""
        precision = self.__dict__["precision"]
        policy = precision["policy"]
        if isinstance(policy, str) and (os.sep in policy or policy.endswith((".yaml", ".yml"))):
            self.__dict__["precision"] = {**precision, "policy": load_policy(policy).to_dict()}

    def _pin_model(self) -> None:
        """Replaces registered models by their directories: an alias may move, and workers have other directories."""
        model = self.__dict__["model"]
        if not any(is_registered(model[key]) for key in ("path", "reference_path")):
            return
        from rllib_llm.registry.resolve import local_path

        directories = {key: local_path(model[key]) for key in ("path", "reference_path")}
        self.__dict__["model"] = {**model, **directories}

    @property
    @override(AlgorithmConfig)
    def _model_config_auto_includes(self) -> dict[str, Any]:
        return {
            "model": self.__dict__["model"],
            "precision": self.__dict__["precision"],
            "needs_reference": self.train["kl_coeff"] != 0.0,
        }

    @override(AlgorithmConfig)
    def get_default_rl_module_spec(self) -> RLModuleSpec:
        from rllib_llm.learner.module import CausalLMModule

        return RLModuleSpec(module_class=CausalLMModule)

    @override(AlgorithmConfig)
    def get_default_learner_class(self) -> type:
        from rllib_llm.learner.learner import LLMTorchLearner

        return LLMTorchLearner


def _is_minus_one(value: Any) -> bool:
    return type(value) in (int, float) and value == -1


def _was_minus_one(name: str) -> bool:
    """Settings that RLlib deprecated have -1 from the start."""
    return _is_minus_one(getattr(AlgorithmConfig(), name, None))
