"""What the values of an experiment's own sections must satisfy; the groups of GRPOConfig have rules of their own."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rllib_llm.algorithm.config import GRPOConfig
    from rllib_llm.experiment import Experiment

__all__ = ["experiment_violations", "in_words_of_the_file", "unusable_parts", "usable_configs"]

# key -> smallest allowed value; null passes where the type allows it.
_SMALLEST: dict[str, float] = {
    "evaluation.interval": 1,
    "evaluation.prompts": 1,
    "evaluation.num_env_runners": 0,
    "run.iterations": 1,
    "run.checkpoint_every": 0,  # 0: only the last one
    "run.keep_checkpoints": 1,
    "run.max_failures": -1,  # -1: without limit, as Tune counts
    "run.resources.cpus_for_trainer": 0,
    "run.resources.cpus_per_env_runner": 0,
    "run.resources.gpus_per_env_runner": 0,
    "run.resources.cpus_per_learner": 0,
    "run.resources.gpus_per_learner": 0,
    "run.resources.ray_cpus": 1,
    "tracking.samples_every": 0,
}
# Section of a file -> the attribute of GRPOConfig that its values become.
_SECTIONS = {
    "precision_config": "precision",
    "llm": "model",
    "rollout_config": "rollout",
    "grpo": "train",
}
# RLlib's name of a setting -> the key of a file.
_RLLIB = {
    "lr": "train.lr",
    "grad_clip": "train.grad_clip",
    "num_epochs": "train.num_epochs",
    "seed": "run.seed",
    "num_learners": "run.resources.num_learners",
    "num_env_runners": "run.resources.num_env_runners",
}
_ATTRIBUTE = re.compile(rf"(?<![\w/.-])({'|'.join(_SECTIONS)})\.(?=[a-z])")


def experiment_violations(experiment: Experiment) -> list[str]:
    """One sentence per value out of range and per wrong setting of the environment.

    The environment is made once to have its settings checked.
    """
    problems = []
    for key, smallest in _SMALLEST.items():
        value: Any = experiment
        for part in key.split("."):
            value = getattr(value, part)
        if value is not None and value < smallest:
            problems.append(f"{key} = {value} must be at least {smallest}.")
    minutes = experiment.run.max_minutes
    if minutes is not None and minutes <= 0.0:
        problems.append(f"run.max_minutes = {minutes} must be above 0, or null for no limit.")
    if not re.fullmatch(r"\w[\w.+-]*", experiment.name):
        problems.append(
            f"name = {experiment.name!r} names a directory below run.directory: use letters, digits and . _ + - only."
        )
    return problems + _environment(experiment)


def _environment(experiment: Experiment) -> list[str]:
    from rllib_llm.envs import EnvConfigError, make_env

    try:
        make_env(experiment.env.name, experiment.env.config, split="train", seed=experiment.run.seed)
    except EnvConfigError as error:
        return [f"env: {error}"]
    return []


def in_words_of_the_file(problem: str) -> str:
    """A violation of GRPOConfig with the keys that a file uses: `rollout_config.top_p` becomes `rollout.top_p`."""
    name, equals, rest = problem.partition(" = ")
    if equals and name in _RLLIB:
        problem = f"{_RLLIB[name]} = {rest}"
    return _ATTRIBUTE.sub(lambda match: f"{_SECTIONS[match[1]]}.", problem)


def usable_configs(experiment: Experiment, make: Callable[[], Sequence[GRPOConfig]]) -> Sequence[GRPOConfig]:
    """What `make` returns, if this machine can train it: engine, environment, model and tracking store are there.

    Raises the error of whichever of them is not, of `make` too; an ExperimentError with all problems where there are
    several errors.
    """
    from rllib_llm.experiment import ExperimentError

    configs: Sequence[GRPOConfig] = ()
    found: list[Exception] = []
    try:
        configs = make()
    except ExperimentError as error:
        found.append(error)
    found += unusable_parts(experiment, configs)
    if not found:
        return configs
    if len(found) == 1:
        raise found[0]
    problems = [text for error in found for text in getattr(error, "problems", (str(error),))]
    raise ExperimentError(f"experiment {experiment.name!r}", problems) from found[0]


def unusable_parts(experiment: Experiment, configs: Sequence[GRPOConfig] = ()) -> list[Exception]:
    """One error per part of `experiment` that cannot be used on this machine, of equal ones one.

    configs: valid ones of this experiment; without one, environment and model are not looked at.
    """
    from rllib_llm.algorithm.preflight import preflight_errors
    from rllib_llm.engines.base import EngineUnavailableError
    from rllib_llm.engines.factory import ENGINES, missing_engine
    from rllib_llm.tracking.store import TrackingUnavailableError, store_address

    found = [error for config in configs for error in preflight_errors(config)]
    engine = experiment.rollout.engine
    if not configs and engine in ENGINES and (missing := missing_engine(engine)):
        found.append(EngineUnavailableError(missing))
    if experiment.tracking.enabled:
        try:
            store_address(experiment.tracking.uri)
        except TrackingUnavailableError as error:
            found.append(error)
    return list({str(error): error for error in found}.values())
