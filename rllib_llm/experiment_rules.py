"""What the values of an experiment's own sections must satisfy; the groups of GRPOConfig have rules of their own."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rllib_llm.experiment import Experiment

__all__ = ["experiment_violations", "in_words_of_the_file"]

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
