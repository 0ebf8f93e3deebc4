"""Rollout engines: the interface, the embedded torch engine, and the table of names."""

from rllib_llm.engines.base import (
    CHECKPOINT_VERSION,
    NO_WEIGHTS,
    Completion,
    EngineUnavailableError,
    PromptError,
    RolloutEngine,
    SamplingParams,
    SamplingParamsError,
)
from rllib_llm.engines.factory import ENGINES, make_engine
from rllib_llm.errors import EngineError

__all__ = [
    "CHECKPOINT_VERSION",
    "ENGINES",
    "NO_WEIGHTS",
    "Completion",
    "EngineError",
    "EngineUnavailableError",
    "PromptError",
    "RolloutEngine",
    "SamplingParams",
    "SamplingParamsError",
    "make_engine",
]
