"""What the values of an experiment's own sections must satisfy; the sections of GRPOConfig have rules of their own."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from precision_policies.errors import MISSING, Violation
from rllib_llm.errors import violations_of
from rllib_llm.settings.groups import SECTIONS
from rllib_llm.settings.read import plain, read

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from rllib_llm.algorithm.config import GRPOConfig
    from rllib_llm.experiment.sections import Experiment

__all__ = ["experiment_violations", "unusable_parts", "usable_configs"]


def experiment_violations(experiment: Experiment, bad: Collection[str] = ()) -> list[Violation]:
    """Types and ranges of all sections, and what is wrong with the settings of the environment.

    The environment is made once to have its settings checked. bad: settings of which nothing is said.
    """
    found: list[Violation] = []
    for name, section in SECTIONS.items():  # those of an Experiment that was made in Python
        read(section, plain(getattr(experiment, name)), name, found, set())
    if not re.fullmatch(r"\w[\w.+-]*", experiment.name):
        problem = "names a directory below run.directory"
        found.append(Violation("name", experiment.name, problem, "use letters, digits and . _ + - only"))
    if not {"env.name", "env.config"} & set(bad):
        found += _environment(experiment)
    return [violation for violation in found if violation.key not in bad]


def _environment(experiment: Experiment) -> list[Violation]:
    from rllib_llm.envs import EnvConfigError, make_env

    try:
        make_env(experiment.env.name, experiment.env.config, split="train", seed=experiment.run.seed)
    except EnvConfigError as error:
        return [Violation("env", MISSING, str(error))]
    return []


def usable_configs(experiment: Experiment, make: Callable[[], Sequence[GRPOConfig]]) -> Sequence[GRPOConfig]:
    """What `make` returns, if this machine can train it: engine, environment, model and tracking store are there.

    Raises the error of whichever of them is not, of `make` too; an ExperimentError with all problems where there are
    several errors.
    """
    from rllib_llm.experiment.errors import ExperimentError

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
    violations = [violation for error in found for violation in violations_of(error)]
    raise ExperimentError(f"experiment {experiment.name!r}", violations) from found[0]


def unusable_parts(experiment: Experiment, configs: Sequence[GRPOConfig] = ()) -> list[Exception]:
    """One error per part of `experiment` that cannot be used on this machine, of equal ones one.

    configs: valid ones of this experiment; without one, environment and model are not looked at.
    """
    from rllib_llm.engines.base import EngineUnavailableError
    from rllib_llm.engines.factory import ENGINES, missing_engine
    from rllib_llm.tracking.store import TrackingUnavailableError, store_address

    found: list[Exception] = []
    if configs:
        from rllib_llm.algorithm.preflight import preflight_errors

        found += [error for config in configs for error in preflight_errors(config)]
    engine = experiment.rollout.engine
    if not configs and engine in ENGINES and (missing := missing_engine(engine)):
        found.append(EngineUnavailableError(missing))
    if experiment.tracking.enabled:
        try:
            store_address(experiment.tracking.uri)
        except TrackingUnavailableError as error:
            found.append(error)
    return list({str(error): error for error in found}.values())
