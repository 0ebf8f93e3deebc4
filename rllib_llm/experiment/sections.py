"""An experiment: all sections of settings together; `experiment.file` reads one from YAML and overrides."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from precision_policies.coerce import setting
from precision_policies.errors import Violation
from rllib_llm.errors import violations_of
from rllib_llm.experiment.errors import ExperimentError
from rllib_llm.settings.groups import (
    EnvSettings,
    EvaluationSettings,
    ModelSettings,
    PrecisionSettings,
    ResourceSettings,
    RolloutSettings,
    RunSettings,
    TrackingSettings,
    TrainSettings,
)
from rllib_llm.settings.names import ATTRIBUTES
from rllib_llm.settings.read import plain, read

if TYPE_CHECKING:
    from rllib_llm.algorithm.config import GRPOConfig

__all__ = ["Experiment", "ResourceSettings", "RunSettings"]

_MODEL_KEYS = ("path", "reference_path")


@dataclass(frozen=True)
class Experiment:
    """Everything that `rllib-llm train` needs to know."""

    name: str = setting("experiment", "how the experiment is called; begins the name of its directory")
    precision: PrecisionSettings = field(default_factory=PrecisionSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    env: EnvSettings = field(default_factory=EnvSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    run: RunSettings = field(default_factory=RunSettings)
    tracking: TrackingSettings = field(default_factory=TrackingSettings)

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists and scalars; `experiment.file.experiment_from_dict` turns them back."""
        return {f.name: plain(getattr(self, f.name)) for f in dataclasses.fields(self)}

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

    def to_grpo_config(self) -> GRPOConfig:
        """The RLlib config of this experiment, validated.

        Raises ExperimentError with every value out of range and everything that GRPOConfig.validate() finds.
        """
        if found := self.violations():
            raise ExperimentError(f"experiment {self.name!r}", found)
        model, _ = self._local_models()
        config = self._unchecked_config(model)
        try:
            config.validate()  # RLlib's own rules
        except ValueError as error:
            raise ExperimentError(f"experiment {self.name!r}", violations_of(error)) from error
        return config

    def violations(self, bad: Collection[str] = ()) -> list[Violation]:
        """What is wrong with this experiment; needs neither Ray nor RLlib, which has rules of its own.

        bad: settings whose default stands for a value that cannot be read; nothing is said that depends on one.
        """
        from rllib_llm.algorithm.validation import section_violations
        from rllib_llm.experiment.rules import experiment_violations

        local, unresolved = self._local_models()
        unknown = {*bad, *(violation.key for violation in unresolved)}
        found: list[Violation] = []
        model = read(ModelSettings, local, "model", [], set())
        parts = (self.precision, model, self.rollout, self.train)
        counts = (self.run.resources.num_learners, self.run.resources.num_env_runners)
        found += experiment_violations(self, unknown)
        malformed = {*unknown, *(violation.key for violation in found)}
        on_gpu = self.run.resources.gpus_per_learner > 0
        return [*found, *section_violations(*parts, *counts, malformed, on_gpu), *unresolved]

    def _local_models(self) -> tuple[dict[str, Any], list[Violation]]:
        """(model settings with registered models as directories, those that cannot be had)."""
        from rllib_llm.registry.errors import RegistryError
        from rllib_llm.registry.resolve import local_path

        settings, found = plain(self.model), []
        for key in _MODEL_KEYS:
            try:
                settings[key] = local_path(settings[key], self.tracking.uri)
            except RegistryError as error:
                found.append(Violation(f"model.{key}", settings[key], str(error)))
        return settings, found

    def _unchecked_config(self, model: dict[str, Any]) -> GRPOConfig:
        """model: the model's settings, with directories for registered models."""
        from rllib_llm.algorithm.config import GRPOConfig

        tree = self.to_dict()
        tree["model"] = model
        sections = {name: tree[name] for name in ("precision", "model", "rollout", "train", "env")}
        resources = {key: tree["run"]["resources"][key] for key in _RESOURCES}
        settings = {**sections, "run": {"seed": self.run.seed, "resources": resources}}
        if self.evaluation.interval is not None:
            settings["evaluation"] = tree["evaluation"]
        return GRPOConfig().update_from_dict(settings)


_RESOURCES = [name.rpartition(".")[2] for name in ATTRIBUTES if name.startswith("run.resources.")]
