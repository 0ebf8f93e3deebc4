"""Builds in the driver what every env runner will build, so that a wrong config fails here, with its own error."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rllib_llm.algorithm.tokenizer_rules import check_tokenizer
from rllib_llm.engines.base import EngineUnavailableError
from rllib_llm.engines.factory import missing_engine
from rllib_llm.envs import EnvConfigError, Prompt, make_env
from rllib_llm.envs.calls import EnvCaller, as_prompt
from rllib_llm.envs.protocol import describe_error
from rllib_llm.models.architecture import ArchitectureError
from rllib_llm.models.checkpoint import check_weights, load_tokenizer
from rllib_llm.models.paths import ModelPathError, resolve_model_path
from rllib_llm.models.safetensor_files import ModelFilesError

if TYPE_CHECKING:
    from rllib_llm.algorithm.config import GRPOConfig

__all__ = ["preflight", "preflight_errors"]


def preflight(config: GRPOConfig) -> None:
    """Makes the environment, its first problem and its prompt's tokens; compares weight files and tokenizer with the
    config.

    An exception in an actor's constructor would reach the user as "IndexError: list index out of range". Raises the
    first of `preflight_errors`, the others as its notes.
    """
    found = preflight_errors(config)
    if found:
        for error in found[1:]:
            found[0].add_note(f"and: {error}")
        raise found[0]


def preflight_errors(config: GRPOConfig) -> list[Exception]:
    """What stands against `config`, a valid one, on this machine.

    EngineUnavailableError, EnvConfigError, ModelPathError, ArchitectureError or ModelFilesError of model and reference,
    TokenizerError of the model.
    """
    settings, found = config.settings(), list[Exception]()
    if missing := missing_engine(settings.rollout.engine):
        found.append(EngineUnavailableError(missing))
    prompt = factory = None
    try:
        prompt = first_prompt(config, config.env_step_timeout_s)
    except EnvConfigError as error:
        found.append(error)
    assert settings.model.path is not None, "validate() requires a path"
    for directory in dict.fromkeys(filter(None, (settings.model.path, settings.model.reference_path))):
        try:
            check_weights(directory, settings.policy)
            if directory != settings.model.path:
                load_tokenizer(directory)  # the learner compares its vocabulary with the model's
        except (ArchitectureError, ModelFilesError, ModelPathError) as error:
            found.append(error)
    try:
        check_tokenizer(resolve_model_path(settings.model.path), settings.rollout, prompt, factory)
    except (ArchitectureError, ModelFilesError, ModelPathError) as error:
        if str(error) not in map(str, found):
            found.append(error)
    return found


def first_prompt(config: GRPOConfig, timeout_s: float | None) -> Prompt:
    """The prompt of problem 0. Raises `EnvConfigError`, whatever a user's environment raises or returns."""
    call = EnvCaller(timeout_s)
    factory = make_env(config.env, dict(config.env_config), split="train", seed=config.seed or 0)
    try:
        env = call("the environment's constructor", factory)
        return as_prompt(call("reset(0)", lambda: env.reset(0)))
    except (EnvConfigError, KeyboardInterrupt):
        raise
    except BaseException as error:  # a user's class may raise anything
        raise EnvConfigError(
            f"env = {config.env!r}: its first problem cannot be made: {describe_error(error)}"
        ) from error
    finally:
        call.close()
