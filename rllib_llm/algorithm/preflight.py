"""Builds in the driver what every env runner will build, so that a wrong config fails here, with its own error."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rllib_llm.engines.base import EngineUnavailableError
from rllib_llm.engines.factory import missing_engine
from rllib_llm.envs import EnvConfigError, Prompt, make_env
from rllib_llm.models.architecture import ArchitectureError
from rllib_llm.models.checkpoint import check_weights, load_config, load_tokenizer
from rllib_llm.models.paths import resolve_model_path
from rllib_llm.models.safetensor_files import CheckpointError
from rllib_llm.prompting import PromptEncoder

if TYPE_CHECKING:
    from rllib_llm.algorithm.config import GRPOConfig

__all__ = ["preflight", "preflight_errors"]


def preflight(config: GRPOConfig) -> None:
    """Makes the environment, its first problem and its prompt's tokens; compares weight files with their config.

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

    EngineUnavailableError, EnvConfigError, and ArchitectureError or CheckpointError of model and reference.
    """
    settings, found = config.settings(), list[Exception]()
    if missing := missing_engine(settings.rollout.engine):
        found.append(EngineUnavailableError(missing))
    prompt = None
    try:
        factory = make_env(config.env, dict(config.env_config), split="train", seed=config.seed or 0)
        prompt = factory().reset(0)
    except EnvConfigError as error:
        found.append(error)
    assert settings.model.path is not None, "validate() requires a path"
    for directory in dict.fromkeys(filter(None, (settings.model.path, settings.model.reference_path))):
        try:
            check_weights(directory, settings.policy)
            if prompt is not None and directory == settings.model.path:
                _check_tokens(directory, prompt)
        except (ArchitectureError, CheckpointError) as error:
            found.append(error)
    return found


def _check_tokens(model: str, prompt: Prompt) -> None:
    path = resolve_model_path(model)
    ids, vocabulary = PromptEncoder(load_tokenizer(path)).encode(prompt), load_config(path).vocab_size
    if max(ids) >= vocabulary:
        raise CheckpointError(
            f"{path}: the tokenizer writes the first prompt with token id {max(ids)}, config.json says vocab_size = "
            f"{vocabulary}: the tokenizer's files are those of another model."
        )
