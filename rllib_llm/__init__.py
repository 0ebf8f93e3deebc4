"""Exactly on-policy low-precision reinforcement learning of language models, as a Ray RLlib plugin.

`import rllib_llm` makes the trainable "GRPO-LLM" known to Ray Tune. It imports neither torch nor Ray: names
are loaded when first used, and the registration waits until RLlib's own registry is imported.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from rllib_llm.plugin.registration import TRAINABLE_NAME, announce

__all__ = [
    "GRPO",
    "TRAINABLE_NAME",
    "CausalLMModule",
    "DAPOConfig",
    "DrGRPOConfig",
    "GRPOConfig",
    "GSPOConfig",
    "LLMEnvRunner",
    "LLMTorchLearner",
    "RLOOConfig",
    "ReinforcePPConfig",
    "TextEpisode",
    "load_policy",
    "make_engine",
    "register_text_env",
]
__version__ = "0.1.0"

_HOMES = {
    "GRPO": "rllib_llm.algorithm",
    "GRPOConfig": "rllib_llm.algorithm",
    "DAPOConfig": "rllib_llm.algorithm",
    "DrGRPOConfig": "rllib_llm.algorithm",
    "GSPOConfig": "rllib_llm.algorithm",
    "RLOOConfig": "rllib_llm.algorithm",
    "ReinforcePPConfig": "rllib_llm.algorithm",
    "CausalLMModule": "rllib_llm.learner.module",
    "LLMTorchLearner": "rllib_llm.learner.learner",
    "LLMEnvRunner": "rllib_llm.rollout.env_runner",
    "TextEpisode": "rllib_llm.rollout.episode",
    "load_policy": "precision_policies",
    "make_engine": "rllib_llm.engines",
    "register_text_env": "rllib_llm.envs",
}

announce()
# Idle OpenMP threads must sleep, not spin: on two busy cores an iteration of the quickstart took 75 s with two
# spinning threads, 4.9 s with two sleeping ones, 5.5 s with one (2026-11-29). torch reads this when it is imported;
# Ray's workers inherit it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(
            f"module 'rllib_llm' has no attribute {name!r}; public names: {', '.join(__all__)}"
        )
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
