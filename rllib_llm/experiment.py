"""What an experiment consists of, as typed sections; `experiment_file` reads one from YAML and overrides.

The groups that GRPOConfig already defines (precision, model, rollout, the loss) are its own dataclasses, so a setting
has one name, one type and one default.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from rllib_llm.algorithm.settings import GRPOSettings, ModelSettings, PrecisionSettings, RolloutSettings

if TYPE_CHECKING:
    from rllib_llm.algorithm.config import GRPOConfig

__all__ = ["Experiment", "ExperimentError"]


class ExperimentError(ValueError):
    """A config that cannot be run; `.problems` holds one sentence per problem, all of them."""

    def __init__(self, source: str, problems: Sequence[str]):
        self.source, self.problems = source, tuple(problems)
        count = f"{len(problems)} problem{'s' if len(problems) != 1 else ''}"
        super().__init__(
            "\n".join([f"{source}: {count}", *(f"  {i}. {text}" for i, text in enumerate(problems, 1))])
        )


_MODEL_KEYS = ("path", "reference_path")


@dataclass(frozen=True)
class EnvSettings:
    """Which task is trained on."""

    name: str = "reasoning_gym"
    """a name from `rllib-llm envs list`, or "package.module:ClassName" """
    config: dict = field(default_factory=dict)
    """passed to the environment; `rllib-llm envs list` shows what each takes"""


@dataclass(frozen=True)
class TrainSettings(GRPOSettings):
    """Loss and optimiser: GRPOConfig.training()."""

    lr: float = 1e-6
    num_epochs: int = 1
    """passes over the samples of an iteration"""
    grad_clip: float | None = 1.0
    """largest global L2 norm of a gradient; null does not clip"""


@dataclass(frozen=True)
class EvaluationSettings:
    """Greedy (or sampled) answers on held-out prompts while training goes on."""

    interval: int | None = None
    """iterations between evaluations; null never evaluates"""
    prompts: int = 64
    """held-out prompts of one evaluation"""
    num_env_runners: int = 1
    """actors that evaluate, each with its own engine"""


@dataclass(frozen=True)
class ResourceSettings:
    """What the trial asks Ray for."""

    num_env_runners: int = 1
    """actors that sample; 0 samples in the trainer's process"""
    num_learners: int = 0
    """actors that train (DDP); 0 trains in the trainer's process"""
    cpus_for_trainer: float = 1.0
    """CPUs of the trainer's process; Ray gives torch as many threads in every process as it has CPUs"""
    cpus_per_env_runner: float = 1.0
    gpus_per_env_runner: float = 0.0
    cpus_per_learner: float = 1.0
    gpus_per_learner: float = 0.0
    ray_address: str | None = None
    """cluster to join; null starts Ray on this machine"""
    ray_cpus: int | None = None
    """CPUs that a locally started Ray declares; null takes the machine's, or as many as the trial needs"""


@dataclass(frozen=True)
class RunSettings:
    """How long, from which seed, and what is kept."""

    iterations: int = 100
    seed: int = 0
    stop: dict[str, float] = field(default_factory=dict)
    """also stop when a metric reaches a value: {env_runners/episode_return_mean: 0.95}"""
    max_minutes: float | None = None
    """also stop after this much training time"""
    checkpoint_every: int = 10
    """iterations; the last one is always kept"""
    keep_checkpoints: int = 2
    max_failures: int = 0
    """times the trial is restarted from its last checkpoint after an error"""
    directory: str = "results"
    """where experiment directories are made"""
    resources: ResourceSettings = field(default_factory=ResourceSettings)


@dataclass(frozen=True)
class TrackingSettings:
    """The MLflow store."""

    enabled: bool = True
    uri: str | None = None
    """null takes MLFLOW_TRACKING_URI, else sqlite:///mlflow.db"""
    experiment: str = "rllib_llm"
    tags: dict[str, str] = field(default_factory=dict)
    samples_every: int = 10
    """iterations between two tables of sampled answers; 0 keeps none"""


@dataclass(frozen=True)
class Experiment:
    """Everything that `rllib-llm train` needs to know."""

    name: str = "experiment"
    precision: PrecisionSettings = field(default_factory=PrecisionSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    env: EnvSettings = field(default_factory=EnvSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    run: RunSettings = field(default_factory=RunSettings)
    tracking: TrackingSettings = field(default_factory=TrackingSettings)

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists and scalars; `experiment_file.experiment_from_dict` turns them back."""
        return _plain(dataclasses.asdict(self))

    def to_yaml(self) -> str:
        """The resolved config as YAML."""
        return OmegaConf.to_yaml(OmegaConf.create(self.to_dict()))

    def pinned(self) -> Experiment:
        """This experiment with every registered model named by its version, so that a resume finds the same weights.

        Raises RegistryError for a model that is not in the registry of `tracking.uri`.
        """
        from rllib_llm.registry.resolve import pinned

        path, reference = (pinned(getattr(self.model, key), self.tracking.uri) for key in _MODEL_KEYS)
        return dataclasses.replace(
            self, model=dataclasses.replace(self.model, path=path, reference_path=reference)
        )

    def _local_models(self) -> tuple[dict[str, Any], dict[str, str]]:
        """(model settings with registered models as directories, key -> problem of those that cannot be had)."""
        from rllib_llm.registry.errors import RegistryError
        from rllib_llm.registry.resolve import local_path

        settings, problems = dataclasses.asdict(self.model), {}
        for key in _MODEL_KEYS:
            try:
                settings[key] = local_path(settings[key], self.tracking.uri)
            except RegistryError as error:
                problems[f"model.{key}"] = f"model.{key} = {settings[key]!r}: {error}"
        return settings, problems

    def to_grpo_config(self) -> GRPOConfig:
        """The RLlib config of this experiment, validated.

        Raises ExperimentError with every value out of range and everything that GRPOConfig.validate() finds.
        """
        from rllib_llm.algorithm.validation import config_violations
        from rllib_llm.experiment_rules import experiment_violations, in_words_of_the_file

        model, unresolved = self._local_models()
        config = self._unchecked_config(model)
        problems = experiment_violations(self)
        problems += [in_words_of_the_file(problem) for problem in config_violations(config)]
        problems = [p for p in problems if not p.startswith(tuple(f"{key} = " for key in unresolved))]
        problems += unresolved.values()
        if problems:
            raise ExperimentError(f"experiment {self.name!r}", problems)
        try:
            config.validate()  # RLlib's own rules
        except ValueError as error:
            raise ExperimentError(f"experiment {self.name!r}", [str(error)]) from error
        return config

    def _unchecked_config(self, model: dict[str, Any]) -> GRPOConfig:
        """model: the model's settings, with directories for registered models."""
        from rllib_llm.algorithm.config import GRPOConfig

        resources, evaluation = self.run.resources, self.evaluation
        config = (
            GRPOConfig()
            .precision(**dataclasses.asdict(self.precision))
            .model(**model)
            .environment(self.env.name, env_config=self.env.config)
            .rollout(**dataclasses.asdict(self.rollout))
            .training(**dataclasses.asdict(self.train))
            .env_runners(
                num_env_runners=resources.num_env_runners,
                num_cpus_per_env_runner=resources.cpus_per_env_runner,
                num_gpus_per_env_runner=resources.gpus_per_env_runner,
            )
            .learners(
                num_learners=resources.num_learners,
                num_cpus_per_learner=resources.cpus_per_learner,
                num_gpus_per_learner=resources.gpus_per_learner,
            )
            .resources(num_cpus_for_main_process=resources.cpus_for_trainer)
            .debugging(seed=self.run.seed)
        )
        if evaluation.interval is not None:
            config.evaluation(
                evaluation_interval=evaluation.interval,
                evaluation_duration=evaluation.prompts,
                evaluation_num_env_runners=evaluation.num_env_runners,
            )
        return config


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
